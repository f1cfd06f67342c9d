// Backward attention with mma.sync, the half that owns queries: dq, for every NVIDIA GPU from sm_80 on.
//
// A thread block owns TILE query rows with their dout, lse and delta, and streams the keys they see, BLOCK at a time. It is the only
// one that adds to its rows of dq, in a fixed order: the same job gives the same bits. What it shares with the half that owns keys
// (S and dP) is computed twice; that is the price of having no atomic addition anywhere.
#define NT (BLOCK / 8)

// Shared memory: queries and douts, two blocks of keys and values, and for each query lse (base 2), delta and how many keys it sees.
#define STREAMED TILE_BYTES(2 * TILE)
#define FIGURES (STREAMED + 2 * TILE_BYTES(2 * BLOCK))
DEV u32 lse_at(int row) { return shared_base() + FIGURES + 4 * row; }
DEV u32 delta_at(int row) { return lse_at(TILE + row); }
DEV u32 seen_at(int row) { return lse_at(2 * TILE + row); }
DEV float shared_float(u32 at) { return __int_as_float((int)load_shared(at)); }

// From scores and dP to dS = P (gain dP - delta), in place of dP; 0 for keys, of a block that begins with `key`, that a row does not see.
DEV void differentiate(float (&dp)[MT][NT][4], const float (&s)[MT][NT][4], const Job& job, bool masked, int key) {
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
mma_backward_queries(const Job job, const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta,
                     float* dq_out) {
  const int tiles = (job.queries + TILE - 1) / TILE, tile = (int)(blockIdx.x % tiles);
  const int query = (job.causal ? tiles - 1 - tile : tile) * TILE;   // the longest first
  const u32 number = blockIdx.x / tiles;
  const int h = (int)(number % job.heads), s = (int)(number / job.heads % job.segments), b = (int)(number / job.heads / job.segments);

  // Positions rise, so the first row of a tile sees the fewest keys and the last one the most.
  const int rows = smaller(TILE, job.queries - query), warp_row = own_row(0, 0) - lane() / 4;
  const int seen_by_all = visible(job, query), blocks = (visible(job, query + rows - 1) + BLOCK - 1) / BLOCK;
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
  const int seen_by_warp = warp_row < rows ? load_shared(seen_at(smaller(warp_row + MT * 16, rows) - 1)) : 0;

  float acc[MT][HD / 8][4];
  clear(acc);
  #pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    copies_done();
    __syncthreads();   // the block is here for all, and the other half of the buffer is free
    if (block + 1 < blocks) load_block(block + 1);
    const int key = block * BLOCK;
    const u32 now = shared_base() + STREAMED + block % 2 * TILE_BYTES(2 * BLOCK), own = shared_base() + TILE_BYTES(warp_row);
    const bool masked = key + BLOCK > seen_by_all;
    const bool dirty = masked && __syncthreads_or(finds_not_finite<BLOCK>(now));
    if (key >= seen_by_warp) continue;

    float weights[MT][NT][4], ds[MT][NT][4];
    scores<NT>(weights, own, now);
    scores<NT>(ds, own + TILE_BYTES(TILE), now + TILE_BYTES(BLOCK));
    differentiate(ds, weights, job, masked, key);
    u32 left[MT][NT / 2][4];
    left_operand<NT>(left, ds);
    guarded_product(dirty, acc, left, now, 0.f, [&](int mt, int half, int row) {
      return key + row < (int)load_shared(seen_at(own_row(mt, half)));
    });
  }
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int row = own_row(r / 2, r % 2);
    // A row that saw nothing, here or anywhere, keeps every bit.
    if (load_shared(seen_at(row)) == 0 || shared_float(lse_at(row)) == neg_inf()) continue;
    add_row(dq_out + at(job.dq, b, s, forgotten(query) + row, h), job.dim, (float)job.scale, acc[r / 2], r % 2);
  }
}
