// Backward attention with mma.sync, the half by queries: dq, for every NVIDIA GPU from sm_80 on.
//
// A thread block has TILE query rows with their dout, lse and delta, and streams the keys they see,
// BLOCK at a time. It alone adds to its rows of dq, in a fixed order: results are bitwise
// repeatable. S and dP are computed in both halves; that is the price of needing no atomic
// additions.
#define NT (BLOCK / 8)

// Shared memory: queries and douts, two blocks of keys and values, and per query lse (base 2),
// delta and the number of visible keys.
#define STREAMED TILE_BYTES(2 * TILE)
#define ROW_STATE (STREAMED + 2 * TILE_BYTES(2 * BLOCK))
DEV u32 lse_at(int row) { return shared_base() + ROW_STATE + 4 * row; }
DEV u32 delta_at(int row) { return lse_at(TILE + row); }
DEV u32 seen_at(int row) { return lse_at(2 * TILE + row); }
DEV float shared_float(u32 at) { return __int_as_float((int)load_shared(at)); }

// dS = P (gain dP - delta) from scores and dP, in place of dP; 0 for masked keys of a block that
// begins at `key`.
DEV void to_ds(float (&dp)[MT][NT][4], const float (&s)[MT][NT][4], const JobParams& job,
    bool masked, int key) {
  const float c = (float)(job.scale * LOG2_E), gain = (float)job.gain;
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int row = own_row(r / 2, r % 2);
    const float lse = shared_float(lse_at(row)), delta = shared_float(delta_at(row));
    const int limit = masked ? (int)load_shared(seen_at(row)) - key : BLOCK;
    #pragma unroll
    for (int n = 0; n < NT; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = dp[r / 2][n][r % 2 * 2 + e];
        x = exp2_fast(fmaf(s[r / 2][n][r % 2 * 2 + e], c, -lse)) * fmaf(gain, x, -delta);
        if (masked && own_column(n) + e >= limit) x = 0.f;
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    mma_backward_queries(const JobParams job, const u16* q, const u16* k, const u16* v,
        const u16* dout, const float* lse, const float* delta, float* dq_out) {
  const int tiles = (job.queries + TILE - 1) / TILE, tile = (int)(blockIdx.x % tiles);
  const int query = (job.causal ? tiles - 1 - tile : tile) * TILE;   // longest tiles first
  const u32 index = blockIdx.x / tiles;
  const int h = (int)(index % job.heads), s = (int)(index / job.heads % job.segments),
            b = (int)(index / job.heads / job.segments);

  // Positions increase, so the first row of a tile sees the fewest keys and the last row the most.
  const int rows = smaller(TILE, job.queries - query), warp_row = own_row(0, 0) - lane() / 4;
  const int visible_to_all = visible(job, query),
            blocks = (visible(job, query + rows - 1) + BLOCK - 1) / BLOCK;
  if (blocks == 0) return;
  const Rows keys = rows_of(job.k, b, s, h, job.keys);
  auto load_block = [&](int block) {
    const u32 to = shared_base() + STREAMED + block % 2 * TILE_BYTES(2 * BLOCK);
    load_tile<BLOCK>(to, k, keys, block * BLOCK, job.dim);
    load_tile<BLOCK>(to + TILE_BYTES(BLOCK), v, keys, block * BLOCK, job.dim);
  };
  load_tile<TILE>(shared_base(), q, rows_of(job.q, b, s, h, job.queries), query, job.dim);
  load_tile<TILE>(shared_base() + TILE_BYTES(TILE), dout, cell_rows(job, b, s, h), query, job.dim);
  load_block(0);
  if (threadIdx.x < TILE) {
    const int row = threadIdx.x;
    const bool real = row < rows;
    const i64 cell = real ? at(job.cells, b, s, query + row, h) : 0;
    store_shared(lse_at(row), (u32)__float_as_int(real ? lse[cell] * (float)LOG2_E : 0.f));
    store_shared(delta_at(row), (u32)__float_as_int(real ? delta[cell] : 0.f));
    store_shared(seen_at(row), (u32)(real ? visible(job, query + row) : 0));
  }
  __syncthreads();
  const int visible_to_warp =
      warp_row < rows ? load_shared(seen_at(smaller(warp_row + MT * 16, rows) - 1)) : 0;

  float acc[MT][HD / 8][4];
  zero(acc);
  #pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    copies_done();
    __syncthreads();   // the block has arrived, and the other buffer is free
    if (block + 1 < blocks) load_block(block + 1);
    const int key = block * BLOCK;
    const u32 now = shared_base() + STREAMED + block % 2 * TILE_BYTES(2 * BLOCK),
              own = shared_base() + TILE_BYTES(warp_row);
    const bool masked = key + BLOCK > visible_to_all;
    const bool nonfinite = masked && __syncthreads_or(has_nonfinite<BLOCK>(now));
    if (key >= visible_to_warp) continue;

    float weights[MT][NT][4], ds[MT][NT][4];
    scores<NT>(weights, own, now);
    scores<NT>(ds, own + TILE_BYTES(TILE), now + TILE_BYTES(BLOCK));
    to_ds(ds, weights, job, masked, key);
    u32 left[MT][NT / 2][4];
    left_operand<NT>(left, ds);
    masked_product(nonfinite, acc, left, now, 0.f, [&](int mt, int half, int row) {
      return key + row < (int)load_shared(seen_at(own_row(mt, half)));
    });
  }
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int row = own_row(r / 2, r % 2);
    // A row that saw no key, here or at all, keeps every bit.
    if (load_shared(seen_at(row)) == 0 || shared_float(lse_at(row)) == neg_inf()) continue;
    add_row(dq_out + at(job.dq, b, s, opaque(query) + row, h), job.dim, (float)job.scale,
        acc[r / 2], r % 2);
  }
}
