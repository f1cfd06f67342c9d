// The row generator and the checksum kernel on the CPU model: writes rows to a file and their sums
// to standard output. `tests/emulated_rows.rs` compares both with the host's. Arguments: file,
// batch entry, first token, stride, tokens, then number and key of each head.
#include "emu.h"
#define __shared__ static   // one block runs at a time
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
#include "../src/kernels/common.cuh"

// On the GPU, conversions are instructions.
#if defined(T_F64)
typedef double T;
#elif defined(T_F32)
typedef float T;
#else
struct T { u16 bits; };
static inline void narrow(float x, T& to) { to.bits = emu::narrow(x); }
static inline float widen(T x) { return emu::widen(x.bits); }
#endif
static inline void narrow(float x, float& to) { to = x; }
static inline void narrow(float x, double& to) { to = x; }
static inline double widen(double x) { return x; }
static inline float widen(float x) { return x; }
#include "../src/kernels/vector8.cuh"
#include "../src/kernels/generator.cu"
#include "../src/kernels/checksum.cu"

int main(int count, char** arguments) {
  auto argument = [&](int i) { return strtoull(arguments[i], nullptr, 10); };
  if (count < 8 || count % 2) return 2;
  i64 first = argument(3), stride = argument(4), tokens = argument(5);
  u64 batch = argument(2);
  std::vector<u64> heads, keys;
  for (int i = 6; i < count; i += 2) {
    heads.push_back(argument(i));
    keys.push_back(argument(i + 1));
  }
  // Aligned like device memory, with a guard after the last row.
  i64 elements = tokens * (i64)heads.size() * DIM;
  std::unique_ptr<T, void (*)(void*)> rows(
      (T*)aligned_alloc(256, (elements * sizeof(T) + 511) / 256 * 256), free);
  memset((void*)(rows.get() + elements), 0x5a, 16);
  emu::launch(
      3, (int)heads.size(), 64, [&] { generate(rows.get(), keys.data(), first, stride, tokens); });
  for (int i = 0; i < 16; i++) if (((u8*)(rows.get() + elements))[i] != 0x5a) return 3;
  std::vector<Sums> sums(3 * heads.size());
  emu::launch(3, (int)heads.size(), 64,
      [&] { checksum(rows.get(), heads.data(), batch, first, stride, tokens, sums.data()); });
  FILE* file = fopen(arguments[1], "wb");
  if (!file || fwrite(rows.get(), sizeof(T), elements, file) != (size_t)elements || fclose(file))
    return 4;
  i64 total = 0, squares = 0;
  for (auto& s : sums) { total += s.signed_sum; squares += s.squares; }
  printf("%lld %lld\n", total, squares);
}
