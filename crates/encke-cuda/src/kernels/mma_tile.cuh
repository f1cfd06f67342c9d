// Tiles of the mma.sync kernels: loads to shared memory, and the two matrix products of attention.
//
// Macros given by the host: HD (head dimension, rounded up to a multiple of 16), VD (the same of
// values, if it differs), WARPS, MT (groups of 16 rows per warp), BLOCK (rows streamed at a time),
// ALIGNED (1 if every row begins at a multiple of 16 bytes and has a multiple of 8 elements, so
// that 16-byte copies are possible), KEY_WARPS (warps that have the same rows and share the rows
// of a block; 1 unless given).
//
// The decision here: a tile row of W elements has a pitch of W + 8 elements. The eight rows that
// ldmatrix reads at once then lie in different banks for every multiple of 16, without a swizzle.
#ifndef KEY_WARPS
#define KEY_WARPS 1
#endif
#define THREADS (WARPS * 32)
#define ROW_WARPS (WARPS / KEY_WARPS)
#define TILE (ROW_WARPS * MT * 16)
// Rows of a block that one warp has.
#define SHARE (BLOCK / KEY_WARPS)
// Resident blocks per multiprocessor: at 255 registers per thread it holds eight warps.
#define RESIDENT (8 / WARPS)
#ifndef VD
#define VD HD
#endif
#define PITCH(width) ((width) + 8)
#define TILE_BYTES(rows) ((rows) * PITCH(HD) * 2)
#define VALUE_BYTES(rows) ((rows) * PITCH(VD) * 2)
#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

DEV int lane() { return threadIdx.x % 32; }
DEV int smaller(int a, int b) { return a < b ? a : b; }

// The rows of one (batch entry, segment, head) of an operand. No pointer: k and v share offsets.
struct Rows { i64 offset, stride; int count; };
DEV Rows rows_of(const OperandParams& o, int b, int s, int h, int count) {
  return Rows{at(o, b, s, 0, h), o.row, count};
}
// out, dout and acc have as many elements per cell as a value.
DEV Rows cell_rows(const Job& job, int b, int s, int h, int count) {
  const int dim = value_dim(job);
  return Rows{at(job.cells, b, s, 0, h) * dim, job.cells.row * dim, count};
}

// All threads load rows first..first + N to shared memory, W elements each. Rows and columns out of
// bounds become 0.
template <int N, int W>
DEV void load_tile(u32 tile, const u16* buffer, const Rows& rows, int first, int dim) {
#if ALIGNED
  // A power of two of lanes loads a row, so that a lane stays in its column: one address, then
  // steps.
  const int lanes = W <= 16    ? 2
                    : W <= 32  ? 4
                    : W <= 64  ? 8
                    : W <= 128 ? 16
                                : 32,
            step = THREADS / lanes;
  // Recomputing addresses is cheaper than keeping them in registers.
  const int thread = opaque(threadIdx.x), column = thread % lanes * 8;
  int row = thread / lanes;
  const u16* from = buffer + rows.offset + (first + row) * rows.stride + column;
  const i64 stride = step * rows.stride;
  if (column >= W) return;
  #pragma unroll
  for (int r = 0; r < N; r += step) {
    bool real = first + row < rows.count && column < dim;
    if (N % step == 0 || row < N)
      copy16(tile + (row * PITCH(W) + column) * 2, real ? from : buffer, real);
    row += step;
    from += stride;
  }
#else
  // Element by element, unrolled by 4: hides some latency, and leaves the sums in registers.
  #pragma unroll 4
  for (int i = opaque(threadIdx.x); i < N * W; i += THREADS) {
    const int row = i / W, column = i % W;
    const bool real = first + row < rows.count && column < dim;
    store_shared(tile + (row * PITCH(W) + column) * 2,
        real ? buffer[rows.offset + (first + row) * rows.stride + column] : (u16)0);
  }
#endif
}

// s = A B^T: MT * 16 rows of A against NT * 8 rows of B, both tiles of load_tile.
template <int NT, int W> DEV void scores(float (&s)[MT][NT][4], u32 a, u32 b) {
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int n = 0; n < NT; n++)
      #pragma unroll
      for (int e = 0; e < 4; e++) s[mt][n][e] = 0.f;
  a += (lane() % 16 * PITCH(W) + lane() / 16 * 8) * 2;
  b += ((lane() % 8 + lane() / 16 * 8) * PITCH(W) + lane() / 8 % 2 * 8) * 2;
  #pragma unroll
  for (int k = 0; k < W / 16; k++) {
    u32 left[MT][4], right[4];
    #pragma unroll
    for (int mt = 0; mt < MT; mt++) ldmatrix(left[mt], a + (mt * 16 * PITCH(W) + k * 16) * 2);
    #pragma unroll
    for (int n = 0; n < NT; n += 2) {
      ldmatrix(right, b + (n * 8 * PITCH(W) + k * 16) * 2);
      #pragma unroll
      for (int mt = 0; mt < MT; mt++) {
        mma(s[mt][n], left[mt], right[0], right[1]);
        mma(s[mt][n + 1], left[mt], right[2], right[3]);
      }
    }
  }
}

// The result of `scores`, rounded to the storage type, as the left operand of `product`. The
// layouts match: no element changes its lane.
template <int NT> DEV void left_operand(u32 (&a)[MT][NT / 2][4], const float (&s)[MT][NT][4]) {
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int k = 0; k < NT / 2; k++)
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        int n = 2 * k + e / 2, half = e % 2;
        a[mt][k][e] = pack(s[mt][n][2 * half], s[mt][n][2 * half + 1]);
      }
}

// The exponent bits of infinity and NaN.
#ifdef T_BF16
#define EXPONENT 0x7f80u
#else
#define EXPONENT 0x7c00u
#endif
DEV bool is_nonfinite(u16 x) { return (x & EXPONENT) == EXPONENT; }
DEV u32 zero_nonfinite(u32 pair) {
  if (is_nonfinite((u16)pair)) pair &= 0xffff0000u;
  if (is_nonfinite((u16)(pair >> 16))) pair &= 0xffffu;
  return pair;
}
// Whether this thread's part of a tile holds infinities or NaNs.
template <int N, int W> DEV bool has_nonfinite(u32 tile) {
  bool found = false;
  #pragma unroll 4
  for (int i = threadIdx.x; i < N * W / 2; i += THREADS) {
    u32 pair = load_shared(tile + (i / (W / 2) * PITCH(W) + i % (W / 2) * 2) * 2);
    found |= is_nonfinite((u16)pair) || is_nonfinite((u16)(pair >> 16));
  }
  return found;
}

// acc += A B: MT * 16 rows of A from registers, KT * 16 rows of B. With ZERO_NONFINITE, infinities
// and NaNs of B count as zeros.
template <bool ZERO_NONFINITE, int KT, int W>
DEV void product(float (&acc)[MT][W / 8][4], const u32 (&a)[MT][KT][4], u32 b) {
  b += (lane() % 16 * PITCH(W) + lane() / 16 * 8) * 2;
  #pragma unroll
  for (int k = 0; k < KT; k++)
    #pragma unroll
    for (int n = 0; n < W / 8; n += 2) {
      u32 right[4];
      ldmatrix_transposed(right, b + (k * 16 * PITCH(W) + n * 8) * 2);
      if (ZERO_NONFINITE) {
        #pragma unroll
        for (int e = 0; e < 4; e++) right[e] = zero_nonfinite(right[e]);
      }
      #pragma unroll
      for (int mt = 0; mt < MT; mt++) {
        mma(acc[mt][n], a[mt][k], right[0], right[1]);
        mma(acc[mt][n + 1], a[mt][k], right[2], right[3]);
      }
    }
}

// Adds the terms that a product with ZERO_NONFINITE left out: every infinity or NaN of B reaches
// exactly the rows that see it, and all other rows keep their bits. `sees(mt, half, row of B)` is
// called for this thread's rows. `weight` is 1 if the left operand is positive and 0 if its sign is
// unknown: an infinity then becomes NaN.
template <int N, int W, class Sees>
DEV void add_nonfinite(float (&acc)[MT][W / 8][4], u32 b, float weight, const Sees& sees) {
  b += lane() % 4 * 4;
  #pragma unroll 1
  for (int row = 0; row < N; row++) {
    bool visible[MT][2];
    #pragma unroll
    for (int r = 0; r < 2 * MT; r++) visible[r / 2][r % 2] = sees(r / 2, r % 2, row);
    #pragma unroll
    for (int n = 0; n < W / 8; n++) {
      u32 pair = load_shared(b + (row * PITCH(W) + n * 8) * 2);
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        u16 x = (u16)(pair >> (16 * e));
        if (!is_nonfinite(x)) continue;
        #pragma unroll
        for (int r = 0; r < 2 * MT; r++)
          if (visible[r / 2][r % 2]) acc[r / 2][n][r % 2 * 2 + e] += unpack(x) * weight;
      }
    }
  }
}

// The product of a block that may be partly masked.
template <int KT, int W, class Sees> DEV void masked_product(bool nonfinite,
    float (&acc)[MT][W / 8][4], const u32 (&a)[MT][KT][4], u32 b, float weight, const Sees& sees) {
  if (!nonfinite) return product<false, KT, W>(acc, a, b);
  product<true, KT, W>(acc, a, b);
  add_nonfinite<KT * 16, W>(acc, b, weight, sees);
}

template <int W> DEV void zero(float (&acc)[MT][W / 8][4]) {
  #pragma unroll
  for (int mt = 0; mt < MT; mt++)
    #pragma unroll
    for (int n = 0; n < W / 8; n++)
      #pragma unroll
      for (int e = 0; e < 4; e++) acc[mt][n][e] = 0.f;
}

// Sums and maxima over the quad of lanes that share a row.
DEV float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
DEV float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The row in the tile of this thread's row (mt, half), and the column of its elements (n, 0), (n,
// 1).
DEV int own_row(int mt, int half) {
  const int warp = (int)threadIdx.x / 32, of_rows = KEY_WARPS == 1 ? warp : warp % ROW_WARPS;
  return (of_rows * MT + mt) * 16 + lane() / 4 + half * 8;
}
DEV int own_column(int n) { return n * 8 + lane() % 4 * 2; }

// Two neighbouring elements of a row of `dim` in global memory; the second may be out of bounds.
DEV void read_pair(const float* row, int column, int dim, float& x, float& y) {
#if ALIGNED
  if (column < dim) { float2 pair = *(const float2*)(row + column); x = pair.x; y = pair.y; }
#else
  if (column < dim) x = row[column];
  if (column + 1 < dim) y = row[column + 1];
#endif
}
DEV void write_pair(float* row, int column, int dim, float x, float y) {
#if ALIGNED
  if (column < dim) *(float2*)(row + column) = make_float2(x, y);
#else
  if (column < dim) row[column] = x;
  if (column + 1 < dim) row[column + 1] = y;
#endif
}
DEV void write_pair(u16* row, int column, int dim, float x, float y) {
  u32 pair = pack(x, y);
#if ALIGNED
  if (column < dim) *(u32*)(row + column) = pair;
#else
  if (column < dim) row[column] = (u16)pair;
  if (column + 1 < dim) row[column + 1] = (u16)(pair >> 16);
#endif
}
// row += factor * (this thread's elements of that row)
template <int W>
DEV void add_row(float* row, int dim, float factor, const float (&acc)[W / 8][4], int half) {
  #pragma unroll
  for (int n = 0; n < W / 8; n++) {
    float x = 0.f, y = 0.f;
    read_pair(row, own_column(n), dim, x, y);
    write_pair(
        row, own_column(n), dim, x + factor * acc[n][2 * half], y + factor * acc[n][2 * half + 1]);
  }
}

#if MASKED
#if SLOPES
// What slopes subtract from a score is |base + i query_step - j key_step| times the slope, for
// query i and key j of a tile, counted from its first ones.
struct Slope { float slope, base, query_step, key_step; };
DEV Slope slope_of(const Job& job, const PieceParams& p, int h, int query, int key) {
  return Slope{(float)job.mask.slopes[h], (float)(query_position(p, query) - key_position(p, key)),
      (float)p.query_step, (float)p.key_step};
}
#else
struct Slope {};
DEV Slope slope_of(const Job&, const PieceParams&, int, int, int) { return Slope{}; }
#endif

// The score of a pair from q.k, in natural units, and its derivative by scale * q.k.
struct Transform { float scale, softcap, inverse; };
DEV Transform transform_of(const Job& job) {
  Transform t{(float)job.scale, 0.f, 0.f};
#if SOFTCAP
  t.softcap = (float)job.mask.softcap;
  t.inverse = (float)(2 * LOG2_E * job.scale / job.mask.softcap);
#endif
  return t;
}
DEV float transformed(
    const Transform& t, const Slope& slope, float product, int i, int j, float& derivative) {
  float s = product * t.scale;
  derivative = 1.f;
#if SOFTCAP
  // tanh(x) = 1 - 2 / (exp(2x) + 1): its error is that of one rounding of 1.
  const float share = fmaf(-2.f, reciprocal_fast(exp2_fast(product * t.inverse) + 1.f), 1.f);
  s = t.softcap * share;
  derivative = fmaf(-share, share, 1.f);
#endif
#if SLOPES
  const float distance =
      fmaf((float)i, slope.query_step, fmaf((float)j, -slope.key_step, slope.base));
  s = fmaf(-slope.slope, fabsf(distance), s);
#endif
  return s;
}

#if DROPOUT
// For query row `i`, one bit for each of 32 keys from row `key` on: 1 if the pair is kept.
DEV u32 kept_pairs(const Job& job, const PieceParams& p, int b, int s, int h, int i, int key) {
  const MaskParams& of = job.mask;
  const u64 start = (u64)(of.first_token + s * of.segment_step);
  u64 token = start + (u64)key_position(p, key);
  const u32 query = (u32)(start + (u64)query_position(p, i)),
            head = (u32)(of.coin_heads[h] + of.all_heads * b);
  auto draw = [&](u64 four) {
    return philox((u32)four, query, head, (u32)of.document, of.seed[0], of.seed[1]);
  };
  u32 kept = 0;
  if (p.key_step == 1) {
    // The keys of a coin's four are consecutive: nine draws cover 32 keys from anywhere.
    const u32 skipped = (u32)(token % 4);
    u64 bits = 0;
    #pragma unroll 1
    for (int n = 0; n < (skipped ? 9 : 8); n++) {
      const Coins coins = draw(token / 4 + n);
      u32 four = 0;
      #pragma unroll
      for (int w = 0; w < 4; w++) four |= (u32)(coins.word[w] >= of.threshold) << w;
      bits |= (u64)four << (4 * n);
    }
    return (u32)(bits >> skipped);
  }
  #pragma unroll 1
  for (int n = 0; n < 32; n++, token += p.key_step) {
    const Coins coins = draw(token / 4);
    const u32 w = (u32)(token % 4);
    const u32 coin = w == 0 ? coins.word[0] : w == 1 ? coins.word[1]
                     : w == 2 ? coins.word[2] : coins.word[3];
    kept |= (u32)(coin >= of.threshold) << n;
  }
  return kept;
}
#endif
#endif
