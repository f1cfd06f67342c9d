// Fill, copy and add. Macros: FROM and TO, the types of the two sides.

extern "C" __global__ void fill(TO* to, i64 elements, double value) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements;
      i += (i64)gridDim.x * blockDim.x)
    narrow(value, to[i]);
}

// One warp per row, in the order of the source.
extern "C" __global__ void copy_rows(const FROM* from, TO* to, const BlockParams block, int add) {
  i64 warps = (i64)gridDim.x * blockDim.x / 32,
      rows = (i64)block.batch * block.segments * block.rows * block.heads;
  for (i64 index = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / 32; index < rows;
      index += warps) {
    int head = index % block.heads; i64 rest = index / block.heads;
    int row = rest % block.rows; rest /= block.rows;
    int segment = rest % block.segments, batch = rest / block.segments;
    const FROM* source = from + at(block.from, batch, segment, row, head);
    TO* target = to + at(block.to, batch, segment, row, head);
    for (i64 c = threadIdx.x % 32; c < block.width; c += 32) {
      // The sum of two f32 is exact in an f64, so it too is rounded once.
      if (add) narrow((double)widen(target[c]) + (double)widen(source[c]), target[c]);
      else narrow(widen(source[c]), target[c]);
    }
  }
}

// Contiguous elements: one thread per element.
extern "C" __global__ void copy_elements(const FROM* from, TO* to, i64 elements, int add) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements;
      i += (i64)gridDim.x * blockDim.x) {
    if (add) narrow((double)widen(to[i]) + (double)widen(from[i]), to[i]);
    else narrow(widen(from[i]), to[i]);
  }
}
