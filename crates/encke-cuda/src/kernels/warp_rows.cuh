// Rows of a few 16-byte vectors, shared by the lanes of a warp: one lane per vector, several loads
// in flight, because memory latency dominates. A warp has whole rows only.

struct __align__(16) SumVector { A x[16 / sizeof(A)]; };
struct __align__(16) InputVector { T x[16 / sizeof(T)]; };
struct __align__(16 / sizeof(A) * sizeof(T)) OutputVector { T x[16 / sizeof(A)]; };

DEV i64 first_warp() { return (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32; }
DEV i64 all_warps() { return (i64)gridDim.x * blockDim.x / 32; }

struct WarpRows {
  int pieces;       // vectors of a row; 0 if rows are no aligned vectors, or more than 32
  int rows;         // rows of a warp: 1 if they are no vectors
  int row, piece;   // of this lane: piece 0 writes what a row has once
  DEV bool used() const { return row < rows; }
  // The row of this lane among all rows, if its warp is the one with this number.
  DEV i64 at(i64 warp) const { return warp * rows + row; }
};
DEV WarpRows warp_rows(i64 bytes, u64 addresses) {
  const int lane = threadIdx.x % 32, pieces = (int)(bytes / 16);
  if (bytes % 16 || bytes == 0 || bytes > 512 || addresses % 16) return {0, 1, 0, lane};
  return {pieces, 32 / pieces, lane / pieces, lane % pieces};
}
// The sum over the lanes of a row, on each of them.
DEV A sum_of_row(const WarpRows& w, A x) {
  if ((w.pieces & (w.pieces - 1)) == 0) {
    for (int distance = w.pieces / 2; distance > 0; distance /= 2)
      x += __shfl_xor_sync(~0u, x, distance);
    return x;
  }
  A sum = 0;
  for (int i = 0; i < w.pieces; i++) sum += __shfl_sync(~0u, x, w.row * w.pieces + i);
  return sum;
}
DEV A product_of(const InputVector& x, const InputVector& y) {
  A sum = 0;
  #pragma unroll
  for (int e = 0; e < 16 / sizeof(T); e++) sum += widen(x.x[e]) * widen(y.x[e]);
  return sum;
}
// The product of two rows, by a whole warp; on each lane.
template <typename X>
DEV A product_of_rows(const X* x, const T* y, i64 dim) {
  A sum = 0;
  for (i64 c = threadIdx.x % 32; c < dim; c += 32) sum += widen(x[c]) * widen(y[c]);
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

#define UNROLL 4
// Calls done(index, cell, of(cell), out·dout) once for every index below `count` whose
// cell_of(index) is not negative, with the rows of that cell. A warp takes as many indices as it
// has rows in flight, one per lane: what is done once for an index is done for all of them at once.
template <typename CELL, typename OF, typename DONE>
DEV void each_product(const T* out, const T* dout, i64 dim, i64 count, const CELL& cell_of,
    const OF& of, const DONE& done) {
  const WarpRows w = warp_rows(dim * sizeof(T), (u64)out | (u64)dout);
  const i64 step = all_warps();
  if (!w.pieces) {
    for (i64 index = first_warp(); index < count; index += step) {
      const i64 cell = cell_of(index);
      if (cell < 0) continue;
      const A product = product_of_rows(out + cell * dim, dout + cell * dim, dim);
      if (w.piece == 0) done(index, cell, of(cell), product);
    }
    return;
  }
  const int lane = threadIdx.x % 32, steps = min(UNROLL, 32 / w.rows), indices = steps * w.rows;
  for (i64 warp = first_warp(); warp * indices < count; warp += step) {
    const i64 index = warp * indices + lane,
              cell = lane < indices && index < count ? cell_of(index) : -1;
    InputVector x[UNROLL], y[UNROLL];
    bool real[UNROLL];
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      if (i >= steps) break;
      const i64 own = __shfl_sync(~0u, cell, i * w.rows + w.row);
      real[i] = w.used() && own >= 0;
      if (!real[i]) continue;
      x[i] = ((const InputVector*)out)[own * w.pieces + w.piece];
      y[i] = ((const InputVector*)dout)[own * w.pieces + w.piece];
    }
    decltype(of(0)) more;
    if (cell >= 0) more = of(cell);
    A product = 0;
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      if (i >= steps) break;
      const A sum = sum_of_row(w, real[i] ? product_of(x[i], y[i]) : (A)0),
              own = __shfl_sync(~0u, sum, lane % w.rows * w.pieces);
      if (lane / w.rows == i) product = own;
    }
    if (cell >= 0) done(index, cell, more, product);
  }
}
