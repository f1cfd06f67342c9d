// Forward attention with mma.sync, for every NVIDIA GPU from sm_80 on: bf16 and f16, exact at every edge.
//
// A thread block owns TILE query rows of one (batch entry, segment, head) and streams their keys, BLOCK at a time; while one
// block is computed the next one is copied. Each warp owns MT * 16 rows, so a softmax never leaves a quad of lanes.
//
// The decision here: nothing about a job is a variant but its head dim and alignment. Mask, carry and end are asked at run time,
// outside the inner loops, so one compiled kernel serves every job of a run.
//
// Inside, scores are in base 2 (times scale * log2 e); a carry outside is in natural units.

// One softmax under way: this thread's rows, and its share of their sums (quads are summed at the end).
struct Softmax { float m[MT][2], l[MT][2]; };

// A row's scores become weights relative to the largest one so far, and what was summed before shrinks accordingly.
DEV void absorb(Softmax& state, float (&s)[MT][BLOCK / 8][4], float (&acc)[MT][HD / 8][4], float c) {
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = neg_inf();
      #pragma unroll
      for (int n = 0; n < BLOCK / 8; n++) top = fmaxf(top, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
      float m = fmaxf(state.m[mt][half], quad_max(top) * c);
      float origin = m == neg_inf() ? 0.f : m;   // a row that has seen nothing: every weight is exp2(-inf - 0)
      float shrink = exp2_fast(state.m[mt][half] - origin), sum = 0.f;
      #pragma unroll
      for (int n = 0; n < BLOCK / 8; n++)
        #pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[mt][n][e] = exp2_fast(fmaf(s[mt][n][e], c, -origin));
          sum += s[mt][n][e];
        }
      state.m[mt][half] = m;
      state.l[mt][half] = fmaf(state.l[mt][half], shrink, sum);
      #pragma unroll
      for (int n = 0; n < HD / 8; n++) { acc[mt][n][2 * half] *= shrink; acc[mt][n][2 * half + 1] *= shrink; }
    }
}

// Scores of keys that a row does not see, of a block that begins with `key`; `seen` is where the limits of the rows are.
DEV void hide(float (&s)[MT][BLOCK / 8][4], int key, u32 seen) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int limit = (int)load_shared(seen + own_row(r / 2, r % 2) * 4) - key;
    #pragma unroll
    for (int n = 0; n < BLOCK / 8; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        if (own_column(n) + e >= limit) s[r / 2][n][r % 2 * 2 + e] = neg_inf();
  }
}

// Where the scale is negative, the queries are negated and the scale is its size: the largest product is the largest score then.
DEV void negate_queries(u32 tile) {
  for (int i = threadIdx.x; i < TILE * HD / 2; i += THREADS) {
    u32 address = tile + (i / (HD / 2) * PITCH + i % (HD / 2) * 2) * 2;
    store_shared(address, load_shared(address) ^ 0x80008000u);
  }
  __syncthreads();
}

struct Operands { const u16 *q, *k, *v; float *acc, *m, *l; u16* out; float* lse; };
struct Place { int b, s, h, first; };
DEV Place place_of(const Job& job, u32 number) {
  const u32 tiles = (job.queries + TILE - 1) / TILE, place = number / tiles;
  int tile = (int)(number % tiles);
  if (job.causal) tile = (int)tiles - 1 - tile;   // the longest first: they decide when the last one ends
  return Place{(int)(place / job.heads / job.segments), (int)(place / job.heads % job.segments), (int)(place % job.heads), tile * TILE};
}

// Nothing seen yet, or what the carry in memory has seen.
DEV void begin(const Job& job, const Operands& in, int begins, const Place& place, Softmax& state, float (&acc)[MT][HD / 8][4]) {
  clear(acc);
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, i = place.first + own_row(mt, half);
    state.m[mt][half] = neg_inf();
    state.l[mt][half] = 0.f;
    if (begins || i >= job.queries) continue;
    const i64 cell = at(job.cells, place.b, place.s, i, place.h);
    state.m[mt][half] = in.m[cell] * (float)LOG2_E;
    if (lane() % 4 == 0) state.l[mt][half] = in.l[cell];   // one lane of the quad: the four are summed
    #pragma unroll
    for (int n = 0; n < HD / 8; n++)
      read_pair(in.acc + cell * job.dim, own_column(n), job.dim, acc[mt][n][2 * half], acc[mt][n][2 * half + 1]);
  }
}

// Writes what the rows have become. A row that goes on and saw nothing here keeps every bit of its carry.
DEV void finish(const Job& job, const Operands& to, int begins, int end, u32 seen, const Softmax& state, const float (&acc)[MT][HD / 8][4]) {
  const Place place = place_of(job, (u32)forgotten((int)blockIdx.x));
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, i = place.first + own_row(mt, half);
    const float m = state.m[mt][half], l = quad_sum(state.l[mt][half]);
    if (i >= job.queries || (!begins && !end && load_shared(seen + own_row(mt, half) * 4) == 0)) continue;
    const i64 cell = at(job.cells, place.b, place.s, i, place.h);
    if (lane() % 4 == 0) {
      float largest = m * LN_2;
      if (!begins) {
        // The largest score of before goes back as it came, not through two roundings.
        const float before = to.m[cell];
        if (before * (float)LOG2_E == m) largest = before;
      }
      if (!end) { to.m[cell] = largest; to.l[cell] = l; }
      else to.lse[cell] = l == 0.f ? neg_inf() : largest + log2_fast(l) * LN_2;
    }
    const float factor = l == 0.f ? 0.f : (float)job.gain / l;
    #pragma unroll
    for (int n = 0; n < HD / 8; n++) {
      const float x = acc[mt][n][2 * half], y = acc[mt][n][2 * half + 1];
      if (!end) write_pair(to.acc + cell * job.dim, own_column(n), job.dim, x, y);
      else write_pair(to.out + cell * job.dim, own_column(n), job.dim, x * factor, y * factor);
    }
  }
}

// Rows begin with nothing where `begins` is set, and with (acc, m, l) otherwise; where `end` is set they end as (out, lse), and as (acc, m, l) otherwise.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
mma_forward(const Job job, const u16* q, const u16* k, const u16* v, float* acc_out, float* m, float* l, u16* out, float* lse,
            int begins, int end) {
  const Operands operands = {q, k, v, acc_out, m, l, out, lse};
  // Shared memory: the queries, two blocks of keys and values, and how many keys each query sees.
  const u32 queries = shared_base(), streamed = queries + TILE_BYTES(TILE), seen = streamed + 4 * TILE_BYTES(BLOCK);
  const Place place = place_of(job, blockIdx.x);
  // Positions rise, so the first row of a tile sees the fewest keys and the last one the most.
  const int rows = smaller(TILE, job.queries - place.first), warp_row = own_row(0, 0) - lane() / 4;
  const int seen_by_all = visible(job, place.first), blocks = (visible(job, place.first + rows - 1) + BLOCK - 1) / BLOCK;
  if (blocks == 0 && !(begins | end)) return;

  const Rows keys = rows_of(job.k, place.b, place.s, place.h, job.keys);
  auto load_block = [&](int block) {
    u32 to = streamed + block % 2 * TILE_BYTES(2 * BLOCK);
    load_tile<BLOCK>(to, k, keys, block * BLOCK, job.dim);
    load_tile<BLOCK>(to + TILE_BYTES(BLOCK), v, keys, block * BLOCK, job.dim);
  };
  if (blocks > 0) {
    load_tile<TILE>(queries, q, rows_of(job.q, place.b, place.s, place.h, job.queries), place.first, job.dim);
    load_block(0);
  }
  if (threadIdx.x < TILE) store_shared(seen + threadIdx.x * 4, (u32)((int)threadIdx.x < rows ? visible(job, place.first + threadIdx.x) : 0));
  Softmax state;
  float acc[MT][HD / 8][4];
  begin(job, operands, begins, place, state, acc);
  __syncthreads();
  const int seen_by_warp = warp_row < rows ? load_shared(seen + smaller(warp_row + MT * 16, rows) * 4 - 4) : 0;

  // A scale of zero is one too small to matter: a hidden score is -inf, and 0 times it would be NaN.
  const float c = fmaxf((float)(job.scale * LOG2_E) * (job.scale < 0 ? -1.f : 1.f), 1e-37f);
  #pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    copies_done();
    __syncthreads();   // the block is here for all, and the other half of the buffer is free
    if (block == 0 && job.scale < 0) negate_queries(queries);
    if (block + 1 < blocks) load_block(block + 1);
    const int key = block * BLOCK;
    const u32 now = streamed + block % 2 * TILE_BYTES(2 * BLOCK), values = now + TILE_BYTES(BLOCK);
    const bool masked = key + BLOCK > seen_by_all;
    const bool dirty = masked && __syncthreads_or(finds_not_finite<BLOCK>(values));
    if (key >= seen_by_warp) continue;

    float weights[MT][BLOCK / 8][4];
    scores<BLOCK / 8>(weights, queries + TILE_BYTES(warp_row), now);
    if (masked) hide(weights, key, seen);
    absorb(state, weights, acc, c);
    u32 left[MT][BLOCK / 16][4];
    left_operand<BLOCK / 8>(left, weights);
    guarded_product(dirty, acc, left, values, 1.f, [&](int mt, int half, int row) {
      return key + row < (int)load_shared(seen + own_row(mt, half) * 4);
    });
  }
  finish(job, operands, forgotten(begins), forgotten(end), seen, state, acc);   // asked again: no register is left to keep them in
}
