// The CPU form of `src/kernels/mma.cuh`, on the fibers of `emu.h`: ldmatrix and mma.sync of a warp,
// and asynchronous copies.
//
// A copy may complete at any moment between its issue and the wait, so its target is filled with
// NaN at once and with the data only at the wait: a read in between gets wrong results.
#pragma once
#include "emu.h"

namespace emu {
struct Copy { u32 to, bytes; const void* from; bool real; };
inline std::vector<Copy> copies[1024];
inline std::vector<size_t> copy_groups[1024];   // copies of each group, in order
static inline void copy(u32 to, const void* from, u32 bytes, bool real) {
  if (to % bytes || (real && (u64)from % bytes)) fail("a copy that is not aligned", to);
  memset(at(to, bytes), 0xff, bytes);
  copies[threadIdx.x].push_back({to, bytes, from, real});
}
// Words that the lanes of a warp exchange. Two buffers alternate: a lane overwrites one only after
// all lanes have reached the next exchange, so one barrier per exchange is enough.
struct LaneWords { u32 arguments[6]; };
inline LaneWords lane_words[2][1024]; inline int parity[1024];
static inline const LaneWords* exchange(const LaneWords& own) {
  int t = threadIdx.x, now = parity[t] ^= 1;
  lane_words[now][t] = own;
  __syncwarp();
  return &lane_words[now][t & ~31];
}
// Conversion by table: otherwise half of the time would be spent in conversions.
static inline const float* widened() {
  static const std::vector<float> table = [] {
    std::vector<float> all(65536);
    for (u32 x = 0; x < 65536; x++) all[x] = widen((u16)x);
    return all;
  }();
  return table.data();
}
}  // namespace emu

static inline u32 shared_base() { return emu::BASE; }
static inline void store_shared(u32 to, u16 x) { memcpy(emu::at(to, 2), &x, 2); }
static inline void copy16(u32 to, const void* from, bool real) { emu::copy(to, from, 16, real); }
static inline void copy4(u32 to, const void* from, bool real) { emu::copy(to, from, 4, real); }
namespace emu {
static inline void complete_copies(size_t count) {
  auto& all = copies[threadIdx.x];
  for (size_t i = 0; i < count; i++) {
    const Copy& x = all[i];
    if (x.real) memcpy(at(x.to, x.bytes), x.from, x.bytes);
    else memset(at(x.to, x.bytes), 0, x.bytes);
  }
  all.erase(all.begin(), all.begin() + count);
}
}  // namespace emu
static inline void copies_done() {
  emu::complete_copies(emu::copies[threadIdx.x].size());
  emu::copy_groups[threadIdx.x].clear();
}
static inline void commit_copies() {
  auto& groups = emu::copy_groups[threadIdx.x]; size_t before = 0;
  for (size_t count : groups) before += count;
  groups.push_back(emu::copies[threadIdx.x].size() - before);
}
template <int PENDING> static inline void copies_done_but() {
  auto& groups = emu::copy_groups[threadIdx.x]; size_t count = 0, done = 0;
  for (; done + PENDING < groups.size(); done++) count += groups[done];
  groups.erase(groups.begin(), groups.begin() + done);
  emu::complete_copies(count);
}
static inline int __syncthreads_or(int x) {
  static int any[2]; static long uses[1024];
  int now = uses[threadIdx.x]++ & 1; any[now] |= x != 0;
  __syncthreads();
  int result = any[now];
  __syncthreads();   // all threads have read it
  any[now] = 0;
  return result;
}
static inline void ldmatrix(u32 (&x)[4], u32 row) {
  if (row % 16) emu::fail("a matrix row that is not aligned", row);
  int lane = threadIdx.x % 32; const emu::LaneWords* all = emu::exchange({{row}});
  for (int m = 0; m < 4; m++)
    memcpy(&x[m], emu::at(all[8 * m + lane / 4].arguments[0] + lane % 4 * 4, 4), 4);
}
static inline void ldmatrix_transposed(u32 (&x)[4], u32 row) {
  if (row % 16) emu::fail("a matrix row that is not aligned", row);
  int lane = threadIdx.x % 32; const emu::LaneWords* all = emu::exchange({{row}});
  for (int m = 0; m < 4; m++) {
    u16 pair[2];
    for (int e = 0; e < 2; e++)
      memcpy(&pair[e], emu::at(all[8 * m + lane % 4 * 2 + e].arguments[0] + lane / 4 * 2, 2), 2);
    memcpy(&x[m], pair, 4);
  }
}
__attribute__((noinline)) static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = threadIdx.x % 32;
  const emu::LaneWords* all = emu::exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const float* wide = emu::widened();
  for (int i = 0; i < 4; i++) {
    int row = lane / 4, column = lane % 4 * 2 + i % 2, half = i / 2; float sum = 0;
    for (int k = 0; k < 16; k++) {
      u32 x = all[row * 4 + k % 8 / 2].arguments[half + 2 * (k / 8)],
          y = all[column * 4 + k % 8 / 2].arguments[4 + k / 8];
      sum += wide[(u16)(x >> (16 * (k % 2)))] * wide[(u16)(y >> (16 * (k % 2)))];
    }
    d[i] += sum;
  }
}
