// Forward attention with mma.sync, for every NVIDIA GPU from sm_80 on: bf16 and f16, exact at every
// edge.
//
// A thread block has TILE query rows of one (batch entry, segment, head) and streams their keys,
// BLOCK at a time; the next block is copied while one is computed. Each warp has MT * 16 rows, so a
// softmax never leaves a quad of lanes.
//
// The decision here: variants differ only in head dimension and alignment. Mask, carry and finish
// are run-time flags, tested outside the inner loops, so one compiled kernel serves every job of a
// run.
//
// Scores are in base 2 (times scale * log2 e); the carry in memory is in natural units.

// The state of an online softmax: this thread's rows, and its part of their sums (quads are summed
// last).
struct Softmax { float m[MT][2], l[MT][2]; };

// One step of the online softmax: scores become weights relative to the running maximum, and
// earlier sums are rescaled.
DEV void online_softmax(
    Softmax& state, float (&s)[MT][BLOCK / 8][4], float (&acc)[MT][HD / 8][4], float c) {
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      float row_max = neg_inf();
      #pragma unroll
      for (int n = 0; n < BLOCK / 8; n++)
        row_max = fmaxf(row_max, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
      float m = fmaxf(state.m[mt][half], quad_max(row_max) * c);
      float origin =
          m == neg_inf() ? 0.f : m;   // a row that saw no key: every weight is exp2(-inf)
      float rescale = exp2_fast(state.m[mt][half] - origin), sum = 0.f;
      #pragma unroll
      for (int n = 0; n < BLOCK / 8; n++)
        #pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[mt][n][e] = exp2_fast(fmaf(s[mt][n][e], c, -origin));
          sum += s[mt][n][e];
        }
      state.m[mt][half] = m;
      state.l[mt][half] = fmaf(state.l[mt][half], rescale, sum);
      #pragma unroll
      for (int n = 0; n < HD / 8; n++) {
        acc[mt][n][2 * half] *= rescale;
        acc[mt][n][2 * half + 1] *= rescale;
      }
    }
}

// Masks the scores of keys that a row does not see, in a block that begins at `key`; `limits` is
// the address of the rows' limits.
DEV void apply_mask(float (&s)[MT][BLOCK / 8][4], int key, u32 limits) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int limit = (int)load_shared(limits + own_row(r / 2, r % 2) * 4) - key;
    #pragma unroll
    for (int n = 0; n < BLOCK / 8; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        if (own_column(n) + e >= limit) s[r / 2][n][r % 2 * 2 + e] = neg_inf();
  }
}

// For a negative scale, negates the queries, so that the largest product is the largest score.
DEV void negate_queries(u32 tile) {
  for (int i = threadIdx.x; i < TILE * HD / 2; i += THREADS) {
    u32 address = tile + (i / (HD / 2) * PITCH + i % (HD / 2) * 2) * 2;
    store_shared(address, load_shared(address) ^ 0x80008000u);
  }
  __syncthreads();
}

struct Operands { const u16 *q, *k, *v; float *acc, *m, *l; u16* out; float* lse; };
struct TileOrigin { int b, s, h, first; };
DEV TileOrigin tile_origin(const JobParams& job, u32 index) {
  const u32 tiles = (job.queries + TILE - 1) / TILE, origin = index / tiles;
  int tile = (int)(index % tiles);
  if (job.causal)
    tile = (int)tiles - 1 - tile;   // longest tiles first: they determine the makespan
  return TileOrigin{(int)(origin / job.heads / job.segments),
      (int)(origin / job.heads % job.segments), (int)(origin % job.heads), tile * TILE};
}

// Starts the softmax, or loads its carry.
DEV void load_state(const JobParams& job, const Operands& in, int starts, const TileOrigin& origin,
    Softmax& state, float (&acc)[MT][HD / 8][4]) {
  zero(acc);
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, i = origin.first + own_row(mt, half);
    state.m[mt][half] = neg_inf();
    state.l[mt][half] = 0.f;
    if (starts || i >= job.queries) continue;
    const i64 cell = at(job.cells, origin.b, origin.s, i, origin.h);
    state.m[mt][half] = in.m[cell] * (float)LOG2_E;
    if (lane() % 4 == 0)
      state.l[mt][half] = in.l[cell];   // one lane of the quad: the four are summed
    #pragma unroll
    for (int n = 0; n < HD / 8; n++)
      read_pair(in.acc + cell * job.dim, own_column(n), job.dim, acc[mt][n][2 * half],
          acc[mt][n][2 * half + 1]);
  }
}

// Stores the rows. A row that continues and saw no key here keeps every bit of its carry.
DEV void store_state(const JobParams& job, const Operands& to, int starts, int finishes, u32 limits,
    const Softmax& state, const float (&acc)[MT][HD / 8][4]) {
  const TileOrigin origin = tile_origin(job, (u32)opaque((int)blockIdx.x));
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, i = origin.first + own_row(mt, half);
    const float m = state.m[mt][half], l = quad_sum(state.l[mt][half]);
    if (i >= job.queries ||
        (!starts && !finishes && load_shared(limits + own_row(mt, half) * 4) == 0))
      continue;
    const i64 cell = at(job.cells, origin.b, origin.s, i, origin.h);
    if (lane() % 4 == 0) {
      float largest = m * LN_2;
      if (!starts) {
        // An unchanged maximum is stored as it was loaded, not after two roundings.
        const float before = to.m[cell];
        if (before * (float)LOG2_E == m) largest = before;
      }
      if (!finishes) { to.m[cell] = largest; to.l[cell] = l; }
      else to.lse[cell] = l == 0.f ? neg_inf() : largest + log2_fast(l) * LN_2;
    }
    const float factor = l == 0.f ? 0.f : (float)job.gain / l;
    #pragma unroll
    for (int n = 0; n < HD / 8; n++) {
      const float x = acc[mt][n][2 * half], y = acc[mt][n][2 * half + 1];
      if (!finishes) write_pair(to.acc + cell * job.dim, own_column(n), job.dim, x, y);
      else write_pair(to.out + cell * job.dim, own_column(n), job.dim, x * factor, y * factor);
    }
  }
}

// Rows start empty if `starts`, else from (acc, m, l); they finish in (out, lse) if `finishes`,
// else in (acc, m, l).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mma_forward(const JobParams job, const u16* q, const u16* k, const u16* v, float* acc_out,
        float* m, float* l, u16* out, float* lse, int starts, int finishes) {
  const Operands operands = {q, k, v, acc_out, m, l, out, lse};
  // Shared memory: the queries, two blocks of keys and values, and the number of visible keys per
  // query.
  const u32 queries = shared_base(), streamed = queries + TILE_BYTES(TILE),
            limits = streamed + 4 * TILE_BYTES(BLOCK);
  const TileOrigin origin = tile_origin(job, blockIdx.x);
  // Positions increase, so the first row of a tile sees the fewest keys and the last row the most.
  const int rows = smaller(TILE, job.queries - origin.first), warp_row = own_row(0, 0) - lane() / 4;
  const int visible_to_all = visible(job, origin.first),
            blocks = (visible(job, origin.first + rows - 1) + BLOCK - 1) / BLOCK;
  if (blocks == 0 && !(starts | finishes)) return;

  const Rows keys = rows_of(job.k, origin.b, origin.s, origin.h, job.keys);
  auto load_block = [&](int block) {
    u32 to = streamed + block % 2 * TILE_BYTES(2 * BLOCK);
    load_tile<BLOCK>(to, k, keys, block * BLOCK, job.dim);
    load_tile<BLOCK>(to + TILE_BYTES(BLOCK), v, keys, block * BLOCK, job.dim);
  };
  if (blocks > 0) {
    load_tile<TILE>(queries, q, rows_of(job.q, origin.b, origin.s, origin.h, job.queries),
        origin.first, job.dim);
    load_block(0);
  }
  if (threadIdx.x < TILE)
    store_shared(limits + threadIdx.x * 4,
        (u32)((int)threadIdx.x < rows ? visible(job, origin.first + threadIdx.x) : 0));
  Softmax state;
  float acc[MT][HD / 8][4];
  load_state(job, operands, starts, origin, state, acc);
  __syncthreads();
  const int visible_to_warp =
      warp_row < rows ? load_shared(limits + smaller(warp_row + MT * 16, rows) * 4 - 4) : 0;

  // A scale of zero is replaced by a tiny one: a masked score is -inf, and 0 times it would be NaN.
  const float c = fmaxf((float)(job.scale * LOG2_E) * (job.scale < 0 ? -1.f : 1.f), 1e-37f);
  #pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    copies_done();
    __syncthreads();   // the block has arrived, and the other buffer is free
    if (block == 0 && job.scale < 0) negate_queries(queries);
    if (block + 1 < blocks) load_block(block + 1);
    const int key = block * BLOCK;
    const u32 now = streamed + block % 2 * TILE_BYTES(2 * BLOCK), values = now + TILE_BYTES(BLOCK);
    const bool masked = key + BLOCK > visible_to_all;
    const bool nonfinite = masked && __syncthreads_or(has_nonfinite<BLOCK>(values));
    if (key >= visible_to_warp) continue;

    float weights[MT][BLOCK / 8][4];
    scores<BLOCK / 8>(weights, queries + TILE_BYTES(warp_row), now);
    if (masked) apply_mask(weights, key, limits);
    online_softmax(state, weights, acc, c);
    u32 left[MT][BLOCK / 16][4];
    left_operand<BLOCK / 8>(left, weights);
    masked_product(nonfinite, acc, left, values, 1.f, [&](int mt, int half, int row) {
      return key + row < (int)load_shared(limits + own_row(mt, half) * 4);
    });
  }
  // The flags are read again: no register is left to keep them in.
  store_state(job, operands, opaque(starts), opaque(finishes), limits, state, acc);
}
