// Backward attention with mma.sync, the half by queries: dq, for every NVIDIA GPU from sm_80 on.
//
// A thread block has TILE query rows with their dout, lse and delta, and streams the keys they see,
// BLOCK at a time. It alone adds to its rows of dq, in a fixed order: results are bitwise
// repeatable. S and dP are computed in both halves; that is the price of needing no atomic
// additions.
#define NT (BLOCK / 8)

// Shared memory: queries and douts, two blocks of keys and values, per query lse (base 2), delta
// and the visible keys, and two blocks of coins.
#define OWN_BYTES (TILE_BYTES(TILE) + VALUE_BYTES(TILE))
#define BLOCK_BYTES (TILE_BYTES(BLOCK) + VALUE_BYTES(BLOCK))
#define ROW_STATE (OWN_BYTES + 2 * BLOCK_BYTES)
DEV u32 lse_at(int row) { return shared_base() + ROW_STATE + 4 * row; }
DEV u32 delta_at(int row) { return lse_at(TILE + row); }
DEV u32 seen_at(int row) { return lse_at(2 * TILE + row); }
DEV u32 unseen_at(int row) { return lse_at(3 * TILE + row); }
DEV float shared_float(u32 at) { return __int_as_float((int)load_shared(at)); }
// The key rows that a row of the tile sees.
DEV Range seen_by(int row) {
#if MASKED
  const int start = (int)load_shared(unseen_at(row));
#else
  const int start = 0;
#endif
  return Range{start, (int)load_shared(seen_at(row))};
}
#if DROPOUT
#define COIN_WORDS ((BLOCK + 31) / 32)
DEV u32 coins_at(int block, int row) {
  return lse_at(4 * TILE + (block % 2 * TILE + row) * COIN_WORDS);
}
#endif

// What a tile's scores are made of, counted from its first query and a block's first key.
#if MASKED
struct BlockScores { Transform transform; Slope slope; u32 coins; };
#else
struct BlockScores {};
#endif

// dS = P (gain dP - delta) from scores and dP, in place of dP; 0 for masked keys of a block that
// begins at `key`. `LARGE`: there may be large rows.
template <bool LARGE>
DEV void to_ds(float (&dp)[MT][NT][4], const float (&s)[MT][NT][4], const Job& job, bool masked,
    int key, const BlockScores& of) {
  const float c = (float)(job.scale * LOG2_E), gain = (float)job.gain;
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int row = own_row(r / 2, r % 2);
    const float lse = shared_float(lse_at(row)), delta = shared_float(delta_at(row)),
                certain = certain_from(lse);
    const Range seen = masked ? seen_by(row) : Range{key, key + BLOCK};
    const int start = seen.start - key, limit = seen.end - key;
    #pragma unroll
    for (int n = 0; n < NT; n++) {
#if DROPOUT
      const u32 coins = load_shared(of.coins + (row * COIN_WORDS + n / 4) * 4);
#endif
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = dp[r / 2][n][r % 2 * 2 + e];
        const float product = s[r / 2][n][r % 2 * 2 + e];
        float factor = gain;
#if DROPOUT
        factor = coins >> ((own_column(n) + e) % 32) & 1 ? gain * (float)job.mask.kept : 0.f;
#endif
#if SOFTCAP || SLOPES
        float derivative;
        const float score =
            transformed(of.transform, of.slope, product, row, own_column(n) + e, derivative);
        float log = fmaf(score, (float)LOG2_E, -lse);
        if (LARGE && log > certain) log = 0.f;
        x = exp2_fast(log) * fmaf(factor, x, -delta) * derivative;
#else
        float log = fmaf(product, c, -lse);
        if (LARGE && log > certain) log = 0.f;
        x = exp2_fast(log) * fmaf(factor, x, -delta);
#endif
        if (masked && (own_column(n) + e >= limit || (MASKED && own_column(n) + e < start)))
          x = 0.f;
      }
    }
  }
}

// Query rows from `first` on, before `end`. Blocks of keys are counted from `key` on, and end
// before `end_key`.
struct TileOrigin { int b, s, h, first, end, key, end_key; i64 entry; };
DEV TileOrigin tile_origin(const Job& job, u32 block) {
#if MASKED
  const u32 tiles = job.mask.count_tiles, index = block / tiles;
  const i64 entry = job.mask.tiles[block % tiles];
  const PieceParams& p = piece_at(job, entry);
  const int first = p.first_query + (int)(u32)entry * TILE, end = p.end_query, key = p.first_key,
            end_key = p.end_key;
#else
  const int tiles = (job.queries + TILE - 1) / TILE, tile = (int)(block % tiles);
  const int first = (job.causal ? tiles - 1 - tile : tile) * TILE;   // longest tiles first
  const u32 index = block / tiles;
  const int end = job.queries, key = 0, end_key = job.keys;
  const i64 entry = 0;
#endif
  return TileOrigin{(int)(index / job.heads / job.segments),
      (int)(index / job.heads % job.segments), (int)(index % job.heads), first, end, key, end_key,
      entry};
}
DEV Range visible_keys(const Job& job, const TileOrigin& origin, int i) {
#if MASKED
  return keys_of(piece_at(job, origin.entry), i);
#else
  return Range{0, visible(job, i)};
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mma_backward_queries(const Job job, const u16* q, const u16* k, const u16* v,
        const u16* dout, const float* lse, const float* delta, float* dq_out) {
  const TileOrigin origin = tile_origin(job, blockIdx.x);
  const int b = origin.b, s = origin.s, h = origin.h, query = origin.first;

  // Positions increase, so the first row of a tile sees the first keys and the last row the last.
  const int rows = smaller(TILE, origin.end - query), warp_row = own_row(0, 0) - lane() / 4;
  const Range first_sees = visible_keys(job, origin, query),
              last_sees = visible_keys(job, origin, query + rows - 1);
  const int first_block = (first_sees.start - origin.key) / BLOCK,
            blocks = (last_sees.end - origin.key + BLOCK - 1) / BLOCK;
  if (blocks <= first_block) return;
  const Rows keys = rows_of(job.k, b, s, h, origin.end_key);
#if MASKED
  const Rows value_rows = rows_of(values(job), b, s, h, origin.end_key);
#else
  const Rows& value_rows = keys;
#endif
  auto load_block = [&](int block) {
    const u32 to = shared_base() + OWN_BYTES + block % 2 * BLOCK_BYTES;
    const int key = origin.key + block * BLOCK;
    load_tile<BLOCK, HD>(to, k, keys, key, job.dim);
    load_tile<BLOCK, VD>(to + TILE_BYTES(BLOCK), v, value_rows, key, value_dim(job));
#if DROPOUT
    for (int n = threadIdx.x; n < TILE * COIN_WORDS; n += THREADS) {
      const int row = n / COIN_WORDS, word = n % COIN_WORDS;
      if (row < rows)
        store_shared(coins_at(block, row) + 4 * word,
            kept_pairs(job, piece_at(job, origin.entry), b, s, h, query + row, key + word * 32));
    }
#endif
  };
  load_tile<TILE, HD>(shared_base(), q, rows_of(job.q, b, s, h, origin.end), query, job.dim);
  load_tile<TILE, VD>(shared_base() + TILE_BYTES(TILE), dout, cell_rows(job, b, s, h, origin.end),
      query, value_dim(job));
  load_block(first_block);
  if (threadIdx.x < TILE) {
    const int row = threadIdx.x;
    const bool real = row < rows;
    const i64 cell = real ? at(job.cells, b, s, query + row, h) : 0;
    const Range seen = real ? visible_keys(job, origin, query + row) : Range{0, 0};
    store_shared(lse_at(row), (u32)__float_as_int(real ? lse[cell] * (float)LOG2_E : 0.f));
    const i64 of_delta = real ? at(job.delta, b, s, query + row, h) : 0;
    store_shared(delta_at(row), (u32)__float_as_int(real ? delta[of_delta] : 0.f));
    store_shared(seen_at(row), (u32)seen.end);
#if MASKED
    store_shared(unseen_at(row), (u32)seen.start);
#endif
  }
  __syncthreads();
  // The keys that some row of this warp sees.
  const Range warp_sees =
      warp_row < rows ? Range{seen_by(warp_row).start,
                            seen_by(smaller(warp_row + MT * 16, rows) - 1).end}
                      : Range{0, 0};

  bool large = false;
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) large |= is_large(shared_float(lse_at(own_row(r / 2, r % 2))));
  large = __any_sync(~0u, large);

  float acc[MT][HD / 8][4];
  zero<HD>(acc);
  #pragma unroll 1
  for (int block = first_block; block < blocks; block++) {
    copies_done();
    __syncthreads();   // the block has arrived, and the other buffer is free
    if (block + 1 < blocks) load_block(block + 1);
    const int key = origin.key + block * BLOCK;
    const u32 now = shared_base() + OWN_BYTES + block % 2 * BLOCK_BYTES;
    const bool masked = key + BLOCK > first_sees.end || (MASKED && key < last_sees.start);
    const bool nonfinite = masked && __syncthreads_or(has_nonfinite<BLOCK, HD>(now));
    if (key >= warp_sees.end || (MASKED && key + BLOCK <= warp_sees.start)) continue;

    float weights[MT][NT][4], ds[MT][NT][4];
    scores<NT, HD>(weights, shared_base() + TILE_BYTES(warp_row), now);
    scores<NT, VD>(ds, shared_base() + TILE_BYTES(TILE) + VALUE_BYTES(warp_row),
        now + TILE_BYTES(BLOCK));
    BlockScores of;
#if SOFTCAP || SLOPES
    of.transform = transform_of(job);
    of.slope = slope_of(job, piece_at(job, origin.entry), h, query, key);
#endif
#if DROPOUT
    of.coins = coins_at(block, 0);
#endif
    if (SOFTCAP || SLOPES || DROPOUT || masked || large)
      to_ds<true>(ds, weights, job, masked, key, of);
    else to_ds<false>(ds, weights, job, false, key, of);
    u32 left[MT][NT / 2][4];
    left_operand<NT>(left, ds);
    masked_product<NT / 2, HD>(nonfinite, acc, left, now, 0.f, [&](int mt, int half, int row) {
      const Range seen = seen_by(own_row(mt, half));
      return key + row < seen.end && (!MASKED || key + row >= seen.start);
    });
  }
  // The tile is looked up again: no register is left to keep it in.
  const TileOrigin to = tile_origin(job, (u32)opaque((int)blockIdx.x));
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int row = own_row(r / 2, r % 2);
    // A row that saw no key, here or at all, keeps every bit.
    const Range seen = seen_by(row);
    if (seen.start >= seen.end || shared_float(lse_at(row)) == neg_inf()) continue;
    add_row<HD>(dq_out + at(job.dq, to.b, to.s, to.first + row, to.h), job.dim, (float)job.scale,
        acc[r / 2], r % 2);
  }
}
