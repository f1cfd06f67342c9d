// Forward attention of few queries to many keys with mma.sync (sm_80 and later): bf16 and f16.
//
// Such a call is bound by the memory that its keys lie in, so the keys of a tile are split over the
// GPU, and each is read once: all query heads that share keys are rows of one tile. A tile has
// TILE / group queries of `group` heads; row r is query r / group of member r % group. A thread
// block streams one split of the keys of one tile, BLOCK at a time, STAGES blocks in flight. Within
// a block of keys each of KEY_WARPS warps has SHARE of them, for the same rows; they are merged at
// the end. `split_merge.cu` then merges the splits, in their order.
//
// The decision here: a split writes its softmax state to its own copy of every cell, so that the
// sum has one order, whatever finishes first. Which keys are a split's follows from what the tile
// sees and from the number of splits, which is the host's.
//
// Scores are in base 2 (times scale * log2 e), and so are the maxima in the splits' states.

struct SplitParams {
  const i64* members;   // the heads of each group, `group` for each; -1 where it has fewer
  int groups, group;    // groups of heads that share keys, and heads of the largest
  int splits, pad;
};
// The states of all splits, one after the other: acc, m and l of every (batch entry, segment,
// query, head).
struct SplitStates { float *acc, *m, *l; };

// Queries from `first` on, before `end`, of the heads of a group. Blocks of keys are counted from
// `key` on, and end before `end_key`.
struct SplitOrigin { int b, s, group, split, first, end, key, end_key; i64 entry; };
// Groups change fastest: they read neighbouring rows of memory at the same time. Tiles are next:
// they read the same keys.
DEV SplitOrigin split_origin(const Job& job, const SplitParams& params, u32 index) {
  const int queries = TILE / params.group;
  SplitOrigin o;
  o.group = (int)(index % params.groups);
  index /= params.groups;
#if MASKED
  const u32 tiles = job.mask.count_tiles;
  o.entry = job.mask.tiles[index % tiles];
  const PieceParams& p = piece_at(job, o.entry);
  o.first = p.first_query + (int)(u32)o.entry * queries;
  o.end = smaller(p.end_query, o.first + queries);
  o.key = p.first_key;
  o.end_key = p.end_key;
#else
  const u32 tiles = (job.queries + queries - 1) / queries;
  o.entry = 0;
  o.first = (int)(index % tiles) * queries;
  o.end = smaller(job.queries, o.first + queries);
  o.key = 0;
  o.end_key = job.keys;
#endif
  index /= tiles;
  o.split = (int)(index % params.splits);
  index /= params.splits;
  o.s = (int)(index % job.segments);
  o.b = (int)(index / job.segments);
  return o;
}
DEV Range visible_keys(const Job& job, const SplitOrigin& origin, int i) {
#if MASKED
  return keys_of(piece_at(job, origin.entry), i);
#else
  return Range{0, visible(job, i)};
#endif
}

// The query and the head of a row of a tile; the head is -1 if there is no such row.
struct PackedRow { int query, head; };
DEV PackedRow packed_row(const SplitParams& params, const SplitOrigin& origin, int row) {
  const int query = origin.first + row / params.group;
  if (query >= origin.end) return PackedRow{query, -1};
  return PackedRow{query, (int)params.members[origin.group * params.group + row % params.group]};
}

// Loads the queries of a tile: rows lie apart, as their heads do. Rows and columns that do not
// exist become 0.
DEV void load_queries(u32 tile, const u16* q, const Job& job, const SplitParams& params,
    const SplitOrigin& origin) {
#if ALIGNED
  const int width = 8;
#else
  const int width = 1;
#endif
  const int columns = HD / width;
  #pragma unroll 1
  for (int n = threadIdx.x; n < TILE * columns; n += THREADS) {
    const int row = n / columns, column = n % columns * width;
    const PackedRow of = packed_row(params, origin, row);
    const bool real = of.head >= 0 && column < job.dim;
    const u16* from = real ? q + at(job.q, origin.b, origin.s, of.query, of.head) + column : q;
    const u32 to = tile + (row * PITCH(HD) + column) * 2;
#if ALIGNED
    copy16(to, from, real);
#else
    store_shared(to, real ? *from : (u16)0);
#endif
  }
}

#if SOFTCAP || SLOPES
// Scores in natural units from products, of keys from `key` on.
DEV void transform_rows(float (&s)[MT][SHARE / 8][4], const Job& job, const SplitParams& params,
    const SplitOrigin& origin, const Transform& transform, int key) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const PackedRow row = packed_row(params, origin, own_row(r / 2, r % 2));
    const Slope slope = slope_of(job, piece_at(job, origin.entry), row.head < 0 ? 0 : row.head,
        row.query, key);
    #pragma unroll
    for (int n = 0; n < SHARE / 8; n++)
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[r / 2][n][r % 2 * 2 + e];
        float derivative;
        x = transformed(transform, slope, x, 0, own_column(n) + e, derivative);
      }
  }
}
#endif

// ---- merging the warps that have the same rows ----
// Words of a lane's state: sums, then m and l.
#define STATE_WORDS (MT * (VD / 8) * 4 + 4 * MT)
DEV u32 state_address(u32 states, int warp, int word) {
  return states + ((warp * STATE_WORDS + word) * 32 + lane()) * 4;
}
DEV void put(u32 to, float x) { store_shared(to, __float_as_uint(x)); }
DEV float get(u32 from) { return __uint_as_float(load_shared(from)); }

// Leaves this warp's state in slot `warp`.
DEV void leave_state(
    u32 states, int warp, const Softmax& state, const float (&acc)[MT][VD / 8][4]) {
  #pragma unroll
  for (int mt = 0; mt < MT; mt++) {
    #pragma unroll
    for (int n = 0; n < VD / 8; n++)
      #pragma unroll
      for (int e = 0; e < 4; e++)
        put(state_address(states, warp, (mt * (VD / 8) + n) * 4 + e), acc[mt][n][e]);
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int word = MT * (VD / 8) * 4 + (mt * 2 + half) * 2;
      put(state_address(states, warp, word), state.m[mt][half]);
      put(state_address(states, warp, word + 1), state.l[mt][half]);
    }
  }
}
// Merges the state in slot `warp` into this warp's.
DEV void take_state(u32 states, int warp, Softmax& state, float (&acc)[MT][VD / 8][4]) {
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2, word = MT * (VD / 8) * 4 + r * 2;
    const float other = get(state_address(states, warp, word)),
                m = fmaxf(state.m[mt][half], other), origin = m == neg_inf() ? 0.f : m,
                mine = exp2_fast(state.m[mt][half] - origin), its = exp2_fast(other - origin);
    state.m[mt][half] = m;
    state.l[mt][half] =
        fmaf(its, get(state_address(states, warp, word + 1)), state.l[mt][half] * mine);
    #pragma unroll
    for (int n = 0; n < VD / 8; n++)
      #pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; e++)
        acc[mt][n][e] = fmaf(its, get(state_address(states, warp, (mt * (VD / 8) + n) * 4 + e)),
            acc[mt][n][e] * mine);
  }
}

// Stores the rows of a split. A row that saw no key has an empty state.
DEV void store_split(const Job& job, const SplitParams& params, const SplitOrigin& origin,
    const SplitStates& to, const Softmax& state, const float (&acc)[MT][VD / 8][4]) {
  const int dim = value_dim(job);
  const i64 first = ((i64)origin.split * job.batch + origin.b) * job.segments + origin.s;
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) {
    const int mt = r / 2, half = r % 2;
    const float l = quad_sum(state.l[mt][half]);
    const PackedRow row = packed_row(params, origin, own_row(mt, half));
    if (row.head < 0) continue;
    const i64 cell = (first * job.queries + row.query) * job.heads + row.head;
    if (lane() % 4 == 0) { to.m[cell] = state.m[mt][half]; to.l[cell] = l; }
    #pragma unroll
    for (int n = 0; n < VD / 8; n++)
      write_pair(to.acc + cell * dim, own_column(n), dim, acc[mt][n][2 * half],
          acc[mt][n][2 * half + 1]);
  }
}

// One split of one tile: its state goes to `acc`, `m` and `l`.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    split_forward(const Job job, const SplitParams params, const u16* q, const u16* k,
        const u16* v, float* acc_out, float* m, float* l) {
  // Shared memory: the queries, STAGES blocks of keys and values, the visible keys of each row.
  const u32 block_bytes = TILE_BYTES(BLOCK) + VALUE_BYTES(BLOCK);
  const u32 queries = shared_base(), streamed = queries + TILE_BYTES(TILE),
            limits = streamed + STAGES * block_bytes;
  const SplitOrigin origin = split_origin(job, params, blockIdx.x);
  // Positions increase, so the first query of a tile sees the first keys and the last the last.
  const Range first_sees = visible_keys(job, origin, origin.first),
              last_sees = visible_keys(job, origin, origin.end - 1);
  const int rows = (origin.end - origin.first) * params.group,
            warp = (int)threadIdx.x / 32, first_row = own_row(0, 0) - lane() / 4,
            share = warp / ROW_WARPS * SHARE;
  // The blocks that the tile sees, and those of them that are the split's.
  int first_block = (first_sees.start - origin.key) / BLOCK,
      blocks = (last_sees.end - origin.key + BLOCK - 1) / BLOCK - first_block;
  if (blocks < 0) blocks = 0;
  const int end_block = first_block + (int)((i64)blocks * (origin.split + 1) / params.splits);
  first_block += (int)((i64)blocks * origin.split / params.splits);

  // Any member of the group has its keys.
  const int head = (int)params.members[origin.group * params.group];
  const Rows keys = rows_of(job.k, origin.b, origin.s, head, origin.end_key);
#if MASKED
  const Rows value_rows = rows_of(values(job), origin.b, origin.s, head, origin.end_key);
#else
  const Rows& value_rows = keys;
#endif
  auto load_block = [&](int block) {
    const u32 to = streamed + (block - first_block) % STAGES * block_bytes;
    const int key = origin.key + block * BLOCK;
    load_tile<BLOCK, HD>(to, k, keys, key, job.dim);
    load_tile<BLOCK, VD>(to + TILE_BYTES(BLOCK), v, value_rows, key, value_dim(job));
  };
  if (first_block < end_block) load_queries(queries, q, job, params, origin);
  #pragma unroll 1
  for (int n = 0; n < STAGES - 1; n++) {
    if (first_block + n < end_block) load_block(first_block + n);
    commit_copies();
  }
  for (int row = threadIdx.x; row < TILE; row += THREADS) {
    const Range seen = row < rows ? visible_keys(job, origin, origin.first + row / params.group)
                                  : Range{0, 0};
    store_shared(limits + row * 4, (u32)seen.end);
#if MASKED
    store_shared(limits + (TILE + row) * 4, (u32)seen.start);
#endif
  }
  Softmax state;
  float acc[MT][VD / 8][4];
  zero<VD>(acc);
  #pragma unroll
  for (int r = 0; r < 2 * MT; r++) { state.m[r / 2][r % 2] = neg_inf(); state.l[r / 2][r % 2] = 0; }
  __syncthreads();
  // The keys that some row of this warp sees.
  const Range warp_sees =
      first_row < rows ? Range{seen_by(limits, first_row).start,
                             seen_by(limits, smaller(first_row + MT * 16, rows) - 1).end}
                       : Range{0, 0};

#if SOFTCAP || SLOPES
  const Transform transform = transform_of(job);
  const float c = (float)LOG2_E;
#else
  const float c = score_factor(job.scale);
#endif
  #pragma unroll 1
  for (int block = first_block; block < end_block; block++) {
    copies_done_but<STAGES - 2>();
    __syncthreads();   // the block has arrived, and the buffer before it is free
#if !(SOFTCAP || SLOPES)
    if (block == first_block && job.scale < 0) negate_queries(queries);
#endif
    if (block + STAGES - 1 < end_block) load_block(block + STAGES - 1);
    commit_copies();
    const int first_key = origin.key + block * BLOCK, key = first_key + share;
    const u32 now = streamed + (block - first_block) % STAGES * block_bytes,
              own_values = now + TILE_BYTES(BLOCK) + VALUE_BYTES(share);
    const bool masked = first_key + BLOCK > first_sees.end ||
                        (MASKED && first_key < last_sees.start);
    const bool nonfinite = masked && __syncthreads_or(has_nonfinite<BLOCK, VD>(
                                         now + TILE_BYTES(BLOCK)));
    if (key >= warp_sees.end || (MASKED && key + SHARE <= warp_sees.start)) continue;

    float weights[MT][SHARE / 8][4];
    scores<SHARE / 8, HD>(weights, queries + TILE_BYTES(first_row), now + TILE_BYTES(share));
#if SOFTCAP || SLOPES
    transform_rows(weights, job, params, origin, transform, key);
#endif
    if (masked) apply_mask(weights, key, limits);
    online_softmax(state, weights, acc, c);
    u32 left[MT][SHARE / 16][4];
    left_operand<SHARE / 8>(left, weights);
    masked_product<SHARE / 16, VD>(
        nonfinite, acc, left, own_values, 1.f, [&](int mt, int half, int row) {
          const Range seen = seen_by(limits, own_row(mt, half));
          return key + row < seen.end && (!MASKED || key + row >= seen.start);
        });
  }
  // The warps of the same rows are merged in pairs, in a fixed order, where the tiles were.
  copies_done();
  #pragma unroll 1
  for (int half = WARPS / 2; half >= ROW_WARPS; half /= 2) {
    __syncthreads();   // what this memory held before has been read
    if (warp >= half && warp < 2 * half) leave_state(queries, warp - half, state, acc);
    __syncthreads();
    if (warp < half) take_state(queries, warp, state, acc);
  }
  if (warp >= ROW_WARPS) return;
  store_split(job, params, origin, SplitStates{acc_out, m, l}, state, acc);
}
