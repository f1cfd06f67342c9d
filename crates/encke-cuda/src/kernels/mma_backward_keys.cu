// Backward attention with mma.sync, the half that owns keys: dk and dv, for every NVIDIA GPU from sm_80 on.
//
// A thread block owns TILE key rows and streams the queries that see them, BLOCK at a time, with their dout, lse and delta. It is
// the only one that adds to its rows of dk and dv, in a fixed order: the same job gives the same bits. Query heads that share a
// key head therefore share its thread block too.
//
// The decision here: everything is computed transposed (rows are keys, columns are queries), so that P^T and dS^T come out of one
// product as the left operand of the next, without a detour through shared memory.
//
// PARTS is what is computed: 1 dv, 2 dk, 3 both. Where both accumulators do not fit the registers, the kernel runs once for each.
#define NT (BLOCK / 8)

struct Operands { const u16 *q, *k, *v, *dout; const float *lse, *delta; float *dk, *dv; };

struct Place { int b, s, h, key; };
DEV Place place_of(const Job& job, u32 number) {
  const u32 tiles = (job.keys + TILE - 1) / TILE, group = number / tiles;
  // The first keys are seen by most queries: the longest tiles come first.
  return Place{(int)(group / job.heads / job.segments), (int)(group / job.heads % job.segments), (int)(group % job.heads),
               (int)(number % tiles) * TILE};
}

// Shared memory: the keys and values, two blocks of queries and douts, two blocks of (lse, delta), and for each key the first query
// that sees it.
#define VALUES (PARTS & 2 ? TILE : 0)
#define BLOCK_BYTES (TILE_BYTES(2 * BLOCK) + 8 * BLOCK)
DEV u32 first_at(int row) { return shared_base() + TILE_BYTES(TILE + VALUES) + 2 * BLOCK_BYTES + 4 * row; }

// A block of streamed rows in shared memory is named by its address: the queries begin there, the rest follows.
DEV u32 streamed(int turn) { return shared_base() + TILE_BYTES(TILE + VALUES) + turn % 2 * BLOCK_BYTES; }
DEV u32 douts_at(u32 block) { return block + TILE_BYTES(BLOCK); }
DEV u32 lse_at(u32 block, int i) { return block + TILE_BYTES(2 * BLOCK) + 4 * i; }
DEV u32 delta_at(u32 block, int i) { return lse_at(block, BLOCK + i); }
DEV float shared_float(u32 at) { return __int_as_float((int)load_shared(at)); }

DEV void load_block(const Job& job, const Operands& from, int b, int s, int h, int block, int turn) {
  const u32 to = streamed(turn);
  const int first = block * BLOCK;
  load_tile<BLOCK>(to, from.q, rows_of(job.q, b, s, h, job.queries), first, job.dim);
  load_tile<BLOCK>(douts_at(to), from.dout, cell_rows(job, b, s, h), first, job.dim);
  for (int i = threadIdx.x; i < BLOCK; i += THREADS) {
    const bool real = first + i < job.queries;
    const i64 cell = real ? at(job.cells, b, s, first + i, h) : 0;
    copy4(lse_at(to, i), from.lse + cell, real);      // a row that does not exist has lse 0: its weights meet rows of zeros
    copy4(delta_at(to, i), from.delta + cell, real);
  }
}

// Whether the block has a query that saw nothing anywhere: its dout and delta may be anything and count for nothing.
DEV bool finds_blind(u32 block) {
  bool found = false;
  #pragma unroll
  for (int i = 0; i < (BLOCK + 31) / 32; i++)
    if (i * 32 + lane() < BLOCK) found |= shared_float(lse_at(block, i * 32 + lane())) == neg_inf();
  return __any_sync(~0u, found);
}

// x = 0 for the pairs of a block, beginning with query row `query`, that do not see each other.
DEV void hide(float (&x)[MT][NT][4], u32 block, int query) {
  #pragma unroll
  for (int n = 0; n < NT; n++)
    #pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = own_column(n) + e;
      const bool blind = shared_float(lse_at(block, i)) == neg_inf();
      #pragma unroll
      for (int r = 0; r < 2 * MT; r++)
        if (blind || query + i < (int)load_shared(first_at(own_row(r / 2, r % 2)))) x[r / 2][n][r % 2 * 2 + e] = 0.f;
    }
}

DEV void weigh(float (&p)[MT][NT][4], u32 block, float c) {
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
DEV void differentiate(float (&dp)[MT][NT][4], const float (&p)[MT][NT][4], u32 block, float gain) {
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

// Adds one block of queries to dk and dv. `guarded`: not every pair of the block counts.
DEV void absorb(const Job& job, u32 block, int query, bool guarded, float (&dk)[MT][HD / 8][4], float (&dv)[MT][HD / 8][4]) {
  const u32 keys = shared_base() + TILE_BYTES(own_row(0, 0) - lane() / 4), values = keys + TILE_BYTES(TILE);
  bool dirty = false;
  if (guarded) dirty = __syncthreads_or(finds_not_finite<BLOCK>(block) || finds_not_finite<BLOCK>(douts_at(block)));
  auto sees = [&](int mt, int half, int i) {
    return query + i >= (int)load_shared(first_at(own_row(mt, half))) && shared_float(lse_at(block, i)) != neg_inf();
  };
  float p[MT][NT][4];
  u32 left[MT][NT / 2][4];
  scores<NT>(p, keys, block);
  weigh(p, block, (float)(job.scale * LOG2_E));
  if (guarded) hide(p, block, query);
  if (PARTS & 1) {
    left_operand<NT>(left, p);
    guarded_product(dirty, dv, left, douts_at(block), 1.f, sees);
  }
  if (PARTS & 2) {
    float ds[MT][NT][4];
    scores<NT>(ds, values, douts_at(block));
    differentiate(ds, p, block, (float)job.gain);
    if (guarded) hide(ds, block, query);
    left_operand<NT>(left, ds);
    guarded_product(dirty, dk, left, block, 0.f, sees);
  }
}

DEV void finish(const Job& job, const Operands& to, const float (&dk)[MT][HD / 8][4], const float (&dv)[MT][HD / 8][4]) {
  const Place place = place_of(job, (u32)forgotten((int)blockIdx.x));
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, row = own_row(mt, half), j = place.key + row;
    // A key that nobody sees keeps every bit.
    if (j >= job.keys || (int)load_shared(first_at(row)) >= job.queries) continue;
    const i64 address = at(job.k, place.b, place.s, j, place.h);
    if (PARTS & 2) add_row(to.dk + address, job.dim, (float)job.scale, dk[mt], half);
    if (PARTS & 1) add_row(to.dv + address, job.dim, (float)job.gain, dv[mt], half);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
mma_backward_keys(const Job job, const u16* q, const u16* k, const u16* v, const u16* dout, const float* lse, const float* delta,
                  float* dk_out, float* dv_out) {
  const Operands operands = {q, k, v, dout, lse, delta, dk_out, dv_out};
  const Place place = place_of(job, blockIdx.x);
  const int b = place.b, s = place.s, h = place.h, key = place.key;
  for (int other = 0; other < h; other++)
    if (job.k.heads[other] == job.k.heads[h]) return;   // the first head with this key head does it for all of them

  const int first_block = first_query(job, key) / BLOCK;
  if (first_query(job, key) >= job.queries) return;
  load_tile<TILE>(shared_base(), k, rows_of(job.k, b, s, h, job.keys), key, job.dim);
  if (PARTS & 2) load_tile<TILE>(shared_base() + TILE_BYTES(TILE), v, rows_of(job.k, b, s, h, job.keys), key, job.dim);
  // Rows that do not exist count as the last one that does, so the last row of a tile is seen by the fewest queries.
  if (threadIdx.x < TILE) store_shared(first_at(threadIdx.x), (u32)first_query(job, smaller(key + threadIdx.x, job.keys - 1)));

  float dk[MT][HD / 8][4], dv[MT][HD / 8][4];
  clear(dk);
  clear(dv);
  int head = h, block = first_block;
  load_block(job, operands, b, s, head, block, 0);
  #pragma unroll 1
  for (int turn = 0; head < job.heads; turn++) {
    copies_done();
    __syncthreads();   // the block is here for all, and the other half of the buffer is free
    const int query = block * BLOCK;
    if (++block * BLOCK >= job.queries) {
      block = first_block;
      do head++; while (head < job.heads && job.k.heads[head] != job.k.heads[h]);
    }
    if (head < job.heads) load_block(job, operands, b, s, head, block, turn + 1);
    const u32 now = streamed(turn);
    absorb(job, now, query, query < (int)load_shared(first_at(TILE - 1)) || finds_blind(now), dk, dv);
  }
  finish(job, operands, dk, dv);
}
