// Forward attention with mma.sync, for every NVIDIA GPU from sm_80 on: bf16 and f16, exact at every
// edge.
//
// A thread block has TILE query rows of one (batch entry, segment, head) and streams their keys,
// BLOCK at a time; the next block is copied while one is computed. Each warp has MT * 16 rows, so a
// softmax never leaves a quad of lanes.
//
// The decision here: variants differ in head dimension and alignment, and in whether the job has
// more than a causal mask (masks.cuh). Causal masks, carry and finish are run-time flags, tested
// outside the inner loops, so that few compiled kernels serve every job of a run.
//
// Scores are in base 2 (times scale * log2 e); the carry in memory is in natural units.

#if SOFTCAP || SLOPES
// Scores in natural units from products; `slope` counts from the first row of the tile and from the
// first key of the block.
DEV void transform_scores(
    float (&s)[MT][BLOCK / 8][4], const Transform& transform, const Slope& slope) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++)
    #pragma unroll
    for (int n = 0; n < BLOCK / 8; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[r / 2][n][r % 2 * 2 + e];
        float derivative;
        x = transformed(
            transform, slope, x, own_row(r / 2, r % 2), own_column(n) + e, derivative);
      }
}
#endif

#if DROPOUT
// Words of kept pairs in a row.
#define COIN_WORDS ((BLOCK + 31) / 32)
// Draws the coins of a block that begins at `key`, for all rows of the tile.
DEV void draw_coins(const Job& job, const PieceParams& p, int b, int s, int h, int first, int end,
    int key, u32 coins) {
  for (int n = threadIdx.x; n < TILE * COIN_WORDS; n += THREADS) {
    const int row = n / COIN_WORDS, word = n % COIN_WORDS;
    if (first + row < end)
      store_shared(coins + n * 4, kept_pairs(job, p, b, s, h, first + row, key + word * 32));
  }
}
// Weights become 0 for dropped pairs, and grow for others.
DEV void drop_pairs(float (&s)[MT][BLOCK / 8][4], u32 coins, float kept) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++)
    #pragma unroll
    for (int n = 0; n < BLOCK / 8; n++) {
      const u32 word =
          load_shared(coins + (own_row(r / 2, r % 2) * COIN_WORDS + n / 4) * 4);
      #pragma unroll
      for (int e = 0; e < 2; e++)
        s[r / 2][n][r % 2 * 2 + e] *= word >> ((own_column(n) + e) % 32) & 1 ? kept : 0.f;
    }
}
#endif

struct Operands { const u16 *q, *k, *v; float *acc, *m, *l; u16* out; float* lse; };
// Query rows from `first` on, before `end`. Blocks of keys are counted from `key` on, and end
// before `end_key`.
struct TileOrigin { int b, s, h, first, end, key, end_key; i64 entry; };
DEV TileOrigin tile_origin(const Job& job, u32 index) {
#if MASKED
  const u32 tiles = job.mask.count_tiles, origin = index / tiles;
  const i64 entry = job.mask.tiles[index % tiles];
  const PieceParams& p = piece_at(job, entry);
  const int first = p.first_query + (int)(u32)entry * TILE, end = p.end_query, key = p.first_key,
            end_key = p.end_key;
#else
  const u32 tiles = (job.queries + TILE - 1) / TILE, origin = index / tiles;
  int tile = (int)(index % tiles);
  if (job.causal)
    tile = (int)tiles - 1 - tile;   // longest tiles first: they determine the makespan
  const int first = tile * TILE, end = job.queries, key = 0, end_key = job.keys;
  const i64 entry = 0;
#endif
  return TileOrigin{(int)(origin / job.heads / job.segments),
      (int)(origin / job.heads % job.segments), (int)(origin % job.heads), first, end, key, end_key,
      entry};
}
DEV Range visible_keys(const Job& job, const TileOrigin& origin, int i) {
#if MASKED
  return keys_of(piece_at(job, origin.entry), i);
#else
  return Range{0, visible(job, i)};
#endif
}

// Starts the softmax, or loads its carry.
DEV void load_state(const Job& job, const Operands& in, int starts, const TileOrigin& origin,
    Softmax& state, float (&acc)[MT][VD / 8][4]) {
  const int dim = value_dim(job);
  zero<VD>(acc);
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, i = origin.first + own_row(mt, half);
    state.m[mt][half] = neg_inf();
    state.l[mt][half] = 0.f;
    if (starts || i >= origin.end) continue;
    const i64 cell = at(job.cells, origin.b, origin.s, i, origin.h);
    state.m[mt][half] = __fmul_rn(in.m[cell], (float)LOG2_E);   // not fused with a difference
    if (lane() % 4 == 0)
      state.l[mt][half] = in.l[cell];   // one lane of the quad: the four are summed
    #pragma unroll
    for (int n = 0; n < VD / 8; n++)
      read_pair(in.acc + cell * dim, own_column(n), dim, acc[mt][n][2 * half],
          acc[mt][n][2 * half + 1]);
  }
}

// Stores the rows. A row that continues and saw no key here keeps every bit of its carry.
DEV void store_state(const Job& job, const Operands& to, int starts, int finishes, u32 limits,
    const Softmax& state, const float (&acc)[MT][VD / 8][4]) {
  const TileOrigin origin = tile_origin(job, (u32)opaque((int)blockIdx.x));
  const int dim = value_dim(job);
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, i = origin.first + own_row(mt, half);
    const float m = state.m[mt][half], l = quad_sum(state.l[mt][half]);
    if (i >= origin.end) continue;
    if (!starts && !finishes) {
      const Range seen = seen_by(limits, own_row(mt, half));
      if (seen.start >= seen.end) continue;
    }
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
    for (int n = 0; n < VD / 8; n++) {
      const float x = acc[mt][n][2 * half], y = acc[mt][n][2 * half + 1];
      if (!finishes) write_pair(to.acc + cell * dim, own_column(n), dim, x, y);
      else write_pair(to.out + cell * dim, own_column(n), dim, x * factor, y * factor);
    }
  }
}

// Rows start empty if `starts`, else from (acc, m, l); they finish in (out, lse) if `finishes`,
// else in (acc, m, l).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mma_forward(const Job job, const u16* q, const u16* k, const u16* v, float* acc_out,
        float* m, float* l, u16* out, float* lse, int starts, int finishes) {
  const Operands operands = {q, k, v, acc_out, m, l, out, lse};
  // Shared memory: the queries, two blocks of keys and values, the visible keys of each query, and
  // two blocks of coins.
  const u32 block_bytes = TILE_BYTES(BLOCK) + VALUE_BYTES(BLOCK);
  const u32 queries = shared_base(), streamed = queries + TILE_BYTES(TILE),
            limits = streamed + 2 * block_bytes;
  const TileOrigin origin = tile_origin(job, blockIdx.x);
  // Positions increase, so the first row of a tile sees the first keys and the last row the last.
  const int rows = smaller(TILE, origin.end - origin.first), warp_row = own_row(0, 0) - lane() / 4;
  const Range first_sees = visible_keys(job, origin, origin.first),
              last_sees = visible_keys(job, origin, origin.first + rows - 1);
  const int first_block = (first_sees.start - origin.key) / BLOCK,
            blocks = (last_sees.end - origin.key + BLOCK - 1) / BLOCK;
  if (blocks <= first_block && !(starts | finishes)) return;

  const Rows keys = rows_of(job.k, origin.b, origin.s, origin.h, origin.end_key);
#if MASKED
  const Rows value_rows = rows_of(values(job), origin.b, origin.s, origin.h, origin.end_key);
#else
  const Rows& value_rows = keys;
#endif
  auto load_block = [&](int block) {
    const u32 to = streamed + block % 2 * block_bytes;
    const int key = origin.key + block * BLOCK;
    load_tile<BLOCK, HD>(to, k, keys, key, job.dim);
    load_tile<BLOCK, VD>(to + TILE_BYTES(BLOCK), v, value_rows, key, value_dim(job));
#if DROPOUT
    draw_coins(job, piece_at(job, origin.entry), origin.b, origin.s, origin.h, origin.first,
        origin.end, key, limits + (2 * TILE + block % 2 * TILE * COIN_WORDS) * 4);
#endif
  };
  if (blocks > first_block) {
    load_tile<TILE, HD>(queries, q, rows_of(job.q, origin.b, origin.s, origin.h, origin.end),
        origin.first, job.dim);
    load_block(first_block);
  }
  if (threadIdx.x < TILE) {
    const Range seen = (int)threadIdx.x < rows
                           ? visible_keys(job, origin, origin.first + threadIdx.x) : Range{0, 0};
    store_shared(limits + threadIdx.x * 4, (u32)seen.end);
#if MASKED
    store_shared(limits + (TILE + threadIdx.x) * 4, (u32)seen.start);
#endif
  }
  Softmax state;
  float acc[MT][VD / 8][4];
  load_state(job, operands, starts, origin, state, acc);
  __syncthreads();
  // The keys that some row of this warp sees.
  const Range warp_sees =
      warp_row < rows
          ? Range{seen_by(limits, warp_row).start,
                seen_by(limits, smaller(warp_row + MT * 16, rows) - 1).end}
          : Range{0, 0};

#if SOFTCAP || SLOPES
  const Transform transform = transform_of(job);
  const float c = (float)LOG2_E;
#else
  const float c = score_factor(job.scale);
#endif
  #pragma unroll 1
  for (int block = first_block; block < blocks; block++) {
    copies_done();
    __syncthreads();   // the block has arrived, and the other buffer is free
#if !(SOFTCAP || SLOPES)
    if (block == first_block && job.scale < 0) negate_queries(queries);
#endif
    if (block + 1 < blocks) load_block(block + 1);
    const int key = origin.key + block * BLOCK;
    const u32 now = streamed + block % 2 * block_bytes, values = now + TILE_BYTES(BLOCK);
    const bool masked = key + BLOCK > first_sees.end || (MASKED && key < last_sees.start);
    const bool nonfinite = masked && __syncthreads_or(has_nonfinite<BLOCK, VD>(values));
    if (key >= warp_sees.end || (MASKED && key + BLOCK <= warp_sees.start)) continue;

    float weights[MT][BLOCK / 8][4];
    scores<BLOCK / 8, HD>(weights, queries + TILE_BYTES(warp_row), now);
#if SOFTCAP || SLOPES
    transform_scores(weights, transform,
        slope_of(job, piece_at(job, origin.entry), origin.h, origin.first, key));
#endif
    if (masked) apply_mask(weights, key, limits);
    online_softmax(state, weights, acc, c);
#if DROPOUT
    drop_pairs(weights, limits + (2 * TILE + block % 2 * TILE * COIN_WORDS) * 4,
        (float)job.mask.kept);
#endif
    u32 left[MT][BLOCK / 16][4];
    left_operand<BLOCK / 8>(left, weights);
    masked_product<BLOCK / 16, VD>(
        nonfinite, acc, left, values, 1.f, [&](int mt, int half, int row) {
          const Range seen = seen_by(limits, own_row(mt, half));
          return key + row < seen.end && (!MASKED || key + row >= seen.start);
        });
  }
  // The flags are read again: no register is left to keep them in.
  store_state(job, operands, opaque(starts), opaque(finishes), limits, state, acc);
}
