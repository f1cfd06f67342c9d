// Gradients of attention on Hopper: dK, dV and dQ in one pass over the scores. This file is common
// to the kernels for narrow and for wide heads: tiles, loads, additions to dQ, and the mask.
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
// Macros: HD head dimension in steps of 16 (the job's may be smaller: missing columns read as
// zero), BQ queries per block, STAGES pipeline stages of blocks, DQ_STAGES staging buffers of
// finished dQ, SCALES_DQ whether dQ is multiplied by its gain (0: dS includes all of the scale).

#define WIDE (HD > 128)
#define BK (WIDE ? 64 : 128)
#define SLABS (WIDE ? 4 : (HD + 63) / 64)    // 64 columns of 16 bits: one swizzled row of 128 bytes
#define K_BYTES (SLABS * BK * 128)
#define Q_BYTES (SLABS * BQ * 128)
#define PAIR_BYTES (BK * 128)                // [key][64 queries], of P or dS
#define PAIRS (WIDE ? 2 : BQ / 64)           // wide: P and dS; else dS of every 64 queries
#define DQ_SLABS (2 * SLABS)                 // 32 columns of f32: again 128 bytes
#define DQ_BYTES (DQ_SLABS * BQ * 128)
#define NEVER 0x7fffffff
#define TILE_BYTES 48                        // bytes of a tile's descriptor
#define NONFINITE_BIT 0x80000000u                     // marks a key's first row

// What happens to the sums of dK and dV: added to memory; or, where a zero-fill is pending, stored,
// as sums or rounded to the type of the keys.
enum Stores { ADDED = 0, STORED = 1, ROUNDED = 2 };

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
  int query_blocks, pad;      // of one head
};

// Shared memory layout; `*_full` and `*_empty` are barriers, 8 bytes each.
struct Shared {
  u32 k, v, q, o, pairs, dq, lse, delta, first, end;
  u32 k_full, v_full, kv_empty, q_full, o_full, empty, dq_full, dq_empty, tile_full, tile_empty;
  u32 ds_full, ds_empty;      // of dS of two blocks, for narrow heads
  // Whether keys are not finite; see set_unmasked_from; two tile descriptors.
  u32 nonfinite, unmasked, tiles;
};
DEV Shared shared_from(u32 base) {
  Shared m;
  m.k = base;
  m.v = m.k + K_BYTES;
  m.q = m.v + K_BYTES;
  m.o = m.q + STAGES * Q_BYTES;
  m.pairs = m.o + STAGES * Q_BYTES;
  m.dq = m.pairs + 2 * PAIRS * PAIR_BYTES;
  m.lse = m.dq + DQ_STAGES * DQ_BYTES;
  m.delta = m.lse + STAGES * BQ * 4;
  m.first = m.delta + STAGES * BQ * 4;
  m.end = m.first + BK * 4;
  m.tiles = m.end + (WINDOWED ? BK * 4 : 0);
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

// Stores the tile with this index, unless no query sees its keys and no zeros need to be stored for
// them.
DEV bool store_tile(const HopperBackward& w, const Shared& m, u32 n, u32 index) {
  const JobParams& job = w.job;
  u32 rest = index / (u32)w.key_tiles;
  int key_block = index - rest * w.key_tiles;
  if (job.causal && w.fixed_order) key_block = w.key_tiles - 1 - key_block;
  const u32 to = m.tiles + slot_of(opaque(n)) * TILE_BYTES;
#if WINDOWED
  // Word by word, and read again: few registers here. Tiles are not staggered.
  store_shared(to + FIRST, (u32)w.first_blocks[key_block]);
  store_shared(to + START, load_shared(to + FIRST));
  store_shared(to + END, (u32)max((int)load_shared(to + FIRST), w.end_blocks[key_block]));
  store_shared(to + ORDER, (u32)(w.key_tiles - 1 - key_block));
  store_shared(to + UNCONTESTED, (u32)w.first_blocks[key_block + 1]);
  if (load_shared(to + FIRST) == load_shared(to + END) && w.stores == ADDED) return false;
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
#if WINDOWED
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

DEV void load_slabs(u32 to, u32 slab_bytes, const TensorMap* map, u32 barrier, int row, int head,
    int segment, int batch) {
  #pragma unroll
  for (int slab = 0; slab < SLABS; slab++)
    tma_load(to + slab * slab_bytes, map, barrier, slab * 64, row, head, segment, batch);
}
// One of two load streams: a tile's keys and its blocks of queries with lse, or values, output
// gradients and delta. `fixed` and `moving` are the targets. The first stream also publishes the
// tiles.
template <bool SECOND> DEV void load_stream(const HopperBackward& w, const Shared& m,
    const TensorMap* fixed_map, const TensorMap* moving_map) {
  const u32 once = SECOND ? m.v_full : m.k_full, full = SECOND ? m.o_full : m.q_full,
            fixed = SECOND ? m.v : m.k, moving = SECOND ? m.o : m.q,
            dense = SECOND ? m.delta : m.lse;
  u32 n = 0;
  #pragma unroll 1
  while (SECOND ? wait_tile(m, n) : publish_tile(w, m, n)) {
    n = opaque(n);   // keep no expression of n from before
    barrier_wait(m.kv_empty, tile_parity(n) ^ 1);
    barrier_expect(once, K_BYTES);
    load_slabs(fixed, BK * 128, fixed_map, once, tile_word(m, n, KEY_BLOCK) * BK,
        tile_word(m, n, KEY_HEAD), tile_word(m, n, SEGMENT), tile_word(m, n, BATCH));
    #pragma unroll 1
    for (int member = tile_word(m, n, FIRST_MEMBER); member < tile_word(m, n, END_MEMBER);
        member++) {
      const int4* head = w.query_heads + member;
      const int segment = tile_word(m, n, SEGMENT), batch = tile_word(m, n, BATCH);
      const float* from =
          (SECOND ? w.delta : w.lse) +
          (((i64)batch * w.job.segments + segment) * w.job.heads + head->x) * w.padded;
      const int coordinate = SECOND ? head->z : head->y;
      int block = tile_word(m, n, START);
      #pragma unroll 1
      for (bool more = tile_word(m, n, FIRST) < tile_word(m, n, END); more;
          block = next_block(m, n, block), more = block != tile_word(m, n, START), n++) {
        const u32 stage = stage_of<STAGES>(n), barrier = full + 8 * stage;
        barrier_wait(m.empty + 8 * stage, parity_of<STAGES>(n) ^ 1);
        barrier_expect(barrier, Q_BYTES + BQ * 4);
        load_slabs(moving + stage * Q_BYTES, BQ * 128, moving_map, barrier, block * BQ, coordinate,
            segment, batch);
        bulk_load(dense + stage * BQ * 4, from + block * BQ, BQ * 4, barrier);
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
              (WINDOWED ? w.query_blocks : tile_word(m, n, END));
      int block = tile_word(m, n, START);
      #pragma unroll 1
      for (bool more = tile_word(m, n, FIRST) < tile_word(m, n, END); more;
          block = next_block(m, n, block), more = block != tile_word(m, n, START), n++) {
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
  bulk_wait_all();
}

// ---- warpgroups 1 and 2 -------------------------------------------------------------------

// The two keys of a thread: a query row sees a key from row `first` on, and before row `end`.
struct Mask {
  int first[2];
  bool nonfinite[2];
#if WINDOWED
  int end[2];
#endif
};

// All consumer threads examine K and V once. A key row that is not finite is zeroed in K (0 x NaN
// would reach the dQ of rows that do not see it), and its scores are set to NaN instead, where they
// are seen. For V it is enough that masked dP are replaced rather than multiplied by 0.
DEV bool check_keys(const HopperBackward& w, const Shared& m, int key_block, int thread) {
  const JobParams& job = w.job;
  const int sharing = 256 / BK, row = thread / sharing, share = thread % sharing,
            pieces = 8 / sharing;
  bool k_fine = true, v_fine = true;
  #pragma unroll
  for (int i = 0; i < SLABS * pieces; i++) {
    const u32 at = (i / pieces) * (BK * 128) + row * 128 + (share * pieces + i % pieces) * 16;
    k_fine = all_finite(load_shared_16(m.k + at)) && k_fine;
    v_fine = all_finite(load_shared_16(m.v + at)) && v_fine;
  }
  const bool nonfinite =
      __ballot_sync(~0u, !k_fine) >> (thread % 32 - share) & ((1 << sharing) - 1);
  if (nonfinite)
    for (int i = 0; i < SLABS * pieces; i++)
      store_shared(m.k + (i / pieces) * (BK * 128) + row * 128 + (share * pieces + i % pieces) * 16,
          0.f, 0.f, 0.f, 0.f);
  const int key = key_block * BK + row;
#if WINDOWED
  if (share == 0) {
    const Range seeing = key < job.keys ? w.key_rows[key] : Range{NEVER, 0};
    store_shared(m.first + row * 4, (u32)seeing.start | (nonfinite ? NONFINITE_BIT : 0u));
    store_shared(m.end + row * 4, (u32)seeing.end);
  }
#else
  if (share == 0)
    store_shared(m.first + row * 4,
        (u32)(key < job.keys ? first_query(job, key) : NEVER) | (nonfinite ? NONFINITE_BIT : 0u));
#endif
  if (!k_fine || !v_fine) store_shared(m.nonfinite, 1u);
  fence_async();
  named_sync(2, 256);
  return load_shared(m.nonfinite) == 0;
}

// From query row `unmasked` on, every row sees all keys of a warpgroup and no mask is needed; NEVER
// if anything is not finite. In shared memory, to save registers.
DEV void set_unmasked_from(
    const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread, int last_key) {
  const bool finite = check_keys(w, m, tile_word(m, n, KEY_BLOCK), warpgroup * 128 + thread) &&
                      w.control[NONFINITE_QUERIES] == 0;
#if WINDOWED
  // Up to the second row, every row sees the warpgroup's first key.
  const bool whole = finite && last_key < w.job.keys;
  store_shared(m.unmasked + warpgroup * 4, (u32)(whole ? w.key_rows[last_key].start : NEVER));
  store_shared(m.unmasked + 8 + warpgroup * 4, (u32)(whole ? w.key_rows[last_key - 63].end : 0));
#else
  store_shared(m.unmasked + warpgroup * 4,
      (u32)(finite && last_key < w.job.keys ? first_query(w.job, last_key) : NEVER));
#endif
  __syncwarp();
}
DEV int unmasked_from(const Shared& m, int warpgroup) {
  return (int)load_shared(m.unmasked + warpgroup * 4);
}
// Whether a block of queries needs a mask.
DEV bool is_masked(const Shared& m, int warpgroup, int block) {
#if WINDOWED
  const bool after = (block + 1) * BQ > (int)load_shared(m.unmasked + 8 + warpgroup * 4);
#else
  const bool after = false;
#endif
  return __any_sync(~0u, block * BQ < unmasked_from(m, warpgroup) || after);
}

// Zeroes the query rows of a block whose lse is NaN, before any product reads them.
DEV void zero_nonfinite_queries(u32 q, u32 o, u32 lse) {
  #pragma unroll 1
  for (int i = threadIdx.x - 128; i < SLABS * BQ * 8; i += 256) {
    float x, y;
    load_shared(lse + (i / 8 % BQ & ~1) * 4, x, y);
    if (is_finite(i / 8 & 1 ? y : x)) continue;
    store_shared(q + i * 16, 0.f, 0.f, 0.f, 0.f); store_shared(o + i * 16, 0.f, 0.f, 0.f, 0.f);
  }
  fence_async();
  named_sync(3, 256);
}

// 64 queries x 64 columns of dQ = dS K, over all keys of the tile; both operands are MN-major.
DEV void issue_dq(float (&dq)[32], u32 ds, u32 keys) {
  const u64 a = matrix(ds, 1024, 1024), b = matrix(keys, 1024, 1024);
  #pragma unroll
  for (int k = 0; k < BK / 16; k++)
    wgmma_ss_ta_tb_n64(dq, further(a, k * 2048), further(b, k * 2048), k != 0);
}

DEV Mask mask_of(const Shared& m, int row) {
  const u32 x = load_shared(m.first + row * 4), y = load_shared(m.first + row * 4 + 32);
  Mask mask{{(int)(x & ~NONFINITE_BIT), (int)(y & ~NONFINITE_BIT)},
      {(x & NONFINITE_BIT) != 0, (y & NONFINITE_BIT) != 0}};
#if WINDOWED
  mask.end[0] = (int)load_shared(m.end + row * 4);
  mask.end[1] = (int)load_shared(m.end + row * 4 + 32);
#endif
  return mask;
}
// Whether query `row` sees key `e` of this thread, and saw any key at all.
DEV bool sees(const Mask& mask, int e, int row, float lse) {
#if WINDOWED
  if (row >= mask.end[e]) return false;
#endif
  return row >= mask.first[e] && lse != -neg_inf();
}

// P = exp2(S - lse); `lse` and `delta` are the addresses of this thread's first column.
template <int N> DEV void to_probabilities(float (&s)[N], u32 lse, float exponent) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    s[4 * i] = exp2_fast(fmaf(s[4 * i], exponent, -x));
    s[4 * i + 1] = exp2_fast(fmaf(s[4 * i + 1], exponent, -y));
    s[4 * i + 2] = exp2_fast(fmaf(s[4 * i + 2], exponent, -x));
    s[4 * i + 3] = exp2_fast(fmaf(s[4 * i + 3], exponent, -y));
  }
}
// The same with a mask: 0 where masked, NaN where a key that is not finite is seen. `row` is that
// of the first column.
template <int N>
DEV void to_probabilities(float (&s)[N], u32 lse, float exponent, const Mask& mask, int row) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const float p = exp2_fast(fmaf(s[4 * i + e], exponent, -(e & 1 ? y : x)));
      s[4 * i + e] = sees(mask, e >> 1, row + i * 8 + (e & 1), e & 1 ? y : x)
                         ? (mask.nonfinite[e >> 1] ? __uint_as_float(QUIET_NAN) : p)
                         : 0.f;
    }
  }
}
// dS = P (gain dP - delta), in place of dP. Under a mask, P = 0 gives 0 even where dP is NaN.
template <bool HIDES, int N>
DEV void to_ds(float (&dp)[N], const float (&p)[N], u32 delta, float gain) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(delta + i * 32, x, y);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const float ds = p[4 * i + e] * fmaf(dp[4 * i + e], gain, -(e & 1 ? y : x));
      dp[4 * i + e] = HIDES && p[4 * i + e] == 0.f ? 0.f : ds;
    }
  }
}
template <int N> DEV void to_stored(u32 (&to)[N], const float (&from)[2 * N]) {
  #pragma unroll
  for (int i = 0; i < N; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}
// Stores dS (or P) to shared memory as [key][64 queries], swizzled, from 16 keys on; `piece` is the
// first 8 queries.
template <int N> DEV void store_pairs(u32 to, const u32 (&x)[N], int key, int piece, int lane) {
  const u32 row = opaque(to + (key + (lane & 15)) * 128), swizzle = (lane & 7) << 4,
            half = (lane >> 4) << 4;
  #pragma unroll
  for (int i = 0; i < N / 2; i += 2)
    store_matrices(row + ((((piece + i) << 4) + half) ^ swizzle), x[2 * i], x[2 * i + 1],
        x[2 * i + 2], x[2 * i + 3]);
  fence_async();
}
// Stages this warp's 16 rows x 64 columns of dQ in the buffer that warp 1 adds from: [32
// columns][row] [column], swizzled. Odd rows store columns 16 further on in the same instruction,
// which avoids bank conflicts.
DEV void stage_dq(u32 to, const float (&dq)[32], float gain, int lane) {
  const bool odd = lane / 4 & 1;
  const u32 row = (lane / 4) * 128, swizzle = (lane / 4) << 4, in_chunk = (lane & 1) * 8;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 column = (i % 4) ^ (odd ? 2 : 0);
    #pragma unroll
    for (int down = 0; down < 2; down++) {
      const float x = odd ? dq[4 * (i ^ 2) + 2 * down] : dq[4 * i + 2 * down],
                  y = odd ? dq[4 * (i ^ 2) + 2 * down + 1] : dq[4 * i + 2 * down + 1];
      store_shared(to + (i / 4) * (BQ * 128) + row + down * 1024 +
                       (((column * 32) + (lane & 2) * 8) ^ swizzle) + in_chunk,
          SCALES_DQ ? x * gain : x, SCALES_DQ ? y * gain : y);
    }
  }
  fence_async();
  __syncwarp();
}
// Adds this thread's part of dK or dV to memory, or stores it: two rows, every fourth pair of
// columns from `column` on. No other thread adds to these elements, so the order does not matter; a
// reduction in memory avoids waiting for the old value.
template <int N> DEV void add_rows(void* to, const JobParams& job, const Shared& m, u32 n,
    int stores, int head, const float (&sum)[N], float gain, int key, int column, int lane) {
  #pragma unroll
  for (int down = 0; down < 2; down++) {
    if (key + 8 * down >= job.keys) continue;
    const i64 row =
        at(job.k, tile_word(m, n, BATCH), tile_word(m, n, SEGMENT), key + 8 * down, head) + column +
        (lane % 4) * 2;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
      // fmaf(x, gain, 0) turns -0 into 0, as adding to a zero would.
      const float x = fmaf(sum[4 * i + 2 * down], gain, 0.f),
                  y = fmaf(sum[4 * i + 2 * down + 1], gain, 0.f);
      if (column + i * 8 >= job.dim) continue;
      if (stores == ROUNDED)
        *(u32*)((u16*)to + row + i * 8) = pack(x, y);
      else if (stores == STORED)
        *(float2*)((float*)to + row + i * 8) = make_float2(x, y);
      else
        global_add((float*)to + row + i * 8, x, y);
    }
  }
}

// Releases the tile's keys and values: those of the next tile may be loaded.
DEV void release_keys(const Shared& m, int warpgroup, int thread) {
  if (warpgroup == 0 && thread == 0) store_shared(m.nonfinite, 0u);
  if (thread % 32 == 0) barrier_arrive(m.kv_empty);
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
