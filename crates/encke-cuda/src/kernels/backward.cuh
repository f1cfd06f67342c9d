// Common to `backward_rows` and `hopper_backward`: their workspace, and the marks of special rows.
//
// The dense arrays hold lse in base 2, and delta times the factor of dS, for (batch, segment, head,
// row), with the rows of a head padded to `padded`.
//   lse = +inf : the row saw no key, or is out of bounds. P = exp2(s - inf) = 0.
//   lse = NaN  : the row's query or output gradient is not finite. P = NaN for every key it sees,
//   and
//                the row's operands are replaced by zeros, because in a matrix product 0 x NaN
//                would also reach the keys it does not see.

// WINDOWED: queries see ranges of keys (windows, documents) rather than the first ones. Both ends
// of the ranges grow with the query; the host sets `causal`.
#ifndef WINDOWED
#define WINDOWED 0
#endif
// TILED: blocks of queries in a tile of the grid (spec, section 12); 0: there is no grid.
#ifndef TILED
#define TILED 0
#endif

// Words of `control`, zeroed before the first kernel; the semaphores (one per block of queries)
// follow.
#define NEXT_TILE 0
#define SPECIAL_QUERIES 1   // whether there are marked or large rows
#define SEMAPHORES 2

// P is stored in 16 bits. f16 is subnormal below 2^-14, where most P of long rows lie, and no P is
// above 1: P is stored times 2^14, and dV is divided by it.
#ifdef T_F16
#define P_SHIFT 14.0f
#else
#define P_SHIFT 0.0f
#endif

DEV bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }
// Whether both elements of a pair are finite.
DEV bool all_finite(u32 pair) {
#ifdef T_F16
  return (pair & 0x7c00u) != 0x7c00u && (pair & 0x7c000000u) != 0x7c000000u;
#else
  return (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
#endif
}
DEV bool all_finite(const uint4& x) {
  return all_finite(x.x) && all_finite(x.y) && all_finite(x.z) && all_finite(x.w);
}
#define QUIET_NAN 0x7fc00000u
