// Fill, copy and add. Macros: FROM and TO, the types of the two sides.

extern "C" __global__ void fill(TO* to, i64 elements, double value) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements;
      i += (i64)gridDim.x * blockDim.x)
    narrow(value, to[i]);
}

// Eight elements that are loaded or stored at once, where they are aligned for it.
template <class E> struct __align__(16) Eight { E x[8]; };
DEV bool aligned(const FROM* from, const TO* to) { return (((u64)from | (u64)to) & 15) == 0; }

DEV void copy_element(const FROM& from, TO& to, int add) {
  // The sum of two f32 is exact in an f64, so it too is rounded once.
  if (add) narrow((double)widen(to) + (double)widen(from), to);
  else narrow(widen(from), to);
}

// In the order of the source, as many rows per warp as have eight elements for each lane.
extern "C" __global__ void copy_rows(const FROM* from, TO* to, const BlockParams block, int add) {
  const i64 width = block.width, eights = width / 8;
  const int lanes = eights >= 32 ? 32 : eights >= 16 ? 16 : eights >= 8 ? 8 : 4;
  const int lane = threadIdx.x % lanes;
  const i64 step = (i64)gridDim.x * blockDim.x / lanes,
            rows = (i64)block.batch * block.segments * block.rows * block.heads;
  for (i64 index = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / lanes; index < rows;
      index += step) {
    int head = index % block.heads; i64 rest = index / block.heads;
    int row = rest % block.rows; rest /= block.rows;
    int segment = rest % block.segments, batch = rest / block.segments;
    const FROM* source = from + at(block.from, batch, segment, row, head);
    TO* target = to + at(block.to, batch, segment, row, head);
    i64 c = 8 * lane;
    if (aligned(source, target))
      for (; c + 8 <= width; c += 8 * lanes) {
        const Eight<FROM> x = *(const Eight<FROM>*)(source + c);
        Eight<TO> y;
        if (add) y = *(const Eight<TO>*)(target + c);
        #pragma unroll
        for (int i = 0; i < 8; i++) copy_element(x.x[i], y.x[i], add);
        *(Eight<TO>*)(target + c) = y;
      }
    for (; c < width; c += 8 * lanes)
      for (i64 i = c; i < width && i < c + 8; i++) copy_element(source[i], target[i], add);
  }
}

// Contiguous elements: one thread per element.
extern "C" __global__ void copy_elements(const FROM* from, TO* to, i64 elements, int add) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < elements;
      i += (i64)gridDim.x * blockDim.x) {
    copy_element(from[i], to[i], add);
  }
}
