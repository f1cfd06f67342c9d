// Before the backward kernel: lse and delta of every query row, dense, so that one bulk copy brings
// those of a block; and the rows that must stay hidden are found (backward.cuh says how they are marked).
//
// Only rows that some key does not see are looked at: all of them under a mask, else those that saw nothing.

struct BackwardRows {
  Job job;
  const u16 *q, *dout;
  const float *lse, *delta;
  float *dense_lse, *dense_delta;
  u32* control;
  int padded;
  float delta_gain;
};

// Each thread writes one row; the 32 threads of a warp look at their 32 rows together.
extern "C" __global__ void __launch_bounds__(256)
backward_rows(const __grid_constant__ BackwardRows w) {
  const Job& job = w.job;
  const i64 place = (i64)blockIdx.x * 256 + threadIdx.x, total = (i64)job.batch * job.segments * job.heads * w.padded;
  const int lane = threadIdx.x % 32;
  if (place - lane >= total) return;  // `padded` is a multiple of 32: a warp's rows are of one head
  const int row = (int)(place % w.padded);
  const i64 outer = place / w.padded;
  const int h = (int)(outer % job.heads), s = (int)(outer / job.heads % job.segments), b = (int)(outer / job.heads / job.segments);
  float lse = neg_inf(), delta = 0.f;
  if (row < job.queries) {
    const i64 cell = at(job.cells, b, s, row, h);
    lse = w.lse[cell];
    if (lse != neg_inf()) delta = w.delta[cell];
  }
  const bool silent = lse == neg_inf();
  u32 look = __ballot_sync(~0u, row < job.queries && (job.causal || silent)), sick = 0;
  const int chunks = job.dim / 8;  // of 16 bytes
  while (look) {
    const int other = __ffs(look) - 1, there = row - lane + other;
    look &= look - 1;
    bool fine = true;
    for (int c = lane; c < 2 * chunks; c += 32) {
      const u16* from = c < chunks ? w.q + at(job.q, b, s, there, h) + 8 * c
                                   : w.dout + at(job.cells, b, s, there, h) * job.dim + 8 * (c - chunks);
      fine = fine && are_numbers(*(const uint4*)from);
    }
    if (__ballot_sync(~0u, !fine)) sick |= 1u << other;
  }
  const bool mine = sick >> lane & 1;
  w.dense_lse[place] = silent ? -neg_inf() : mine ? __uint_as_float(NOT_A_NUMBER) : fmaf(lse, 1.4426950408889634f, -P_SHIFT);
  w.dense_delta[place] = delta * w.delta_gain;
  if (sick && lane == 0) w.control[SICK_QUERIES] = 1;
}
