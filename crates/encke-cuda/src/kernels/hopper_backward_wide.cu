// Gradients on Hopper for head dimensions above 128. Sums of 64 keys x 256 columns do not fit into
// a warpgroup's registers, so both consumers share the tile's 64 keys: each computes S and dP of
// half of the queries, exchanges P and dS through shared memory, and accumulates half of the
// columns of dK, dV and dQ.

#define HALF_QUERIES (BQ / 2)
#define HALF_COLUMNS 128

// S^T or dP^T of the warpgroup's 32 queries: all keys (or values) times queries (or output
// gradients).
DEV void issue_half(float (&s)[HALF_QUERIES / 2], u32 keys, u32 queries) {
  const u64 a = matrix(keys, 16, 1024), b = matrix(queries, 16, 1024);
  #pragma unroll
  for (int k = 0; k < HD / 16; k++)
    wgmma_ss_n32(s, further(a, (k / 4) * (BK * 128) + (k % 4) * 32),
        further(b, (k / 4) * (BQ * 128) + (k % 4) * 32), k != 0);
}
// dV += P^T dO or dK += dS^T Q: both from shared memory, half of the columns.
DEV void issue_half_sum(float (&sum)[HALF_COLUMNS / 2], u32 left, u32 right) {
  const u64 a = matrix(left, 16, 1024), b = matrix(right, BQ * 128, 1024);
  #pragma unroll
  for (int k = 0; k < BQ / 16; k++)
    wgmma_ss_tb_n128(sum, further(a, k * 32), further(b, k * 2048), 1);
}

DEV u32 process_tile(const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread) {
  const JobParams& job = w.job;
  const int warp = thread / 32, lane = thread % 32;
  const u32 rows = warpgroup * HALF_QUERIES,
            from = rows * 4 + (lane % 4) * 8;   // queries of the block, offset of lse, delta
  const u32 columns = warpgroup * 2;                                             // in slabs
  float dk[HALF_COLUMNS / 2], dv[HALF_COLUMNS / 2];
  #pragma unroll
  for (int i = 0; i < HALF_COLUMNS / 2; i++) dk[i] = dv[i] = 0.f;
  barrier_wait(m.k_full, tile_parity(n)); barrier_wait(m.v_full, tile_parity(n));
  set_unmasked_from(w, m, n, warpgroup, thread, tile_word(m, n, KEY_BLOCK) * BK + BK - 1);
  int block = tile_word(m, n, START);
  #pragma unroll 1
  for (; block_of(n) < (u32)tile_word(m, n, LAST); n++) {
    const u32 stage = stage_of<STAGES>(n), parity = parity_of<STAGES>(n),
              p_at = m.pairs + (n & 1) * PAIRS * PAIR_BYTES, ds_at = p_at + PAIR_BYTES;
    const u32 q = m.q + stage * Q_BYTES, o = m.o + stage * Q_BYTES,
              lse = m.lse + stage * BQ * 4 + from, delta = m.delta + stage * BQ * 4 + from;
    const int row = block * BQ + rows + (lane % 4) * 2;
    const bool masked = is_masked(m, warpgroup, block);
    float s[HALF_QUERIES / 2], dp[HALF_QUERIES / 2], dq[2][32];
    u32 pair[HALF_QUERIES / 4];
    barrier_wait(m.q_full + 8 * stage, parity); barrier_wait(m.o_full + 8 * stage, parity);
    if (unmasked_from(m, warpgroup) == NEVER && w.control[NONFINITE_QUERIES] != 0)
      zero_nonfinite_queries(q, o, m.lse + stage * BQ * 4);
    wgmma_fence(); issue_half(s, m.k, q + rows * 128); wgmma_commit();
    wgmma_fence(); issue_half(dp, m.v, o + rows * 128); wgmma_commit();
    wgmma_wait<1>();
    if (masked) to_probabilities(s, lse, w.exponent, mask_of(m, warp * 16 + lane / 4), row);
    else to_probabilities(s, lse, w.exponent);
    to_stored(pair, s);
    store_pairs(p_at, pair, warp * 16, rows / 8, lane);
    wgmma_wait<0>();
    to_ds<true>(dp, s, delta, w.dp_gain);
    to_stored(pair, dp);
    store_pairs(ds_at, pair, warp * 16, rows / 8, lane);
    named_sync(1, 256);   // both halves of P and dS are stored
    wgmma_fence(); issue_half_sum(dv, p_at, o + columns * (BQ * 128)); wgmma_commit();
    wgmma_fence(); issue_half_sum(dk, ds_at, q + columns * (BQ * 128)); wgmma_commit();
    wgmma_fence();
    issue_dq(dq[0], ds_at, m.k + columns * (BK * 128));
    issue_dq(dq[1], ds_at, m.k + (columns + 1) * (BK * 128));
    wgmma_commit();
    wgmma_wait<1>();
    if (lane == 0) barrier_arrive(m.empty + 8 * stage);
    wgmma_wait<0>();
    const u32 dq_stage = stage_of<DQ_STAGES>(n);
    barrier_wait(m.dq_empty + 8 * dq_stage, parity_of<DQ_STAGES>(n) ^ 1);
    #pragma unroll
    for (int i = 0; i < 2; i++)
      stage_dq(m.dq + dq_stage * DQ_BYTES + (columns + i) * 2 * (BQ * 128) + warp * 16 * 128, dq[i],
          w.dq_gain, lane);
    if (lane == 0) barrier_arrive(m.dq_full + 8 * dq_stage);
    block = next_block(m, n, block);
  }
  release_keys(m, warpgroup, thread);
  const int head = w.query_heads[tile_word(m, n, FIRST_MEMBER)].x,
            key = tile_word(m, n, KEY_BLOCK) * BK + warp * 16 + lane / 4;
  add_rows(w.dk, job, m, n, w.stores, head, dk, w.dk_gain, key, warpgroup * HALF_COLUMNS, lane);
  add_rows(w.dv, job, m, n, w.stores, head, dv, w.dv_gain, key, warpgroup * HALF_COLUMNS, lane);
  return n;
}
