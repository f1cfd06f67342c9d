// Common to all kernels: short type names, the parameter structs and their address arithmetic.
// No #include, so that NVRTC needs no headers. `JobParams`, `BlockParams` and `OperandParams`
// mirror `src/abi.rs`, field by field.
//
// Macros given by the host: T_BF16, T_F16, T_F32 or T_F64, the storage type. Sums are f32, or f64
// for T_F64.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEV __device__ __forceinline__

// An affine view of a buffer, in elements. `heads` are head offsets, `unit` a common divisor of
// them.
struct OperandParams { i64 offset, batch, segment, row, unit; const i64* heads; };

struct JobParams {
  OperandParams q, k, cells, delta, dq;
  i64 query, query_step, key, key_step;   // positions, when `causal`
  int batch, segments, queries, keys, heads, dim, causal, value_dim;
  double scale, gain;
};

// Rows to copy, add or merge.
struct BlockParams { OperandParams from, to; int batch, segments, rows, heads; i64 width; };

// Query rows that see only some key rows, in a window over affine positions: a document of a packed
// job, or all of a job.
struct PieceParams {
  i64 query, query_step, key, key_step;   // positions of the piece's first query and key
  i64 left, right;                        // how far queries see
  int first_query, end_query, first_key, end_key;
};
// What a masked job has beside `JobParams`.
struct MaskParams {
  OperandParams v;
  const PieceParams* pieces;
  const i64* tiles;            // piece << 32 | tile of the piece
  const double* slopes;        // of each head; null without
  const i64* coin_heads;       // the query head of each head
  double softcap;              // 0 without
  double kept;                 // the factor of a pair that is not dropped; 0 without dropout
  i64 first_token, segment_step, document, all_heads;
  u64 threshold;               // the least coin of a pair that is kept
  u32 seed[2];
  int count_tiles, value_dim;
};

// A test in src/abi.rs asserts the same sizes on the host.
static_assert(sizeof(OperandParams) == 48 && sizeof(JobParams) == 320 &&
                  sizeof(BlockParams) == 120 && sizeof(PieceParams) == 64 &&
                  sizeof(MaskParams) == 152,
    "src/abi.rs has another layout");

DEV i64 at(const OperandParams& o, int b, int s, i64 row, int h) {
  return o.offset + b * o.batch + s * o.segment + row * o.row + o.heads[h];
}

// The number of keys that query row i sees; it sees the first ones.
DEV int visible(const JobParams& job, int i) {
  if (!job.causal) return job.keys;
  i64 ahead = job.query + i * job.query_step - job.key;
  if (ahead < 0) return 0;
  i64 count = ahead / job.key_step + 1;
  return count < job.keys ? (int)count : job.keys;
}
// The first query row that sees key row j; job.queries if none does.
DEV int first_query(const JobParams& job, int j) {
  if (!job.causal) return 0;
  i64 behind = job.key + j * job.key_step - job.query;
  if (behind <= 0) return 0;
  i64 row = (behind + job.query_step - 1) / job.query_step;
  return row < job.queries ? (int)row : job.queries;
}

DEV float neg_inf() { return __int_as_float(0xff800000); }

// Scores in base 2 from 4096 on are large: the rounding of a row's maximum or of its lse may be
// seen in its weights. Every row decides for itself, so that no row's bits depend on another row's
// scores. Infinities and NaN are not large.
#define LARGE_SCORE 4096.f
DEV bool is_large(float score) { return fabsf(score) >= LARGE_SCORE && fabsf(score) != -neg_inf(); }
// Stands for a scale of 0: any product times it is about 0. (The least subnormal number.)
#define TINY_SCALE 1.4e-45f
// In the backward pass, the exponent from which on a weight is 1: the lse of a large row whose only
// weight this is may be off by 4 units of 2^-23 from the score, rounded as it is in several steps.
DEV float certain_from(float lse) {
  return is_large(lse) ? fabsf(lse) * -4.7683716e-7f : -neg_inf();
}
