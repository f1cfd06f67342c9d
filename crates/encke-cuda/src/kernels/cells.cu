// Kernels on cells, at most one warp per cell: merging carries, finishing a softmax, delta.

DEV i64 first_warp() { return (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32; }
DEV i64 all_warps() { return (i64)gridDim.x * blockDim.x / 32; }

extern "C" __global__ void merge_cells(const A* from_acc, const A* from_m, const A* from_l,
    A* to_acc, A* to_m, A* to_l, const BlockParams block) {
  i64 cells = (i64)block.batch * block.segments * block.rows * block.heads;
  int lane = threadIdx.x % 32;
  for (i64 index = first_warp(); index < cells; index += all_warps()) {
    int head = index % block.heads; i64 rest = index / block.heads;
    int row = rest % block.rows; rest /= block.rows;
    int segment = rest % block.segments, batch = rest / block.segments;
    i64 source = at(block.from, batch, segment, row, head),
        target = at(block.to, batch, segment, row, head);
    A from_max = from_m[source], to_max = to_m[target],
      new_max = from_max > to_max ? from_max : to_max;
    if (from_max == neg_inf()) continue;           // an empty carry changes nothing
    A a = to_max == neg_inf() ? (A)0 : exp(to_max - new_max), b = exp(from_max - new_max);
    __syncwarp();
    for (i64 c = lane; c < block.width; c += 32) {
      A kept = to_max == neg_inf() ? (A)0 : a * to_acc[target * block.width + c];
      to_acc[target * block.width + c] = kept + b * from_acc[source * block.width + c];
    }
    if (lane == 0) {
      to_m[target] = new_max;
      to_l[target] = (to_max == neg_inf() ? (A)0 : a * to_l[target]) + b * from_l[source];
    }
  }
}

// ---- rows of a few 16-byte vectors: one lane per vector, several loads in flight, because memory
// latency dominates ----

#define UNROLL 4
// n if rows of `bytes` bytes are 2^n aligned vectors, at most one per lane of a warp; else -1.
DEV int log2_vectors(i64 bytes, u64 addresses) {
  const i64 pieces = bytes / 16;
  return bytes % 16 == 0 && pieces > 0 && pieces <= 32 && (pieces & (pieces - 1)) == 0 &&
                 addresses % 16 == 0
             ? __ffs((int)pieces) - 1
             : -1;
}
struct __align__(16) SumVector { A x[16 / sizeof(A)]; };
struct __align__(16) InputVector { T x[16 / sizeof(T)]; };
struct __align__(16 / sizeof(A) * sizeof(T)) OutputVector { T x[16 / sizeof(A)]; };

// As the attention kernels of the type finish a row: those with tensor cores multiply it by a
// factor.
DEV T normalized(A acc, A l, A gain) {
  T x;
  const A scaled = sizeof(T) == 2 ? acc * (gain / l) : gain * (acc / l);
  narrow(l == 0 ? (A)0 : scaled, x);
  return x;
}
DEV float sum_of(float x, float y) { return __fadd_rn(x, y); }
DEV double sum_of(double x, double y) { return x + y; }
DEV A lse_of(A m, A l) { return l == 0 ? (A)neg_inf() : sum_of(m, log(l)); }

DEV void finish_vectors(const SumVector* acc, const A* m, const A* l, OutputVector* out, A* lse,
    i64 cells, int shift, A gain) {
  const i64 step = (i64)gridDim.x * blockDim.x, all = cells << shift;
  for (i64 from = blockIdx.x * (i64)blockDim.x + threadIdx.x; from < all; from += UNROLL * step) {
    SumVector x[UNROLL]; A sum[UNROLL];
    #pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (from + i * step < all) {
        x[i] = acc[from + i * step];
        sum[i] = l[(from + i * step) >> shift];
      }
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const i64 at = from + i * step, cell = at >> shift;
      if (at >= all) continue;
      OutputVector y;
      #pragma unroll
      for (int e = 0; e < 16 / sizeof(A); e++) y.x[e] = normalized(x[i].x[e], sum[i], gain);
      out[at] = y;
      if (cell << shift == at) lse[cell] = lse_of(m[cell], sum[i]);
    }
  }
}

extern "C" __global__ void finish_cells(
    const A* acc, const A* m, const A* l, T* out, A* lse, i64 cells, i64 dim, double gain) {
  const int shift = log2_vectors(dim * sizeof(A), (u64)acc | (u64)out);
  if (shift >= 0)
    return finish_vectors(
        (const SumVector*)acc, m, l, (OutputVector*)out, lse, cells, shift, (A)gain);
  int lane = threadIdx.x % 32;
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) {
    for (i64 c = lane; c < dim; c += 32)
      out[cell * dim + c] = normalized(acc[cell * dim + c], l[cell], (A)gain);
    if (lane == 0) lse[cell] = lse_of(m[cell], l[cell]);
  }
}

template <typename OUT>
DEV void delta_of_cell(const OUT* out, const T* dout, const A* dlse, A* delta, i64 cell, i64 dim) {
  const int lane = threadIdx.x % 32;
  A sum = 0;
  for (i64 c = lane; c < dim; c += 32)
    sum += widen(out[cell * dim + c]) * widen(dout[cell * dim + c]);
  for (int x = 16; x > 0; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
  if (lane == 0) delta[cell] = dlse ? sum - dlse[cell] : sum;
}

DEV void delta_of_vectors(const InputVector* out, const InputVector* dout, const A* dlse, A* delta,
    i64 cells, int shift) {
  const int lane = threadIdx.x % 32;
  const i64 step = (i64)gridDim.x * blockDim.x, all = cells << shift;
  for (i64 from = blockIdx.x * (i64)blockDim.x + threadIdx.x; from - lane < all;
      from += UNROLL * step) {
    InputVector x[UNROLL], y[UNROLL];
    #pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (from + i * step < all) {
        x[i] = out[from + i * step];
        y[i] = dout[from + i * step];
      }
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const i64 at = from + i * step, cell = at >> shift;
      A sum = 0;
      if (at < all)
        #pragma unroll
        for (int e = 0; e < 16 / sizeof(T); e++) sum += widen(x[i].x[e]) * widen(y[i].x[e]);
      for (int distance = 1 << shift >> 1; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
      if (at < all && cell << shift == at) delta[cell] = dlse ? sum - dlse[cell] : sum;
    }
  }
}

extern "C" __global__ void delta_cells(
    const T* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  const int shift = log2_vectors(dim * sizeof(T), (u64)out | (u64)dout);
  if (shift >= 0)
    return delta_of_vectors(
        (const InputVector*)out, (const InputVector*)dout, dlse, delta, cells, shift);
  for (i64 cell = first_warp(); cell < cells; cell += all_warps())
    delta_of_cell(out, dout, dlse, delta, cell, dim);
}

// The same where `out` holds sums that were not rounded yet.
extern "C" __global__ void delta_of_sums(
    const A* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  for (i64 cell = first_warp(); cell < cells; cell += all_warps())
    delta_of_cell(out, dout, dlse, delta, cell, dim);
}
