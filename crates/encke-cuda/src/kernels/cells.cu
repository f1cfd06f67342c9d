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

extern "C" __global__ void finish_cells(const A* acc, const A* m, const A* l, T* out, A* lse, i64 cells, i64 dim, double gain) {
  int lane = threadIdx.x % 32;
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) {
    A sum = l[cell];
    for (i64 c = lane; c < dim; c += 32) narrow(sum == 0 ? (A)0 : (A)((A)gain * (acc[cell * dim + c] / sum)), out[cell * dim + c]);
    if (lane == 0) lse[cell] = sum == 0 ? (A)neg_inf() : m[cell] + log(sum);
  }
}

// 16 bytes of a row.
struct __align__(16) Piece { T x[16 / sizeof(T)]; };

// delta where rows are a few whole pieces: one lane a piece, several of them at a time, since it is waiting for memory that takes the time.
DEV void delta_of_pieces(const Piece* out, const Piece* dout, const A* dlse, A* delta, i64 cells, int pieces) {
  const int together = 4, lane = threadIdx.x % 32;
  const i64 step = (i64)gridDim.x * blockDim.x, all = cells * pieces;
  for (i64 from = blockIdx.x * (i64)blockDim.x + threadIdx.x; from - lane < all; from += together * step) {
    Piece x[together], y[together];
    #pragma unroll
    for (int i = 0; i < together; i++)
      if (from + i * step < all) { x[i] = out[from + i * step]; y[i] = dout[from + i * step]; }
    #pragma unroll
    for (int i = 0; i < together; i++) {
      const i64 at = from + i * step;
      A sum = 0;
      if (at < all)
        #pragma unroll
        for (int e = 0; e < 16 / sizeof(T); e++) sum += widen(x[i].x[e]) * widen(y[i].x[e]);
      for (int apart = pieces / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      const i64 cell = at / pieces;
      if (at < all && lane % pieces == 0) delta[cell] = dlse ? sum - dlse[cell] : sum;
    }
  }
}

extern "C" __global__ void delta_cells(const T* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  const int lane = threadIdx.x % 32;
  const i64 pieces = dim * sizeof(T) / 16;
  if (pieces * 16 == dim * sizeof(T) && pieces <= 32 && (pieces & (pieces - 1)) == 0 && (((u64)out | (u64)dout) & 15) == 0)
    return delta_of_pieces((const Piece*)out, (const Piece*)dout, dlse, delta, cells, (int)pieces);
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) {
    A sum = 0;
    for (i64 c = lane; c < dim; c += 32) sum += widen(out[cell * dim + c]) * widen(dout[cell * dim + c]);
    for (int x = 16; x > 0; x >>= 1) sum += __shfl_xor_sync(~0u, sum, x);
    if (lane == 0) delta[cell] = dlse ? sum - dlse[cell] : sum;
  }
}
