// What is done to cells, one warp a cell or less: merging carries, ending a softmax, delta.

DEV i64 first_warp() { return (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32; }
DEV i64 all_warps() { return (i64)gridDim.x * blockDim.x / 32; }

extern "C" __global__ void merge_cells(const A* from_acc, const A* from_m, const A* from_l, A* to_acc, A* to_m, A* to_l, const Block block) {
  i64 cells = (i64)block.batch * block.segments * block.rows * block.heads;
  int lane = threadIdx.x % 32;
  for (i64 index = first_warp(); index < cells; index += all_warps()) {
    int head = index % block.heads; i64 rest = index / block.heads;
    int row = rest % block.rows; rest /= block.rows;
    int segment = rest % block.segments, batch = rest / block.segments;
    i64 source = at(block.from, batch, segment, row, head), target = at(block.to, batch, segment, row, head);
    A theirs = from_m[source], ours = to_m[target], top = theirs > ours ? theirs : ours;
    if (theirs == neg_inf()) continue;           // an empty carry changes nothing
    A a = ours == neg_inf() ? (A)0 : exp(ours - top), b = exp(theirs - top);
    __syncwarp();
    for (i64 c = lane; c < block.width; c += 32) {
      A kept = ours == neg_inf() ? (A)0 : a * to_acc[target * block.width + c];
      to_acc[target * block.width + c] = kept + b * from_acc[source * block.width + c];
    }
    if (lane == 0) { to_m[target] = top; to_l[target] = (ours == neg_inf() ? (A)0 : a * to_l[target]) + b * from_l[source]; }
  }
}

// ---- rows that are a few whole pieces of 16 bytes: one lane a piece, several of them at a time, since it is waiting for memory that takes the time ----

#define TOGETHER 4
// Whether rows of so many bytes are 2^n pieces, at most one for each lane of a warp; then n, else -1.
DEV int pieces_of(i64 bytes, u64 addresses) {
  const i64 pieces = bytes / 16;
  return bytes % 16 == 0 && pieces > 0 && pieces <= 32 && (pieces & (pieces - 1)) == 0 && addresses % 16 == 0 ? __ffs((int)pieces) - 1 : -1;
}
struct __align__(16) Sums { A x[16 / sizeof(A)]; };
struct __align__(16) Piece { T x[16 / sizeof(T)]; };
struct __align__(16 / sizeof(A) * sizeof(T)) Ended { T x[16 / sizeof(A)]; };

DEV T ended(A acc, A l, A gain) { T x; narrow(l == 0 ? (A)0 : (A)(gain * (acc / l)), x); return x; }
DEV A lse_of(A m, A l) { return l == 0 ? (A)neg_inf() : m + log(l); }

DEV void finish_pieces(const Sums* acc, const A* m, const A* l, Ended* out, A* lse, i64 cells, int shift, A gain) {
  const i64 step = (i64)gridDim.x * blockDim.x, all = cells << shift;
  for (i64 from = blockIdx.x * (i64)blockDim.x + threadIdx.x; from < all; from += TOGETHER * step) {
    Sums x[TOGETHER]; A sum[TOGETHER];
    #pragma unroll
    for (int i = 0; i < TOGETHER; i++) if (from + i * step < all) { x[i] = acc[from + i * step]; sum[i] = l[(from + i * step) >> shift]; }
    #pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const i64 at = from + i * step, cell = at >> shift;
      if (at >= all) continue;
      Ended y;
      #pragma unroll
      for (int e = 0; e < 16 / sizeof(A); e++) y.x[e] = ended(x[i].x[e], sum[i], gain);
      out[at] = y;
      if (cell << shift == at) lse[cell] = lse_of(m[cell], sum[i]);
    }
  }
}

extern "C" __global__ void finish_cells(const A* acc, const A* m, const A* l, T* out, A* lse, i64 cells, i64 dim, double gain) {
  const int shift = pieces_of(dim * sizeof(A), (u64)acc | (u64)out);
  if (shift >= 0) return finish_pieces((const Sums*)acc, m, l, (Ended*)out, lse, cells, shift, (A)gain);
  int lane = threadIdx.x % 32;
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) {
    for (i64 c = lane; c < dim; c += 32) out[cell * dim + c] = ended(acc[cell * dim + c], l[cell], (A)gain);
    if (lane == 0) lse[cell] = lse_of(m[cell], l[cell]);
  }
}

template <typename OUT> DEV void delta_of_cell(const OUT* out, const T* dout, const A* dlse, A* delta, i64 cell, i64 dim) {
  const int lane = threadIdx.x % 32;
  A sum = 0;
  for (i64 c = lane; c < dim; c += 32) sum += widen(out[cell * dim + c]) * widen(dout[cell * dim + c]);
  for (int x = 16; x > 0; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
  if (lane == 0) delta[cell] = dlse ? sum - dlse[cell] : sum;
}

DEV void delta_of_pieces(const Piece* out, const Piece* dout, const A* dlse, A* delta, i64 cells, int shift) {
  const int lane = threadIdx.x % 32;
  const i64 step = (i64)gridDim.x * blockDim.x, all = cells << shift;
  for (i64 from = blockIdx.x * (i64)blockDim.x + threadIdx.x; from - lane < all; from += TOGETHER * step) {
    Piece x[TOGETHER], y[TOGETHER];
    #pragma unroll
    for (int i = 0; i < TOGETHER; i++) if (from + i * step < all) { x[i] = out[from + i * step]; y[i] = dout[from + i * step]; }
    #pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const i64 at = from + i * step, cell = at >> shift;
      A sum = 0;
      if (at < all)
        #pragma unroll
        for (int e = 0; e < 16 / sizeof(T); e++) sum += widen(x[i].x[e]) * widen(y[i].x[e]);
      for (int apart = 1 << shift >> 1; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      if (at < all && cell << shift == at) delta[cell] = dlse ? sum - dlse[cell] : sum;
    }
  }
}

extern "C" __global__ void delta_cells(const T* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  const int shift = pieces_of(dim * sizeof(T), (u64)out | (u64)dout);
  if (shift >= 0) return delta_of_pieces((const Piece*)out, (const Piece*)dout, dlse, delta, cells, shift);
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) delta_of_cell(out, dout, dlse, delta, cell, dim);
}

// The same where out is sums that were not rounded yet.
extern "C" __global__ void delta_of_sums(const A* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) delta_of_cell(out, dout, dlse, delta, cell, dim);
}
