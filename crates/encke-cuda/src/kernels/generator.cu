// Rows of a sequence that is never stored, made where they are needed: each number is a function of seed, tensor, batch
// entry, head, token and channel, and of nothing else. The same function as the generator of the simulator's streams, bit
// for bit: 64-bit keys of rows, and a 32-bit hash of the channel under them.
// What does not depend on the token is mixed on the host: `keys` holds one for each head.
// Macros: T_* (what is stored), DIM (numbers in a row).
#define EIGHTS ((DIM + 7) / 8)

// The finaliser of SplitMix64, moved off its fixed point at 0.
DEV u64 mix(u64 x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A number with mean 0 and variance 1, evenly spread over +-sqrt(3).
DEV float number(u32 low, u32 high, u32 channel) {
  const float unit = 1.7320508f / 2147483648.0f;
  u32 h = low + channel * 0x9e3779b9u;
  h = (h ^ (h >> 16)) * 0x21f0aaadu ^ high;
  h = (h ^ (h >> 15)) * 0xd35a2d97u;
  return (float)(int)(h ^ (h >> 15)) * unit;
}

// Tokens first, first + stride, ... of the heads that have keys, as [tokens, heads, DIM]. blockIdx.y is the head, and one
// thread makes eight numbers: neighbours write one line, and nothing is divided but by constants.
extern "C" __global__ void generate(T* to, const u64* keys, i64 first, i64 stride, i64 tokens) {
  u64 head = keys[blockIdx.y];
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < tokens * EIGHTS; i += (i64)gridDim.x * blockDim.x) {
    i64 token = i / EIGHTS;
    int channel = (int)(i % EIGHTS) * 8;
    u64 key = mix(head ^ mix((u64)(first + token * stride)));
    u32 low = (u32)key, high = (u32)(key >> 32);
    T* row = to + (token * gridDim.y + blockIdx.y) * DIM + channel;
    Eight eight;
    #pragma unroll
    for (int c = 0; c < 8; c++) narrow(number(low, high, channel + c), eight.x[c]);
#if DIM % 8 == 0
    *(Eight*)row = eight;
#else
    for (int c = 0; c < 8 && channel + c < DIM; c++) row[c] = eight.x[c];
#endif
  }
}
