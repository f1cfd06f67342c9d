// Backward attention with mma.sync, the half by keys: dk and dv, for every NVIDIA GPU from sm_80
// on.
//
// A thread block has TILE key rows and streams the queries that see them, BLOCK at a time, with
// their dout, lse and delta. It alone adds to its rows of dk and dv, in a fixed order: results are
// bitwise repeatable. Query heads that share a key head therefore share its thread block.
//
// The decision here: everything is computed transposed (rows are keys, columns are queries), so
// that P^T and dS^T are left operands of the next product without a transposition through shared
// memory.
//
// PARTS selects what is computed: 1 dv, 2 dk, 3 both. Where both accumulators do not fit into
// registers, the kernel runs once for each.
#define NT (BLOCK / 8)

struct Operands { const u16 *q, *k, *v, *dout; const float *lse, *delta; float *dk, *dv; };

// Key rows from `key` on, before `end`. Blocks of queries are counted from `query` on, and end
// before `end_query`.
struct TileOrigin { int b, s, h, key, end, query, end_query; i64 entry; };
DEV TileOrigin tile_origin(const Job& job, u32 index) {
#if MASKED
  const u32 tiles = job.mask.count_tiles, group = index / tiles;
  const i64 entry = job.mask.tiles[index % tiles];
  const PieceParams& p = piece_at(job, entry);
  const int key = p.first_key + (int)(u32)entry * TILE, end = p.end_key, query = p.first_query,
            end_query = p.end_query;
#else
  const u32 tiles = (job.keys + TILE - 1) / TILE, group = index / tiles;
  // The first keys are seen by most queries: the longest tiles come first.
  const int key = (int)(index % tiles) * TILE, end = job.keys, query = 0, end_query = job.queries;
  const i64 entry = 0;
#endif
  return TileOrigin{(int)(group / job.heads / job.segments),
      (int)(group / job.heads % job.segments), (int)(group % job.heads), key, end, query, end_query,
      entry};
}
DEV Range seeing_queries(const Job& job, const TileOrigin& origin, int j) {
#if MASKED
  return queries_of(piece_at(job, origin.entry), j);
#else
  return Range{first_query(job, j), job.queries};
#endif
}

// Shared memory: keys and values, two blocks of queries and douts with (lse, delta) and coins, and
// the queries that see each key.
#define OWN_BYTES (TILE_BYTES(TILE) + (PARTS & 2 ? VALUE_BYTES(TILE) : 0))
#define COIN_WORDS (DROPOUT ? TILE / 32 : 0)
#define BLOCK_BYTES \
  (TILE_BYTES(BLOCK) + VALUE_BYTES(BLOCK) + 8 * BLOCK + 4 * BLOCK * COIN_WORDS)
DEV u32 first_at(int row) { return shared_base() + OWN_BYTES + 2 * BLOCK_BYTES + 4 * row; }
// The queries that see a key row of the tile.
DEV Range seeing(int row) {
#if MASKED
  const int end = (int)load_shared(first_at(TILE + row));
#else
  const int end = 0x7fffffff;   // blocks end with the queries
#endif
  return Range{(int)load_shared(first_at(row)), end};
}

// A block of streamed rows is identified by its shared address: queries first, the rest follows.
DEV u32 streamed(int step) { return shared_base() + OWN_BYTES + step % 2 * BLOCK_BYTES; }
DEV u32 douts_at(u32 block) { return block + TILE_BYTES(BLOCK); }
DEV u32 lse_at(u32 block, int i) { return douts_at(block) + VALUE_BYTES(BLOCK) + 4 * i; }
DEV u32 delta_at(u32 block, int i) { return lse_at(block, BLOCK + i); }
DEV u32 coins_at(u32 block, int i) { return lse_at(block, 2 * BLOCK + i * COIN_WORDS); }
DEV float shared_float(u32 at) { return __int_as_float((int)load_shared(at)); }

DEV void load_block(const Job& job, const Operands& from, const TileOrigin& origin, int h,
    int block, int step) {
  const u32 to = streamed(step);
  const int b = origin.b, s = origin.s, first = origin.query + block * BLOCK,
            end = origin.end_query;
  load_tile<BLOCK, HD>(to, from.q, rows_of(job.q, b, s, h, end), first, job.dim);
  load_tile<BLOCK, VD>(
      douts_at(to), from.dout, cell_rows(job, b, s, h, end), first, value_dim(job));
  for (int i = threadIdx.x; i < BLOCK; i += THREADS) {
    const bool real = first + i < end;
    const i64 cell = real ? at(job.cells, b, s, first + i, h) : 0;
    copy4(lse_at(to, i), from.lse + cell,
        real);   // out of bounds: lse 0, multiplied by rows of zeros
    copy4(delta_at(to, i), from.delta + (real ? at(job.delta, b, s, first + i, h) : 0), real);
  }
#if DROPOUT
  for (int n = threadIdx.x; n < BLOCK * COIN_WORDS; n += THREADS) {
    const int i = n / COIN_WORDS, word = n % COIN_WORDS;
    if (first + i < end)
      store_shared(coins_at(to, i) + 4 * word, kept_pairs(job, piece_at(job, origin.entry), b, s, h,
                                                   first + i, origin.key + word * 32));
  }
#endif
}

// Whether a query of the block saw no key at all, so that its dout and delta are ignored, or is
// large.
DEV bool has_special_rows(u32 block) {
  bool found = false;
  #pragma unroll
  for (int i = 0; i < (BLOCK + 31) / 32; i++)
    if (i * 32 + lane() < BLOCK)
      // Where lse times log2 e, rounded, is LARGE_SCORE or more.
      found |= fabsf(shared_float(lse_at(block, i * 32 + lane()))) >= 2839.f;
  return __any_sync(~0u, found);
}

// x = 0 for the masked pairs of a block that begins at query row `query`.
DEV void apply_mask(float (&x)[MT][NT][4], u32 block, int query) {
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = own_column(n) + e;
      const bool empty = shared_float(lse_at(block, i)) == neg_inf();
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        const Range sees = seeing(own_row(r / 2, r % 2));
        if (empty || query + i < sees.start || (MASKED && query + i >= sees.end))
          x[r / 2][n][r % 2 * 2 + e] = 0.f;
      }
    }
}

// `LARGE`: there may be large rows.
template <bool LARGE> DEV void to_probabilities(float (&p)[MT][NT][4], u32 block, float c) {
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const float lse = shared_float(lse_at(block, own_column(n) + e)) * (float)LOG2_E;
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        float& x = p[r / 2][n][r % 2 * 2 + e];
        x = fmaf(x, c, -lse);
        if (LARGE && x > certain_from(lse)) x = 0.f;
        x = exp2_fast(x);
      }
    }
}
// dS = P (gain dP - delta), in place of dP.
DEV void to_ds(float (&dp)[MT][NT][4], const float (&p)[MT][NT][4], u32 block, float gain) {
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const float delta = shared_float(delta_at(block, own_column(n) + e));
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        float& x = dp[r / 2][n][r % 2 * 2 + e];
        x = p[r / 2][n][r % 2 * 2 + e] * fmaf(gain, x, -delta);
      }
    }
}

#if SOFTCAP || SLOPES || DROPOUT
// From products of queries and keys, and of douts and values: P times what dropout makes of it, and
// dS. `slope` counts from the block's first query and the tile's first key.
DEV void to_gradients(float (&p)[MT][NT][4], float (&dp)[MT][NT][4], const Job& job, u32 block,
    const Transform& transform, const Slope& slope) {
  const float c = (float)(job.scale * LOG2_E), gain = (float)job.gain;
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = own_column(n) + e;
      const float lse = shared_float(lse_at(block, i)) * (float)LOG2_E,
                  delta = PARTS & 2 ? shared_float(delta_at(block, i)) : 0.f;
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        const int row = own_row(r / 2, r % 2);
        float& x = p[r / 2][n][r % 2 * 2 + e];
        float derivative = 1.f, kept = 1.f;
#if SOFTCAP || SLOPES
        float log = fmaf(transformed(transform, slope, x, i, row, derivative), (float)LOG2_E, -lse);
#else
        float log = fmaf(x, c, -lse);
#endif
        if (log > certain_from(lse)) log = 0.f;
        const float weight = exp2_fast(log);
#if DROPOUT
        const u32 coins = load_shared(coins_at(block, i) + row / 32 * 4);
        kept = coins >> (row % 32) & 1 ? (float)job.mask.kept : 0.f;
#endif
        x = weight * kept;
        if (PARTS & 2) {
          float& y = dp[r / 2][n][r % 2 * 2 + e];
          y = weight * fmaf(gain * kept, y, -delta) * derivative;
        }
      }
    }
}
#endif

// Adds one block of queries to dk and dv. `masked`: some pairs of the block are masked.
DEV void accumulate_block(const Job& job, const TileOrigin& origin, int head, u32 block, int query,
    bool masked, float (&dk)[MT][HD / 8][4], float (&dv)[MT][VD / 8][4]) {
  const int row = own_row(0, 0) - lane() / 4;
  const u32 keys = shared_base() + TILE_BYTES(row),
            values = shared_base() + TILE_BYTES(TILE) + VALUE_BYTES(row);
  bool nonfinite = false;
  if (masked)
    nonfinite = __syncthreads_or(
        has_nonfinite<BLOCK, HD>(block) || has_nonfinite<BLOCK, VD>(douts_at(block)));
  auto sees = [&](int mt, int half, int i) {
    const Range range = seeing(own_row(mt, half));
    return query + i >= range.start && (!MASKED || query + i < range.end) &&
           shared_float(lse_at(block, i)) != neg_inf();
  };
  float p[MT][NT][4];
  u32 left[MT][NT / 2][4];
#if SOFTCAP || SLOPES || DROPOUT
  float ds[MT][NT][4];
  scores<NT, HD>(p, keys, block);
  if (PARTS & 2) scores<NT, VD>(ds, values, douts_at(block));
  to_gradients(p, ds, job, block, transform_of(job),
      slope_of(job, piece_at(job, origin.entry), head, query, origin.key));
  if (masked) apply_mask(p, block, query);
  if (masked && PARTS & 2) apply_mask(ds, block, query);
  if (PARTS & 1) {
    left_operand<NT>(left, p);
    masked_product<NT / 2, VD>(nonfinite, dv, left, douts_at(block), 1.f, sees);
  }
  if (PARTS & 2) {
    left_operand<NT>(left, ds);
    masked_product<NT / 2, HD>(nonfinite, dk, left, block, 0.f, sees);
  }
#else
  scores<NT, HD>(p, keys, block);
  if (masked) {
    to_probabilities<true>(p, block, (float)(job.scale * LOG2_E));
    apply_mask(p, block, query);
  } else {
    to_probabilities<false>(p, block, (float)(job.scale * LOG2_E));
  }
  if (PARTS & 1) {
    left_operand<NT>(left, p);
    masked_product<NT / 2, VD>(nonfinite, dv, left, douts_at(block), 1.f, sees);
  }
  if (PARTS & 2) {
    float ds[MT][NT][4];
    scores<NT, VD>(ds, values, douts_at(block));
    to_ds(ds, p, block, (float)job.gain);
    if (masked) apply_mask(ds, block, query);
    left_operand<NT>(left, ds);
    masked_product<NT / 2, HD>(nonfinite, dk, left, block, 0.f, sees);
  }
#endif
}

DEV void store_gradients(const Job& job, const Operands& to, const float (&dk)[MT][HD / 8][4],
    const float (&dv)[MT][VD / 8][4]) {
  const TileOrigin origin = tile_origin(job, (u32)opaque((int)blockIdx.x));
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, row = own_row(mt, half), j = origin.key + row;
    // A key that no query sees keeps every bit.
    const Range range = seeing(row);
    if (j >= origin.end || range.start >= (MASKED ? range.end : job.queries)) continue;
    const i64 address = at(job.k, origin.b, origin.s, j, origin.h);
    if (PARTS & 2) add_row<HD>(to.dk + address, job.dim, (float)job.scale, dk[mt], half);
#if MASKED
    const i64 value = at(values(job), origin.b, origin.s, j, origin.h);
#else
    const i64 value = address;
#endif
    if (PARTS & 1) add_row<VD>(to.dv + value, value_dim(job), (float)job.gain, dv[mt], half);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mma_backward_keys(const Job job, const u16* q, const u16* k, const u16* v,
        const u16* dout, const float* lse, const float* delta, float* dk_out, float* dv_out) {
  const Operands operands = {q, k, v, dout, lse, delta, dk_out, dv_out};
  const TileOrigin origin = tile_origin(job, blockIdx.x);
  const int b = origin.b, s = origin.s, h = origin.h, key = origin.key;
  for (int other = 0; other < h; other++)
    if (job.k.heads[other] == job.k.heads[h])
      return;   // the first head with this key head handles all of them

  // Positions increase, so the first row of a tile is seen by the first queries, and the last row
  // by the last.
  const Range first_seen = seeing_queries(job, origin, key),
              last_seen = MASKED ? seeing_queries(job, origin, smaller(key + TILE, origin.end) - 1)
                                 : first_seen;
  const int first_block = (first_seen.start - origin.query) / BLOCK;
  if (first_seen.start >= last_seen.end) return;
  load_tile<TILE, HD>(shared_base(), k, rows_of(job.k, b, s, h, origin.end), key, job.dim);
  if (PARTS & 2)
    load_tile<TILE, VD>(shared_base() + TILE_BYTES(TILE), v,
        rows_of(values(job), b, s, h, origin.end), key, value_dim(job));
  // Rows out of bounds count as the last row, so the last row of a tile is seen by the fewest
  // queries.
  if (threadIdx.x < TILE) {
    const Range range = seeing_queries(job, origin, smaller(key + threadIdx.x, origin.end - 1));
    store_shared(first_at(threadIdx.x), (u32)range.start);
#if MASKED
    store_shared(first_at(TILE + threadIdx.x), (u32)range.end);
#endif
  }

  float dk[MT][HD / 8][4], dv[MT][VD / 8][4];
  zero<HD>(dk);
  zero<VD>(dv);
  int head = h, block = first_block;
  load_block(job, operands, origin, head, block, 0);
  #pragma unroll 1
  for (int step = 0; head < job.heads; step++) {
    copies_done();
    __syncthreads();   // the block has arrived, and the other buffer is free
    const int query = origin.query + block * BLOCK;
#if MASKED
    const int now_head = head;
#else
    const int now_head = 0;
#endif
    if (origin.query + ++block * BLOCK >= last_seen.end) {
      block = first_block;
      // The tile's head is looked up again: no register is left to keep it in.
      const int own = tile_origin(job, (u32)opaque((int)blockIdx.x)).h;
      do head++; while (head < job.heads && job.k.heads[head] != job.k.heads[own]);
    }
    if (head < job.heads) load_block(job, operands, origin, head, block, step + 1);
    const u32 now = streamed(step);
    const bool masked = query < (int)load_shared(first_at(TILE - 1)) ||
                        (MASKED && query + BLOCK > first_seen.end) || has_special_rows(now);
    accumulate_block(job, origin, now_head, now, query, masked, dk, dv);
  }
  store_gradients(job, operands, dk, dv);
}
