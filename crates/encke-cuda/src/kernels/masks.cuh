// Masks, score transforms and dropout (spec sections 9 to 11), for programs with MASKED=1. Without
// it a job is a plain one, and all of this is absent from the program.
//
// The decision here: a tile of rows lies in one piece (a document, or the whole job), so that its
// visible rows follow from one band. Tiles come from a list, longest first, which the host makes.
//
// Tensor core kernels are also compiled for what a job has of SOFTCAP, SLOPES and DROPOUT.
#ifndef MASKED
#define MASKED 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SLOPES
#define SLOPES 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif

// Rows start..end.
struct Range { int start, end; };
DEV Range common_rows(Range a, Range b) {
  return Range{a.start > b.start ? a.start : b.start, a.end < b.end ? a.end : b.end};
}

// How many of `rows` rows, at positions `first`, `first + step`..., lie before `position`.
DEV int rows_before(i64 position, i64 first, i64 step, int rows) {
  i64 above = position - first;
  if (above <= 0) return 0;
  if (step != 1) above = (above + step - 1) / step;
  return above < rows ? (int)above : rows;
}
// The position of a query row, and of a key row.
DEV i64 query_position(const PieceParams& p, int i) {
  return p.query + (i - p.first_query) * p.query_step;
}
DEV i64 key_position(const PieceParams& p, int j) { return p.key + (j - p.first_key) * p.key_step; }
// The key rows that query row i sees, and the query rows that see key row j. Both ends grow with
// the row.
DEV Range keys_of(const PieceParams& p, int i) {
  const i64 x = query_position(p, i);
  const int keys = p.end_key - p.first_key;
  return Range{p.first_key + rows_before(x - p.left, p.key, p.key_step, keys),
      p.first_key + rows_before(x + p.right + 1, p.key, p.key_step, keys)};
}
DEV Range queries_of(const PieceParams& p, int j) {
  const i64 y = key_position(p, j);
  const int queries = p.end_query - p.first_query;
  return Range{p.first_query + rows_before(y - p.right, p.query, p.query_step, queries),
      p.first_query + rows_before(y + p.left + 1, p.query, p.query_step, queries)};
}

#if MASKED
// As `MaskedJobParams` in src/abi.rs.
struct Job : JobParams { MaskParams mask; };
static_assert(sizeof(Job) == 472, "src/abi.rs has another layout");
DEV int value_dim(const Job& job) { return job.mask.value_dim; }
DEV const OperandParams& values(const Job& job) { return job.mask.v; }
DEV const PieceParams& piece_at(const Job& job, i64 entry) { return job.mask.pieces[entry >> 32]; }

// Philox4x32-10, as in encke-core's dropout.rs.
struct Coins { u32 word[4]; };
DEV Coins philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  #pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(b >> 32) ^ c1 ^ k0;
    c1 = (u32)b;
    c2 = (u32)(a >> 32) ^ c3 ^ k1;
    c3 = (u32)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Coins{{c0, c1, c2, c3}};
}
// The coins of a query and of the four keys of which the key at this position is one.
DEV Coins coins_of(const Job& job, const PieceParams& p, int b, int s, int h, i64 query, i64 key) {
  const MaskParams& of = job.mask;
  const i64 start = of.first_token + s * of.segment_step;
  return philox((u32)((u64)(start + key) / 4), (u32)(start + query),
      (u32)(of.coin_heads[h] + of.all_heads * b), (u32)of.document, of.seed[0], of.seed[1]);
}
// Whether a pair is dropped.
DEV bool is_dropped(const Job& job, const PieceParams& p, int b, int s, int h, int i, int j) {
  if (job.mask.kept == 0) return false;
  const i64 key = key_position(p, j), start = job.mask.first_token + s * job.mask.segment_step;
  const Coins coins = coins_of(job, p, b, s, h, query_position(p, i), key);
  const int word = (int)((u64)(start + key) % 4);
  const u32 coin = word == 0 ? coins.word[0] : word == 1 ? coins.word[1]
                   : word == 2 ? coins.word[2] : coins.word[3];
  return coin < job.mask.threshold;
}
#else
typedef JobParams Job;
DEV int value_dim(const Job& job) { return job.dim; }
DEV const OperandParams& values(const Job& job) { return job.k; }
#endif
