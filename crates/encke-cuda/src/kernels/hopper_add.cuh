// Instructions of Hopper that only the backward kernel uses: additions to memory by the copy
// engine, and turns that CTAs take at it. The emulator's are in `emu/backward.h`.
#ifndef EMULATED
// Adds one box of f32 in shared memory to a five-dimensional map; what lies outside of it is dropped.
DEV void tma_add(const TensorMap* map, u32 from, int column, int row, int head, int segment, int batch) {
  asm volatile("cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
    :: "l"(map), "r"(from), "r"(column), "r"(row), "r"(head), "r"(segment), "r"(batch) : "memory");
}
DEV void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until it is this one's turn. What others added before is then done, and later additions come after it.
DEV void await_turn(const u32* turn, u32 mine) {
  u32 now;
#ifdef WATCHDOG
  u32 tries = 0;
#define GIVE_UP if (++tries > 10000000u) asm volatile("trap;");
#else
#define GIVE_UP
#endif
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    GIVE_UP
  } while (now != mine);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
DEV void pass_turn(u32* turn, u32 next) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(turn), "r"(next) : "memory");
}
#endif
