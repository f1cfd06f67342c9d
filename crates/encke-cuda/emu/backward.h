// The parts of the CPU model that only the backward kernels need: TMA reductions and semaphores.
//
// As everywhere in the model, late effects happen as late as possible: an addition is made when its
// thread waits for it, and its values are read from shared memory at that moment.
#pragma once
#include "emu.h"

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };

namespace emu {
struct Addend { const Map* map; u32 from; i64 at[5]; };
inline std::unordered_map<const Fiber*, std::vector<Addend>> addends;
inline long releases = 0;
}

// The map of f32 rows for reductions: a box of 32 columns and `box_rows` rows.
static inline TensorMap addition_map(void* base, u64 columns, u64 rows, u64 heads, u64 segments,
    u64 batch, u64 row, u64 head, u64 segment, u64 entry, u32 box_rows) {
  TensorMap m{};
  m.opaque[0] = (u64) new emu::Map{(const u8*)base, {columns, rows, heads, segments, batch},
      {4, row * 4, head * 4, segment * 4, entry * 4}, {32, box_rows, 1, 1, 1}};
  return m;
}
static inline void tma_add(const TensorMap* map, u32 from, int c0, int c1, int c2, int c3, int c4) {
  if (from % 1024) emu::fail("a box that is not aligned", from);
  emu::addends[emu::running].push_back(
      {(const emu::Map*)map->opaque[0], from, {c0, c1, c2, c3, c4}});
}
static inline void bulk_commit() {}
namespace emu {
static inline void add_now() {
  auto& all = addends[running];
  for (const Addend& x : all) {
    u32 offset = 0;
    for (u32 row = 0; row < x.map->box[1]; row++)
      for (u32 column = 0; column < x.map->box[0]; column++, offset += 4) {
        i64 coordinate[5] = {x.at[0] + column, x.at[1] + row, x.at[2], x.at[3], x.at[4]};
        bool inside = true;
        u64 to = 0;
        for (int i = 0; i < 5; i++) {
          inside &= coordinate[i] >= 0 && (u64)coordinate[i] < x.map->extents[i];
          to += (u64)coordinate[i] * x.map->stride_bytes[i];
        }
        float v;
        memcpy(&v, at(swizzle(x.from + offset), 4), 4);
        if (inside) *(float*)(x.map->base + to) += v;
      }
  }
  all.clear();
}
}
#define bulk_wait_read emu::add_now
#define bulk_wait_all emu::add_now

static inline void semaphore_wait(const u32* semaphore, u32 value) {
  while (*semaphore != value) emu::wait({&emu::releases, emu::releases, false, "its semaphore"});
}
static inline void semaphore_release(u32* semaphore, u32 value) {
  *semaphore = value;
  emu::releases++;
}
