// A CPU model of the Hopper instructions in `src/kernels/hopper.cuh`, so that the kernels run
// unchanged and are checked without a GPU. It models values, barriers and the layout of shared
// memory (TMA's swizzle, wgmma's descriptors); not timing, and not the memory order of plain
// writes.
//
// The decision that shaped it: effects that the hardware may delay happen late or at a random
// moment. A thread is a fiber that runs until it must wait; a TMA load completes some time after
// its issue; a wgmma is computed at the wait that needs it. A buffer released too early, an
// accumulator read too early or a missing wait therefore shows as wrong values, and a deadlock ends
// with a list of what each warp waits for.
//
// EMU_SEED in the environment selects another order of fibers and loads.
#pragma once
// Where it is set by default, jumps between stacks are taken for mistakes.
#undef _FORTIFY_SOURCE
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>

#define EMULATED 1
#define __device__ static
#define __forceinline__ inline
#define DEV_MEMBER inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Dim3 { int x, y, z; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
using std::max; using std::min;
template <class To, class From> static inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __int_as_float(int x) { return bits_as<float>(x); }
static inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
static inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
static inline int __float_as_int(float x) { return bits_as<int>(x); }

namespace emu {

// ---- fibers ----
// What a fiber waits for: a counter that no longer has this value (or, for mbarriers, this parity).
struct Wait {
  const long* counter = nullptr;
  long value = 0;
  bool parity = false;
  const char* what = "";
};
struct Cta;
struct Fiber {
  ucontext_t context;
  bool begun = false;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  Cta* cta;
  Dim3 thread;
  bool done = false;
  Wait wait;
};

struct NamedBarrier { int arrived = 0; long generation = 0;
  bool hit(int expected) {
    if (++arrived < expected) return false;
    arrived = 0;
    generation++;
    return true;
  }
};
struct Mbarrier { long arrivals = 0, pending = 0, bytes = 0, phase = 0;
  void complete() { if (pending == 0 && bytes == 0) { phase++; pending = arrivals; } } };
struct Product {
  float* d;
  u32 a[4];
  u64 a_matrix, b_matrix;
  int keep, n;
  bool registers, a_across, b_across, negate;
};
struct Addition { float* to; u32 from, bytes; bool add; };   // or a plain copy

constexpr u32 MEMORY = 228 * 1024, BASE = 1024;   // addresses begin at BASE, so that 0 is invalid
struct Cta {
  u8* memory; Dim3 block;
  NamedBarrier named[16], warp[32], group[8];
  std::unordered_map<u32, Mbarrier> barriers;
  std::vector<std::function<void()>> pending_loads;          // TMA loads in flight
  std::vector<Product> products[1024]; std::vector<int> groups[1024];
  std::vector<Addition> additions[1024];
  // `registers`: per thread, by warpgroup; 0 if it never changed them.
  u64 exchange[1024]; int registers[8] = {};
  Cta() {
    memory = (u8*)aligned_alloc(1024, MEMORY);
    memset(memory, 0xff, MEMORY);
  }   // NaN where nothing was written
  ~Cta() { free(memory); }
};
inline Cta* cta;
inline Fiber* running;
inline jmp_buf scheduler;
inline const std::function<void()>* body;
inline u64 chance = 0x9e3779b97f4a7c15ull;
static inline u32 draw() {
  chance = chance * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(chance >> 33);
}

[[noreturn]] static inline void fail(const char* what, u32 detail = 0) {
  fprintf(stderr, "EMULATOR: %s (%u) in thread %d of block %d\n", what, detail,
      running ? running->thread.x : -1, cta ? cta->block.x : -1);
  _Exit(8);
}
static inline u8* at(u32 address, u32 bytes = 1) {
  if (address < BASE || address + bytes > BASE + MEMORY)
    fail("shared memory out of bounds", address);
  return cta->memory + (address - BASE);
}
}  // namespace emu
inline Dim3 blockDim, gridDim, threadIdx, blockIdx;
namespace emu {
static inline bool ready(const Fiber& f) {
  if (f.done) return false;
  if (!f.wait.counter) return true;
  return f.wait.parity ? (*f.wait.counter & 1) != f.wait.value : *f.wait.counter != f.wait.value;
}
// Runs a fiber until it waits or is done. Contexts begin fibers and jumps resume them: a context
// saves the mask of signals, which takes longer than what most fibers do between two waits.
__attribute__((noinline)) static void resume(Fiber* f) {
  running = f;
  cta = f->cta;
  threadIdx = f->thread;
  blockIdx = cta->block;
  if (_setjmp(scheduler)) return;
  if (f->begun) _longjmp(f->here, 1);
  f->begun = true;
  setcontext(&f->context);
}
__attribute__((noinline)) static void suspend() {
  if (!_setjmp(running->here)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void wait(Wait w) {
  running->wait = w;
  if (ready(*running)) { running->wait.counter = nullptr; return; }
  suspend();
  running->wait.counter = nullptr;
}
static inline void start() {
  (*body)();
  running->done = true;
  suspend();
}

// Completes some loads, or all.
static inline bool complete_loads(Cta* c, bool all) {
  bool any = false; Cta* before = cta; cta = c;
  for (size_t i = 0; i < c->pending_loads.size();) {
    if (!all && draw() % 4) { i++; continue; }
    auto load = std::move(c->pending_loads[i]);
    c->pending_loads.erase(c->pending_loads.begin() + i);
    load();
    any = true;
  }
  cta = before; return any;
}
static inline void run(std::vector<std::unique_ptr<Cta>>& ctas, int threads) {
  std::vector<std::unique_ptr<Fiber>> fibers; const size_t stack = 256 * 1024;
  // Stacks of fibers that are done, whose pages the system need not clear again.
  static std::vector<std::unique_ptr<char[]>> stacks;
  for (auto& c : ctas) for (int t = 0; t < threads; t++) {
      auto f = std::make_unique<Fiber>();
      if (stacks.empty()) stacks.emplace_back(new char[stack]);
      f->stack = std::move(stacks.back());
      stacks.pop_back();
      f->cta = c.get();
      f->thread = {t, 0, 0};
      getcontext(&f->context);
      f->context.uc_stack.ss_sp = f->stack.get();
      f->context.uc_stack.ss_size = stack;
      f->context.uc_link = nullptr;  // a fiber that is done is not resumed
      makecontext(&f->context, (void (*)())start, 0);
      fibers.push_back(std::move(f));
  }
  size_t left = fibers.size();
  while (left) {
    bool moved = false; size_t n = fibers.size(), first = draw() % n, step = draw() % 2 ? 1 : n - 1;
    for (size_t i = 0, k = first; i < n; i++, k = (k + step) % n) {
      Fiber* f = fibers[k].get(); if (!ready(*f)) continue;
      resume(f); moved = true; left -= f->done;
    }
    for (auto& c : ctas) moved |= complete_loads(c.get(), false);
    if (!moved) for (auto& c : ctas) moved |= complete_loads(c.get(), true);
    if (!moved) {
      fprintf(stderr, "EMULATOR: deadlock\n");
      for (auto& f : fibers)
        if (!f->done && f->thread.x % 32 == 0)
          fprintf(stderr, "  block %d thread %d waits for %s\n", f->cta->block.x, f->thread.x,
              f->wait.what);
      _Exit(9);
    }
  }
  for (auto& f : fibers) stacks.push_back(std::move(f->stack));
  running = nullptr; cta = nullptr;
}
// Runs a grid, `resident` blocks at a time (0: all, for blocks that wait for one another).
static inline void launch(int blocks_x, int blocks_y, int threads,
    const std::function<void()>& kernel, int resident = 1) {
  if (const char* seed = getenv("EMU_SEED")) chance += strtoull(seed, nullptr, 10);
  blockDim = {threads, 1, 1}; gridDim = {blocks_x, blocks_y, 1}; body = &kernel;
  int all = blocks_x * blocks_y; if (!resident) resident = all;
  for (int first = 0; first < all; first += resident) {
    std::vector<std::unique_ptr<Cta>> ctas;
    for (int i = first; i < std::min(all, first + resident); i++) {
      ctas.push_back(std::make_unique<Cta>());
      ctas.back()->block = {i % blocks_x, i / blocks_x, 0};
    }
    run(ctas, threads);
    for (auto& c : ctas) {
      if (!c->pending_loads.empty()) fail("a load is never waited for");
      for (auto& g : c->groups) if (!g.empty()) fail("a wgmma was never waited for");
      int start = 65536 / threads / 8 * 8, asked = 0;
      for (int g = 0; g < threads / 128; g++)
        asked += 128 * (c->registers[g] ? c->registers[g] : start);
      if (asked > start * (threads / 128 * 128))
        fail("more registers raised than the block has: the GPU would wait forever", asked);
    }
  }
}

// ---- elements of the storage type ----
#ifdef T_F16
static inline u16 narrow(float x) { return bits_as<u16>((_Float16)x); }
static inline float widen(u16 x) { return (float)bits_as<_Float16>(x); }
#else
static inline u16 narrow(float x) {
  u32 u = bits_as<u32>(x);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline float widen(u16 x) { return bits_as<float>((u32)x << 16); }
#endif

// ---- tensor maps ----
struct Map {
  const u8* base;
  u64 extents[5], stride_bytes[5];
  u32 box[5];
};   // stride_bytes[0] is 2
static inline u32 swizzle(u32 address) { return address ^ (((address >> 7) & 7) << 4); }
static inline u64 element_at(u32 address) {
  u16 v;
  memcpy(&v, at(swizzle(address), 2), 2);
  return v;
}
static inline Mbarrier& barrier(u32 address) {
  auto found = cta->barriers.find(address);
  if (found == cta->barriers.end()) fail("a barrier that was never initialised", address);
  return found->second;
}
static inline void arrive(Mbarrier& b) {
  if (--b.pending < 0) fail("too many arrivals");
  b.complete();
}
}  // namespace emu

struct TensorMap { u64 opaque[16]; };
// The map of an operand: (columns, rows, heads, segments, batch), strides in elements, a box of 64
// columns and `box_rows` rows.
static inline TensorMap tensor_map(const void* base, u64 columns, u64 rows, u64 heads, u64 segments,
    u64 batch, u64 row, u64 head, u64 segment, u64 entry, u32 box_rows) {
  TensorMap m{};
  m.opaque[0] = (u64) new emu::Map{(const u8*)base, {columns, rows, heads, segments, batch},
      {2, row * 2, head * 2, segment * 2, entry * 2}, {64, box_rows, 1, 1, 1}};
  return m;
}
#define SHARED_MEMORY(name) u8* name = emu::cta->memory
#define SHARED_BASE emu::BASE
static inline void check_shared_base(const void*) {}

// ---- mbarrier ----
static inline void barrier_init(u32 b, u32 arrivals) {
  if (b % 8) emu::fail("a barrier that is not aligned", b);
  emu::Mbarrier x;
  x.arrivals = x.pending = arrivals;
  emu::cta->barriers[b] = x;
}
static inline void barrier_init_fence() {}
static inline void barrier_expect(u32 b, u32 bytes) {
  auto& x = emu::barrier(b);
  x.bytes += bytes;
  emu::arrive(x);
}
static inline void barrier_arrive(u32 b) { emu::arrive(emu::barrier(b)); }
static inline void barrier_wait(u32 b, u32 parity) {
  auto& x = emu::barrier(b);
  emu::wait({&x.phase, (long)parity, true, "an mbarrier"});
}

// ---- TMA ----
static inline void tma_prefetch(const TensorMap*) {}
static inline void tma_load(
    u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3, int c4) {
  if (to % 1024) emu::fail("a tile that is not aligned", to);
  emu::cta->pending_loads.push_back([=] {
    const emu::Map& m = *(const emu::Map*)map->opaque[0];
    i64 at[5] = {c0, c1, c2, c3, c4};
    u32 offset = 0;
    for (u32 row = 0; row < m.box[1]; row++)
      for (u32 column = 0; column < m.box[0]; column++, offset += 2) {
        i64 coordinate[5] = {at[0] + column, at[1] + row, at[2], at[3], at[4]};
        bool inside = true;
        u64 from = 0;
        for (int i = 0; i < 5; i++) {
          inside &= coordinate[i] >= 0 && (u64)coordinate[i] < m.extents[i];
          from += (u64)coordinate[i] * m.stride_bytes[i];
        }
        u16 v = 0;
        if (inside) memcpy(&v, m.base + from, 2);
        memcpy(emu::at(emu::swizzle(to + offset), 2), &v, 2);
      }
    auto& b = emu::barrier(barrier);
    b.bytes -= offset;
    b.complete();
  });
}
static inline void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 || (u64)from % 16 || bytes % 16) emu::fail("a bulk copy that is not aligned", to);
  emu::cta->pending_loads.push_back([=] {
    memcpy(emu::at(to, bytes), from, bytes);
    auto& b = emu::barrier(barrier);
    b.bytes -= bytes;
    b.complete();
  });
}
// A bulk addition happens at the wait, after which its staging memory may be reused.
namespace emu {
static inline void bulk(float* to, u32 from, u32 bytes, bool add) {
  if (from % 16 || (u64)to % 16 || bytes % 16) fail("a bulk copy that is not aligned", from);
  cta->additions[threadIdx.x].push_back({to, from, bytes, add});
}
}
static inline void bulk_add(float* to, u32 from, u32 bytes) { emu::bulk(to, from, bytes, true); }
static inline void bulk_store(float* to, u32 from, u32 bytes) { emu::bulk(to, from, bytes, false); }
static inline void bulk_wait_read() {
  auto& all = emu::cta->additions[threadIdx.x];
  for (auto& x : all)
    for (u32 i = 0; i < x.bytes / 4; i++) {
      float v;
      memcpy(&v, emu::at(x.from + 4 * i, 4), 4);
      x.to[i] = x.add ? x.to[i] + v : v;
    }
  all.clear();
}
static inline void bulk_wait_all() { bulk_wait_read(); }
static inline void fence_async() {}

// ---- warps and named barriers ----
static inline void named_arrive(int id, int threads) { emu::cta->named[id].hit(threads); }
static inline void named_sync(int id, int threads) {
  auto& b = emu::cta->named[id];
  long g = b.generation;
  if (!b.hit(threads)) emu::wait({&b.generation, g, false, "a named barrier"});
}
static inline void __syncthreads() { named_sync(0, blockDim.x); }
static inline void __syncwarp(u32 = ~0u) {
  auto& b = emu::cta->warp[threadIdx.x / 32];
  long g = b.generation;
  if (!b.hit(32)) emu::wait({&b.generation, g, false, "its warp"});
}
namespace emu {
static inline void group_sync() {
  auto& b = cta->group[threadIdx.x / 128];
  long g = b.generation;
  if (!b.hit(128)) wait({&b.generation, g, false, "its warpgroup"});
}
template <class T> static inline T shuffle(T v, int from) {
  int t = threadIdx.x;
  u64 bits = 0;
  memcpy(&bits, &v, sizeof v);
  cta->exchange[t] = bits;
  __syncwarp();
  T r; memcpy(&r, &cta->exchange[(t & ~31) + (from & 31)], sizeof r); __syncwarp(); return r;
}
}  // namespace emu
template <class T> static inline T __shfl_xor_sync(u32, T v, int x) {
  return emu::shuffle(v, (threadIdx.x & 31) ^ x);
}
template <class T> static inline T __shfl_sync(u32, T v, int lane, int width = 32) {
  int own = threadIdx.x & 31;
  return emu::shuffle(v, (own & ~(width - 1)) + (lane & (width - 1)));
}
template <class T> static inline T __shfl_down_sync(u32, T v, int by) {
  int own = threadIdx.x & 31;
  return emu::shuffle(v, own + by < 32 ? own + by : own);
}
static inline u32 __ballot_sync(u32, int p) {
  int t = threadIdx.x; emu::cta->exchange[t] = p != 0; __syncwarp();
  u32 r = 0; for (int i = 0; i < 32; i++) r |= (u32)emu::cta->exchange[(t & ~31) + i] << i;
  __syncwarp(); return r;
}
static inline int __any_sync(u32 m, int p) { return __ballot_sync(m, p) != 0; }
static inline int __all_sync(u32 m, int p) { return __ballot_sync(m, p) == ~0u; }
static inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
// One fiber runs at a time, so plain code is atomic.
template <class T> static inline T atomicAdd(T* p, T v) { T old = *p; *p += v; return old; }
template <class T> static inline T atomicMax(T* p, T v) {
  T old = *p;
  *p = max(old, v);
  return old;
}
template <class T> static inline T atomicOr(T* p, T v) { T old = *p; *p |= v; return old; }
template <class T> static inline T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
static inline void __threadfence() {}
static inline void __nanosleep(u32) {}
template <class T> static inline T __ldg(const T* p) { return *p; }

// ---- shared and global memory ----
static inline void store_shared(u32 to, float x, float y) {
  float v[2] = {x, y};
  memcpy(emu::at(to, 8), v, 8);
}
static inline void store_shared(u32 to, float x, float y, float z, float w) {
  float v[4] = {x, y, z, w};
  memcpy(emu::at(to, 16), v, 16);
}
static inline void store_shared(u32 to, uint4 x) { memcpy(emu::at(to, 16), &x, 16); }
static inline void store_shared(u32 to, u32 x) { memcpy(emu::at(to, 4), &x, 4); }
static inline void load_shared(u32 from, float& x, float& y) {
  memcpy(&x, emu::at(from, 4), 4);
  memcpy(&y, emu::at(from + 4, 4), 4);
}
static inline u32 load_shared(u32 from) { u32 x; memcpy(&x, emu::at(from, 4), 4); return x; }
static inline uint4 load_shared_16(u32 from) {
  if (from % 16) emu::fail("not aligned", from);
  uint4 x;
  memcpy(&x, emu::at(from, 16), 16);
  return x;
}
static inline void or_shared(u32 where, u32 bits) {
  u32 x = load_shared(where) | bits;
  store_shared(where, x);
}
static inline void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  int t = threadIdx.x, warp = t & ~31, lane = t & 31;
  u32 r[4] = {a, b, c, d};
  emu::cta->exchange[t] = to;
  __syncwarp();
  for (int m = 0; m < 4; m++)
    memcpy(emu::at((u32)emu::cta->exchange[warp + 8 * m + lane / 4] + (lane % 4) * 4, 4), &r[m], 4);
  __syncwarp();
}
static inline uint4 load_matrices(u32 from) {
  int t = threadIdx.x, warp = t & ~31, lane = t & 31;
  u32 r[4];
  emu::cta->exchange[t] = from;
  __syncwarp();
  for (int m = 0; m < 4; m++)
    memcpy(&r[m], emu::at((u32)emu::cta->exchange[warp + 8 * m + lane / 4] + (lane % 4) * 4, 4), 4);
  __syncwarp(); return {r[0], r[1], r[2], r[3]};
}
static inline void global_add(float* to, float x, float y) { to[0] += x; to[1] += y; }

// ---- arithmetic ----
template <class N> static inline N opaque(N x) { return x; }
static inline float exp2_fast(float x) { return exp2f(x); }
static inline float log2_fast(float x) { return log2f(x); }
static inline float reciprocal_fast(float x) { return 1.f / x; }
static inline u32 pack(float low, float high) {
  return emu::narrow(low) | ((u32)emu::narrow(high) << 16);
}
static inline float unpack(u16 x) { return emu::widen(x); }

// ---- wgmma ----
// Registers that one warpgroup raises must have been lowered by others: a block's total is fixed.
template <int COUNT> static inline void registers_raise() {
  emu::cta->registers[threadIdx.x / 128] = COUNT;
}
template <int COUNT> static inline void registers_lower() {
  emu::cta->registers[threadIdx.x / 128] = COUNT;
}
template <int N> static inline void pin(float (&)[N]) {}
static inline void wgmma_fence() {}
namespace emu {
// Computes the `index`-th pending product of the warpgroup whose first thread is `first`. Programs
// spend half of their time here, so that its loops are worth vectors, which -O2 does not make.
__attribute__((optimize("O3"))) static void multiply(int first, size_t index) {
  const Product& x = cta->products[first][index]; float a[64][16]; static float b[16][256];
  auto start = [](u64 m) { return (u32)(m & 0x3FFF) << 4; };
  auto slab = [](u64 m) { return (u32)((m >> 16) & 0x3FFF) << 4; };
  auto group = [](u64 m) { return (u32)((m >> 32) & 0x3FFF) << 4; };
  if (x.registers) {
    for (int t = 0; t < 128; t++) for (int g = 0; g < 4; g++) for (int e = 0; e < 2; e++)
          a[t / 32 * 16 + (t % 32) / 4 + (g & 1) * 8][(t % 4) * 2 + (g >> 1) * 8 + e] =
              widen((u16)(cta->products[first + t][index].a[g] >> (16 * e)));
  } else {
    u32 s = start(x.a_matrix), g = group(x.a_matrix);
    for (int m = 0; m < 64; m++) for (int k = 0; k < 16; k++)
        a[m][k] = widen(element_at(x.a_across ? s + (k / 8) * g + (k % 8) * 128 + m * 2
                                              : s + (m / 8) * g + (m % 8) * 128 + k * 2));
  }
  u32 s = start(x.b_matrix), l = slab(x.b_matrix), g = group(x.b_matrix);
  for (int n = 0; n < x.n; n++) for (int k = 0; k < 16; k++)
      b[k][n] = widen(
          element_at(x.b_across ? s + (n / 64) * l + (k / 8) * g + (k % 8) * 128 + (n % 64) * 2
                                : s + (n / 8) * g + (n % 8) * 128 + k * 2));
  for (int m = 0; m < 64; m++) {
    float sum[256]; for (int n = 0; n < x.n; n++) sum[n] = 0;
    for (int k = 0; k < 16; k++) {
      float w = x.negate ? -a[m][k] : a[m][k];
      for (int n = 0; n < x.n; n++) sum[n] += w * b[k][n];
    }
    for (int n = 0; n < x.n; n++) {
      int thread = (m / 16) * 32 + (m % 8) * 4 + (n % 8) / 2,
          element = (n / 8) * 4 + ((m % 16) / 8) * 2 + (n & 1);
      float* p = cta->products[first + thread][index].d + element;
      *p = (x.keep ? *p : 0.f) + sum[n];
    }
  }
}
__attribute__((noinline)) static void issue(float* d, const u32* a, u64 a_matrix, u64 b_matrix,
    int keep, int n, bool a_across, bool b_across, bool negate) {
  Product p{d, {0, 0, 0, 0}, a_matrix, b_matrix, keep, n, a != nullptr, a_across, b_across, negate};
  if (a) memcpy(p.a, a, 16);
  cta->products[threadIdx.x].push_back(p);
}
__attribute__((noinline)) static void complete(int pending) {
  int t = threadIdx.x, first = t & ~127; group_sync();
  auto& groups = cta->groups[t];
  int finished = std::max(0, (int)cta->groups[first].size() - pending), count = 0;
  for (int g = 0; g < finished; g++) count += cta->groups[first][g];
  group_sync();
  if (t == first) for (int i = 0; i < count; i++) multiply(first, i);
  group_sync();
  auto& products = cta->products[t];
  products.erase(products.begin(), products.begin() + count);
  groups.erase(groups.begin(), groups.begin() + finished);
  group_sync();
}
}  // namespace emu
static inline void wgmma_commit() {
  auto& groups = emu::cta->groups[threadIdx.x]; int before = 0; for (int g : groups) before += g;
  groups.push_back((int)emu::cta->products[threadIdx.x].size() - before);
}
template <int PENDING> static inline void wgmma_wait() {
  emu::complete(PENDING);
  asm volatile("" ::: "memory");
}

// The wrappers that `src/wgmma.rs` generates, for every n.
#define EMULATE_WGMMA_SS(N, SUFFIX, A, B, NEGATE)                                         \
  static inline void wgmma_ss##SUFFIX##_n##N(float (&d)[N / 2], u64 a, u64 b, int keep) { \
    emu::issue(d, nullptr, a, b, keep, N, A, B, NEGATE);                                  \
  }
#define EMULATE_WGMMA_RS(N, SUFFIX, B, NEGATE)                              \
  static inline void wgmma_rs##SUFFIX##_n##N(                               \
      float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int keep) { \
    u32 a[4] = {a0, a1, a2, a3};                                            \
    emu::issue(d, a, 0, b, keep, N, false, B, NEGATE);                      \
  }
#define EMULATE_WGMMA(N)                                                                          \
  EMULATE_WGMMA_SS(N, , false, false, false)                                                      \
  EMULATE_WGMMA_SS(N, _neg, false, false, true) EMULATE_WGMMA_SS(N, _tb, false, true, false)      \
      EMULATE_WGMMA_SS(N, _ta, true, false, false) EMULATE_WGMMA_SS(N, _ta_tb, true, true, false) \
          EMULATE_WGMMA_RS(N, , false, false) EMULATE_WGMMA_RS(N, _neg, false, true)              \
              EMULATE_WGMMA_RS(N, _tb, true, false)
EMULATE_WGMMA(8)
EMULATE_WGMMA(16) EMULATE_WGMMA(24) EMULATE_WGMMA(32) EMULATE_WGMMA(40) EMULATE_WGMMA(48)
    EMULATE_WGMMA(56) EMULATE_WGMMA(64) EMULATE_WGMMA(72) EMULATE_WGMMA(80) EMULATE_WGMMA(88)
        EMULATE_WGMMA(96) EMULATE_WGMMA(104) EMULATE_WGMMA(112) EMULATE_WGMMA(120)
            EMULATE_WGMMA(128) EMULATE_WGMMA(136) EMULATE_WGMMA(144) EMULATE_WGMMA(152)
                EMULATE_WGMMA(160) EMULATE_WGMMA(168) EMULATE_WGMMA(176) EMULATE_WGMMA(184)
                    EMULATE_WGMMA(192) EMULATE_WGMMA(200) EMULATE_WGMMA(208) EMULATE_WGMMA(216)
                        EMULATE_WGMMA(224) EMULATE_WGMMA(232) EMULATE_WGMMA(240) EMULATE_WGMMA(248)
                            EMULATE_WGMMA(256)
