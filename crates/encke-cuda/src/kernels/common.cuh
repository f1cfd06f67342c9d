// What every kernel shares: short names for types, the job it is told, and addresses in it.
// No #include: NVRTC then needs no headers. `Job`, `Block` and `Operand` mirror `src/abi.rs`, field by field.
//
// Macros given by the host: T_BF16 or T_F16 or T_F32 or T_F64 (what is stored); what is summed is f32, f64 for T_F64.
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef long long i64;
#define DEV __device__ __forceinline__

// An affine view of a buffer, in elements. `unit` divides every head's share (tensor maps count heads in units).
struct Operand { i64 offset, batch, segment, row, unit; const i64* heads; };

struct Job {
  Operand q, k, cells, dq;
  i64 query, query_step, key, key_step;   // positions, when `causal`
  int batch, segments, queries, keys, heads, dim, causal, pad;
  double scale, gain;
};

// Rows to be copied, added or merged.
struct Block { Operand from, to; int batch, segments, rows, heads; i64 width; };

// The host's mirror has these sizes too (a test in src/abi.rs).
static_assert(sizeof(Operand) == 48 && sizeof(Job) == 272 && sizeof(Block) == 120, "what the host tells is what a kernel reads");

DEV i64 at(const Operand& o, int b, int s, i64 row, int h) { return o.offset + b * o.batch + s * o.segment + row * o.row + o.heads[h]; }

// How many keys query row i sees: always the first so many.
DEV int visible(const Job& job, int i) {
  if (!job.causal) return job.keys;
  i64 ahead = job.query + i * job.query_step - job.key;
  if (ahead < 0) return 0;
  i64 count = ahead / job.key_step + 1;
  return count < job.keys ? (int)count : job.keys;
}
// The first query row that sees key row j (job.queries where none does).
DEV int first_query(const Job& job, int j) {
  if (!job.causal) return 0;
  i64 behind = job.key + j * job.key_step - job.query;
  if (behind <= 0) return 0;
  i64 row = (behind + job.query_step - 1) / job.query_step;
  return row < job.queries ? (int)row : job.queries;
}

DEV float neg_inf() { return __int_as_float(0xff800000); }
