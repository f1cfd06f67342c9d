// PTX instructions of Hopper (sm_90a): mbarriers, TMA, wgmma, named barriers, bulk copies. One
// function each and nothing else; the kernels combine them.
//
// The emulator (`emu/emu.h`) defines EMULATED and functions of the same names; code outside that
// guard is arithmetic that both share. Shared memory is one dynamic array that kernels lay out
// themselves, and barriers are addresses in it.
//
// Macros given by the host: T_BF16 or T_F16, the storage type. WATCHDOG: a wait of 2 s traps
// instead of hanging.

// An opaque CUtensorMap.
#ifndef EMULATED
struct __align__(128) TensorMap { u64 opaque[16]; };
#define DEV_MEMBER __device__ __forceinline__
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]

// The start of dynamic shared memory on this architecture, in blocks without static shared memory.
// As a constant it makes most addresses and descriptors constants; kernels check it.
#define SHARED_BASE 1024u
DEV void check_shared_base(const void* memory) {
  if ((u32)__cvta_generic_to_shared(memory) != SHARED_BASE) asm volatile("trap;");
}

// ---- mbarrier: counts arrivals and bytes of a phase; `parity` is that of the awaited phase ----
DEV void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA.
DEV void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Arrives, and makes the phase wait for `bytes` bytes too.
DEV void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
      : "memory");
}
DEV void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
#ifdef WATCHDOG
DEV void barrier_wait(u32 barrier, u32 parity) {
  u64 start, now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < 2000000000ull);
  asm volatile("trap;");
}
#else
DEV void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_LOOP:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra WAIT_DONE;\nbra WAIT_LOOP;\nWAIT_DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif

// ---- TMA ----
DEV void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// One box (columns, rows, 1, 1, 1) of a five-dimensional map; elements out of bounds arrive as
// zeros.
DEV void tma_load(u32 to, const TensorMap* map, u32 barrier, int column, int row, int head,
    int segment, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(segment), "r"(batch)
      : "memory");
}
// Contiguous bytes; addresses and sizes are multiples of 16.
DEV void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Adds f32 elements in shared memory to global memory, as one bulk group.
DEV void bulk_add(float* to, u32 from, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], "
      "%2;\ncp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
// The same, stored instead of added.
DEV void bulk_store(float* to, u32 from, u32 bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::
          "l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
DEV void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEV void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders writes of threads to shared memory before accesses of TMA and wgmma.
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma: the products themselves are generated (`src/wgmma.rs`) ----
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Pins registers to this point of the program: no access to them moves across it.
template <int N> DEV void pin(float (&d)[N]) {
  #pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}

// ---- registers and named barriers ----
template <int COUNT> DEV void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> DEV void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
DEV void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEV void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- shared memory by address ----
DEV void store_shared(u32 to, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w)
      : "memory");
}
DEV void store_shared(u32 to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
DEV void store_shared(u32 to, uint4 x) {
  asm volatile(
      "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}
DEV void store_shared(u32 to, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
DEV void load_shared(u32 from, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from) : "memory");
}
DEV u32 load_shared(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
DEV uint4 load_shared_16(u32 from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "r"(from)
      : "memory");
  return x;
}
DEV void or_shared(u32 at, u32 bits) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(at), "r"(bits) : "memory");
}
// Four 8x8 tiles of 16-bit elements; lane L gives the address of row L % 8 of tile L / 8.
DEV void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}
DEV uint4 load_matrices(u32 from) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "r"(from)
      : "memory");
  return x;
}

// ---- global memory ----
// A reduction in memory; no thread waits for its result.
DEV void global_add(float* to, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

#endif  // EMULATED

// A wgmma descriptor of a matrix in shared memory, with the 128-byte swizzle that TMA wrote it in
// (mode 1 in bits 62..63). Rows of 64 elements, 128 bytes each, in groups of 8 rows; every tile
// begins at a multiple of 1024 bytes. K-major operand: group_bytes = 1024 to the next 8 rows;
// slab_bytes is unused. A step of 16 columns is 32 bytes. MN-major operand: slab_bytes to the next
// 64 columns, group_bytes = 1024 to the next 8 rows; a step of 16 rows is 2048 bytes.
DEV u64 matrix(u32 address, u32 slab_bytes, u32 group_bytes) {
  return (u64)((address & 0x3FFFF) >> 4 | (slab_bytes >> 4) << 16) |
         ((u64)(group_bytes >> 4) << 32) | (1ull << 62);
}
// The same descriptor `bytes` bytes further on. Addresses do not reach the field's last bit, so one
// 32-bit addition is enough; a product has many steps.
DEV u64 further(u64 matrix, u32 bytes) {
  return (matrix & 0xffffffff00000000ull) | (u32)((u32)matrix + bytes / 16);
}
// The address of 16-byte chunk `piece` (0..7) of row `row` in a swizzled tile of 128-byte rows.
DEV u32 swizzled(u32 tile, u32 row, u32 piece) {
  return tile + row * 128 + ((piece ^ (row & 7)) << 4);
}

// Over the quad of lanes that hold one row of an accumulator.
DEV float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
DEV float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
