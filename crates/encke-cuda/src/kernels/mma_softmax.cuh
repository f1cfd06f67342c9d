// The online softmax of the mma.sync forward kernels: a warp has MT * 16 rows and SHARE keys of a
// block, so a row never leaves a quad of lanes.

// The state of an online softmax: this thread's rows, and its part of their sums (quads are summed
// last).
struct Softmax { float m[MT][2], l[MT][2]; };

// One step of the online softmax: scores become weights relative to the running maximum, and
// earlier sums are rescaled.
//
// The maximum is a rounded product, so large scores are rounded products too: the largest one has a
// weight of 1, whatever the rounding was.
DEV void online_softmax(
    Softmax& state, float (&s)[MT][SHARE / 8][4], float (&acc)[MT][VD / 8][4], float c) {
  bool large = false;
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      float row_max = neg_inf();
      #pragma unroll
      for (int n = 0; n < SHARE / 8; n++)
        row_max = fmaxf(row_max, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
      const float m = fmaxf(state.m[mt][half], quad_max(row_max) * c);
      const float rescale = exp2_fast(state.m[mt][half] - (m == neg_inf() ? 0.f : m));
      large |= fabsf(m) >= LARGE_SCORE;   // or a row that saw no key
      state.m[mt][half] = m;
      state.l[mt][half] *= rescale;
      #pragma unroll
      for (int n = 0; n < VD / 8; n++) {
        acc[mt][n][2 * half] *= rescale;
        acc[mt][n][2 * half + 1] *= rescale;
      }
    }
  large = __any_sync(~0u, large);
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const float m = state.m[mt][half];
      const float origin =
          m == neg_inf() ? 0.f : m;   // a row that saw no key: every weight is exp2(-inf)
      float factor = c, sum = 0.f;
      if (large && is_large(origin)) {
        factor = 1.f;
        #pragma unroll
        for (int n = 0; n < SHARE / 8; n++)
          #pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; e++)
            s[mt][n][e] = __fmul_rn(s[mt][n][e], c);
      }
      #pragma unroll
      for (int n = 0; n < SHARE / 8; n++)
        #pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[mt][n][e] = exp2_fast(fmaf(s[mt][n][e], factor, -origin));
          sum += s[mt][n][e];
        }
      state.l[mt][half] += sum;
    }
}

// The key rows that a row of the tile sees, kept from address `limits` on: all ends, then all
// starts.
DEV Range seen_by(u32 limits, int row) {
#if MASKED
  const int start = (int)load_shared(limits + (TILE + row) * 4);
#else
  const int start = 0;
#endif
  return Range{start, (int)load_shared(limits + row * 4)};
}

// Masks the scores of keys that a row does not see, for keys from `key` on.
DEV void apply_mask(float (&s)[MT][SHARE / 8][4], int key, u32 limits) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const Range seen = seen_by(limits, own_row(r / 2, r % 2));
    const int start = seen.start - key, limit = seen.end - key;
    #pragma unroll
    for (int n = 0; n < SHARE / 8; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        if (own_column(n) + e >= limit || (MASKED && own_column(n) + e < start))
          s[r / 2][n][r % 2 * 2 + e] = neg_inf();
  }
}

// The factor of a product in base 2. A scale of zero is replaced by a tiny one: a masked score is
// -inf, and 0 times it would be NaN. A negative one is positive here, and the queries are negated.
DEV float score_factor(double scale) {
  return fmaxf((float)(scale * LOG2_E) * (scale < 0 ? -1.f : 1.f), TINY_SCALE);
}
// For a negative scale, negates the queries, so that the largest product is the largest score.
DEV void negate_queries(u32 tile) {
  for (int i = threadIdx.x; i < TILE * HD / 2; i += THREADS) {
    u32 address = tile + (i / (HD / 2) * PITCH(HD) + i % (HD / 2) * 2) * 2;
    store_shared(address, load_shared(address) ^ 0x80008000u);
  }
  __syncthreads();
}
