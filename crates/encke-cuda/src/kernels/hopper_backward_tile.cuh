// The arithmetic of the Hopper backward kernels on a tile of keys and a block of queries, common to
// narrow and wide rows: masks, P and dS, and the ways of dQ, dK and dV to memory.

// The two keys of a thread: a query row sees a key from row `first` on, and before row `end`.
struct Mask {
  int first[2];
  bool nonfinite[2];
#if WINDOWED
  int end[2];
#endif
};

// What a tile's masks need from memory: loaded while its keys are still on their way. With WINDOWED
// also the queries that see this thread's key, and the warpgroup's first and last.
struct KeyMasks {
  bool finite_queries;
#if WINDOWED
  Range own, first, last;
#endif
};
DEV KeyMasks load_key_masks(const HopperBackward& w, int key_block, int thread, int last_key) {
  KeyMasks masks;
  masks.finite_queries = w.control[SPECIAL_QUERIES] == 0;
#if WINDOWED
  const int key = key_block * BK + thread / (256 / BK);
  const Range none{NEVER, 0};
  masks.own = key < w.job.keys ? w.key_rows[key] : none;
  // Up to the second row, every row sees the warpgroup's first key.
  masks.first = last_key < w.job.keys ? w.key_rows[last_key - 63] : none;
  masks.last = last_key < w.job.keys ? w.key_rows[last_key] : none;
#endif
  return masks;
}
// All consumer threads examine K and V once. A key row that is not finite is zeroed in K (0 x NaN
// would reach the dQ of rows that do not see it), and its scores are set to NaN instead, where they
// are seen. For V it is enough that masked dP are replaced rather than multiplied by 0.
DEV bool check_keys(
    const HopperBackward& w, const Shared& m, const KeyMasks& masks, int key_block, int thread) {
  const JobParams& job = w.job;
  const int sharing = 256 / BK, row = thread / sharing, share = thread % sharing,
            pieces = 8 / sharing;
  bool k_fine = true, v_fine = true;
  #pragma unroll
  for (int i = 0; i < (SLABS > V_SLABS ? SLABS : V_SLABS) * pieces; i++) {
    const u32 at = (i / pieces) * (BK * 128) + row * 128 + (share * pieces + i % pieces) * 16;
    if (i < SLABS * pieces) k_fine = all_finite(load_shared_16(m.k + at)) && k_fine;
    if (i < V_SLABS * pieces) v_fine = all_finite(load_shared_16(m.v + at)) && v_fine;
  }
  const bool nonfinite =
      __ballot_sync(~0u, !k_fine) >> (thread % 32 - share) & ((1 << sharing) - 1);
  if (nonfinite)
    for (int i = 0; i < SLABS * pieces; i++)
      store_shared(m.k + (i / pieces) * (BK * 128) + row * 128 + (share * pieces + i % pieces) * 16,
          0.f, 0.f, 0.f, 0.f);
  const int key = key_block * BK + row;
#if WINDOWED
  if (share == 0) {
    store_shared(m.first + row * 4, (u32)masks.own.start | (nonfinite ? NONFINITE_BIT : 0u));
    store_shared(m.end + row * 4, (u32)masks.own.end);
#if SLOPES
    store_shared(m.distances + row * 4, (u32)(key < job.keys ? w.distances[key] : 0));
#endif
  }
#else
  if (share == 0)
    store_shared(m.first + row * 4,
        (u32)(key < job.keys ? first_query(job, key) : NEVER) | (nonfinite ? NONFINITE_BIT : 0u));
#endif
  if (!k_fine || !v_fine) store_shared(m.nonfinite, 1u);
  fence_async();
  named_sync(2, 256);
  return load_shared(m.nonfinite) == 0;
}

// From query row `unmasked` on, every row sees all keys of a warpgroup and no mask is needed; NEVER
// if anything is not finite or any row is large. In shared memory, to save registers.
//
// The keys are awaited here.
DEV void set_unmasked_from(
    const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread, int last_key) {
  const int key_block = tile_word(m, n, KEY_BLOCK), own = warpgroup * 128 + thread;
  const KeyMasks masks = load_key_masks(w, key_block, own, last_key);
  barrier_wait(m.k_full, tile_parity(n)); barrier_wait(m.v_full, tile_parity(n));
  const bool finite = check_keys(w, m, masks, key_block, own) && masks.finite_queries;
#if WINDOWED
  store_shared(m.unmasked + warpgroup * 4, (u32)(finite ? masks.last.start : NEVER));
  store_shared(m.unmasked + 8 + warpgroup * 4, (u32)(finite ? masks.first.end : 0));
#else
  store_shared(m.unmasked + warpgroup * 4,
      (u32)(finite && last_key < w.job.keys ? first_query(w.job, last_key) : NEVER));
#endif
  __syncwarp();
}
DEV int unmasked_from(const Shared& m, int warpgroup) {
  return (int)load_shared(m.unmasked + warpgroup * 4);
}
// Whether a block of queries needs a mask.
DEV bool is_masked(const Shared& m, int warpgroup, int block) {
#if WINDOWED
  const bool after = (block + 1) * BQ > (int)load_shared(m.unmasked + 8 + warpgroup * 4);
#else
  const bool after = false;
#endif
  return __any_sync(~0u, block * BQ < unmasked_from(m, warpgroup) || after);
}

// Zeroes the query rows of a block whose lse is NaN, before any product reads them.
DEV void zero_nonfinite_queries(u32 q, u32 o, u32 lse) {
  #pragma unroll 1
  for (int i = threadIdx.x - 128; i < (SLABS > V_SLABS ? SLABS : V_SLABS) * BQ * 8; i += 256) {
    float x, y;
    load_shared(lse + (i / 8 % BQ & ~1) * 4, x, y);
    if (is_finite(i / 8 & 1 ? y : x)) continue;
    if (i < SLABS * BQ * 8) store_shared(q + i * 16, 0.f, 0.f, 0.f, 0.f);
    if (i < V_SLABS * BQ * 8) store_shared(o + i * 16, 0.f, 0.f, 0.f, 0.f);
  }
  fence_async();
  named_sync(3, 256);
}

// 64 queries x 64 or 128 columns of dQ = dS K, over all keys of the tile; both operands are
// MN-major.
template <int N> DEV void issue_dq(float (&dq)[N], u32 ds, u32 keys) {
  const u64 a = matrix(ds, 1024, 1024), b = matrix(keys, BK * 128, 1024);
  #pragma unroll
  for (int k = 0; k < BK / 16; k++) {
    const u64 left = further(a, k * 2048), right = further(b, k * 2048);
    if constexpr (N == 32) wgmma_ss_ta_tb_n64(dq, left, right, k != 0);
    else wgmma_ss_ta_tb_n128(dq, left, right, k != 0);
  }
}

DEV Mask mask_of(const Shared& m, int row) {
  const u32 x = load_shared(m.first + row * 4), y = load_shared(m.first + row * 4 + 32);
  Mask mask{{(int)(x & ~NONFINITE_BIT), (int)(y & ~NONFINITE_BIT)},
      {(x & NONFINITE_BIT) != 0, (y & NONFINITE_BIT) != 0}};
#if WINDOWED
  mask.end[0] = (int)load_shared(m.end + row * 4);
  mask.end[1] = (int)load_shared(m.end + row * 4 + 32);
#endif
  return mask;
}
// Whether query `row` sees key `e` of this thread, and saw any key at all.
DEV bool sees(const Mask& mask, int e, int row, float lse) {
#if WINDOWED
  if (row >= mask.end[e]) return false;
#endif
  return row >= mask.first[e] && lse != -neg_inf();
}

// P = exp2(S - lse); `lse` and `delta` are the addresses of this thread's first column.
template <int N> DEV void to_probabilities(float (&s)[N], u32 lse, float exponent) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    s[4 * i] = exp2_fast(fmaf(s[4 * i], exponent, -x));
    s[4 * i + 1] = exp2_fast(fmaf(s[4 * i + 1], exponent, -y));
    s[4 * i + 2] = exp2_fast(fmaf(s[4 * i + 2], exponent, -x));
    s[4 * i + 3] = exp2_fast(fmaf(s[4 * i + 3], exponent, -y));
  }
}
// The same with a mask: 0 where masked, NaN where a key that is not finite is seen. `row` is that
// of the first column.
template <int N>
DEV void to_probabilities(float (&s)[N], u32 lse, float exponent, const Mask& mask, int row) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    const float certain[2] = {certain_from(x), certain_from(y)};
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      float log = fmaf(s[4 * i + e], exponent, -(e & 1 ? y : x));
      if (log - P_SHIFT > certain[e & 1]) log = P_SHIFT;
      const float p = exp2_fast(log);
      s[4 * i + e] = sees(mask, e >> 1, row + i * 8 + (e & 1), e & 1 ? y : x)
                         ? (mask.nonfinite[e >> 1] ? __uint_as_float(QUIET_NAN) : p)
                         : 0.f;
    }
  }
}
#if TRANSFORMED
// The same for transformed scores: also stores P in 16 bits, and P times the derivative of the
// score in `s`. `key` is the thread's first one, `row` the first query.
template <bool HIDES, int N> DEV void to_transformed(float (&s)[N], u32 (&stored)[N / 2],
    const HopperBackward& w, const Shared& m, u32 lse, u32 stage, int key, int row) {
  Mask mask;
  if (HIDES) mask = mask_of(m, key);
  float slope = 0.f, distance[2] = {0.f, 0.f};
#if SLOPES
  slope = __uint_as_float(load_shared(m.slopes + stage * 4));
  #pragma unroll
  for (int h = 0; h < 2; h++)
    distance[h] = (float)((int)load_shared(m.distances + (key + 8 * h) * 4) +
                          row * w.query_position_step);
#endif
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float p[2], derivative[2];
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        float score = s[4 * i + 2 * h + e];
        derivative[e] = 1.f;
#if SOFTCAP
        // tanh(x) = 1 - 2 / (exp(2x) + 1): its error is that of one rounding of 1.
        score = fmaf(-2.f, reciprocal_fast(exp2_fast(score * w.inverse_cap) + 1.f), 1.f);
        derivative[e] = fmaf(-score, score, 1.f);
#endif
        score *= SOFTCAP ? w.softcap : w.exponent;
#if SLOPES
        const float ahead =
            fmaf((float)(i * 8 + e), (float)w.query_position_step, distance[h]);
        score = fmaf(-slope, fabsf(ahead), score);
#endif
        p[e] = exp2_fast(score - (e ? y : x));
        if (HIDES && !sees(mask, h, row + i * 8 + e, e ? y : x)) p[e] = 0.f;
        else if (HIDES && mask.nonfinite[h]) p[e] = __uint_as_float(QUIET_NAN);
      }
      stored[2 * i + h] = pack(p[0], p[1]);
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        float& to = s[4 * i + 2 * h + e];
        to = p[e] * derivative[e];
        // Only hidden pairs are 0: theirs are left out of dS.
        if (HIDES && SOFTCAP && p[e] > 0.f) to = fmaxf(to, 1e-37f);
      }
    }
  }
}
#endif
// dS = P (gain dP - delta), in place of dP. Under a mask, P = 0 gives 0 even where dP is NaN.
template <bool HIDES, int N>
DEV void to_ds(float (&dp)[N], const float (&p)[N], u32 delta, float gain) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(delta + i * 32, x, y);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const float ds = p[4 * i + e] * fmaf(dp[4 * i + e], gain, -(e & 1 ? y : x));
      dp[4 * i + e] = HIDES && p[4 * i + e] == 0.f ? 0.f : ds;
    }
  }
}
template <int N> DEV void to_stored(u32 (&to)[N], const float (&from)[2 * N]) {
  #pragma unroll
  for (int i = 0; i < N; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}
// Stores dS (or P) to shared memory as [key][64 queries], swizzled, from 16 keys on; `piece` is the
// first 8 queries.
template <int N> DEV void store_pairs(u32 to, const u32 (&x)[N], int key, int piece, int lane) {
  const u32 row = opaque(to + (key + (lane & 15)) * 128), swizzle = (lane & 7) << 4,
            half = (lane >> 4) << 4;
  #pragma unroll
  for (int i = 0; i < N / 2; i += 2)
    store_matrices(row + ((((piece + i) << 4) + half) ^ swizzle), x[2 * i], x[2 * i + 1],
        x[2 * i + 2], x[2 * i + 3]);
  fence_async();
}
// Stages this warp's 16 rows x 64 columns of dQ in the buffer that warp 1 adds from: [32
// columns][row] [column], swizzled. Odd rows store columns 16 further on in the same instruction,
// which avoids bank conflicts.
DEV void stage_dq(u32 to, const float (&dq)[32], float gain, int lane) {
  const bool odd = lane / 4 & 1;
  const u32 row = (lane / 4) * 128, swizzle = (lane / 4) << 4, in_chunk = (lane & 1) * 8;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 column = (i % 4) ^ (odd ? 2 : 0);
    #pragma unroll
    for (int down = 0; down < 2; down++) {
      const float x = odd ? dq[4 * (i ^ 2) + 2 * down] : dq[4 * i + 2 * down],
                  y = odd ? dq[4 * (i ^ 2) + 2 * down + 1] : dq[4 * i + 2 * down + 1];
      store_shared(to + (i / 4) * (BQ * 128) + row + down * 1024 +
                       (((column * 32) + (lane & 2) * 8) ^ swizzle) + in_chunk,
          SCALES_DQ ? x * gain : x, SCALES_DQ ? y * gain : y);
    }
  }
  fence_async();
  __syncwarp();
}
#if TILED
// Loads what `add_rows` stored, without its gain.
template <int N> DEV void load_rows(const void* from, const JobParams& job, const Shared& m, u32 n,
    int head, float (&sum)[N], float gain, int key, int column, int lane) {
  const float inverse = gain == 0.f ? 0.f : 1.f / gain;
  #pragma unroll
  for (int down = 0; down < 2; down++) {
    const bool exists = key + 8 * down < job.keys;
    const i64 row = at(job.k, tile_word(m, n, BATCH), tile_word(m, n, SEGMENT),
                        exists ? key + 8 * down : 0, head) + column + (lane % 4) * 2;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float2 x = make_float2(0.f, 0.f);
      if (exists && column + i * 8 < job.dim)
        x = *(const float2*)((const float*)from + row + i * 8);
      sum[4 * i + 2 * down] = x.x * inverse;
      sum[4 * i + 2 * down + 1] = x.y * inverse;
    }
  }
}
#endif
// Adds this thread's part of dK or dV (VALUES) to memory, or stores it: two rows, every fourth pair
// of columns from `column` on. No other thread adds to these elements, so the order does not
// matter; a reduction in memory avoids waiting for the old value.
template <bool VALUES, int N> DEV void add_rows(void* to, const JobParams& job, const Shared& m,
    u32 n, int stores, int head, const float (&sum)[N], float gain, int key, int column, int lane) {
  const int dim = VALUES ? job.value_dim : job.dim;
  #pragma unroll
  for (int down = 0; down < 2; down++) {
    if (key + 8 * down >= job.keys) continue;
    i64 row = at(job.k, tile_word(m, n, BATCH), tile_word(m, n, SEGMENT), key + 8 * down, head);
    if (VALUES && OWN_VALUES) row = row / job.dim * dim;   // rows are in the order of the keys
    row += column + (lane % 4) * 2;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
      // fmaf(x, gain, 0) turns -0 into 0, as adding to a zero would.
      const float x = fmaf(sum[4 * i + 2 * down], gain, 0.f),
                  y = fmaf(sum[4 * i + 2 * down + 1], gain, 0.f);
      if (column + i * 8 >= dim) continue;
      if (stores == ROUNDED)
        *(u32*)((u16*)to + row + i * 8) = pack(x, y);
      else if (stores != ADDED)
        *(float2*)((float*)to + row + i * 8) = make_float2(x, y);
      else
        global_add((float*)to + row + i * 8, x, y);
    }
  }
}

// Releases the tile's keys and values: those of the next tile may be loaded.
DEV void release_keys(const Shared& m, int warpgroup, int thread) {
  if (warpgroup == 0 && thread == 0) store_shared(m.nonfinite, 0u);
  if (thread % 32 == 0) barrier_arrive(m.kv_empty);
}
