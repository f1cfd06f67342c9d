// Gradients of attention on Hopper: dK, dV and dQ in one pass over the scores.
//
// One CTA has one tile: 128 keys of one key head. It keeps K, V and the sums of dK, dV, and goes
// through every block of queries of every query head that reads this key head, from the last
// block down to the first one that sees a key of the tile. Per block five products:
//   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ = dS K.
// S and dP are formed transposed, keys as rows: P^T and dS^T then lie in registers just as the
// left operand of dV and dK wants them, and a thread has but two keys, so that its mask is two numbers.
//
// Roles: warps 0 and 2 load, warp 1 adds finished dQ blocks to memory, warpgroups 1 and 2 multiply (64 keys each).
// dQ is added by the copy engine (reduction through a tensor map), straight into the caller's rows.
// Where the order of those additions must be fixed, a block of queries has a turn: tile by tile
// of its keys, counted in memory. Tiles are drawn from a counter in that same order, so that a
// tile only ever waits for tiles that were drawn before it.
//
// Macros: HD head dimension in steps of 16 (the job's may be smaller: what is missing reads as
// zero), BQ queries in a block, STAGES blocks in flight, STAGINGS buffers for finished dQ.

#define BK 128
#define SLABS ((HD + 63) / 64)               // 64 columns of 16 bits: one swizzled row of 128 bytes
#define K_BYTES (SLABS * BK * 128)
#define Q_BYTES (SLABS * BQ * 128)
#define PARTS (BQ / 64)                      // a block is worked on 64 queries at a time
#define DS_BYTES (PARTS * BK * 128)          // [64 queries][key][query]
#define DQ_SLABS (2 * SLABS)                 // 32 columns of f32: again 128 bytes
#define DQ_BYTES (DQ_SLABS * BQ * 128)
#define MMA_S JOIN(wgmma_ss_n, BQ)
#define MMA_ACC JOIN(wgmma_rs_tb_n, HD)
#define NEVER 0x7fffffff
#ifndef EARLY_S
#define EARLY_S 1
#endif
#ifndef ABLATE
#define ABLATE 0
#endif

struct HopperBackward {
  Job job;
  float *dk, *dv;
  const float *lse, *delta;   // dense, from backward_rows
  const int2* key_heads;      // of each key head: its first query head in the next table, its coordinate in k's map; and an end
  const int4* query_heads;    // which head of the job, and its coordinates in the maps of q, dout and dq
  u32* control;
  int key_head_count, key_tiles, padded, fixed_order;
  float exponent;             // scale, in base 2
  float dp_gain, dq_gain, dk_gain, dv_gain;
};

// Where things lie in shared memory; `*_full` and `*_empty` are barriers, 8 bytes each.
struct Shared {
  u32 k, v, q, o, ds, dq, lse, delta, poison, first;
  u32 k_full, v_full, q_full, q_empty, o_full, o_empty, dq_full, dq_empty;
  u32 sick, tile, total;   // whether a warpgroup's keys hold what must stay hidden (two words); the tile; its blocks over all heads
};
DEV Shared shared_from(u32 base) {
  Shared m;
  m.k = base; m.v = m.k + K_BYTES; m.q = m.v + K_BYTES; m.o = m.q + STAGES * Q_BYTES; m.ds = m.o + STAGES * Q_BYTES;
  m.dq = m.ds + 2 * DS_BYTES; m.lse = m.dq + STAGINGS * DQ_BYTES; m.delta = m.lse + STAGES * BQ * 4; m.poison = m.delta + STAGES * BQ * 4;
  m.first = m.poison + BK * 4; m.tile = m.first + BK * 4; m.total = m.tile + 32; m.k_full = m.tile + 48; m.v_full = m.k_full + 8;
  m.q_full = m.v_full + 8; m.q_empty = m.q_full + STAGES * 8; m.o_full = m.q_empty + STAGES * 8; m.o_empty = m.o_full + STAGES * 8;
  m.dq_full = m.o_empty + STAGES * 8; m.dq_empty = m.dq_full + STAGINGS * 8;
  m.sick = m.dq_empty + STAGINGS * 8;
  return m;
}

// A tile, and the blocks of queries that see it: first_block..blocks, of each of its query heads. It lies
// in shared memory: everyone reads it, few of its numbers are needed at a time, and registers are short.
struct Tile { int batch, segment, key_block, key_head, first_block, blocks, first_member, end_member; };
DEV Tile tile_at(const HopperBackward& w, int index) {
  const Job& job = w.job;
  Tile t;
  t.key_block = index % w.key_tiles;
  int rest = index / w.key_tiles;
  const int2 head = w.key_heads[rest % w.key_head_count];
  t.first_member = head.x; t.key_head = head.y; t.end_member = w.key_heads[rest % w.key_head_count + 1].x;
  rest /= w.key_head_count;
  t.segment = rest % job.segments; t.batch = rest / job.segments;
  t.blocks = (job.queries + BQ - 1) / BQ;
  const int first = first_query(job, t.key_block * BK);
  t.first_block = first >= job.queries ? t.blocks : first / BQ;
  return t;
}
DEV void put_tile(u32 to, const Tile& t) {
  store_shared(to, make_uint4(t.batch, t.segment, t.key_block, t.key_head));
  store_shared(to + 16, make_uint4(t.first_block, t.blocks, t.first_member, t.end_member));
  store_shared(to + 32, (u32)((t.blocks - t.first_block) * (t.end_member - t.first_member)));
}
DEV Tile take_tile(u32 from) {
  const uint4 x = load_shared_16(from), y = load_shared_16(from + 16);
  return Tile{(int)x.x, (int)x.y, (int)x.z, (int)x.w, (int)y.x, (int)y.y, (int)y.z, (int)y.w};
}

// Block n of a CTA uses place n % COUNT of a ring of buffers; the parity of the barrier's phase there.
template <int COUNT> DEV u32 place_of(u32 n) { return n % COUNT; }
template <int COUNT> DEV u32 parity_of(u32 n) { return n / COUNT & 1; }

// ---- warps 0 and 2: load -----------------------------------------------------------------------

DEV void load_slabs(u32 to, u32 slab_bytes, const TensorMap* map, u32 barrier, int row, int head, int segment, int batch) {
  #pragma unroll
  for (int slab = 0; slab < SLABS; slab++) tma_load(to + slab * slab_bytes, map, barrier, slab * 64, row, head, segment, batch);
}
// One of the two streams: the tile's keys once and block after block of queries with their lse, or values,
// output gradients and delta. `fixed` and `moving` are where they go; barriers of the second kind follow the first.
DEV void load_stream(const HopperBackward& w, const Shared& m, bool second, const TensorMap* fixed_map, const TensorMap* moving_map, u32 fixed, u32 moving, u32 dense, const float* rows) {
  const u32 once = second ? m.v_full : m.k_full, full = second ? m.o_full : m.q_full, empty = second ? m.o_empty : m.q_empty;
  const int segment = load_shared(m.tile + 4), batch = load_shared(m.tile);
  barrier_expect(once, K_BYTES);
  load_slabs(fixed, BK * 128, fixed_map, once, load_shared(m.tile + 8) * BK, load_shared(m.tile + 12), segment, batch);
  u32 n = 0;
  #pragma unroll 1
  for (int member = load_shared(m.tile + 24); member < (int)load_shared(m.tile + 28); member++) {
    const int4* head = w.query_heads + member;
    const float* from = rows + (((i64)batch * w.job.segments + segment) * w.job.heads + head->x) * w.padded;
    const int coordinate = second ? head->z : head->y;
    #pragma unroll 1
    for (int block = load_shared(m.tile + 20) - 1; block >= (int)load_shared(m.tile + 16); block--, n++) {
      const u32 place = place_of<STAGES>(n), barrier = full + 8 * place;
      barrier_wait(empty + 8 * place, parity_of<STAGES>(n) ^ 1);
      barrier_expect(barrier, Q_BYTES + BQ * 4);
      load_slabs(moving + place * Q_BYTES, BQ * 128, moving_map, barrier, block * BQ, coordinate, segment, batch);
      bulk_load(dense + place * BQ * 4, from + block * BQ, BQ * 4, barrier);
    }
  }
}

// ---- warp 1: adds finished dQ to memory -------------------------------------------------------

DEV void add_dq(const HopperBackward& w, const Shared& m, const TensorMap* dqs) {
  const int segment = load_shared(m.tile + 4), batch = load_shared(m.tile);
  u32 n = 0;
  #pragma unroll 1
  for (int member = load_shared(m.tile + 24); member < (int)load_shared(m.tile + 28); member++) {
    const int4* head = w.query_heads + member;
    const int coordinate = head->w;
    u32* turns = w.control + TURNS + (((i64)batch * w.job.segments + segment) * w.job.heads + head->x) * load_shared(m.tile + 20);
    #pragma unroll 1
    for (int block = load_shared(m.tile + 20) - 1; block >= (int)load_shared(m.tile + 16); block--, n++) {
      const u32 place = place_of<STAGINGS>(n);
      barrier_wait(m.dq_full + 8 * place, parity_of<STAGINGS>(n));
      if (w.fixed_order) await_turn(turns + block, load_shared(m.tile + 8));
      #pragma unroll
      for (int slab = 0; slab < DQ_SLABS; slab++)
        if (slab * 32 < w.job.dim && !(ABLATE & 1)) tma_add(dqs, m.dq + place * DQ_BYTES + slab * (BQ * 128), slab * 32, block * BQ, coordinate, segment, batch);
      bulk_commit();
      bulk_wait_read();
      barrier_arrive(m.dq_empty + 8 * place);
      if (w.fixed_order) { bulk_wait_all(); pass_turn(turns + block, load_shared(m.tile + 8) + 1); }
    }
  }
  bulk_wait_all();
}

// ---- warpgroups 1 and 2 -------------------------------------------------------------------

// The two keys of a thread: a query row sees a key from row `first` on. `poison` is NaN for a key that is sick.
struct Mask { int first[2]; float poison[2]; };

// Looks once at the warpgroup's 64 rows of K and V. A key row with something that is no number is
// taken out of K (0 x NaN would reach the dQ of rows that do not see it) and its scores are made
// NaN instead, where they are seen. V needs only that hidden dP are replaced, not multiplied by 0.
DEV bool keys_are_healthy(const Job& job, const Shared& m, int key_block, int warpgroup, int thread) {
  const u32 row = warpgroup * 64 + thread / 2, in_slab = row * 128 + (thread % 2) * 64;
  bool k_fine = true, v_fine = true;
  #pragma unroll
  for (int c = 0; c < SLABS * 4; c++) {
    const u32 at = (c / 4) * (BK * 128) + in_slab + (c % 4) * 16;
    k_fine = are_numbers(load_shared_16(m.k + at)) && k_fine; v_fine = are_numbers(load_shared_16(m.v + at)) && v_fine;
  }
  const u32 odd = __ballot_sync(~0u, !k_fine), pair = odd >> (thread % 32 & ~1) & 3;
  if (pair) for (int c = 0; c < SLABS * 4; c++) store_shared(m.k + (c / 4) * (BK * 128) + in_slab + (c % 4) * 16, 0.f, 0.f, 0.f, 0.f);
  const int key = key_block * BK + row;
  if (thread % 2) store_shared(m.poison + row * 4, pair ? NOT_A_NUMBER : 0u);
  else store_shared(m.first + row * 4, (u32)(key < job.keys ? first_query(job, key) : NEVER));
  if (!k_fine || !v_fine) store_shared(m.sick + warpgroup * 4, 1u);
  fence_async();
  named_sync(2 + warpgroup, 128);
  return load_shared(m.sick + warpgroup * 4) == 0;
}

// Takes out of a block the query rows whose lse is no number, before any product reads them.
DEV void clear_sick_queries(u32 q, u32 o, u32 lse) {
  #pragma unroll 1
  for (int i = threadIdx.x - 128; i < SLABS * BQ * 8; i += 256) {
    float x, y;
    load_shared(lse + (i / 8 % BQ & ~1) * 4, x, y);
    if (is_number(i / 8 & 1 ? y : x)) continue;
    store_shared(q + i * 16, 0.f, 0.f, 0.f, 0.f); store_shared(o + i * 16, 0.f, 0.f, 0.f, 0.f);
  }
  fence_async();
  named_sync(4, 256);
}

// S^T of a block: the warpgroup's 64 keys times all of its queries.
DEV void issue_scores(float (&s)[BQ / 2], u32 keys, u32 queries) {
  #pragma unroll
  for (int k = 0; k < HD / 16; k++)
    MMA_S(s, matrix(keys + (k / 4) * (BK * 128) + (k % 4) * 32, 16, 1024), matrix(queries + (k / 4) * (BQ * 128) + (k % 4) * 32, 16, 1024), k != 0);
}
// dP^T of 64 queries.
DEV void issue_dp(float (&dp)[32], u32 values, u32 douts) {
  #pragma unroll
  for (int k = 0; k < HD / 16; k++)
    wgmma_ss_n64(dp, matrix(values + (k / 4) * (BK * 128) + (k % 4) * 32, 16, 1024), matrix(douts + (k / 4) * (BQ * 128) + (k % 4) * 32, 16, 1024), k != 0);
}
// dV += P^T dO or dK += dS^T Q over 64 queries: the left operand in registers.
DEV void issue_sum(float (&sum)[HD / 2], const u32 (&left)[16], u32 right) {
  #pragma unroll
  for (int k = 0; k < 4; k++)
    MMA_ACC(sum, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3], matrix(right + k * 2048, BQ * 128, 1024), 1);
}
// 64 queries x 64 columns of dQ = dS K, over all keys of the tile; both operands lie transposed.
DEV void issue_dq(float (&dq)[32], u32 ds, u32 keys) {
  #pragma unroll
  for (int k = 0; k < BK / 16; k++)
    wgmma_ss_ta_tb_n64(dq, matrix(ds + k * 2048, 1024, 1024), matrix(keys + k * 2048, 1024, 1024), k != 0);
}

// Whether each of two neighbouring queries, `row` and row + 1, sees key `e` of this thread and ever saw any.
DEV Mask mask_of(const Shared& m, int row) {
  return Mask{{(int)load_shared(m.first + row * 4), (int)load_shared(m.first + row * 4 + 32)},
              {__uint_as_float(load_shared(m.poison + row * 4)), __uint_as_float(load_shared(m.poison + row * 4 + 32))}};
}
DEV bool sees(const Mask& mask, int e, int row, float lse) { return row >= mask.first[e] && lse != -neg_inf(); }

// P from S: exp2(S - lse).
DEV void to_probabilities(float (&s)[32], u32 lse, float exponent) {
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    s[4 * i] = exp2_fast(fmaf(s[4 * i], exponent, -x)); s[4 * i + 1] = exp2_fast(fmaf(s[4 * i + 1], exponent, -y));
    s[4 * i + 2] = exp2_fast(fmaf(s[4 * i + 2], exponent, -x)); s[4 * i + 3] = exp2_fast(fmaf(s[4 * i + 3], exponent, -y));
  }
}
// dS from dP: P (gain dP - delta).
DEV void to_ds(float (&dp)[32], const float (&p)[32], u32 delta, float gain) {
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    float x, y;
    load_shared(delta + i * 32, x, y);
    dp[4 * i] = p[4 * i] * fmaf(dp[4 * i], gain, -x); dp[4 * i + 1] = p[4 * i + 1] * fmaf(dp[4 * i + 1], gain, -y);
    dp[4 * i + 2] = p[4 * i + 2] * fmaf(dp[4 * i + 2], gain, -x); dp[4 * i + 3] = p[4 * i + 3] * fmaf(dp[4 * i + 3], gain, -y);
  }
}
// Replaces what is hidden by 0, and poisons the rest of a sick key.
DEV void hide(float (&x)[32], const Mask& mask, int row, u32 lse) {
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    float a, b;
    load_shared(lse + i * 32, a, b);
    #pragma unroll
    for (int e = 0; e < 4; e++)
      x[4 * i + e] = sees(mask, e >> 1, row + i * 8 + (e & 1), e & 1 ? b : a) ? x[4 * i + e] + mask.poison[e >> 1] : 0.f;
  }
}
DEV void to_stored(u32 (&to)[16], const float (&from)[32]) {
  #pragma unroll
  for (int i = 0; i < 16; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}
// dS to shared memory as [64 queries][key][query], swizzled, for dQ.
DEV void store_ds(u32 to, const u32 (&ds)[16], int warpgroup, int warp, int lane) {
  const u32 row = (warpgroup * 64 + warp * 16 + (lane & 15)) * 128, swizzle = (lane & 7) << 4, half = (lane >> 4) << 4;
  #pragma unroll
  for (int i = 0; i < 8; i += 2)
    store_matrices(to + row + (((i << 4) + half) ^ swizzle), ds[2 * i], ds[2 * i + 1], ds[2 * i + 2], ds[2 * i + 3]);
  fence_async();
}
// This warp's 16 rows x 64 columns of dQ into the buffer warp 1 adds from: [32 columns][row][column],
// swizzled. Odd rows store the columns 16 further in the same instruction, so that no two rows meet in a bank.
DEV void stage_dq(u32 to, const float (&dq)[32], float gain, int lane) {
  const bool odd = lane / 4 & 1;
  const u32 row = (lane / 4) * 128, swizzle = (lane / 4) << 4, in_chunk = (lane & 1) * 8;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 column = (i % 4) ^ (odd ? 2 : 0);
    #pragma unroll
    for (int down = 0; down < 2; down++) {
      const float x = odd ? dq[4 * (i ^ 2) + 2 * down] : dq[4 * i + 2 * down], y = odd ? dq[4 * (i ^ 2) + 2 * down + 1] : dq[4 * i + 2 * down + 1];
      store_shared(to + (i / 4) * (BQ * 128) + row + down * 1024 + (((column * 32) + (lane & 2) * 8) ^ swizzle) + in_chunk, x * gain, y * gain);
    }
  }
  fence_async();
  __syncwarp();
}
// Adds this thread's share of dK or dV to memory: two rows, every fourth pair of columns.
DEV void add_rows(float* to, const Job& job, const Tile& t, int head, const float (&sum)[HD / 2], float gain, int key, int lane) {
  #pragma unroll
  for (int down = 0; down < 2; down++) {
    if (key + 8 * down >= job.keys) continue;
    float2* row = (float2*)(to + at(job.k, t.batch, t.segment, key + 8 * down, head) + (lane % 4) * 2);
    #pragma unroll
    for (int part = 0; part < HD / 8; part += 4) {
      float2 x[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) if (part + i < HD / 8 && (part + i) * 8 < job.dim) x[i] = row[(part + i) * 4];
      #pragma unroll
      for (int i = 0; i < 4; i++) if (part + i < HD / 8 && (part + i) * 8 < job.dim) {
        x[i].x += sum[4 * (part + i) + 2 * down] * gain; x[i].y += sum[4 * (part + i) + 2 * down + 1] * gain;
        row[(part + i) * 4] = x[i];
      }
    }
  }
}

// Waits for block n's queries and begins S^T.
DEV void begin_scores(float (&s)[BQ / 2], const HopperBackward& w, const Shared& m, u32 n, int clear, u32 keys) {
  const u32 place = place_of<STAGES>(n), parity = parity_of<STAGES>(n);
  barrier_wait(m.q_full + 8 * place, parity);
  if (clear == NEVER && w.control[SICK_QUERIES] != 0) {
    barrier_wait(m.o_full + 8 * place, parity);
    clear_sick_queries(m.q + place * Q_BYTES, m.o + place * Q_BYTES, m.lse + place * BQ * 4);
  }
  wgmma_fence(); issue_scores(s, keys, m.q + place * Q_BYTES); wgmma_commit();
}

DEV void multiply(const HopperBackward& w, const Shared& m, int warpgroup, int thread) {
  const Job& job = w.job;
  const int key_block = load_shared(m.tile + 8), warp = thread / 32, lane = thread % 32;
  const u32 keys = m.k + warpgroup * 64 * 128, values = m.v + warpgroup * 64 * 128, column = (lane % 4) * 8;
  float dk[HD / 2], dv[HD / 2];
  #pragma unroll
  for (int i = 0; i < HD / 2; i++) dk[i] = dv[i] = 0.f;

  barrier_wait(m.k_full, 0); barrier_wait(m.v_full, 0);
  // From query row `clear` on every row sees all of the warpgroup's keys, and nothing needs to be hidden.
  const int last = key_block * BK + warpgroup * 64 + 63;
  const bool healthy = keys_are_healthy(job, m, key_block, warpgroup, thread) && w.control[SICK_QUERIES] == 0;
  const int clear = healthy && last < job.keys ? first_query(job, last) : NEVER;

  int block = load_shared(m.tile + 20) - 1;
  float s[BQ / 2];
  if (EARLY_S) { begin_scores(s, w, m, 0, clear, keys); wgmma_wait<0>(); }
  #pragma unroll 1
  for (u32 n = 0; n < load_shared(m.total); n++) {
    const u32 place = place_of<STAGES>(n), ds_at = m.ds + (n & 1) * DS_BYTES;
    const u32 q = m.q + place * Q_BYTES, o = m.o + place * Q_BYTES, lse = m.lse + place * BQ * 4, delta = m.delta + place * BQ * 4;
    const bool hidden = block * BQ < clear;
    float dp[PARTS][32], dq[32];
    if (!EARLY_S) begin_scores(s, w, m, n, clear, keys);
    barrier_wait(m.o_full + 8 * place, parity_of<STAGES>(n));
    #pragma unroll
    for (int part = 0; part < PARTS; part++) { wgmma_fence(); issue_dp(dp[part], values, o + part * 64 * 128); wgmma_commit(); }
    if (!EARLY_S) wgmma_wait<PARTS>();
    #pragma unroll
    for (int part = 0; part < PARTS; part++) {
      float (&scores)[32] = reinterpret_cast<float (&)[32]>(s[32 * part]);
      const int row = block * BQ + part * 64 + (lane % 4) * 2, from = part * 64 * 4 + column;
      u32 p[16], ds[16];
      to_probabilities(scores, lse + from, w.exponent);
      if (hidden) hide(scores, mask_of(m, warpgroup * 64 + warp * 16 + lane / 4), row, lse + from);
      to_stored(p, scores);
      wgmma_fence(); issue_sum(dv, p, o + part * 64 * 128); wgmma_commit();
      // Of what is under way, dP of this part is the oldest.
      if (part == 0) wgmma_wait<PARTS>(); else wgmma_wait<3>();
      to_ds(dp[part], scores, delta + from, w.dp_gain);
      if (hidden) hide(dp[part], mask_of(m, warpgroup * 64 + warp * 16 + lane / 4), row, lse + from);
      to_stored(ds, dp[part]);
      store_ds(ds_at + part * (BK * 128), ds, warpgroup, warp, lane);
      wgmma_fence(); issue_sum(dk, ds, q + part * 64 * 128); wgmma_commit();
    }
    if (!(ABLATE & 2)) named_sync(1, 256);   // both halves of dS are there
    wgmma_fence();
    if (PARTS == 1) issue_dq(dq, ds_at, m.k + warpgroup * (BK * 128)); else issue_dq(dq, ds_at + warpgroup * (BK * 128), m.k);
    wgmma_commit();
    wgmma_wait<1>();
    if (lane == 0) { barrier_arrive(m.q_empty + 8 * place); barrier_arrive(m.o_empty + 8 * place); }
    // The next block's scores run while dQ is carried away. After the last block they are formed once more, for nobody.
    if (EARLY_S) { begin_scores(s, w, m, n + 1 < load_shared(m.total) ? n + 1 : n, clear, keys); wgmma_wait<1>(); }
    else wgmma_wait<0>();
    const u32 staging = place_of<STAGINGS>(n);
    barrier_wait(m.dq_empty + 8 * staging, parity_of<STAGINGS>(n) ^ 1);
    stage_dq(m.dq + staging * DQ_BYTES + (PARTS == 1 ? warpgroup * 2 * BQ * 128 : warpgroup * 64 * 128) + warp * 16 * 128, dq, w.dq_gain, lane);
    if (lane == 0) barrier_arrive(m.dq_full + 8 * staging);
    if (EARLY_S) wgmma_wait<0>();
    block = block == (int)load_shared(m.tile + 16) ? (int)load_shared(m.tile + 20) - 1 : block - 1;
  }
  const Tile t = take_tile(m.tile);
  const int head = w.query_heads[t.first_member].x;
  const int key = t.key_block * BK + warpgroup * 64 + warp * 16 + lane / 4;
  add_rows(w.dk, job, t, head, dk, w.dk_gain, key, lane);
  add_rows(w.dv, job, t, head, dv, w.dv_gain, key, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1)
hopper_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap k,
                const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dq, const __grid_constant__ HopperBackward w) {
  SHARED_MEMORY(memory);
  const Shared m = shared_from(shared_address(memory));
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    barrier_init(m.k_full, 1); barrier_init(m.v_full, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(m.q_full + 8 * i, 1); barrier_init(m.q_empty + 8 * i, 8);
      barrier_init(m.o_full + 8 * i, 1); barrier_init(m.o_empty + 8 * i, 8);
    }
    for (int i = 0; i < STAGINGS; i++) { barrier_init(m.dq_full + 8 * i, 8); barrier_init(m.dq_empty + 8 * i, 1); }
    barrier_init_fence();
    store_shared(m.sick, 0u); store_shared(m.sick + 4, 0u);
    put_tile(m.tile, tile_at(w, (int)atomicAdd(w.control + NEXT_TILE, 1u)));
  }
  __syncthreads();
  if (load_shared(m.tile + 16) >= load_shared(m.tile + 20)) return;  // no query sees these keys
  if (warpgroup == 0) {
    registers_lower<24>();
    if (threadIdx.x == 0) load_stream(w, m, false, &k, &q, m.k, m.q, m.lse, w.lse);
    if (threadIdx.x == 64) load_stream(w, m, true, &v, &dout, m.v, m.o, m.delta, w.delta);
    if (threadIdx.x == 32) add_dq(w, m, &dq);
  } else {
    registers_raise<240>();
    multiply(w, m, warpgroup - 1, threadIdx.x % 128);
  }
}
