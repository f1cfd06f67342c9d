// The PTX instructions of the mma.sync kernels (sm_80 and later), one function each and nothing
// else. `emu/mma.h` has the same functions for the CPU, so that the kernels run there unchanged.
//
// Shared memory addresses are 32 bits, as the instructions take them.

// The start of dynamic shared memory; each kernel lays out its tiles from here.
DEV u32 shared_base() {
  extern __shared__ __align__(16) u8 shared_memory[];
  return (u32)__cvta_generic_to_shared(shared_memory);
}
DEV u32 load_shared(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
DEV void store_shared(u32 to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
DEV void store_shared(u32 to, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

// Copies 16 bytes to shared memory asynchronously. Without `real` it writes zeros and reads
// nothing.
DEV void copy16(u32 to, const void* from, bool real) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
      : "memory");
}
DEV void copy4(u32 to, const void* from, bool real) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0)
      : "memory");
}
// Waits for all copies of this thread. Those of other threads are visible after the next
// __syncthreads.
DEV void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Ends a group of copies of this thread, and waits for all groups but the last PENDING.
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEV void copies_done_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements. Lane 8i + r gives the address of row r of matrix i; each
// lane gets elements 2(lane % 4) and 2(lane % 4) + 1 of row lane / 4 of every matrix (of that
// column, in the transposed form).
DEV void ldmatrix(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}
DEV void ldmatrix_transposed(u32 (&x)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
}

// d += a b for 16 x 16 and 16 x 8 elements, accumulated in f32.
DEV void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef T_BF16
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
