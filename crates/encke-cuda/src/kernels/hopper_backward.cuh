// Gradients of attention on Hopper: dK, dV and dQ in one pass over the scores. This file is common
// to the kernels for narrow and for wide rows: tiles, loads, additions to dQ, and the roles.
//
// A tile is BK keys of one key head. Its CTA keeps K, V and the sums of dK and dV, and loops over
// every block of queries that sees a key of the tile, of every query head that reads this key head.
// Five products per block:
//   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ = dS K.
// S and dP are computed transposed, with keys as rows: P^T and dS^T are then left operands of dV
// and dK without a transposition, and a thread has only two keys, so its mask is two integers.
//
// Roles: warps 0 and 2 load, warp 1 adds finished dQ blocks to memory, warpgroups 1 and 2 compute.
// dQ is added by TMA reductions, directly into the caller's rows. The grid is persistent: warp 0
// computes the next tile and loads its first queries during the current tile, and its keys while
// sums are stored. Block counts and barrier phases continue across tiles.
//
// In a fixed order, each block of queries has a semaphore in memory that the tiles of its keys pass
// in order. Tiles are drawn from a counter in that order, so a tile waits only for tiles drawn
// before it. Under a mask the order is from the last tile of keys down, and every tile begins at
// its first block: the tiles of a block then reach it at different times, in that order, and rarely
// wait. Without a mask each tile begins `stagger` blocks after the previous tile and wraps around:
// a block is reached first by the tile that begins there, then by the tiles before it, and last by
// the tiles after it. All tiles of a head must then run at once; where there may be too many
// (`stagger` is 0), all begin at the first block and follow each other. In any order, tiles are
// staggered too: those that run at once add to different rows.
//
// With TILED dQ is always added in a fixed order: that of the tiles of the grid, the last keys
// first. The sums of dK and dV meet queries in the order of the grid, too: tile after tile, and in
// each tile every query head. They continue what is in memory, so that no sum of sums arises where
// queries are cut between tiles; gains are powers of two, and change no bit.
//
// Macros: HD head dimension in steps of 16 (the job's may be smaller: missing columns read as
// zero), VD that of values, if they have another, BQ queries per block, STAGES pipeline stages of
// blocks, DQ_STAGES staging buffers of finished dQ, SCALES_DQ whether dQ is multiplied by its gain
// (0: dS includes all of the scale), SOFTCAP and SLOPES whether scores have them (WINDOWED is set
// then, too).

#ifdef VD
#define OWN_VALUES 1
#else
#define OWN_VALUES 0
#define VD HD
#endif
#ifndef WIDE
#define WIDE (HD > 128 || VD > 128)
#endif
#define BK (WIDE ? 64 : 128)
// Slabs of 64 columns of 16 bits: one swizzled row of 128 bytes. Two at least where warpgroups
// divide them.
#define SLABS (HD <= 64 && BQ == 64 ? 2 : (HD + 63) / 64)    // of keys and queries
#define V_SLABS (VD <= 64 && WIDE ? 2 : (VD + 63) / 64)      // of values and output gradients
#define K_BYTES (SLABS * BK * 128)
#define V_BYTES (V_SLABS * BK * 128)
#define Q_BYTES (SLABS * BQ * 128)
#define O_BYTES (V_SLABS * BQ * 128)
#define PAIR_BYTES (BK * 128)                // [key][64 queries], of P or dS
#define PAIRS (WIDE ? 2 : BQ / 64)           // wide: P and dS; else dS of every 64 queries
#define DQ_SLABS (2 * SLABS)                 // 32 columns of f32: again 128 bytes
#define DQ_BYTES (DQ_SLABS * BQ * 128)
#define TRANSFORMED (SOFTCAP || SLOPES)
#define NEVER 0x7fffffff
#define TILE_BYTES 48                        // bytes of a tile's descriptor
#define NONFINITE_BIT 0x80000000u                     // marks a key's first row

// What happens to the sums of dK and dV: added to memory; or, where a zero-fill is pending, stored,
// as sums or rounded to the type of the keys; with TILED, continued rather than added.
enum Stores { ADDED = 0, STORED = 1, ROUNDED = 2, CONTINUED = 3 };

struct HopperBackward {
  JobParams job;
  void *dk, *dv;              // f32, or the type of the keys
  const float *lse, *delta;   // dense, from backward_rows
  // For each key head: its first query head in the next table, its coordinate in k's map; and an
  // end.
  const int2* key_heads;
  // The head of the job, and its coordinates in the maps of q, dout and dq.
  const int4* query_heads;
  u32* control;
  int key_head_count, key_tiles, padded, fixed_order;
  float exponent;             // scale, in base 2
  float dp_gain, dq_gain, dk_gain, dv_gain;
  int tiles;                  // in total
  const int* first_blocks;    // for each tile of keys, from backward_rows
  int stores;                 // a Stores
  int stagger;
  // With WINDOWED, from backward_rows: the queries that see each key, and the end of each tile's
  // blocks.
  const Range* key_rows;
  const int* end_blocks;
  int query_blocks;           // of one head
  // With SOFTCAP or SLOPES, in base 2: the cap, and twice the scale over it; the slopes of heads,
  // f32 in words of 64 bits; from backward_rows, how far query row 0 would lie after each key.
  float softcap, inverse_cap;
  int query_position_step;
  const uint2* slopes;
  const int* distances;
};

// Shared memory layout; `*_full` and `*_empty` are barriers, 8 bytes each.
struct Shared {
  u32 k, v, q, o, pairs, dq, lse, delta, first, end;
  u32 k_full, v_full, kv_empty, q_full, o_full, empty, dq_full, dq_empty, tile_full, tile_empty;
  u32 ds_full, ds_empty;      // of dS of two blocks, for narrow heads
  // Whether keys are not finite; see set_unmasked_from; two tile descriptors; with TILED the block
  // in each stage.
  u32 nonfinite, unmasked, tiles, blocks;
  u32 distances, slopes;      // of the tile's keys; of the blocks' heads
};
DEV Shared shared_from(u32 base) {
  Shared m;
  m.k = base;
  m.v = m.k + K_BYTES;
  m.q = m.v + V_BYTES;
  m.o = m.q + STAGES * Q_BYTES;
  m.pairs = m.o + STAGES * O_BYTES;
  m.dq = m.pairs + 2 * PAIRS * PAIR_BYTES;
  m.lse = m.dq + DQ_STAGES * DQ_BYTES;
  m.delta = m.lse + STAGES * BQ * 4;
  m.first = m.delta + STAGES * BQ * 4;
  m.end = m.first + BK * 4;
  m.distances = m.end + (WINDOWED ? BK * 4 : 0);
  m.slopes = m.distances + (SLOPES ? BK * 4 : 0);
  m.tiles = m.slopes + (SLOPES ? 16 : 0);
  m.k_full = m.tiles + 2 * TILE_BYTES;
  m.v_full = m.k_full + 8;
  m.kv_empty = m.v_full + 8;
  m.q_full = m.kv_empty + 8; m.o_full = m.q_full + STAGES * 8; m.empty = m.o_full + STAGES * 8;
  m.dq_full = m.empty + STAGES * 8;
  m.dq_empty = m.dq_full + DQ_STAGES * 8;
  m.tile_full = m.dq_empty + DQ_STAGES * 8;
  m.tile_empty = m.tile_full + 16;
  m.ds_full = m.tile_empty + 16;
  m.ds_empty = m.ds_full + 16;
  m.nonfinite = m.ds_empty + 16; m.unmasked = m.nonfinite + 8;
  m.blocks = m.unmasked + (WINDOWED ? 16 : 8);
  return m;
}

// A role's progress in one register: blocks so far, and above them the tile's number modulo 4.
// Block n uses stage n % COUNT of a circular buffer; the parity is that of the barrier's phase
// there.
#define ONE_TILE 0x40000000u
DEV u32 block_of(u32 n) { return n & (ONE_TILE - 1); }
template <int COUNT> DEV u32 stage_of(u32 n) { return block_of(n) % COUNT; }
template <int COUNT> DEV u32 parity_of(u32 n) { return block_of(n) / COUNT & 1; }
DEV u32 tile_parity(u32 n) { return n >> 30 & 1; }   // of barriers with one phase per tile
DEV u32 slot_of(u32 n) { return n >> 30 & 1; }       // of two slots
DEV u32 slot_parity(u32 n) { return n >> 31; }

// A tile's descriptor. For each of its query heads it processes blocks of queries from START to
// END, then from FIRST on. It is in shared memory: all roles read it, few fields at a time, and
// registers are scarce. LAST: the blocks of this CTA up to its end. ORDER: the tile's position in
// the order of additions; blocks below UNCONTESTED are not seen by any tile that comes before it.
// KEY_BLOCK is negative after the last tile.
enum {
  BATCH = 0,
  SEGMENT = 4,
  KEY_BLOCK = 8,
  KEY_HEAD = 12,
  FIRST = 16,
  END = 20,
  FIRST_MEMBER = 24,
  END_MEMBER = 28,
  START = 32,
  ORDER = 36,
  UNCONTESTED = 40,
  LAST = 44
};
DEV int tile_word(const Shared& m, u32 n, int word) {
  return (int)load_shared(m.tiles + slot_of(n) * TILE_BYTES + word);
}

DEV int next_block(const Shared& m, u32 n, int block) {
  return block + 1 == tile_word(m, n, END) ? tile_word(m, n, FIRST) : block + 1;
}
// The block after `block`, which is the n-th and has been loaded if it exists.
DEV int loaded_block(const Shared& m, u32 n, int block) {
#if TILED
  return (int)load_shared(m.blocks + stage_of<STAGES>(n) * 4);
#else
  return next_block(m, n, block);
#endif
}

// Stores the tile with this index, unless no query sees its keys and no zeros need to be stored for
// them.
DEV bool store_tile(const HopperBackward& w, const Shared& m, u32 n, u32 index) {
  const JobParams& job = w.job;
  u32 rest = index / (u32)w.key_tiles;
  int key_block = index - rest * w.key_tiles;
  if ((job.causal || TILED) && w.fixed_order) key_block = w.key_tiles - 1 - key_block;
  const u32 to = m.tiles + slot_of(opaque(n)) * TILE_BYTES;
#if WINDOWED || TILED
  // Word by word, and read again: few registers here. Tiles are not staggered.
  store_shared(to + FIRST, (u32)w.first_blocks[key_block]);
  store_shared(to + START, load_shared(to + FIRST));
  store_shared(to + END, (u32)max((int)load_shared(to + FIRST), w.end_blocks[key_block]));
  store_shared(to + ORDER, (u32)(w.key_tiles - 1 - key_block));
  store_shared(to + UNCONTESTED, (u32)w.first_blocks[key_block + 1]);
  if (load_shared(to + FIRST) == load_shared(to + END) &&
      (w.stores == ADDED || w.stores == CONTINUED))
    return false;
#else
  const int blocks = (job.queries + BQ - 1) / BQ, first = w.first_blocks[key_block];
  if (first == blocks && w.stores == ADDED) return false;
#endif
  const int head = rest % (u32)w.key_head_count;
  const int2 members = w.key_heads[head];
  const int end_member = w.key_heads[head + 1].x;
  rest /= (u32)w.key_head_count;
  store_shared(
      to, make_uint4(rest / (u32)job.segments, rest % (u32)job.segments, key_block, members.y));
#if WINDOWED || TILED
  store_shared(to + FIRST_MEMBER, (u32)members.x);
  store_shared(to + END_MEMBER, (u32)end_member);
  const u32 blocks = load_shared(to + END) - load_shared(to + FIRST);
  store_shared(to + LAST, block_of(n) + blocks * (end_member - members.x));
#else
  store_shared(to + 16, make_uint4(first, blocks, members.x, end_member));
  store_shared(to + 32, make_uint4(first + key_block * w.stagger,
                            job.causal ? w.key_tiles - 1 - key_block : key_block,
                            job.causal ? w.first_blocks[key_block + 1] : 0,
                            block_of(n) + (blocks - first) * (end_member - members.x)));
#endif
  return true;
}
// Publishes the next tile; false after the last one. In a fixed order, staggered tiles may have to
// wait for the very tile that would be drawn next, so the next is drawn only after this one has
// ended.
DEV bool publish_tile(const HopperBackward& w, const Shared& m, u32 n) {
  if (w.fixed_order && w.stagger != 0 && n != 0)
    barrier_wait(m.tile_empty + 8 * slot_of(n - ONE_TILE), slot_parity(n - ONE_TILE));
  barrier_wait(m.tile_empty + 8 * slot_of(n), slot_parity(n) ^ 1);
  u32 index;
  do index = atomicAdd(w.control + NEXT_TILE, 1u);
  while (index < (u32)w.tiles && !store_tile(w, m, n, index));
  const bool found = index < (u32)w.tiles;
  const u32 slot = slot_of(opaque(n));   // few registers here
  if (!found) store_shared(m.tiles + slot * TILE_BYTES + KEY_BLOCK, ~0u);
  barrier_arrive(m.tile_full + 8 * slot);
  return found;
}
DEV bool wait_tile(const Shared& m, u32 n) {
  barrier_wait(m.tile_full + 8 * slot_of(n), slot_parity(n));
  return tile_word(m, n, KEY_BLOCK) >= 0;
}
DEV void release_tile(const Shared& m, u32 n) { barrier_arrive(m.tile_empty + 8 * slot_of(n)); }

// ---- warps 0 and 2: load -----------------------------------------------------------------------

template <int COUNT> DEV void load_slabs(u32 to, u32 slab_bytes, const TensorMap* map,
    u32 barrier, int row, int head, int segment, int batch) {
  #pragma unroll
  for (int slab = 0; slab < COUNT; slab++)
    tma_load(to + slab * slab_bytes, map, barrier, slab * 64, row, head, segment, batch);
}
#if TILED
// The end of the blocks of a grid's tile from block `start` of it on.
DEV int grid_end(const Shared& m, u32 n, int start) {
  return min((start / TILED + 1) * TILED, tile_word(m, n, END));
}
#endif
// One of two load streams: a tile's keys and its blocks of queries with lse, or values, output
// gradients and delta. `fixed` and `moving` are the targets. The first stream also publishes the
// tiles.
template <bool SECOND> DEV void load_stream(const HopperBackward& w, const Shared& m,
    const TensorMap* fixed_map, const TensorMap* moving_map) {
  const u32 once = SECOND ? m.v_full : m.k_full, full = SECOND ? m.o_full : m.q_full,
            fixed = SECOND ? m.v : m.k, moving = SECOND ? m.o : m.q,
            dense = SECOND ? m.delta : m.lse;
  constexpr int slabs = SECOND ? V_SLABS : SLABS;
  u32 n = 0;
  #pragma unroll 1
  while (SECOND ? wait_tile(m, n) : publish_tile(w, m, n)) {
    n = opaque(n);   // keep no expression of n from before
    barrier_wait(m.kv_empty, tile_parity(n) ^ 1);
    barrier_expect(once, slabs * BK * 128);
    load_slabs<slabs>(fixed, BK * 128, fixed_map, once, tile_word(m, n, KEY_BLOCK) * BK,
        tile_word(m, n, KEY_HEAD), tile_word(m, n, SEGMENT), tile_word(m, n, BATCH));
#if TILED
    int end;
    #pragma unroll 1
    for (int start = tile_word(m, n, FIRST); start < tile_word(m, n, END); start = end) {
      end = grid_end(m, n, start);
#else
    {
#endif
    #pragma unroll 1
    for (int member = tile_word(m, n, FIRST_MEMBER); member < tile_word(m, n, END_MEMBER);
        member++) {
      const int4* head = w.query_heads + member;
      const int segment = tile_word(m, n, SEGMENT), batch = tile_word(m, n, BATCH);
      const float* from =
          (SECOND ? w.delta : w.lse) +
          (((i64)batch * w.job.segments + segment) * w.job.heads + head->x) * w.padded;
      const int coordinate = SECOND ? head->z : head->y;
#if TILED
      #pragma unroll 1
      for (int block = start; block < end; block++, n++) {
#else
      int block = tile_word(m, n, START);
      #pragma unroll 1
      for (bool more = tile_word(m, n, FIRST) < tile_word(m, n, END); more;
          block = next_block(m, n, block), more = block != tile_word(m, n, START), n++) {
#endif
        const u32 stage = stage_of<STAGES>(n), barrier = full + 8 * stage;
        barrier_wait(m.empty + 8 * stage, parity_of<STAGES>(n) ^ 1);
        if (SLOPES && !SECOND) store_shared(m.slopes + 4 * stage, w.slopes[head->x].x);
        if (TILED && !SECOND) store_shared(m.blocks + stage * 4, (u32)block);
        barrier_expect(barrier, slabs * BQ * 128 + BQ * 4);
        load_slabs<slabs>(moving + stage * (slabs * BQ * 128), BQ * 128, moving_map, barrier,
            block * BQ, coordinate, segment, batch);
        bulk_load(dense + stage * BQ * 4, from + block * BQ, BQ * 4, barrier);
      }
    }
    }
    if (SECOND) release_tile(m, n);
    n += ONE_TILE;
  }
}

// ---- warp 1: adds finished dQ to memory -------------------------------------------------------

// The semaphore value that this tile waits for at a block, and the value after which it releases
// it: where the tile is uncontested, the tiles that never come are skipped.
DEV u32 release_value(const HopperBackward& w, const Shared& m, u32 n, int block) {
  const int own = tile_word(m, n, ORDER);
  if (w.stagger == 0) return own;
  const int first = min(block / w.stagger, w.key_tiles - 1) - own;
  return first < 0 ? first + w.key_tiles : first;
}
DEV u32 wait_value(const HopperBackward& w, const Shared& m, u32 n, int block) {
  return block < tile_word(m, n, UNCONTESTED) ? 0 : release_value(w, m, n, block);
}

DEV void add_dq(const HopperBackward& w, const Shared& m, const TensorMap* dqs) {
  u32 n = 0;
  #pragma unroll 1
  for (; wait_tile(m, n); release_tile(m, n), n += ONE_TILE) {
#if TILED
    int end;
    #pragma unroll 1
    for (int start = tile_word(m, n, FIRST); start < tile_word(m, n, END); start = end) {
      end = grid_end(m, n, start);
#else
    {
#endif
    #pragma unroll 1
    for (int member = tile_word(m, n, FIRST_MEMBER); member < tile_word(m, n, END_MEMBER);
        member++) {
      const int4* head = w.query_heads + member;
      const int coordinate = head->w;
      u32* semaphores =
          w.control + SEMAPHORES +
          (((i64)tile_word(m, n, BATCH) * w.job.segments + tile_word(m, n, SEGMENT)) *
                  w.job.heads +
              head->x) *
              (WINDOWED || TILED ? w.query_blocks : tile_word(m, n, END));
#if TILED
      #pragma unroll 1
      for (int block = start; block < end; block++, n++) {
#else
      int block = tile_word(m, n, START);
      #pragma unroll 1
      for (bool more = tile_word(m, n, FIRST) < tile_word(m, n, END); more;
          block = next_block(m, n, block), more = block != tile_word(m, n, START), n++) {
#endif
        const u32 stage = stage_of<DQ_STAGES>(n);
        barrier_wait(m.dq_full + 8 * stage, parity_of<DQ_STAGES>(n));
        if (w.fixed_order) semaphore_wait(semaphores + block, wait_value(w, m, n, block));
        #pragma unroll
        for (int slab = 0; slab < DQ_SLABS; slab++)
          if (slab * 32 < w.job.dim)
            tma_add(dqs, m.dq + stage * DQ_BYTES + slab * (BQ * 128), slab * 32, block * BQ,
                coordinate, tile_word(m, n, SEGMENT), tile_word(m, n, BATCH));
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(m.dq_empty + 8 * stage);
        if (w.fixed_order) {
          bulk_wait_all();
          semaphore_release(semaphores + block, release_value(w, m, n, block) + 1);
        }
      }
    }
    }
  }
  bulk_wait_all();
}

// Computes one tile; the two kernels differ here. Returns the new progress.
DEV u32 process_tile(const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread);

extern "C" __global__ void __launch_bounds__(384, 1)
    hopper_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap dout,
        const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
        const __grid_constant__ TensorMap dq, const __grid_constant__ HopperBackward w) {
  SHARED_MEMORY(memory);
  const Shared m = shared_from(SHARED_BASE);
  // Uniform per warp, as the compiler sees.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    check_shared_base(memory);
    barrier_init(m.k_full, 1); barrier_init(m.v_full, 1); barrier_init(m.kv_empty, 8);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(m.q_full + 8 * i, 1);
      barrier_init(m.o_full + 8 * i, 1);
      barrier_init(m.empty + 8 * i, 8);
    }
    for (int i = 0; i < DQ_STAGES; i++) {
      barrier_init(m.dq_full + 8 * i, 8);
      barrier_init(m.dq_empty + 8 * i, 1);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(m.tile_full + 8 * i, 1);
      barrier_init(m.tile_empty + 8 * i, 10);
      barrier_init(m.ds_full + 8 * i, 8);
      barrier_init(m.ds_empty + 8 * i, 8);
    }
    barrier_init_fence();
    store_shared(m.nonfinite, 0u);
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_lower<24>();
    if (threadIdx.x == 0) { tma_prefetch(&k); tma_prefetch(&q); load_stream<false>(w, m, &k, &q); }
    if (threadIdx.x == 64) {
      tma_prefetch(&v);
      tma_prefetch(&dout);
      load_stream<true>(w, m, &v, &dout);
    }
    if (threadIdx.x == 32) { tma_prefetch(&dq); add_dq(w, m, &dq); }
  } else {
    registers_raise<240>();
    #pragma unroll 1
    for (u32 n = 0; wait_tile(m, n); n += ONE_TILE) {
      n = process_tile(w, m, n, warpgroup - 1, threadIdx.x % 128);
      __syncwarp();
      if (threadIdx.x % 32 == 0) release_tile(m, n);
    }
  }
}
