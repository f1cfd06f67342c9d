// Before the backward kernel: lse and delta of every query row, dense, so that one bulk copy brings
// those of a block; and the rows that must stay hidden are found (backward.cuh says how they are marked).
//
// Besides it finds the first block of queries that sees each tile of keys: a division of 64 bits that the kernel has
// no registers for where it draws its tiles.
//
// Only rows that some key does not see are looked at (under a mask all of them, else those that saw nothing), and of these
// only where lse or delta is no number: a query with such a number has no finite score and so no finite lse, and delta is
// dout times out. To read all of q and dout takes a hundredth of the time of the gradients.

struct BackwardRows {
  Job job;
  const u16 *q, *dout;
  const float *lse, *delta;
  float *dense_lse, *dense_delta;
  u32* control;
  int padded;
  float delta_gain;
  int* first_blocks;      // of each tile of keys, and an end
  int key_tiles, tile_keys;
};

// Which of the rows in `look`, counted from `row`, hold something that is no number: a warp reads them together, 16 bytes
// a thread and several of them at a time, because it is waiting for memory that takes the time here.
DEV u32 sick_rows(const BackwardRows& w, u32 look, int b, int s, int row, int h, int lane) {
  const Job& job = w.job;
  const int half = job.dim / 8, pieces = 2 * half;   // of a row: q, then dout
  const u16 *q = w.q + at(job.q, b, s, row, h), *dout = w.dout + at(job.cells, b, s, row, h) * job.dim;
  const i64 q_step = job.q.row, dout_step = job.cells.row * job.dim;
  const int rows_on = 32 / pieces, pieces_on = 32 % pieces, together = 8;
  int there = lane / pieces, piece = lane % pieces;
  u32 sick = 0;
  for (int from = 0; from < pieces; from += together) {
    uint4 x[together];
    int of[together];
    #pragma unroll
    for (int i = 0; i < together; i++) {
      x[i] = make_uint4(0, 0, 0, 0);
      of[i] = there;
      if (from + i < pieces && (look >> there & 1))
        x[i] = *(const uint4*)(piece < half ? q + there * q_step + 8 * piece : dout + there * dout_step + 8 * (piece - half));
      there += rows_on; piece += pieces_on;
      if (piece >= pieces) { piece -= pieces; there++; }
    }
    #pragma unroll
    for (int i = 0; i < together; i++) if (!are_numbers(x[i])) sick |= 1u << of[i];
  }
  for (int apart = 16; apart > 0; apart /= 2) sick |= __shfl_xor_sync(~0u, sick, apart);
  return sick;
}

// The first block of queries that sees a tile of keys, and the number of blocks where none does.
DEV int first_block(const BackwardRows& w, int tile) {
  const int key = tile * w.tile_keys, row = key < w.job.keys ? first_query(w.job, key) : w.job.queries;
  return row < w.job.queries ? row / BQ : (w.job.queries + BQ - 1) / BQ;
}

// Each thread writes one row; the 32 threads of a warp look at their 32 rows together.
extern "C" __global__ void __launch_bounds__(256)
backward_rows(const __grid_constant__ BackwardRows w) {
  const Job& job = w.job;
  const i64 place = (i64)blockIdx.x * 256 + threadIdx.x, total = (i64)job.batch * job.segments * job.heads * w.padded;
  const int lane = threadIdx.x % 32;
  for (i64 tile = place; tile <= w.key_tiles; tile += (i64)gridDim.x * 256) w.first_blocks[tile] = first_block(w, (int)tile);
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
  const bool finite = is_number(lse) && is_number(delta);
  const u32 look = __ballot_sync(~0u, row < job.queries && !finite && (job.causal || silent));
  const u32 sick = look ? sick_rows(w, look, b, s, row - lane, h, lane) : 0;
  const bool mine = sick >> lane & 1;
  w.dense_lse[place] = silent ? -neg_inf() : mine ? __uint_as_float(NOT_A_NUMBER) : fmaf(lse, 1.4426950408889634f, -P_SHIFT);
  w.dense_delta[place] = delta * w.delta_gain;
  if (sick && lane == 0) w.control[SICK_QUERIES] = 1;
}
