// Attention without tensor cores: any type, any stride, head dimensions up to 576. For f32 and f64,
// whose precision tensor cores do not keep. A block has TILE rows and loops over the other operand
// in tiles; thread (y, x) computes the pair of row y and streamed row x, and then columns x, x +
// TILE, ... of row y. Masked pairs are skipped rather than multiplied by zero, so that hidden NaNs
// have no effect. Sums have a fixed order: results are bitwise repeatable. Macros: T_*, COLUMNS
// (columns per thread), MASKED (see masks.cuh).
#define TILE 16
// Dynamic shared memory; the CPU model has its own.
#ifndef PLAIN_SHARED
#define PLAIN_SHARED extern __shared__ double raw[]
#endif
#define X ((int)threadIdx.x % TILE)
#define Y ((int)threadIdx.x / TILE)

// The larger of two; a NaN wins, so that it does not look like an empty row.
DEV A larger(A a, A b) { return a > b || a != a ? a : b; }
DEV A row_max(A x) {
  for (int w = TILE / 2; w > 0; w >>= 1) x = larger(x, __shfl_xor_sync(~0u, x, w));
  return x;
}
DEV A row_sum(A x) {
  for (int w = TILE / 2; w > 0; w >>= 1) x += __shfl_xor_sync(~0u, x, w);
  return x;
}

// TILE rows from `first` on of one (batch entry, segment, head). Rows end before `end`, and
// streamed rows are counted in tiles from `origin` on.
struct TileOrigin {
  int batch, segment, head, first, end, origin;
#if MASKED
  PieceParams piece;
#endif
};
// The number of tiles of one head with `rows` rows.
DEV int tiles_of(const Job& job, int rows) {
#if MASKED
  return job.mask.count_tiles;
#else
  return (rows + TILE - 1) / TILE;
#endif
}
DEV TileOrigin tile_origin(const Job& job, i64 index, int tiles, int heads, bool queries) {
  TileOrigin p;
  const int tile = index % tiles;
  index /= tiles; p.head = index % heads; index /= heads;
  p.segment = index % job.segments; p.batch = index / job.segments;
#if MASKED
  const i64 entry = job.mask.tiles[tile];
  p.piece = piece_at(job, entry);
  p.first = (queries ? p.piece.first_query : p.piece.first_key) + (int)(u32)entry * TILE;
  p.end = queries ? p.piece.end_query : p.piece.end_key;
  p.origin = queries ? p.piece.first_key : p.piece.first_query;
#else
  p.first = tile * TILE; p.end = queries ? job.queries : job.keys; p.origin = 0;
#endif
  return p;
}
// The keys that a query row sees, and the queries that see a key row.
DEV Range visible_keys(const Job& job, const TileOrigin& p, int i) {
#if MASKED
  return keys_of(p.piece, i);
#else
  return Range{0, visible(job, i)};
#endif
}
DEV Range seeing_queries(const Job& job, const TileOrigin& p, int j) {
#if MASKED
  return queries_of(p.piece, j);
#else
  return Range{first_query(job, j), job.queries};
#endif
}
// The start of the streamed tile that holds `row`.
DEV int tile_start(const TileOrigin& p, int row) {
  return p.origin + (row - p.origin) / TILE * TILE;
}
// Compilers fuse products and sums where they like, and not alike with and without masks. So scores
// and their gradients say where they round: a document then has the same bits in a packed job as in
// a job of its own, whose program may be the one without masks, and a score is that of the forward
// pass.
DEV float rounded_product(float a, float b) { return __fmul_rn(a, b); }
DEV double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The score of a pair given q.k, and its derivative by scale * q.k.
DEV A score(const Job& job, const TileOrigin& p, int head, int i, int j, A product,
    A& derivative) {
  A s = rounded_product((A)job.scale, product);
  derivative = 1;
#if MASKED
  if (job.mask.softcap > 0) {
    const A share = tanh(s / (A)job.mask.softcap);
    s = (A)job.mask.softcap * share;
    derivative = 1 - share * share;
  }
  if (job.mask.slopes) {
    i64 distance = query_position(p.piece, i) - key_position(p.piece, j);
    s -= (A)job.mask.slopes[head] * (A)(distance < 0 ? -distance : distance);
  }
#endif
  return s;
}
// Whether the weight of a pair is dropped, and the factor of those that are not.
DEV bool dropped(const Job& job, const TileOrigin& p, int head, int i, int j) {
#if MASKED
  return is_dropped(job, p.piece, p.batch, p.segment, head, i, j);
#else
  return false;
#endif
}
DEV A kept(const Job& job) {
#if MASKED
  return job.mask.kept == 0 ? (A)1 : (A)job.mask.kept;
#else
  return 1;
#endif
}

// Loads TILE rows to shared memory, widened; rows beyond `count` become zeros. `width`: elements
// per address unit, 1 for q, k and v, the value dimension for dout, which lies at that times the
// address of its cell.
DEV void load_rows(A* shared, const T* from, const OperandParams& o, const TileOrigin& p, int head,
    int first, int count, int dim, int width = 1) {
  bool there = first + Y < count;
  const T* row = from + (there ? at(o, p.batch, p.segment, first + Y, head) * width : 0);
  #pragma unroll 1
  for (int c = X; c < dim; c += TILE) shared[Y * (dim + 1) + c] = there ? (A)widen(row[c]) : (A)0;
}
DEV A dot(const A* a, const A* b, int dim) {
  A sum = 0;
  #pragma unroll 4
  for (int c = 0; c < dim; c++) sum += a[c] * b[c];
  return sum;
}

// Rows start empty or from (acc, m, l); they finish in (out, lse) or are left in (acc, m, l).
extern "C" __global__ void __launch_bounds__(TILE* TILE, 1) plain_forward(const T* q, const T* k,
    const T* v, const Job job, A* acc, A* m, A* l, T* out, A* lse, int starts, int finishes) {
  PLAIN_SHARED;
  const int dim = job.dim, width = value_dim(job), pitch = dim + 1, value_pitch = width + 1,
            tiles = tiles_of(job, job.queries);
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *sp = sv + TILE * value_pitch;
  const i64 all = (i64)tiles * job.heads * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    const TileOrigin p = tile_origin(job, index, tiles, job.heads, true);
    const int row = p.first + Y, last = min(p.first + TILE, p.end) - 1;
    const bool real = row < p.end;
    const Range seen = real ? visible_keys(job, p, row) : Range{0, 0},
                streamed = {visible_keys(job, p, p.first).start, visible_keys(job, p, last).end};
    const i64 cell = real ? at(job.cells, p.batch, p.segment, row, p.head) : 0;
    A running_max = neg_inf(), sum = 0, o[COLUMNS];
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) o[n] = 0;
    if (!starts && real) {
      running_max = m[cell]; sum = l[cell];
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c < width) o[n] = acc[cell * width + c];
      }
    }
    __syncthreads();
    load_rows(sq, q, job.q, p, p.head, p.first, p.end, dim);
    for (int j0 = tile_start(p, streamed.start); j0 < streamed.end; j0 += TILE) {
      __syncthreads();
      load_rows(sk, k, job.k, p, p.head, j0, streamed.end, dim);
      load_rows(sv, v, values(job), p, p.head, j0, streamed.end, width);
      __syncthreads();
      const Range here = common_rows(seen, Range{j0, j0 + TILE});
      const bool sees = j0 + X >= here.start && j0 + X < here.end;
      A s = neg_inf(), derivative;
      if (sees)
        s = score(
            job, p, p.head, row, j0 + X, dot(sq + Y * pitch, sk + X * pitch, dim), derivative);
      A new_max = larger(running_max, row_max(s));
      A rescale = running_max == neg_inf() ? (A)0 : exp(running_max - new_max);
      A weight = sees ? exp(s - new_max) : (A)0;
      A weights = row_sum(weight);
      // A weight below 0 marks a pair that is dropped.
      const bool drops = sees && dropped(job, p, p.head, row, j0 + X);
      sp[Y * TILE + X] = drops ? (A)-1 : weight * kept(job);
      __syncwarp();
      if (here.start < here.end) {
        sum = sum * rescale + weights; running_max = new_max;
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          int c = min(X + n * TILE, width);        // the padding column stands in for missing ones
          A x = o[n] * rescale;
          #pragma unroll 1
          for (int j = here.start - j0; j < here.end - j0; j++) {
            const A w = sp[Y * TILE + j];
            if (!MASKED || !(w < 0)) x += w * sv[j * value_pitch + c];
          }
          o[n] = x;
        }
      }
      __syncwarp();
    }
    if (real) {
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c >= width) continue;
        if (finishes)
          narrow(sum == 0 ? (A)0 : (A)((A)job.gain * (o[n] / sum)), out[cell * width + c]);
        else acc[cell * width + c] = o[n];
      }
      if (X == 0 && finishes) lse[cell] = sum == 0 ? (A)neg_inf() : running_max + log(sum);
      if (X == 0 && !finishes) { m[cell] = running_max; l[cell] = sum; }
    }
  }
}

// dS / P of a pair, given dout.v.
DEV A score_gradient(const Job& job, bool drops, A product, A delta, A derivative) {
  const A gradient = drops ? -delta : fma((A)job.gain * kept(job), product, -delta);
  return gradient * derivative;
}

// dq of TILE queries.
extern "C" __global__ void __launch_bounds__(TILE* TILE, 1) plain_dq(const T* q, const T* k,
    const T* v, const T* dout, const A* lse, const A* delta, A* dq, const Job job) {
  PLAIN_SHARED;
  const int dim = job.dim, width = value_dim(job), pitch = dim + 1, value_pitch = width + 1,
            tiles = tiles_of(job, job.queries);
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *so = sv + TILE * value_pitch,
    *sp = so + TILE * value_pitch;
  const i64 all = (i64)tiles * job.heads * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    const TileOrigin p = tile_origin(job, index, tiles, job.heads, true);
    const int row = p.first + Y, last = min(p.first + TILE, p.end) - 1;
    const i64 cell = row < p.end ? at(job.cells, p.batch, p.segment, row, p.head) : 0;
    const A own = row < p.end ? lse[cell] : (A)neg_inf();
    const Range seen = own == neg_inf() ? Range{0, 0} : visible_keys(job, p, row),
                streamed = {visible_keys(job, p, p.first).start, visible_keys(job, p, last).end};
    const bool any = seen.start < seen.end;
    A shift = any ? delta[at(job.delta, p.batch, p.segment, row, p.head)] : (A)0, g[COLUMNS];
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) g[n] = 0;
    __syncthreads();
    load_rows(sq, q, job.q, p, p.head, p.first, p.end, dim);
    load_rows(so, dout, job.cells, p, p.head, p.first, p.end, width, width);
    for (int j0 = tile_start(p, streamed.start); j0 < streamed.end; j0 += TILE) {
      __syncthreads();
      load_rows(sk, k, job.k, p, p.head, j0, streamed.end, dim);
      load_rows(sv, v, values(job), p, p.head, j0, streamed.end, width);
      __syncthreads();
      const Range here = common_rows(seen, Range{j0, j0 + TILE});
      A ds = 0;
      if (j0 + X >= here.start && j0 + X < here.end) {
        const int j = j0 + X;
        A derivative;
        const A s =
            score(job, p, p.head, row, j, dot(sq + Y * pitch, sk + X * pitch, dim), derivative);
        const A product = dot(so + Y * value_pitch, sv + X * value_pitch, width);
        ds = exp(s - own) *
             score_gradient(job, dropped(job, p, p.head, row, j), product, shift, derivative);
      }
      sp[Y * TILE + X] = ds;
      __syncwarp();
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = min(X + n * TILE, dim);
        #pragma unroll 1
        for (int j = here.start - j0; j < here.end - j0; j++)
          g[n] += sp[Y * TILE + j] * sk[j * pitch + c];
      }
      __syncwarp();
    }
    if (any) {
      i64 to = at(job.dq, p.batch, p.segment, row, p.head);
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c < dim) dq[to + c] += (A)job.scale * g[n];
      }
    }
  }
}

// dk and dv of TILE keys, over all heads that read them. `groups`: the start of each group in the
// list of heads, then the list.
extern "C" __global__ void __launch_bounds__(TILE* TILE, 1)
    plain_dkv(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta,
        A* dk, A* dv, const i64* groups, int count_groups, const Job job) {
  PLAIN_SHARED;
  __shared__ A s_lse[TILE], s_delta[TILE];
  __shared__ Range s_seen[TILE];
  const int dim = job.dim, width = value_dim(job), pitch = dim + 1, value_pitch = width + 1,
            tiles = tiles_of(job, job.keys);
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *so = sv + TILE * value_pitch,
    *sp = so + TILE * value_pitch, *sd = sp + TILE * TILE;
  const i64 all = (i64)tiles * count_groups * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    const TileOrigin p = tile_origin(job, index, tiles, count_groups, false);
    const int row = p.first + Y, group = p.head, last = min(p.first + TILE, p.end) - 1;
    const int from = groups[group], until = groups[group + 1],
              any = groups[count_groups + 1 + from];
    const Range streamed = {
        seeing_queries(job, p, p.first).start, seeing_queries(job, p, last).end};
    A gk[COLUMNS], gv[COLUMNS]; bool touched = false;
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) gk[n] = gv[n] = 0;
    __syncthreads();
    load_rows(sk, k, job.k, p, any, p.first, p.end, dim);
    load_rows(sv, v, values(job), p, any, p.first, p.end, width);
    for (int member = from; member < until; member++) {
      int head = groups[count_groups + 1 + member];
      for (int i0 = tile_start(p, streamed.start); i0 < streamed.end; i0 += TILE) {
        __syncthreads();
        load_rows(sq, q, job.q, p, head, i0, streamed.end, dim);
        load_rows(so, dout, job.cells, p, head, i0, streamed.end, width, width);
        if (Y == 0) {
          int i = i0 + X;
          i64 cell = i < streamed.end ? at(job.cells, p.batch, p.segment, i, head) : 0;
          A own = i < streamed.end ? lse[cell] : (A)neg_inf();
          s_lse[X] = own;
          s_seen[X] = own == neg_inf() ? Range{0, 0} : visible_keys(job, p, i);
          s_delta[X] =
              i < streamed.end ? delta[at(job.delta, p.batch, p.segment, i, head)] : (A)0;
        }
        __syncthreads();
        A weight = 0, ds = 0;
        if (row < p.end && row >= s_seen[X].start && row < s_seen[X].end) {
          A derivative;
          const A s = score(
              job, p, head, i0 + X, row, dot(sk + Y * pitch, sq + X * pitch, dim), derivative);
          const A product = dot(sv + Y * value_pitch, so + X * value_pitch, width);
          const bool drops = dropped(job, p, head, i0 + X, row);
          weight = exp(s - s_lse[X]);
          ds = weight * score_gradient(job, drops, product, s_delta[X], derivative);
          weight = drops ? (A)-1 : weight * kept(job);
        }
        sp[Y * TILE + X] = weight; sd[Y * TILE + X] = ds;
        __syncwarp();
        #pragma unroll 1
        for (int i = 0; i < TILE; i++) {
          if (row >= p.end || row < s_seen[i].start || row >= s_seen[i].end) continue;
          touched = true;
          const A ds = sd[Y * TILE + i], weight = sp[Y * TILE + i], share = (A)job.gain * weight;
          const bool drops = MASKED && weight < 0;
          #pragma unroll
          for (int n = 0; n < COLUMNS; n++) {
            int c = min(X + n * TILE, dim), d = min(X + n * TILE, width);
            if (!drops) gv[n] += share * so[i * value_pitch + d];
            gk[n] += ds * sq[i * pitch + c];
          }
        }
        __syncwarp();
      }
    }
    if (touched) {
      i64 to = at(job.k, p.batch, p.segment, row, any),
          value = at(values(job), p.batch, p.segment, row, any);
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c < dim) dk[to + c] += (A)job.scale * gk[n];
        if (c < width) dv[value + c] += gv[n];
      }
    }
  }
}
