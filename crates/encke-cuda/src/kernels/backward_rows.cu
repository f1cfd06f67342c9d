// Runs before the backward kernel. Gathers lse and delta of every query row into dense arrays, so
// that one bulk copy loads those of a block, and marks rows that are not finite (see backward.cuh).
//
// It also computes the first block of queries that sees each tile of keys: a 64-bit division for
// which the tile scheduler of the backward kernel has no registers.
//
// Only rows that are hidden from some key are examined (all under a mask, else those that saw no
// key), and of these only rows whose lse or delta is not finite: a query that is not finite has no
// finite score and so no finite lse, and delta is dout times out. Reading all of q and dout would
// take a hundredth of the time of the gradients.

struct BackwardRows {
  JobParams job;
  const u16 *q, *dout;
  const float *lse, *delta;
  float *dense_lse, *dense_delta;
  u32* control;
  int padded;
  float delta_gain;
  int* first_blocks;      // for each tile of keys, and an end
  int key_tiles, tile_keys;
  // With WINDOWED: the pieces that have keys, the queries that see each key, and for each tile of
  // keys the block after the last that sees it.
  const PieceParams* pieces;
  Range* key_rows;
  int* end_blocks;
  int count_pieces;
  // With TILED: rows of a tile, positive if queries see keys of their own tile and those before,
  // negative if those after it, 0 if all. The tile of key j begins `shift` query rows after the
  // multiple of a tile's rows that j + key_lead begins with.
  int tile, key_lead, shift;
  // With SLOPES: how far the query with row 0 would lie after each key.
  int* distances;
};
#if TILED
// The first query row of the tile of a key, if the job has it; else 0 or all its rows.
DEV int own_start(const BackwardRows& w, int key) {
  const int size = w.tile < 0 ? -w.tile : w.tile;
  return max(0, min(((key + w.key_lead) & -size) + w.shift, w.job.queries));
}
// The queries among `seeing` that the grid leaves a key.
DEV Range on_grid(const BackwardRows& w, int key, Range seeing) {
  if (w.tile > 0) seeing.start = max(seeing.start, own_start(w, key));
  if (w.tile < 0) seeing.end = min(seeing.end, own_start(w, key));
  return Range{seeing.start, max(seeing.start, seeing.end)};
}
#else
DEV Range on_grid(const BackwardRows&, int, Range seeing) { return seeing; }
#endif

// A bit mask of the rows in `suspects`, counted from `row`, that are not finite. A warp reads them
// together, 16 bytes per thread and several loads in flight, because memory latency dominates.
DEV u32 nonfinite_rows(
    const BackwardRows& w, u32 suspects, int b, int s, int row, int h, int lane) {
  const JobParams& job = w.job;
  const int of_q = job.dim / 8, pieces = of_q + job.value_dim / 8;   // of a row: q, then dout
  const u16 *q = w.q + at(job.q, b, s, row, h),
            *dout = w.dout + at(job.cells, b, s, row, h) * job.value_dim;
  const i64 q_step = job.q.row, dout_step = job.cells.row * job.value_dim;
  const int rows_on = 32 / pieces, pieces_on = 32 % pieces, loads = 8;
  int there = lane / pieces, piece = lane % pieces;
  u32 nonfinite = 0;
  for (int from = 0; from < pieces; from += loads) {
    uint4 x[loads];
    int of[loads];
    #pragma unroll
    for (int i = 0; i < loads; i++) {
      x[i] = make_uint4(0, 0, 0, 0);
      of[i] = there;
      if (from + i < pieces && (suspects >> there & 1))
        x[i] = *(const uint4*)(piece < of_q ? q + there * q_step + 8 * piece
                                            : dout + there * dout_step + 8 * (piece - of_q));
      there += rows_on; piece += pieces_on;
      if (piece >= pieces) { piece -= pieces; there++; }
    }
    #pragma unroll
    for (int i = 0; i < loads; i++) if (!all_finite(x[i])) nonfinite |= 1u << of[i];
  }
  for (int apart = 16; apart > 0; apart /= 2) nonfinite |= __shfl_xor_sync(~0u, nonfinite, apart);
  return nonfinite;
}

#if WINDOWED
// The piece that holds a key, or the first after it.
DEV int piece_of_key(const BackwardRows& w, int key) {
  int low = 0, high = w.count_pieces;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (w.pieces[middle].end_key <= key) low = middle + 1;
    else high = middle;
  }
  return low;
}
// The query rows that see a key. Those of a key in no piece are none, between those of its
// neighbours: both ends grow with the key.
DEV Range seeing_queries(const BackwardRows& w, int key) {
  const int low = piece_of_key(w, key);
  if (low == w.count_pieces) return Range{w.job.queries, w.job.queries};
  const PieceParams& p = w.pieces[low];
  return key < p.first_key ? Range{p.first_query, p.first_query}
                           : on_grid(w, key, queries_of(p, key));
}
DEV void write_ranges(const BackwardRows& w, i64 index, i64 step) {
  for (i64 key = index; key < (i64)w.key_tiles * w.tile_keys; key += step)
    if (key < w.job.keys) {
      w.key_rows[key] = seeing_queries(w, (int)key);
#if SLOPES
      const int piece = piece_of_key(w, (int)key);
      if (piece < w.count_pieces)
        w.distances[key] =
            (int)(query_position(w.pieces[piece], 0) - key_position(w.pieces[piece], (int)key));
#endif
    }
  for (i64 tile = index; tile <= w.key_tiles; tile += step) {
    const i64 key = tile * w.tile_keys, last = min(key + w.tile_keys, (i64)w.job.keys) - 1;
    w.first_blocks[tile] =
        key < w.job.keys ? seeing_queries(w, (int)key).start / BQ : (w.job.queries + BQ - 1) / BQ;
    if (tile < w.key_tiles)
      w.end_blocks[tile] = (seeing_queries(w, (int)last).end + BQ - 1) / BQ;
  }
}
#endif

// The first block of queries that sees a tile of keys; the number of blocks if none does.
DEV int first_block(const BackwardRows& w, int tile) {
  const int key = tile * w.tile_keys, all = w.job.queries,
            row = key < w.job.keys
                      ? on_grid(w, key, Range{first_query(w.job, key), all}).start : all;
  return row < all ? row / BQ : (all + BQ - 1) / BQ;
}

// Each thread writes one row; the 32 threads of a warp examine their 32 rows together.
extern "C" __global__ void __launch_bounds__(256)
backward_rows(const __grid_constant__ BackwardRows w) {
  const JobParams& job = w.job;
  const i64 index = (i64)blockIdx.x * 256 + threadIdx.x,
            total = (i64)job.batch * job.segments * job.heads * w.padded;
  const int lane = threadIdx.x % 32;
#if WINDOWED
  write_ranges(w, index, (i64)gridDim.x * 256);
#else
  for (i64 tile = index; tile <= w.key_tiles; tile += (i64)gridDim.x * 256)
    w.first_blocks[tile] = first_block(w, (int)tile);
#if TILED
  for (i64 tile = index; tile < w.key_tiles; tile += (i64)gridDim.x * 256)
    w.end_blocks[tile] =
        (on_grid(w, (int)(tile * w.tile_keys), Range{0, job.queries}).end + BQ - 1) / BQ;
#endif
#endif
  if (index - lane >= total) return;  // `padded` is a multiple of 32: one head per warp
  const int row = (int)(index % w.padded);
  const i64 outer = index / w.padded;
  const int h = (int)(outer % job.heads), s = (int)(outer / job.heads % job.segments),
            b = (int)(outer / job.heads / job.segments);
  float lse = neg_inf(), delta = 0.f;
  if (row < job.queries) {
    lse = w.lse[at(job.cells, b, s, row, h)];
    if (lse != neg_inf()) delta = w.delta[at(job.delta, b, s, row, h)];
  }
  const bool empty = lse == neg_inf();
  const bool finite = is_finite(lse) && is_finite(delta);
  const u32 suspects = __ballot_sync(~0u, row < job.queries && !finite && (job.causal || empty));
  const u32 nonfinite = suspects ? nonfinite_rows(w, suspects, b, s, row - lane, h, lane) : 0;
  const bool mine = nonfinite >> lane & 1;
  const float dense_lse = empty  ? -neg_inf()
                          : mine ? __uint_as_float(QUIET_NAN)
                                 : fmaf(lse, 1.4426950408889634f, -P_SHIFT);
  w.dense_lse[index] = dense_lse;
  w.dense_delta[index] = delta * w.delta_gain;
  const u32 large = __ballot_sync(~0u, is_large(dense_lse));
  if ((nonfinite | large) && lane == 0) w.control[SPECIAL_QUERIES] = 1;
}
