// What the two backward kernels share: the form in which they are told a job, and how rows that
// must stay hidden are marked.
//
// A row of the dense arrays: lse in base 2 and delta, times what dS is multiplied with anyway, of
// (batch, segment, head, row), the rows of a head filled up to `padded`.
//   lse = +inf : the row saw nothing, or does not exist. P = exp2(s - inf) = 0.
//   lse = NaN  : the row's query or output gradient holds something that is no number. P = NaN for
//                every key it sees, and the row's operands are replaced by zeros, because in a
//                product of matrices 0 x NaN would also reach the keys it does not see.

// Words of `control`, zeroed before the first kernel; the turns (one per block of queries) follow.
#define NEXT_TILE 0
#define SICK_QUERIES 1
#define TURNS 2

// P is stored as 16 bits. Half precision has few bits below 2^-14, where most P of long rows lie,
// and none of P's values is above 1: so they are stored times 2^14, and dV is divided by it.
#ifdef T_F16
#define P_SHIFT 14.0f
#else
#define P_SHIFT 0.0f
#endif

DEV bool is_number(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }
// Whether all of a pair of stored numbers are finite.
DEV bool are_numbers(u32 pair) {
#ifdef T_F16
  return (pair & 0x7c00u) != 0x7c00u && (pair & 0x7c000000u) != 0x7c000000u;
#else
  return (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
#endif
}
DEV bool are_numbers(const uint4& x) { return are_numbers(x.x) && are_numbers(x.y) && are_numbers(x.z) && are_numbers(x.w); }
#define NOT_A_NUMBER 0x7fc00000u
