// Gradients on Hopper for head dimensions up to 128: each consumer warpgroup has 64 keys of the
// tile, and P and dS stay in its registers as left operands. Only dQ needs the keys of both
// warpgroups, and so dS in shared memory.

#define PARTS (BQ / 64)                      // a block is processed 64 queries at a time
#define MMA_S JOIN(wgmma_ss_n, BQ)
#define MMA_DK JOIN(wgmma_rs_tb_n, HD)
#define MMA_DV JOIN(wgmma_rs_tb_n, VD)
// S^T or dP^T of a block: the warpgroup's 64 keys (values) times all queries (output gradients).
// One wide product reads less shared memory than two narrow ones.
template <int DIM> DEV void issue_scores(float (&s)[BQ / 2], u32 keys, u32 queries) {
  const u64 a = matrix(keys, 16, 1024), b = matrix(queries, 16, 1024);
  #pragma unroll
  for (int k = 0; k < DIM / 16; k++)
    MMA_S(s, further(a, (k / 4) * (BK * 128) + (k % 4) * 32),
        further(b, (k / 4) * (BQ * 128) + (k % 4) * 32), k != 0);
}
// dV += P^T dO or dK += dS^T Q over a part of the queries: the left operand in registers.
template <int COLUMNS, int N>
DEV void issue_sum(float (&sum)[COLUMNS], const u32 (&left)[N], u32 right) {
  const u64 b = matrix(right, BQ * 128, 1024);
  #pragma unroll
  for (int k = 0; k < N / 4; k++) {
    const u32 *x = left + 4 * k;
    if constexpr (COLUMNS == HD / 2)
      MMA_DK(sum, x[0], x[1], x[2], x[3], further(b, k * 2048), 1);
    else
      MMA_DV(sum, x[0], x[1], x[2], x[3], further(b, k * 2048), 1);
  }
}
// Waits until block n's queries are loaded. They are waited for while the products of the block
// before are computed: its own scores can then begin at once.
DEV void wait_queries(const HopperBackward& w, const Shared& m, u32 n, bool exists, int warpgroup) {
  const u32 stage = stage_of<STAGES>(n), parity = parity_of<STAGES>(n);
  if (exists) barrier_wait(m.q_full + 8 * stage, parity);
  if (exists && unmasked_from(m, warpgroup) == NEVER && w.control[SPECIAL_QUERIES] != 0) {
    barrier_wait(m.o_full + 8 * stage, parity);
    zero_nonfinite_queries(m.q + stage * Q_BYTES, m.o + stage * O_BYTES, m.lse + stage * BQ * 4);
  }
}
// Issues S^T of block n. Without such a block this is S^T of stale data, which is never used.
DEV void begin_scores(float (&s)[BQ / 2], const Shared& m, u32 n, int warpgroup) {
  const u32 q = m.q + stage_of<STAGES>(n) * Q_BYTES;
  wgmma_fence(); issue_scores<HD>(s, m.k + warpgroup * 64 * 128, q); wgmma_commit();
}

// Issues dQ of block n. A warpgroup has half of the columns, or half of the rows if there are 128.
DEV void issue_block_dq(float (&dq)[32], const Shared& m, u32 n, int warpgroup) {
  const u32 ds = m.pairs + (n & 1) * PAIRS * PAIR_BYTES;
  wgmma_fence();
  if (PARTS == 1)
    issue_dq(dq, ds, m.k + warpgroup * (BK * 128));
  else
    issue_dq(dq, ds + warpgroup * PAIR_BYTES, m.k);
  wgmma_commit();
}
// Waits until both warpgroups have stored dS of block n.
DEV void wait_ds(const Shared& m, u32 n) {
  barrier_wait(m.ds_full + 8 * (n & 1), parity_of<2>(n));
}
// Block n's dQ is complete: releases its dS, and stages dQ for warp 1.
DEV void finish_dq(const float (&dq)[32], const HopperBackward& w, const Shared& m, u32 n,
    int warpgroup, u32 warp, u32 lane) {
  if (lane == 0) barrier_arrive(m.ds_empty + 8 * (n & 1));
  const u32 stage = stage_of<DQ_STAGES>(n);
  barrier_wait(m.dq_empty + 8 * stage, parity_of<DQ_STAGES>(n) ^ 1);
  stage_dq(m.dq + stage * DQ_BYTES +
               (PARTS == 1 ? warpgroup * 2 * BQ * 128 : warpgroup * 64 * 128) + warp * 16 * 128,
      dq, w.dq_gain, lane);
  if (lane == 0) barrier_arrive(m.dq_full + 8 * stage);
}

// One block of queries: P, dS, and the five products, dQ for the block before. Its scores are
// complete on entry; those of the next block are in flight on return. The masked form is a separate
// instantiation: a branch inside would keep the compiler from interleaving arithmetic and products.
//
// S, dP and dQ read both operands from shared memory as fast as it delivers them; dV and dK read
// one from registers, which leaves half of its bandwidth. So dK comes last, and dQ is staged
// meanwhile; staging it while the next scores are computed was 7 % slower. dQ is the only product
// that needs dS of both warpgroups. It comes one block late, so that they need not meet in every
// block: one computes while the other waits. At a tile's first block it is computed from stale data
// and not used.
template <bool HIDES> DEV void process_block(float (&s)[BQ / 2], float (&dk)[HD / 2],
    float (&dv)[VD / 2], const HopperBackward& w, const Shared& m, u32 n, int block,
    int warpgroup, bool is_first) {
  const u32 thread = opaque(threadIdx.x) - 128, warp = thread / 32 % 4, lane = thread % 32;
  const u32 stage = stage_of<STAGES>(n), ds_at = m.pairs + (n & 1) * PAIRS * PAIR_BYTES;
  const u32 q = m.q + stage * Q_BYTES, o = m.o + stage * O_BYTES,
            lse = opaque(m.lse + stage * BQ * 4 + (lane % 4) * 8), delta = lse + (m.delta - m.lse);
  float dp[BQ / 2], dq[32];
  u32 ds[BQ / 4];
  barrier_wait(m.o_full + 8 * stage, parity_of<STAGES>(n));
  wgmma_fence(); issue_scores<VD>(dp, m.v + warpgroup * 64 * 128, o); wgmma_commit();
  #pragma unroll
  for (int part = 0; part < PARTS; part++) {
    float (&x)[32] = reinterpret_cast<float (&)[32]>(s[32 * part]),
          (&y)[32] = reinterpret_cast<float (&)[32]>(dp[32 * part]);
    u32 p[16], (&d)[16] = reinterpret_cast<u32 (&)[16]>(ds[16 * part]);
#if TRANSFORMED
    to_transformed<HIDES>(x, p, w, m, lse + part * 256, stage,
        warpgroup * 64 + warp * 16 + lane / 4, block * BQ + part * 64 + (lane % 4) * 2);
#else
    if (HIDES)
      to_probabilities(x, lse + part * 256, w.exponent,
          mask_of(m, warpgroup * 64 + warp * 16 + lane / 4),
          block * BQ + part * 64 + (lane % 4) * 2);
    else to_probabilities(x, lse + part * 256, w.exponent);
    to_stored(p, x);
#endif
    wgmma_fence(); issue_sum(dv, p, o + part * 64 * 128); wgmma_commit();
    if (part == 0) wgmma_wait<1>();   // for dP
    to_ds<HIDES>(y, x, delta + part * 256, w.dp_gain);
    to_stored(d, y);
    // Both warpgroups have read what was here two blocks ago.
    if (part == 0) barrier_wait(m.ds_empty + 8 * (n & 1), parity_of<2>(n) ^ 1);
    store_pairs(ds_at + part * PAIR_BYTES, d, warpgroup * 64 + warp * 16, 0, lane);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(m.ds_full + 8 * (n & 1));
  if (!is_first) wait_ds(m, n - 1);
  issue_block_dq(dq, m, n - 1, warpgroup);
  wgmma_fence(); issue_sum(dk, ds, q); wgmma_commit();
  wgmma_wait<1>();
  if (!is_first) finish_dq(dq, w, m, n - 1, warpgroup, warp, lane);
  wait_queries(w, m, n + 1, block_of(n + 1) < (u32)tile_word(m, n, LAST), warpgroup);
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(m.empty + 8 * stage);
  begin_scores(s, m, n + 1, warpgroup);
}

// Rounds this warp's 16 rows of dK or dV (VALUES) and stores them, by way of the rows of dS that
// only this warp writes: a thread has 4 bytes of a row, and memory takes 16 at a time. Every warp
// has read dS.
template <bool VALUES, int N> DEV void store_rounded(void* to, const JobParams& job,
    const Shared& m, u32 n, int head, const float (&sum)[N], float gain, int row, int lane) {
  __syncwarp();   // what was here before was read
  #pragma unroll
  for (int from = 0; from < N; from += 32) {
    constexpr int most = N < 32 ? N : 32;
    u32 x[most / 2];
    #pragma unroll
    for (int i = 0; i < most / 2; i++)
      if (from + 2 * i < N)
        x[i] = pack(fmaf(sum[from + 2 * i], gain, 0.f), fmaf(sum[from + 2 * i + 1], gain, 0.f));
      else x[i] = 0;
    store_pairs(m.pairs + from / 32 * PAIR_BYTES, x, row, 0, lane);
  }
  __syncwarp();
  const int key = tile_word(m, n, KEY_BLOCK) * BK + row, dim = VALUES ? job.value_dim : job.dim;
  i64 first = at(job.k, tile_word(m, n, BATCH), tile_word(m, n, SEGMENT), key, head),
      step = job.k.row;
  if (VALUES && OWN_VALUES) { first = first / job.dim * dim; step = step / job.dim * dim; }
  constexpr int pieces = N / 4;
  #pragma unroll
  for (int i = 0; i < pieces / 2; i++) {
    const int down = (lane + 32 * i) / pieces, piece = (lane + 32 * i) % pieces;
    const uint4 x = load_shared_16(
        swizzled(m.pairs + piece / 8 * PAIR_BYTES, row + down, piece % 8));
    if (key + down < job.keys && piece * 8 < dim)
      *(uint4*)((u16*)to + first + down * step + piece * 8) = x;
  }
}

DEV u32 process_tile(const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread) {
  const JobParams& job = w.job;
  const int warp = thread / 32, lane = thread % 32;
  float s[BQ / 2], dk[HD / 2], dv[VD / 2];
  #pragma unroll
  for (int i = 0; i < HD / 2; i++) dk[i] = 0.f;
  #pragma unroll
  for (int i = 0; i < VD / 2; i++) dv[i] = 0.f;
#if TILED
  if (w.stores == CONTINUED) {
    const int head = w.query_heads[tile_word(m, n, FIRST_MEMBER)].x,
              key = tile_word(m, n, KEY_BLOCK) * BK + warpgroup * 64 + warp * 16 + lane / 4;
    load_rows(w.dk, job, m, n, head, dk, w.dk_gain, key, 0, lane);
    load_rows(w.dv, job, m, n, head, dv, w.dv_gain, key, 0, lane);
  }
#endif

  set_unmasked_from(
      w, m, n, warpgroup, thread, tile_word(m, n, KEY_BLOCK) * BK + warpgroup * 64 + 63);
  int block = tile_word(m, n, START);
  bool masked = is_masked(m, warpgroup, block),
       more = block_of(n) < (u32)tile_word(m, n, LAST);
  wait_queries(w, m, n, more, warpgroup);
  begin_scores(s, m, n, warpgroup);
  wgmma_wait<0>();
  bool is_first = true;
  #pragma unroll 1
  while (more) {
    if (masked) process_block<true>(s, dk, dv, w, m, n, block, warpgroup, is_first);
    else process_block<false>(s, dk, dv, w, m, n, block, warpgroup, is_first);
    is_first = false;
    // This overlaps with the next scores.
    n++;
    block = loaded_block(m, n, block);
    more = block_of(n) < (u32)tile_word(m, n, LAST);
    masked = is_masked(m, warpgroup, block);
    wgmma_wait<0>();
  }
  if (!is_first) {
    float dq[32];
    wait_ds(m, n - 1);
    issue_block_dq(dq, m, n - 1, warpgroup);
    wgmma_wait<0>();
    finish_dq(dq, w, m, n - 1, warpgroup, warp, lane);
  }
  release_keys(m, warpgroup, thread);
  const int head = w.query_heads[tile_word(m, n, FIRST_MEMBER)].x;
  const int key = tile_word(m, n, KEY_BLOCK) * BK + warpgroup * 64 + warp * 16 + lane / 4;
  if (w.stores == ROUNDED) {
    // The last two blocks' dS: no warp reads them any more.
    for (u32 block = n; block < n + 2; block++)
      barrier_wait(m.ds_empty + 8 * (block & 1), parity_of<2>(block) ^ 1);
    const int row = warpgroup * 64 + warp * 16;
    store_rounded<false>(w.dk, job, m, n, head, dk, w.dk_gain, row, lane);
    store_rounded<true>(w.dv, job, m, n, head, dv, w.dv_gain, row, lane);
    return n;
  }
  add_rows<false>(w.dk, job, m, n, w.stores, head, dk, w.dk_gain, key, 0, lane);
  add_rows<true>(w.dv, job, m, n, w.stores, head, dv, w.dv_gain, key, 0, lane);
  return n;
}
