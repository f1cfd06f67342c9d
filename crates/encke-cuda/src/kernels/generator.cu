// Generates rows of a sequence that is never stored: each element is a function of seed, tensor,
// batch entry, head, token and channel. The same function as `encke_ring::out_of_core::Generator`,
// bit for bit: 64-bit row keys, and a 32-bit hash of the channel under them. The host mixes
// everything but the token: `keys` holds one key per head. Macros: T_* (storage type), DIM
// (elements of a row).
#define VECTORS ((DIM + 7) / 8)

// The finalizer of SplitMix64, moved off its fixed point at 0.
DEV u64 mix(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// An element with mean 0 and variance 1, uniform in +-sqrt(3).
DEV float element(u32 low, u32 high, u32 channel) {
  const float unit = 1.7320508f / 2147483648.0f;
  u32 h = low + channel * 0x9e3779b9u;
  h = (h ^ (h >> 16)) * 0x21f0aaadu ^ high;
  h = (h ^ (h >> 15)) * 0xd35a2d97u;
  return (float)(int)(h ^ (h >> 15)) * unit;
}

// Tokens first, first + stride, ... of the heads with keys, as [tokens, heads, DIM]. blockIdx.y is
// the head, and one thread generates eight elements: neighbours write one line, and all divisors
// are constants.
extern "C" __global__ void generate(T* to, const u64* keys, i64 first, i64 stride, i64 tokens) {
  u64 head = keys[blockIdx.y];
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < tokens * VECTORS;
      i += (i64)gridDim.x * blockDim.x) {
    i64 token = i / VECTORS;
    int channel = (int)(i % VECTORS) * 8;
    u64 key = mix(head ^ mix((u64)(first + token * stride)));
    u32 low = (u32)key, high = (u32)(key >> 32);
    T* row = to + (token * gridDim.y + blockIdx.y) * DIM + channel;
    Vector8 vector;
    #pragma unroll
    for (int c = 0; c < 8; c++) narrow(element(low, high, channel + c), vector.x[c]);
#if DIM % 8 == 0
    *(Vector8*)row = vector;
#else
    for (int c = 0; c < 8 && channel + c < DIM; c++) row[c] = vector.x[c];
#endif
  }
}
