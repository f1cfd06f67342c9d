// Hopper instructions that only the backward kernel uses: TMA reductions, and semaphores in global
// memory that order them across CTAs. The emulator's are in `emu/backward.h`.
#ifndef EMULATED
// Adds one box of f32 in shared memory to a five-dimensional map; elements out of bounds are
// dropped.
DEV void tma_add(
    const TensorMap* map, u32 from, int column, int row, int head, int segment, int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, "
      "%6}], [%1];" ::"l"(map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(segment), "r"(batch)
      : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the semaphore has a value. Earlier additions of other CTAs are then complete, and
// later ones of this CTA come after them.
DEV void semaphore_wait(const u32* semaphore, u32 value) {
  u32 now;
#ifdef WATCHDOG
  u32 tries = 0;
#define GIVE_UP if (++tries > 10000000u) asm volatile("trap;");
#else
#define GIVE_UP
#endif
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(semaphore) : "memory");
    GIVE_UP
  } while (now != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
DEV void semaphore_release(u32* semaphore, u32 value) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(semaphore), "r"(value) : "memory");
}
#endif
