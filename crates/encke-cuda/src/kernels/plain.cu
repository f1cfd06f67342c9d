// Attention without matrix units: any type, any stride, head dimensions up to 256. For f32 and f64, whose exactness no
// tensor core keeps. A block owns TILE rows and walks over the other side in tiles; thread (y, x) has the pair of its row
// y with the visiting row x, and then the columns x, x + TILE, ... of row y. Hidden pairs are skipped, not multiplied with
// zero, so that what is hidden cannot poison. Sums have one order: bitwise the same from run to run.
// Macros: T_*, COLUMNS (so many times TILE columns).
#define TILE 16
#define X ((int)threadIdx.x % TILE)
#define Y ((int)threadIdx.x / TILE)

// Larger of two, but a NaN wins: what is not a number must not look like an empty row.
DEV A larger(A a, A b) { return a > b || a != a ? a : b; }
DEV A row_max(A x) { for (int w = TILE / 2; w > 0; w >>= 1) x = larger(x, __shfl_xor_sync(~0u, x, w)); return x; }
DEV A row_sum(A x) { for (int w = TILE / 2; w > 0; w >>= 1) x += __shfl_xor_sync(~0u, x, w); return x; }

struct Place { int batch, segment, head, tile; };
DEV Place place(i64 index, int tiles, int heads, int segments) {
  Place p; p.tile = index % tiles; index /= tiles; p.head = index % heads; index /= heads;
  p.segment = index % segments; p.batch = index / segments; return p;
}

// TILE rows of one side into shared memory, widened; rows beyond `count` become zeros. `width`: numbers an address stands
// for, 1 for q, k and v, dim for dout, which lies at dim times the address of its cell.
DEV void bring(A* shared, const T* from, const Operand& o, Place p, int head, int first, int count, int dim, int width = 1) {
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

// Rows begin with nothing, or with what (acc, m, l) hold; they end as (out, lse), or are left in (acc, m, l).
extern "C" __global__ void __launch_bounds__(TILE * TILE, 1)
plain_forward(const T* q, const T* k, const T* v, const Job job, A* acc, A* m, A* l, T* out, A* lse, int begins, int ends) {
  extern __shared__ double raw[];
  int dim = job.dim, pitch = dim + 1, tiles = (job.queries + TILE - 1) / TILE;
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *sp = sv + TILE * pitch;
  i64 all = (i64)tiles * job.heads * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    Place p = place(index, tiles, job.heads, job.segments);
    int first = p.tile * TILE, row = first + Y, last = min(first + TILE, job.queries) - 1;
    int limit = row < job.queries ? visible(job, row) : 0, most = visible(job, last);
    i64 cell = row < job.queries ? at(job.cells, p.batch, p.segment, row, p.head) : 0;
    A top = neg_inf(), sum = 0, o[COLUMNS];
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) o[n] = 0;
    if (!begins && row < job.queries) {
      top = m[cell]; sum = l[cell];
      #pragma unroll
      for (int n = 0; n < COLUMNS; n++) { int c = X + n * TILE; if (c < dim) o[n] = acc[cell * dim + c]; }
    }
    __syncthreads();
    bring(sq, q, job.q, p, p.head, first, job.queries, dim);
    for (int j0 = 0; j0 < most; j0 += TILE) {
      __syncthreads();
      bring(sk, k, job.k, p, p.head, j0, job.keys, dim);
      bring(sv, v, job.k, p, p.head, j0, job.keys, dim);
      __syncthreads();
      bool seen = j0 + X < limit;
      A s = seen ? (A)job.scale * dot(sq + Y * pitch, sk + X * pitch, dim) : (A)neg_inf();
      A peak = larger(top, row_max(s));
      A shrink = top == neg_inf() ? (A)0 : exp(top - peak);
      A weight = seen ? exp(s - peak) : (A)0;
      A weights = row_sum(weight);
      sp[Y * TILE + X] = weight;
      __syncwarp();
      if (j0 < limit) {
        sum = sum * shrink + weights; top = peak;
        int count = min(TILE, limit - j0);
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
          int c = min(X + n * TILE, dim);          // the pad column stands in for what is not there
          A x = o[n] * shrink;
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
        if (ends) narrow(sum == 0 ? (A)0 : (A)((A)job.gain * (o[n] / sum)), out[cell * dim + c]);
        else acc[cell * dim + c] = o[n];
      }
      if (X == 0 && ends) lse[cell] = sum == 0 ? (A)neg_inf() : top + log(sum);
      if (X == 0 && !ends) { m[cell] = top; l[cell] = sum; }
    }
  }
}

// dq of TILE queries.
extern "C" __global__ void __launch_bounds__(TILE * TILE, 1)
plain_dq(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, A* dq, const Job job) {
  extern __shared__ double raw[];
  int dim = job.dim, pitch = dim + 1, tiles = (job.queries + TILE - 1) / TILE;
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *so = sv + TILE * pitch, *sp = so + TILE * pitch;
  i64 all = (i64)tiles * job.heads * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    Place p = place(index, tiles, job.heads, job.segments);
    int first = p.tile * TILE, row = first + Y, last = min(first + TILE, job.queries) - 1;
    i64 cell = row < job.queries ? at(job.cells, p.batch, p.segment, row, p.head) : 0;
    A own = row < job.queries ? lse[cell] : (A)neg_inf();
    int limit = own == neg_inf() ? 0 : visible(job, row), most = visible(job, last);
    A shift = limit ? delta[cell] : (A)0, g[COLUMNS];
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) g[n] = 0;
    __syncthreads();
    bring(sq, q, job.q, p, p.head, first, job.queries, dim);
    bring(so, dout, job.cells, p, p.head, first, job.queries, dim, dim);
    for (int j0 = 0; j0 < most; j0 += TILE) {
      __syncthreads();
      bring(sk, k, job.k, p, p.head, j0, job.keys, dim);
      bring(sv, v, job.k, p, p.head, j0, job.keys, dim);
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
      for (int n = 0; n < COLUMNS; n++) { int c = X + n * TILE; if (c < dim) dq[to + c] += (A)job.scale * g[n]; }
    }
  }
}

// dk and dv of TILE keys, over all heads that read them. `groups`: starts of each group in the list of heads, then that list.
extern "C" __global__ void __launch_bounds__(TILE * TILE, 1)
plain_dkv(const T* q, const T* k, const T* v, const T* dout, const A* lse, const A* delta, A* dk, A* dv, const i64* groups, int count_groups, const Job job) {
  extern __shared__ double raw[];
  __shared__ A s_lse[TILE], s_delta[TILE];
  __shared__ int s_limit[TILE];
  int dim = job.dim, pitch = dim + 1, tiles = (job.keys + TILE - 1) / TILE;
  A *sq = (A*)raw, *sk = sq + TILE * pitch, *sv = sk + TILE * pitch, *so = sv + TILE * pitch, *sp = so + TILE * pitch, *sd = sp + TILE * TILE;
  i64 all = (i64)tiles * count_groups * job.segments * job.batch;
  for (i64 index = blockIdx.x; index < all; index += gridDim.x) {
    Place p = place(index, tiles, count_groups, job.segments);
    int first = p.tile * TILE, row = first + Y, group = p.head;
    int from = groups[group], until = groups[group + 1], any = groups[count_groups + 1 + from];
    A gk[COLUMNS], gv[COLUMNS]; bool touched = false;
    #pragma unroll
    for (int n = 0; n < COLUMNS; n++) gk[n] = gv[n] = 0;
    __syncthreads();
    bring(sk, k, job.k, p, any, first, job.keys, dim);
    bring(sv, v, job.k, p, any, first, job.keys, dim);
    for (int member = from; member < until; member++) {
      int head = groups[count_groups + 1 + member];
      for (int i0 = first_query(job, first) / TILE * TILE; i0 < job.queries; i0 += TILE) {
        __syncthreads();
        bring(sq, q, job.q, p, head, i0, job.queries, dim);
        bring(so, dout, job.cells, p, head, i0, job.queries, dim, dim);
        if (Y == 0) {
          int i = i0 + X; i64 cell = i < job.queries ? at(job.cells, p.batch, p.segment, i, head) : 0;
          A own = i < job.queries ? lse[cell] : (A)neg_inf();
          s_lse[X] = own; s_limit[X] = own == neg_inf() ? 0 : visible(job, i); s_delta[X] = i < job.queries ? delta[cell] : (A)0;
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
