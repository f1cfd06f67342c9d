// Kernels on cells, at most one warp per cell: merging carries, finishing a softmax, delta.

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

DEV void finish_vectors(const WarpRows& w, const SumVector* acc, const A* m, const A* l,
    OutputVector* out, A* lse, i64 cells, A gain) {
  const i64 step = all_warps();
  for (i64 warp = first_warp(); w.used() && w.at(warp) < cells; warp += UNROLL * step) {
    SumVector x[UNROLL]; A sum[UNROLL];
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const i64 cell = w.at(warp + i * step);
      if (cell >= cells) continue;
      x[i] = acc[cell * w.pieces + w.piece];
      sum[i] = l[cell];
    }
    #pragma unroll
    for (int i = 0; i < UNROLL; i++) {
      const i64 cell = w.at(warp + i * step);
      if (cell >= cells) continue;
      OutputVector y;
      #pragma unroll
      for (int e = 0; e < 16 / sizeof(A); e++) y.x[e] = normalized(x[i].x[e], sum[i], gain);
      out[cell * w.pieces + w.piece] = y;
      if (w.piece == 0) lse[cell] = lse_of(m[cell], sum[i]);
    }
  }
}

extern "C" __global__ void finish_cells(
    const A* acc, const A* m, const A* l, T* out, A* lse, i64 cells, i64 dim, double gain) {
  const WarpRows w = warp_rows(dim * sizeof(A), (u64)acc | (u64)out);
  if (w.pieces)
    return finish_vectors(
        w, (const SumVector*)acc, m, l, (OutputVector*)out, lse, cells, (A)gain);
  int lane = threadIdx.x % 32;
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) {
    for (i64 c = lane; c < dim; c += 32)
      out[cell * dim + c] = normalized(acc[cell * dim + c], l[cell], (A)gain);
    if (lane == 0) lse[cell] = lse_of(m[cell], l[cell]);
  }
}

extern "C" __global__ void delta_cells(
    const T* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  each_product(out, dout, dim, cells, [](i64 index) { return index; },
      [=](i64 cell) { return dlse ? dlse[cell] : (A)0; },
      [=](i64, i64 cell, A of_lse, A product) { delta[cell] = product - of_lse; });
}

// The same where `out` holds sums that were not rounded yet.
extern "C" __global__ void delta_of_sums(
    const A* out, const T* dout, const A* dlse, A* delta, i64 cells, i64 dim) {
  for (i64 cell = first_warp(); cell < cells; cell += all_warps()) {
    const A sum = product_of_rows(out + cell * dim, dout + cell * dim, dim);
    if (threadIdx.x % 32 == 0) delta[cell] = dlse ? sum - dlse[cell] : sum;
  }
}
