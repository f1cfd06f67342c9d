// Gradients on Hopper for rows of more than 128 elements. Sums of 64 keys and all columns do not
// fit into a warpgroup's registers, so both consumers share the tile's 64 keys: each computes S and
// dP of half of the queries, exchanges P and dS through shared memory, and accumulates a part of
// the columns of dK, dV and dQ, in slabs of 64. Where slabs cannot be halved, a warpgroup has the
// larger part of dK and the smaller one of dQ.
//
// Where registers and stages suffice, the scores of the next block are computed beside the products
// of this one: these then hide the arithmetic, and the staging of dQ.

#define HALF_QUERIES (BQ / 2)
#define PIPELINED (STAGES > 1 && SLABS + (V_SLABS + 1) / 2 <= 4)

// The slabs of a warpgroup: how many, and the first.
template <int GROUP> struct OwnSlabs {
  static const int less = SLABS / 2, more = SLABS - less, dk = GROUP == 0 ? more : less,
                   first_dk = GROUP == 0 ? 0 : more, dq = GROUP == 0 ? less : more,
                   first_dq = GROUP == 0 ? more : 0,
                   dv = GROUP == 0 ? V_SLABS / 2 : V_SLABS - V_SLABS / 2,
                   first_dv = GROUP == 0 ? 0 : V_SLABS / 2;
};

// S^T or dP^T of the warpgroup's 32 queries: all keys (or values) times queries (or output
// gradients).
template <int DIM> DEV void issue_half(float (&s)[HALF_QUERIES / 2], u32 keys, u32 queries) {
  const u64 a = matrix(keys, 16, 1024), b = matrix(queries, 16, 1024);
  #pragma unroll
  for (int k = 0; k < DIM / 16; k++)
    wgmma_ss_n32(s, further(a, (k / 4) * (BK * 128) + (k % 4) * 32),
        further(b, (k / 4) * (BQ * 128) + (k % 4) * 32), k != 0);
}
// dV += P^T dO or dK += dS^T Q: both from shared memory, one or two slabs of columns.
template <int N> DEV void issue_own_sum(float (&sum)[N], u32 left, u32 right) {
  const u64 a = matrix(left, 16, 1024), b = matrix(right, BQ * 128, 1024);
  #pragma unroll
  for (int k = 0; k < BQ / 16; k++) {
    if constexpr (N == 32) wgmma_ss_tb_n64(sum, further(a, k * 32), further(b, k * 2048), 1);
    else wgmma_ss_tb_n128(sum, further(a, k * 32), further(b, k * 2048), 1);
  }
}

// A thread's place in the tile. Computed where it is used: registers are scarce.
struct Place { int warpgroup, warp, lane; };
DEV Place place_in(int warpgroup) {
  const int thread = (int)(opaque(threadIdx.x) % 128);
  return Place{warpgroup, thread / 32, thread % 32};
}

// Waits until block n's queries and output gradients are loaded.
DEV void wait_queries(const HopperBackward& w, const Shared& m, u32 n, int warpgroup) {
  const u32 stage = stage_of<STAGES>(n), parity = parity_of<STAGES>(n);
  barrier_wait(m.q_full + 8 * stage, parity); barrier_wait(m.o_full + 8 * stage, parity);
  if (unmasked_from(m, warpgroup) == NEVER && w.control[SPECIAL_QUERIES] != 0)
    zero_nonfinite_queries(
        m.q + stage * Q_BYTES, m.o + stage * O_BYTES, m.lse + stage * BQ * 4);
}
// Issues S and dP of block n, as two groups.
DEV void begin_block(float (&s)[HALF_QUERIES / 2], float (&dp)[HALF_QUERIES / 2], const Shared& m,
    u32 n, int warpgroup) {
  const u32 stage = stage_of<STAGES>(n), rows = warpgroup * (HALF_QUERIES * 128);
  wgmma_fence(); issue_half<HD>(s, m.k, m.q + stage * Q_BYTES + rows); wgmma_commit();
  wgmma_fence(); issue_half<VD>(dp, m.v, m.o + stage * O_BYTES + rows); wgmma_commit();
}
// Stores P of block n as soon as its S is complete.
DEV void store_probabilities(float (&s)[HALF_QUERIES / 2], const HopperBackward& w,
    const Shared& m, u32 n, int block, const Place& at) {
  const u32 rows = at.warpgroup * HALF_QUERIES,
            lse = m.lse + (stage_of<STAGES>(n) * BQ + rows + (at.lane % 4) * 2) * 4;
  u32 pair[HALF_QUERIES / 4];
#if TRANSFORMED
  to_transformed<true>(s, pair, w, m, lse, stage_of<STAGES>(n), at.warp * 16 + at.lane / 4,
      block * BQ + (int)rows + (at.lane % 4) * 2);
#else
  if (is_masked(m, at.warpgroup, block))
    to_probabilities(s, lse, w.exponent, mask_of(m, at.warp * 16 + at.lane / 4),
        block * BQ + (int)rows + (at.lane % 4) * 2);
  else to_probabilities(s, lse, w.exponent);
  to_stored(pair, s);
#endif
  store_pairs(m.pairs + (n & 1) * PAIRS * PAIR_BYTES, pair, at.warp * 16, rows / 8, at.lane);
}
// Stores dS of block n, whose dP is complete.
DEV void store_ds(const float (&p)[HALF_QUERIES / 2], float (&dp)[HALF_QUERIES / 2],
    const HopperBackward& w, const Shared& m, u32 n, const Place& at) {
  const u32 rows = at.warpgroup * HALF_QUERIES;
  to_ds<true>(dp, p, m.delta + (stage_of<STAGES>(n) * BQ + rows + (at.lane % 4) * 2) * 4,
      w.dp_gain);
  u32 pair[HALF_QUERIES / 4];
  to_stored(pair, dp);
  store_pairs(m.pairs + (n & 1) * PAIRS * PAIR_BYTES + PAIR_BYTES, pair, at.warp * 16, rows / 8,
      at.lane);
}
// Block n's dQ is complete: stages it for warp 1.
template <int N> DEV void finish_dq(const float (&dq)[N], const HopperBackward& w, const Shared& m,
    u32 n, int first_slab, const Place& at) {
  const u32 stage = stage_of<DQ_STAGES>(n);
  barrier_wait(m.dq_empty + 8 * stage, parity_of<DQ_STAGES>(n) ^ 1);
  #pragma unroll
  for (int i = 0; i < N / 32; i++)
    stage_dq(m.dq + stage * DQ_BYTES + (first_slab + i) * 2 * (BQ * 128) + at.warp * 16 * 128,
        reinterpret_cast<const float (&)[32]>(dq[32 * i]), w.dq_gain, at.lane);
  if (at.lane == 0) barrier_arrive(m.dq_full + 8 * stage);
}

template <int GROUP>
DEV u32 process_own(const HopperBackward& w, const Shared& m, u32 n, int thread) {
  typedef OwnSlabs<GROUP> Own;
  const JobParams& job = w.job;
  float dk[Own::dk * 32], dv[Own::dv * 32], dq[Own::dq * 32];
  #pragma unroll
  for (int i = 0; i < Own::dk * 32; i++) dk[i] = 0.f;
  #pragma unroll
  for (int i = 0; i < Own::dv * 32; i++) dv[i] = 0.f;
#if TILED
  if (w.stores == CONTINUED) {
    const Place at = place_in(GROUP);
    const int head = w.query_heads[tile_word(m, n, FIRST_MEMBER)].x,
              key = tile_word(m, n, KEY_BLOCK) * BK + at.warp * 16 + at.lane / 4;
    load_rows(w.dk, job, m, n, head, dk, w.dk_gain, key, Own::first_dk * 64, at.lane);
    load_rows(w.dv, job, m, n, head, dv, w.dv_gain, key, Own::first_dv * 64, at.lane);
  }
#endif
  set_unmasked_from(w, m, n, GROUP, thread, tile_word(m, n, KEY_BLOCK) * BK + BK - 1);
  int block = tile_word(m, n, START);
  float s[HALF_QUERIES / 2], dp[HALF_QUERIES / 2];
  bool more = block_of(n) < (u32)tile_word(m, n, LAST);
#if PIPELINED
  bool is_first = true;
  if (more) {
    const Place at = place_in(GROUP);
    wait_queries(w, m, n, GROUP);
    begin_block(s, dp, m, n, GROUP);
    wgmma_wait<1>();
    store_probabilities(s, w, m, n, block, at);
    wgmma_wait<0>();
    store_ds(s, dp, w, m, n, at);
  }
#endif
  #pragma unroll 1
  while (more) {
    const Place at = place_in(GROUP);
    const u32 stage = stage_of<STAGES>(n), p = m.pairs + (n & 1) * PAIRS * PAIR_BYTES,
              ds = p + PAIR_BYTES, q = m.q + stage * Q_BYTES + Own::first_dk * (BQ * 128),
              o = m.o + stage * O_BYTES + Own::first_dv * (BQ * 128),
              keys = m.k + Own::first_dq * (BK * 128);
#if PIPELINED
#if !TILED
    block = next_block(m, n, block);
#endif
    more = block_of(n + 1) < (u32)tile_word(m, n, LAST);
#else
    wait_queries(w, m, n, GROUP);
#if TILED
    block = loaded_block(m, n, block);
#endif
    begin_block(s, dp, m, n, GROUP);
    wgmma_wait<1>();
    store_probabilities(s, w, m, n, block, at);
    wgmma_wait<0>();
    store_ds(s, dp, w, m, n, at);
#endif
    named_sync(1, 256);   // both halves of P and dS are stored
    wgmma_fence(); issue_own_sum(dv, p, o); wgmma_commit();
    wgmma_fence(); issue_own_sum(dk, ds, q); wgmma_commit();
#if PIPELINED
    // At the end of the tile these are scores of stale data, which are not used.
    if (!is_first) finish_dq(dq, w, m, n - 1, Own::first_dq, at);
    if (more) wait_queries(w, m, n + 1, GROUP);
#if TILED
    block = loaded_block(m, n + 1, block);
#endif
    begin_block(s, dp, m, n + 1, GROUP);
    wgmma_fence(); issue_dq(dq, ds, keys); wgmma_commit();
    wgmma_wait<2>();
    if (at.lane == 0) barrier_arrive(m.empty + 8 * stage);
    if (more) store_probabilities(s, w, m, n + 1, block, at);
    wgmma_wait<1>();
    if (more) store_ds(s, dp, w, m, n + 1, at);
    wgmma_wait<0>();
    is_first = false;
    n++;
#else
    wgmma_fence(); issue_dq(dq, ds, keys); wgmma_commit();
    wgmma_wait<1>();
    if (at.lane == 0) barrier_arrive(m.empty + 8 * stage);
    wgmma_wait<0>();
    finish_dq(dq, w, m, n, Own::first_dq, at);
#if !TILED
    block = next_block(m, n, block);
#endif
    n++;
    more = block_of(n) < (u32)tile_word(m, n, LAST);
#endif
  }
#if PIPELINED
  if (!is_first) finish_dq(dq, w, m, n - 1, Own::first_dq, place_in(GROUP));
#endif
  release_keys(m, GROUP, thread);
  const Place at = place_in(GROUP);
  const int head = w.query_heads[tile_word(m, n, FIRST_MEMBER)].x,
            key = tile_word(m, n, KEY_BLOCK) * BK + at.warp * 16 + at.lane / 4;
  add_rows<false>(
      w.dk, job, m, n, w.stores, head, dk, w.dk_gain, key, Own::first_dk * 64, at.lane);
  add_rows<true>(
      w.dv, job, m, n, w.stores, head, dv, w.dv_gain, key, Own::first_dv * 64, at.lane);
  return n;
}

DEV u32 process_tile(const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread) {
  return warpgroup == 0 ? process_own<0>(w, m, n, thread) : process_own<1>(w, m, n, thread);
}
