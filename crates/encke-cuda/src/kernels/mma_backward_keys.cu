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

struct TileOrigin { int b, s, h, key; };
DEV TileOrigin tile_origin(const JobParams& job, u32 index) {
  const u32 tiles = (job.keys + TILE - 1) / TILE, group = index / tiles;
  // The first keys are seen by most queries: the longest tiles come first.
  return TileOrigin{(int)(group / job.heads / job.segments),
      (int)(group / job.heads % job.segments), (int)(group % job.heads),
      (int)(index % tiles) * TILE};
}

// Shared memory: keys and values, two blocks of queries and douts, two blocks of (lse, delta), and
// the first query that sees each key.
#define VALUES (PARTS & 2 ? TILE : 0)
#define BLOCK_BYTES (TILE_BYTES(2 * BLOCK) + 8 * BLOCK)
DEV u32 first_at(int row) {
  return shared_base() + TILE_BYTES(TILE + VALUES) + 2 * BLOCK_BYTES + 4 * row;
}

// A block of streamed rows is identified by its shared address: queries first, the rest follows.
DEV u32 streamed(int step) {
  return shared_base() + TILE_BYTES(TILE + VALUES) + step % 2 * BLOCK_BYTES;
}
DEV u32 douts_at(u32 block) { return block + TILE_BYTES(BLOCK); }
DEV u32 lse_at(u32 block, int i) { return block + TILE_BYTES(2 * BLOCK) + 4 * i; }
DEV u32 delta_at(u32 block, int i) { return lse_at(block, BLOCK + i); }
DEV float shared_float(u32 at) { return __int_as_float((int)load_shared(at)); }

DEV void load_block(
    const JobParams& job, const Operands& from, int b, int s, int h, int block, int step) {
  const u32 to = streamed(step);
  const int first = block * BLOCK;
  load_tile<BLOCK>(to, from.q, rows_of(job.q, b, s, h, job.queries), first, job.dim);
  load_tile<BLOCK>(douts_at(to), from.dout, cell_rows(job, b, s, h), first, job.dim);
  for (int i = threadIdx.x; i < BLOCK; i += THREADS) {
    const bool real = first + i < job.queries;
    const i64 cell = real ? at(job.cells, b, s, first + i, h) : 0;
    copy4(lse_at(to, i), from.lse + cell,
        real);   // out of bounds: lse 0, multiplied by rows of zeros
    copy4(delta_at(to, i), from.delta + cell, real);
  }
}

// Whether a query of the block saw no key at all: its dout and delta are ignored.
DEV bool has_empty_rows(u32 block) {
  bool found = false;
  #pragma unroll
  for (int i = 0; i < (BLOCK + 31) / 32; i++)
    if (i * 32 + lane() < BLOCK) found |= shared_float(lse_at(block, i * 32 + lane())) == neg_inf();
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
      for (int r = 0; r < 2 * MT; r++)
        if (empty || query + i < (int)load_shared(first_at(own_row(r / 2, r % 2))))
          x[r / 2][n][r % 2 * 2 + e] = 0.f;
    }
}

DEV void to_probabilities(float (&p)[MT][NT][4], u32 block, float c) {
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const float lse = shared_float(lse_at(block, own_column(n) + e)) * (float)LOG2_E;
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        float& x = p[r / 2][n][r % 2 * 2 + e];
        x = exp2_fast(fmaf(x, c, -lse));
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

// Adds one block of queries to dk and dv. `masked`: some pairs of the block are masked.
DEV void accumulate_block(const JobParams& job, u32 block, int query, bool masked,
    float (&dk)[MT][HD / 8][4], float (&dv)[MT][HD / 8][4]) {
  const u32 keys = shared_base() + TILE_BYTES(own_row(0, 0) - lane() / 4),
            values = keys + TILE_BYTES(TILE);
  bool nonfinite = false;
  if (masked)
    nonfinite =
        __syncthreads_or(has_nonfinite<BLOCK>(block) || has_nonfinite<BLOCK>(douts_at(block)));
  auto sees = [&](int mt, int half, int i) {
    return query + i >= (int)load_shared(first_at(own_row(mt, half))) &&
           shared_float(lse_at(block, i)) != neg_inf();
  };
  float p[MT][NT][4];
  u32 left[MT][NT / 2][4];
  scores<NT>(p, keys, block);
  to_probabilities(p, block, (float)(job.scale * LOG2_E));
  if (masked) apply_mask(p, block, query);
  if (PARTS & 1) {
    left_operand<NT>(left, p);
    masked_product(nonfinite, dv, left, douts_at(block), 1.f, sees);
  }
  if (PARTS & 2) {
    float ds[MT][NT][4];
    scores<NT>(ds, values, douts_at(block));
    to_ds(ds, p, block, (float)job.gain);
    if (masked) apply_mask(ds, block, query);
    left_operand<NT>(left, ds);
    masked_product(nonfinite, dk, left, block, 0.f, sees);
  }
}

DEV void store_gradients(const JobParams& job, const Operands& to, const float (&dk)[MT][HD / 8][4],
    const float (&dv)[MT][HD / 8][4]) {
  const TileOrigin origin = tile_origin(job, (u32)opaque((int)blockIdx.x));
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, row = own_row(mt, half), j = origin.key + row;
    // A key that no query sees keeps every bit.
    if (j >= job.keys || (int)load_shared(first_at(row)) >= job.queries) continue;
    const i64 address = at(job.k, origin.b, origin.s, j, origin.h);
    if (PARTS & 2) add_row(to.dk + address, job.dim, (float)job.scale, dk[mt], half);
    if (PARTS & 1) add_row(to.dv + address, job.dim, (float)job.gain, dv[mt], half);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mma_backward_keys(const JobParams job, const u16* q, const u16* k, const u16* v,
        const u16* dout, const float* lse, const float* delta, float* dk_out, float* dv_out) {
  const Operands operands = {q, k, v, dout, lse, delta, dk_out, dv_out};
  const TileOrigin origin = tile_origin(job, blockIdx.x);
  const int b = origin.b, s = origin.s, h = origin.h, key = origin.key;
  for (int other = 0; other < h; other++)
    if (job.k.heads[other] == job.k.heads[h])
      return;   // the first head with this key head handles all of them

  const int first_block = first_query(job, key) / BLOCK;
  if (first_query(job, key) >= job.queries) return;
  load_tile<TILE>(shared_base(), k, rows_of(job.k, b, s, h, job.keys), key, job.dim);
  if (PARTS & 2)
    load_tile<TILE>(
        shared_base() + TILE_BYTES(TILE), v, rows_of(job.k, b, s, h, job.keys), key, job.dim);
  // Rows out of bounds count as the last row, so the last row of a tile is seen by the fewest
  // queries.
  if (threadIdx.x < TILE)
    store_shared(
        first_at(threadIdx.x), (u32)first_query(job, smaller(key + threadIdx.x, job.keys - 1)));

  float dk[MT][HD / 8][4], dv[MT][HD / 8][4];
  zero(dk);
  zero(dv);
  int head = h, block = first_block;
  load_block(job, operands, b, s, head, block, 0);
  #pragma unroll 1
  for (int step = 0; head < job.heads; step++) {
    copies_done();
    __syncthreads();   // the block has arrived, and the other buffer is free
    const int query = block * BLOCK;
    if (++block * BLOCK >= job.queries) {
      block = first_block;
      do head++; while (head < job.heads && job.k.heads[head] != job.k.heads[h]);
    }
    if (head < job.heads) load_block(job, operands, b, s, head, block, step + 1);
    const u32 now = streamed(step);
    accumulate_block(job, now, query,
        query < (int)load_shared(first_at(TILE - 1)) || has_empty_rows(now), dk, dv);
  }
  store_gradients(job, operands, dk, dv);
}
