// Gradients on Hopper for head dimensions up to 128: each warpgroup has 64 keys of the tile, and P and
// dS stay in its registers as left operands. Only dQ needs the keys of both, and so dS in shared memory.

#define PARTS (BQ / 64)                      // a block is worked on 64 queries at a time
#define MMA_S JOIN(wgmma_ss_n, BQ)
#define MMA_ACC JOIN(wgmma_rs_tb_n, HD)
#ifndef SPLIT
#define SPLIT 1                              // into how many pieces, so that products begin before all of P is there
#endif
#define PIECE (64 / SPLIT)
#ifndef NO_MASK
#define NO_MASK 0
#endif
#ifndef EARLY_S
#define EARLY_S 1
#endif

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
// dV += P^T dO or dK += dS^T Q over a piece of queries: the left operand in registers.
template <int N> DEV void issue_sum(float (&sum)[HD / 2], const u32 (&left)[N], u32 right) {
  #pragma unroll
  for (int k = 0; k < N / 4; k++)
    MMA_ACC(sum, left[4 * k], left[4 * k + 1], left[4 * k + 2], left[4 * k + 3], matrix(right + k * 2048, BQ * 128, 1024), 1);
}
// Waits for block n's queries and begins S^T.
DEV void begin_scores(float (&s)[BQ / 2], const HopperBackward& w, const Shared& m, u32 n, int clear, u32 keys) {
  const u32 place = place_of<STAGES>(n), parity = parity_of<STAGES>(n);
  barrier_wait(m.q_full + 8 * place, parity);
  if (clear == NEVER && w.control[SICK_QUERIES] != 0) {
    barrier_wait(m.o_full + 8 * place, parity);
    clear_sick_queries(m.q + place * Q_BYTES, m.o + place * Q_BYTES, m.lse + place * BQ * 4);
  }
  wgmma_fence(); issue_scores(s, forgotten(keys), m.q + place * Q_BYTES); wgmma_commit();
}

DEV void multiply(const HopperBackward& w, const Shared& m, int warpgroup, int thread) {
  const Job& job = w.job;
  const int key_block = tile_word(m, KEY_BLOCK), warp = thread / 32, lane = thread % 32;
  const u32 keys = m.k + warpgroup * 64 * 128, values = m.v + warpgroup * 64 * 128, column = (lane % 4) * 8;
  float dk[HD / 2], dv[HD / 2];
  #pragma unroll
  for (int i = 0; i < HD / 2; i++) dk[i] = dv[i] = 0.f;

  barrier_wait(m.k_full, 0); barrier_wait(m.v_full, 0);
  // From query row `clear` on every row sees all of the warpgroup's keys, and nothing needs to be hidden.
  const int last = key_block * BK + warpgroup * 64 + 63;
  const bool healthy = keys_are_healthy(job, m, key_block, warpgroup * 128 + thread) && w.control[SICK_QUERIES] == 0;
  const int clear = healthy && last < job.keys ? first_query(job, last) : NEVER;

  int block = tile_word(m, FIRST);
  float s[BQ / 2];
  if (EARLY_S) { begin_scores(s, w, m, 0, clear, keys); wgmma_wait<0>(); }
  #pragma unroll 1
  for (u32 n = 0; n < (u32)tile_word(m, TOTAL); n++) {
    const u32 place = place_of<STAGES>(n), ds_at = m.pairs + (n & 1) * PAIRS * PAIR_BYTES;
    const u32 q = m.q + place * Q_BYTES, o = m.o + place * Q_BYTES, lse = m.lse + place * BQ * 4, delta = m.delta + place * BQ * 4;
    const bool hidden = !NO_MASK && block * BQ < clear;
    float dp[PARTS][32], dq[32];
    if (!EARLY_S) begin_scores(s, w, m, n, clear, keys);
    barrier_wait(m.o_full + 8 * place, parity_of<STAGES>(n));
    #pragma unroll
    for (int part = 0; part < PARTS; part++) { wgmma_fence(); issue_dp(dp[part], values, o + part * 64 * 128); wgmma_commit(); }
    if (!EARLY_S) wgmma_wait<PARTS>();
    #pragma unroll
    for (int part = 0; part < PARTS; part++) {
      #pragma unroll
      for (int piece = part * SPLIT; piece < (part + 1) * SPLIT; piece++) {
        float (&x)[PIECE / 2] = reinterpret_cast<float (&)[PIECE / 2]>(s[PIECE / 2 * piece]);
        u32 p[PIECE / 4];
        to_probabilities(x, lse + piece * PIECE * 4 + column, w.exponent);
        if (hidden) hide(x, mask_of(m, warpgroup * 64 + warp * 16 + lane / 4), block * BQ + piece * PIECE + (lane % 4) * 2, lse + piece * PIECE * 4 + column);
        to_stored(p, x);
        wgmma_fence(); issue_sum(dv, p, o + piece * PIECE * 128); wgmma_commit();
      }
      // Of what is under way, dP of this part is the oldest.
      if (part == 0) wgmma_wait<PARTS - 1 + SPLIT>(); else wgmma_wait<3 * SPLIT>();
      #pragma unroll
      for (int piece = part * SPLIT; piece < (part + 1) * SPLIT; piece++) {
        float (&x)[PIECE / 2] = reinterpret_cast<float (&)[PIECE / 2]>(s[PIECE / 2 * piece]);
        float (&y)[PIECE / 2] = reinterpret_cast<float (&)[PIECE / 2]>(dp[part][PIECE / 2 * (piece % SPLIT)]);
        u32 ds[PIECE / 4];
        to_ds(y, x, delta + piece * PIECE * 4 + column, w.dp_gain);
        if (hidden) hide(y, mask_of(m, warpgroup * 64 + warp * 16 + lane / 4), block * BQ + piece * PIECE + (lane % 4) * 2, lse + piece * PIECE * 4 + column);
        to_stored(ds, y);
        store_pairs(ds_at + part * PAIR_BYTES, ds, warpgroup * 64 + warp * 16, piece % SPLIT * (PIECE / 8), lane);
        wgmma_fence(); issue_sum(dk, ds, q + piece * PIECE * 128); wgmma_commit();
      }
    }
    if (!(ABLATE & 2)) named_sync(1, 256);   // both halves of dS are there
    wgmma_fence();
    if (PARTS == 1) issue_dq(dq, ds_at, m.k + warpgroup * (BK * 128)); else issue_dq(dq, ds_at + warpgroup * (BK * 128), m.k);
    wgmma_commit();
    wgmma_wait<1>();
    if (lane == 0) { barrier_arrive(m.q_empty + 8 * place); barrier_arrive(m.o_empty + 8 * place); }
    // The next block's scores run while dQ is carried away. After the last block they are formed once more, for nobody.
    if (EARLY_S) { begin_scores(s, w, m, n + 1 < (u32)tile_word(m, TOTAL) ? n + 1 : n, clear, keys); wgmma_wait<1>(); }
    else wgmma_wait<0>();
    const u32 staging = place_of<STAGINGS>(n);
    barrier_wait(m.dq_empty + 8 * staging, parity_of<STAGINGS>(n) ^ 1);
    stage_dq(m.dq + staging * DQ_BYTES + (PARTS == 1 ? warpgroup * 2 * BQ * 128 : warpgroup * 64 * 128) + warp * 16 * 128, dq, w.dq_gain, lane);
    if (lane == 0) barrier_arrive(m.dq_full + 8 * staging);
    if (EARLY_S) wgmma_wait<0>();
    if (++block == tile_word(m, END)) block = tile_word(m, FIRST);
  }
  const int head = w.query_heads[tile_word(m, FIRST_MEMBER)].x;
  const int key = tile_word(m, KEY_BLOCK) * BK + warpgroup * 64 + warp * 16 + lane / 4;
  add_rows(w.dk, job, m, head, dk, w.dk_gain, key, 0, lane);
  add_rows(w.dv, job, m, head, dv, w.dv_gain, key, 0, lane);
}
