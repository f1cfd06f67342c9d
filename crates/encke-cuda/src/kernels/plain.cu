// Attention without tensor cores: any type, any stride, head dimensions up to 256. For f32 and f64,
// whose precision tensor cores do not keep. A block has TILE rows and loops over the other operand
// in tiles; thread (y, x) computes the pair of row y and streamed row x, and then columns x, x +
// TILE, ... of row y. Masked pairs are skipped rather than multiplied by zero, so that hidden NaNs
// have no effect. Sums have a fixed order: results are bitwise repeatable. Macros: T_*, COLUMNS
// (columns per thread).
#define TILE 16
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

struct TileOrigin { int batch, segment, head, tile; };
DEV TileOrigin tile_origin(i64 index, int tiles, int heads, int segments) {
  TileOrigin p; p.tile = index % tiles; index /= tiles; p.head = index % heads; index /= heads;
  p.segment = index % segments; p.batch = index / segments; return p;
}

// Loads TILE rows to shared memory, widened; rows beyond `count` become zeros. `width`: elements
// per address unit, 1 for q, k and v, dim for dout, which lies at dim times the address of its
// cell.
DEV void load_rows(A* shared, const T* from, const OperandParams& o, TileOrigin p, int head,
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
    const T* v, const JobParams job, A* acc, A* m, A* l, T* out, A* lse, int starts, int finishes) {
  extern __shared__ double raw[];
  int dim = job.dim, pitch = dim + 1, tiles = (job.queries + TILE - 1) / TILE;
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *sp = sv + TILE * pitch;
  i64 all = (i64)tiles * job.heads * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    TileOrigin p = tile_origin(index, tiles, job.heads, job.segments);
    int first = p.tile * TILE, row = first + Y, last = min(first + TILE, job.queries) - 1;
    int limit = row < job.queries ? visible(job, row) : 0, most = visible(job, last);
    i64 cell = row < job.queries ? at(job.cells, p.batch, p.segment, row, p.head) : 0;
    A running_max = neg_inf(), sum = 0, o[COLUMNS];
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) o[n] = 0;
    if (!starts && row < job.queries) {
      running_max = m[cell]; sum = l[cell];
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c < dim) o[n] = acc[cell * dim + c];
      }
    }
    __syncthreads();
    load_rows(sq, q, job.q, p, p.head, first, job.queries, dim);
    for (int j0 = 0; j0 < most; j0 += TILE) {
      __syncthreads();
      load_rows(sk, k, job.k, p, p.head, j0, job.keys, dim);
      load_rows(sv, v, job.k, p, p.head, j0, job.keys, dim);
      __syncthreads();
      bool seen = j0 + X < limit;
      A s = seen ? (A)job.scale * dot(sq + Y * pitch, sk + X * pitch, dim) : (A)neg_inf();
      A new_max = larger(running_max, row_max(s));
      A rescale = running_max == neg_inf() ? (A)0 : exp(running_max - new_max);
      A weight = seen ? exp(s - new_max) : (A)0;
      A weights = row_sum(weight);
      sp[Y * TILE + X] = weight;
      __syncwarp();
      if (j0 < limit) {
        sum = sum * rescale + weights; running_max = new_max;
        int count = min(TILE, limit - j0);
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          int c = min(X + n * TILE, dim);          // the padding column stands in for missing ones
          A x = o[n] * rescale;
          #pragma unroll 1
          for (int j = 0; j < count; j++) x += sp[Y * TILE + j] * sv[j * pitch + c];
          o[n] = x;
        }
      }
      __syncwarp();
    }
    if (row < job.queries) {
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c >= dim) continue;
        if (finishes)
          narrow(sum == 0 ? (A)0 : (A)((A)job.gain * (o[n] / sum)), out[cell * dim + c]);
        else acc[cell * dim + c] = o[n];
      }
      if (X == 0 && finishes) lse[cell] = sum == 0 ? (A)neg_inf() : running_max + log(sum);
      if (X == 0 && !finishes) { m[cell] = running_max; l[cell] = sum; }
    }
  }
}

// dq of TILE queries.
extern "C" __global__ void __launch_bounds__(TILE* TILE, 1) plain_dq(const T* q, const T* k,
    const T* v, const T* dout, const A* lse, const A* delta, A* dq, const JobParams job) {
  extern __shared__ double raw[];
  int dim = job.dim, pitch = dim + 1, tiles = (job.queries + TILE - 1) / TILE;
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *so = sv + TILE * pitch,
    *sp = so + TILE * pitch;
  i64 all = (i64)tiles * job.heads * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    TileOrigin p = tile_origin(index, tiles, job.heads, job.segments);
    int first = p.tile * TILE, row = first + Y, last = min(first + TILE, job.queries) - 1;
    i64 cell = row < job.queries ? at(job.cells, p.batch, p.segment, row, p.head) : 0;
    A own = row < job.queries ? lse[cell] : (A)neg_inf();
    int limit = own == neg_inf() ? 0 : visible(job, row), most = visible(job, last);
    A shift = limit ? delta[cell] : (A)0, g[COLUMNS];
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) g[n] = 0;
    __syncthreads();
    load_rows(sq, q, job.q, p, p.head, first, job.queries, dim);
    load_rows(so, dout, job.cells, p, p.head, first, job.queries, dim, dim);
    for (int j0 = 0; j0 < most; j0 += TILE) {
      __syncthreads();
      load_rows(sk, k, job.k, p, p.head, j0, job.keys, dim);
      load_rows(sv, v, job.k, p, p.head, j0, job.keys, dim);
      __syncthreads();
      A ds = 0;
      if (j0 + X < limit) {
        A weight = exp((A)job.scale * dot(sq + Y * pitch, sk + X * pitch, dim) - own);
        ds = weight * ((A)job.gain * dot(so + Y * pitch, sv + X * pitch, dim) - shift);
      }
      sp[Y * TILE + X] = ds;
      __syncwarp();
      int count = min(TILE, limit - j0);
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = min(X + n * TILE, dim);
        #pragma unroll 1
        for (int j = 0; j < count; j++) g[n] += sp[Y * TILE + j] * sk[j * pitch + c];
      }
      __syncwarp();
    }
    if (limit) {
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
        A* dk, A* dv, const i64* groups, int count_groups, const JobParams job) {
  extern __shared__ double raw[];
  __shared__ A s_lse[TILE], s_delta[TILE];
  __shared__ int s_limit[TILE];
  int dim = job.dim, pitch = dim + 1, tiles = (job.keys + TILE - 1) / TILE;
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *so = sv + TILE * pitch,
    *sp = so + TILE * pitch, *sd = sp + TILE * TILE;
  i64 all = (i64)tiles * count_groups * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    TileOrigin p = tile_origin(index, tiles, count_groups, job.segments);
    int first = p.tile * TILE, row = first + Y, group = p.head;
    int from = groups[group], until = groups[group + 1], any = groups[count_groups + 1 + from];
    A gk[COLUMNS], gv[COLUMNS]; bool touched = false;
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) gk[n] = gv[n] = 0;
    __syncthreads();
    load_rows(sk, k, job.k, p, any, first, job.keys, dim);
    load_rows(sv, v, job.k, p, any, first, job.keys, dim);
    for (int member = from; member < until; member++) {
      int head = groups[count_groups + 1 + member];
      for (int i0 = first_query(job, first) / TILE * TILE; i0 < job.queries; i0 += TILE) {
        __syncthreads();
        load_rows(sq, q, job.q, p, head, i0, job.queries, dim);
        load_rows(so, dout, job.cells, p, head, i0, job.queries, dim, dim);
        if (Y == 0) {
          int i = i0 + X;
          i64 cell = i < job.queries ? at(job.cells, p.batch, p.segment, i, head) : 0;
          A own = i < job.queries ? lse[cell] : (A)neg_inf();
          s_lse[X] = own;
          s_limit[X] = own == neg_inf() ? 0 : visible(job, i);
          s_delta[X] = i < job.queries ? delta[cell] : (A)0;
        }
        __syncthreads();
        A weight = 0, ds = 0;
        if (row < job.keys && row < s_limit[X]) {
          weight = exp((A)job.scale * dot(sk + Y * pitch, sq + X * pitch, dim) - s_lse[X]);
          ds = weight * ((A)job.gain * dot(sv + Y * pitch, so + X * pitch, dim) - s_delta[X]);
        }
        sp[Y * TILE + X] = weight; sd[Y * TILE + X] = ds;
        __syncwarp();
        #pragma unroll 1
        for (int i = 0; i < TILE; i++) {
          if (row >= job.keys || row >= s_limit[i]) continue;
          touched = true;
          A weight = (A)job.gain * sp[Y * TILE + i], ds = sd[Y * TILE + i];
          #pragma unroll
          for (int n = 0; n < COLUMNS; n++) {
            int c = min(X + n * TILE, dim);
            gv[n] += weight * so[i * pitch + c]; gk[n] += ds * sq[i * pitch + c];
          }
        }
        __syncwarp();
      }
    }
    if (touched) {
      i64 to = at(job.k, p.batch, p.segment, row, any);
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        int c = X + n * TILE;
        if (c >= dim) continue;
        dk[to + c] += (A)job.scale * gk[n]; dv[to + c] += gv[n];
      }
    }
  }
}
