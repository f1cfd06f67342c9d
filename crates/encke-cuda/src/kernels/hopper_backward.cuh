// Gradients of attention on Hopper: dK, dV and dQ in one pass over the scores. What both kernels, for
// narrow and for wide heads, have in common: tiles, loads, the additions to dQ, and the mask.
//
// A tile is BK keys of one key head. The CTA at work on it keeps K, V and the sums of dK, dV, and goes
// through every block of queries that sees a key of the tile, of every query head that reads this
// key head. Per block five products:
//   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ = dS K.
// S and dP are formed transposed, keys as rows: P^T and dS^T then are left operands of dV and dK
// as they lie, and a thread has but two keys, so that its mask is two numbers.
//
// Roles: warps 0 and 2 load, warp 1 adds finished dQ blocks to memory, warpgroups 1 and 2 multiply.
// dQ is added by the copy engine (reduction through a tensor map), straight into the caller's rows.
// The grid is persistent: warp 0 finds the next tile and loads its first queries while the last one is still worked
// on, and its keys while sums are carried away. Blocks, and the phases of their barriers, count on over tiles.
//
// Where the order of those additions must be fixed, a block of queries has a turn, counted in memory,
// that the tiles of its keys take one after the other. Tiles are drawn from a counter in that same
// order, so that a tile only ever waits for tiles that were drawn before it. Under a mask the order is
// from the last tile of keys down, and every tile begins at its first block: each block of queries
// is then wanted by its tiles at different times, in just that order, and hardly anyone waits. Without
// a mask each tile begins `spread` blocks after the one before it, and goes round: a block is wanted by the tile
// that begins there first, then by the ones before that, and at last by the ones behind it. That takes all tiles of a head
// at work at once; where there may be too many (`spread` is 0) all begin at the first block, and follow each other.
//
// Macros: HD head dimension in steps of 16 (the job's may be smaller: what is missing reads as
// zero), BQ queries in a block, STAGES blocks in flight, STAGINGS buffers for finished dQ.

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
#define TILE_BYTES 48                        // what a tile is told in
#define SICK 0x80000000u                     // a bit beside a key's first row

struct HopperBackward {
  Job job;
  float *dk, *dv;
  const float *lse, *delta;   // dense, from backward_rows
  const int2* key_heads;      // of each key head: its first query head in the next table, its coordinate in k's map; and an end
  const int4* query_heads;    // which head of the job, and its coordinates in the maps of q, dout and dq
  u32* control;
  int key_head_count, key_tiles, padded, fixed_order;
  float exponent;             // scale, in base 2
  float dp_gain, dq_gain, dk_gain, dv_gain;
  int tiles;                  // in all
  const int* first_blocks;    // of each tile of keys, from backward_rows
  int blank;                  // dk and dv are to be read as zeros, but nobody has written these: sums are written, not added
  int spread;
};

// Where things lie in shared memory; `*_full` and `*_empty` are barriers, 8 bytes each.
struct Shared {
  u32 k, v, q, o, pairs, dq, lse, delta, first;
  u32 k_full, v_full, kv_empty, q_full, o_full, empty, dq_full, dq_empty, tile_full, tile_empty;
  u32 sick, clear, tiles;   // whether keys hold what must stay hidden; see set_clear; two tiles, by turns
};
DEV Shared shared_from(u32 base) {
  Shared m;
  m.k = base; m.v = m.k + K_BYTES; m.q = m.v + K_BYTES; m.o = m.q + STAGES * Q_BYTES; m.pairs = m.o + STAGES * Q_BYTES;
  m.dq = m.pairs + 2 * PAIRS * PAIR_BYTES; m.lse = m.dq + STAGINGS * DQ_BYTES; m.delta = m.lse + STAGES * BQ * 4; m.first = m.delta + STAGES * BQ * 4;
  m.tiles = m.first + BK * 4; m.k_full = m.tiles + 2 * TILE_BYTES; m.v_full = m.k_full + 8; m.kv_empty = m.v_full + 8;
  m.q_full = m.kv_empty + 8; m.o_full = m.q_full + STAGES * 8; m.empty = m.o_full + STAGES * 8;
  m.dq_full = m.empty + STAGES * 8; m.dq_empty = m.dq_full + STAGINGS * 8; m.tile_full = m.dq_empty + STAGINGS * 8; m.tile_empty = m.tile_full + 16;
  m.sick = m.tile_empty + 16; m.clear = m.sick + 8;
  return m;
}

// How far a role has come, in one register: blocks so far, and above them the tile's turn modulo 4. Block n uses place
// n % COUNT of a ring of buffers; the parity is that of the barrier's phase there.
#define ONE_TILE 0x40000000u
DEV u32 block_of(u32 n) { return n & (ONE_TILE - 1); }
template <int COUNT> DEV u32 place_of(u32 n) { return block_of(n) % COUNT; }
template <int COUNT> DEV u32 parity_of(u32 n) { return block_of(n) / COUNT & 1; }
DEV u32 tile_parity(u32 n) { return n >> 30 & 1; }   // of barriers that have a phase for each tile
DEV u32 slot_of(u32 n) { return n >> 30 & 1; }       // of two slots
DEV u32 slot_parity(u32 n) { return n >> 31; }

// A tile, and its blocks of queries of each of its query heads: from `start` to `end`, then from `first` on. It lies in shared memory: everyone
// reads it, few of its numbers are needed at a time, and registers are short. `last`: blocks of this CTA up to its end.
// A block of queries has its turn, and nobody comes before where the next tile of keys is not seen yet (`alone`).
// KEY_BLOCK is negative behind the last tile.
enum { BATCH = 0, SEGMENT = 4, KEY_BLOCK = 8, KEY_HEAD = 12, FIRST = 16, END = 20, FIRST_MEMBER = 24, END_MEMBER = 28, START = 32, TURN = 36, ALONE = 40, LAST = 44 };
DEV int tile_word(const Shared& m, u32 n, int word) { return (int)load_shared(m.tiles + slot_of(n) * TILE_BYTES + word); }

DEV int next_block(const Shared& m, u32 n, int block) { return block + 1 == tile_word(m, n, END) ? tile_word(m, n, FIRST) : block + 1; }

// Puts the tile with this number where the others find it, unless no query sees its keys and nothing is to be written for them.
DEV bool put_tile(const HopperBackward& w, const Shared& m, u32 n, u32 index) {
  const Job& job = w.job;
  u32 rest = index / (u32)w.key_tiles;
  int key_block = index - rest * w.key_tiles;
  if (job.causal && w.fixed_order) key_block = w.key_tiles - 1 - key_block;
  const int blocks = (job.queries + BQ - 1) / BQ, first = w.first_blocks[key_block];
  if (first == blocks && !w.blank) return false;
  const int head = rest % (u32)w.key_head_count;
  const int2 members = w.key_heads[head];
  const int end_member = w.key_heads[head + 1].x;
  rest /= (u32)w.key_head_count;
  const u32 to = m.tiles + slot_of(forgotten(n)) * TILE_BYTES;
  store_shared(to, make_uint4(rest / (u32)job.segments, rest % (u32)job.segments, key_block, members.y));
  store_shared(to + 16, make_uint4(first, blocks, members.x, end_member));
  store_shared(to + 32, make_uint4(first + key_block * w.spread, job.causal ? w.key_tiles - 1 - key_block : key_block, job.causal ? w.first_blocks[key_block + 1] : 0, block_of(n) + (blocks - first) * (end_member - members.x)));
  return true;
}
// Finds the next tile and tells the others; false behind the last one. Where tiles go round, this one may have to wait for the very
// one that would be drawn: then none is drawn before this one has ended.
DEV bool tell(const HopperBackward& w, const Shared& m, u32 n) {
  if (w.spread != 0 && n != 0) barrier_wait(m.tile_empty + 8 * slot_of(n - ONE_TILE), slot_parity(n - ONE_TILE));
  barrier_wait(m.tile_empty + 8 * slot_of(n), slot_parity(n) ^ 1);
  u32 index;
  do index = atomicAdd(w.control + NEXT_TILE, 1u); while (index < (u32)w.tiles && !put_tile(w, m, n, index));
  const bool found = index < (u32)w.tiles;
  const u32 slot = slot_of(forgotten(n));   // registers are few here
  if (!found) store_shared(m.tiles + slot * TILE_BYTES + KEY_BLOCK, ~0u);
  barrier_arrive(m.tile_full + 8 * slot);
  return found;
}
DEV bool hear(const Shared& m, u32 n) {
  barrier_wait(m.tile_full + 8 * slot_of(n), slot_parity(n));
  return tile_word(m, n, KEY_BLOCK) >= 0;
}
DEV void leave(const Shared& m, u32 n) { barrier_arrive(m.tile_empty + 8 * slot_of(n)); }

// ---- warps 0 and 2: load -----------------------------------------------------------------------

DEV void load_slabs(u32 to, u32 slab_bytes, const TensorMap* map, u32 barrier, int row, int head, int segment, int batch) {
  #pragma unroll
  for (int slab = 0; slab < SLABS; slab++) tma_load(to + slab * slab_bytes, map, barrier, slab * 64, row, head, segment, batch);
}
// One of the two streams: a tile's keys and block after block of queries with their lse, or values, output gradients
// and delta. `fixed` and `moving` are where they go. The first one also finds the tiles.
template <bool SECOND> DEV void load_stream(const HopperBackward& w, const Shared& m, const TensorMap* fixed_map, const TensorMap* moving_map) {
  const u32 once = SECOND ? m.v_full : m.k_full, full = SECOND ? m.o_full : m.q_full, fixed = SECOND ? m.v : m.k, moving = SECOND ? m.o : m.q, dense = SECOND ? m.delta : m.lse;
  u32 n = 0;
  #pragma unroll 1
  while (SECOND ? hear(m, n) : tell(w, m, n)) {
    n = forgotten(n);   // nothing that was derived from it is kept from before
    barrier_wait(m.kv_empty, tile_parity(n) ^ 1);
    barrier_expect(once, K_BYTES);
    load_slabs(fixed, BK * 128, fixed_map, once, tile_word(m, n, KEY_BLOCK) * BK, tile_word(m, n, KEY_HEAD), tile_word(m, n, SEGMENT), tile_word(m, n, BATCH));
    #pragma unroll 1
    for (int member = tile_word(m, n, FIRST_MEMBER); member < tile_word(m, n, END_MEMBER); member++) {
      const int4* head = w.query_heads + member;
      const int segment = tile_word(m, n, SEGMENT), batch = tile_word(m, n, BATCH);
      const float* from = (SECOND ? w.delta : w.lse) + (((i64)batch * w.job.segments + segment) * w.job.heads + head->x) * w.padded;
      const int coordinate = SECOND ? head->z : head->y;
      int block = tile_word(m, n, START);
      #pragma unroll 1
      for (bool more = tile_word(m, n, FIRST) < tile_word(m, n, END); more; block = next_block(m, n, block), more = block != tile_word(m, n, START), n++) {
        const u32 place = place_of<STAGES>(n), barrier = full + 8 * place;
        barrier_wait(m.empty + 8 * place, parity_of<STAGES>(n) ^ 1);
        barrier_expect(barrier, Q_BYTES + BQ * 4);
        load_slabs(moving + place * Q_BYTES, BQ * 128, moving_map, barrier, block * BQ, coordinate, segment, batch);
        bulk_load(dense + place * BQ * 4, from + block * BQ, BQ * 4, barrier);
      }
    }
    if (SECOND) leave(m, n);
    n += ONE_TILE;
  }
}

// ---- warp 1: adds finished dQ to memory -------------------------------------------------------

// This tile's turn at a block, and the one that ends with it: where a tile is alone the turns of those that never come are over.
DEV u32 last_turn(const HopperBackward& w, const Shared& m, u32 n, int block) {
  const int own = tile_word(m, n, TURN);
  if (w.spread == 0) return own;
  const int first = min(block / w.spread, w.key_tiles - 1) - own;
  return first < 0 ? first + w.key_tiles : first;
}
DEV u32 turn_of(const HopperBackward& w, const Shared& m, u32 n, int block) { return block < tile_word(m, n, ALONE) ? 0 : last_turn(w, m, n, block); }

DEV void add_dq(const HopperBackward& w, const Shared& m, const TensorMap* dqs) {
  u32 n = 0;
  #pragma unroll 1
  for (; hear(m, n); leave(m, n), n += ONE_TILE) {
    const int segment = tile_word(m, n, SEGMENT), batch = tile_word(m, n, BATCH);
    #pragma unroll 1
    for (int member = tile_word(m, n, FIRST_MEMBER); member < tile_word(m, n, END_MEMBER); member++) {
      const int4* head = w.query_heads + member;
      const int coordinate = head->w;
      u32* turns = w.control + TURNS + (((i64)batch * w.job.segments + segment) * w.job.heads + head->x) * tile_word(m, n, END);
      int block = tile_word(m, n, START);
      #pragma unroll 1
      for (bool more = tile_word(m, n, FIRST) < tile_word(m, n, END); more; block = next_block(m, n, block), more = block != tile_word(m, n, START), n++) {
        const u32 place = place_of<STAGINGS>(n);
        barrier_wait(m.dq_full + 8 * place, parity_of<STAGINGS>(n));
        if (w.fixed_order) await_turn(turns + block, turn_of(w, m, n, block));
        #pragma unroll
        for (int slab = 0; slab < DQ_SLABS; slab++)
          if (slab * 32 < w.job.dim) tma_add(dqs, m.dq + place * DQ_BYTES + slab * (BQ * 128), slab * 32, block * BQ, coordinate, segment, batch);
        bulk_commit();
        bulk_wait_read();
        barrier_arrive(m.dq_empty + 8 * place);
        if (w.fixed_order) { bulk_wait_all(); pass_turn(turns + block, last_turn(w, m, n, block) + 1); }
      }
    }
  }
  bulk_wait_all();
}

// ---- warpgroups 1 and 2 -------------------------------------------------------------------

// The two keys of a thread: a query row sees a key from row `first` on. A key that is no number is sick.
struct Mask { int first[2]; bool sick[2]; };

// Looks once at K and V, all threads that multiply together. A key row with something that is no number
// is taken out of K (0 x NaN would reach the dQ of rows that do not see it) and its scores are made
// NaN instead, where they are seen. V needs only that hidden dP are replaced, not multiplied by 0.
DEV bool keys_are_healthy(const Job& job, const Shared& m, int key_block, int thread) {
  const int sharing = 256 / BK, row = thread / sharing, share = thread % sharing, pieces = 8 / sharing;
  bool k_fine = true, v_fine = true;
  #pragma unroll
  for (int i = 0; i < SLABS * pieces; i++) {
    const u32 at = (i / pieces) * (BK * 128) + row * 128 + (share * pieces + i % pieces) * 16;
    k_fine = are_numbers(load_shared_16(m.k + at)) && k_fine; v_fine = are_numbers(load_shared_16(m.v + at)) && v_fine;
  }
  const bool sick = __ballot_sync(~0u, !k_fine) >> (thread % 32 - share) & ((1 << sharing) - 1);
  if (sick) for (int i = 0; i < SLABS * pieces; i++) store_shared(m.k + (i / pieces) * (BK * 128) + row * 128 + (share * pieces + i % pieces) * 16, 0.f, 0.f, 0.f, 0.f);
  const int key = key_block * BK + row;
  if (share == 0) store_shared(m.first + row * 4, (u32)(key < job.keys ? first_query(job, key) : NEVER) | (sick ? SICK : 0u));
  if (!k_fine || !v_fine) store_shared(m.sick, 1u);
  fence_async();
  named_sync(2, 256);
  return load_shared(m.sick) == 0;
}

// From query row `clear` on every row sees all of a warpgroup's keys, and nothing needs to be hidden: NEVER where
// something is sick. It lies in shared memory, for want of registers.
DEV void set_clear(const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread, int last_key) {
  const bool healthy = keys_are_healthy(w.job, m, tile_word(m, n, KEY_BLOCK), warpgroup * 128 + thread) && w.control[SICK_QUERIES] == 0;
  store_shared(m.clear + warpgroup * 4, (u32)(healthy && last_key < w.job.keys ? first_query(w.job, last_key) : NEVER));
  __syncwarp();
}
DEV int clear_from(const Shared& m, int warpgroup) { return (int)load_shared(m.clear + warpgroup * 4); }

// Takes out of a block the query rows whose lse is no number, before any product reads them.
DEV void clear_sick_queries(u32 q, u32 o, u32 lse) {
  #pragma unroll 1
  for (int i = threadIdx.x - 128; i < SLABS * BQ * 8; i += 256) {
    float x, y;
    load_shared(lse + (i / 8 % BQ & ~1) * 4, x, y);
    if (is_number(i / 8 & 1 ? y : x)) continue;
    store_shared(q + i * 16, 0.f, 0.f, 0.f, 0.f); store_shared(o + i * 16, 0.f, 0.f, 0.f, 0.f);
  }
  fence_async();
  named_sync(3, 256);
}

// 64 queries x 64 columns of dQ = dS K, over all keys of the tile; both operands lie transposed.
DEV void issue_dq(float (&dq)[32], u32 ds, u32 keys) {
  const u64 a = matrix(ds, 1024, 1024), b = matrix(keys, 1024, 1024);
  #pragma unroll
  for (int k = 0; k < BK / 16; k++) wgmma_ss_ta_tb_n64(dq, further(a, k * 2048), further(b, k * 2048), k != 0);
}

DEV Mask mask_of(const Shared& m, int row) {
  const u32 x = load_shared(m.first + row * 4), y = load_shared(m.first + row * 4 + 32);
  return Mask{{(int)(x & ~SICK), (int)(y & ~SICK)}, {(x & SICK) != 0, (y & SICK) != 0}};
}
// Whether query `row` sees key `e` of this thread, and ever saw any.
DEV bool sees(const Mask& mask, int e, int row, float lse) { return row >= mask.first[e] && lse != -neg_inf(); }

// P from S: exp2(S - lse); `lse` and `delta` are those of this thread's first column.
template <int N> DEV void to_probabilities(float (&s)[N], u32 lse, float exponent) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    s[4 * i] = exp2_fast(fmaf(s[4 * i], exponent, -x)); s[4 * i + 1] = exp2_fast(fmaf(s[4 * i + 1], exponent, -y));
    s[4 * i + 2] = exp2_fast(fmaf(s[4 * i + 2], exponent, -x)); s[4 * i + 3] = exp2_fast(fmaf(s[4 * i + 3], exponent, -y));
  }
}
// The same where something may be hidden: 0 there, and NaN where a sick key is seen. `row` is the first column's.
template <int N> DEV void to_probabilities(float (&s)[N], u32 lse, float exponent, const Mask& mask, int row) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(lse + i * 32, x, y);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const float p = exp2_fast(fmaf(s[4 * i + e], exponent, -(e & 1 ? y : x)));
      s[4 * i + e] = sees(mask, e >> 1, row + i * 8 + (e & 1), e & 1 ? y : x) ? (mask.sick[e >> 1] ? __uint_as_float(NOT_A_NUMBER) : p) : 0.f;
    }
  }
}
// dS from dP: P (gain dP - delta). Where something may be hidden, 0 x NaN must not be.
template <bool HIDDEN, int N> DEV void to_ds(float (&dp)[N], const float (&p)[N], u32 delta, float gain) {
  #pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float x, y;
    load_shared(delta + i * 32, x, y);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      const float ds = p[4 * i + e] * fmaf(dp[4 * i + e], gain, -(e & 1 ? y : x));
      dp[4 * i + e] = HIDDEN && p[4 * i + e] == 0.f ? 0.f : ds;
    }
  }
}
template <int N> DEV void to_stored(u32 (&to)[N], const float (&from)[2 * N]) {
  #pragma unroll
  for (int i = 0; i < N; i++) to[i] = pack(from[2 * i], from[2 * i + 1]);
}
// dS (or P) to shared memory as [key][64 queries], swizzled, from 16 keys on; `piece` is the first 8 queries.
template <int N> DEV void store_pairs(u32 to, const u32 (&x)[N], int key, int piece, int lane) {
  const u32 row = forgotten(to + (key + (lane & 15)) * 128), swizzle = (lane & 7) << 4, half = (lane >> 4) << 4;
  #pragma unroll
  for (int i = 0; i < N / 2; i += 2)
    store_matrices(row + ((((piece + i) << 4) + half) ^ swizzle), x[2 * i], x[2 * i + 1], x[2 * i + 2], x[2 * i + 3]);
  fence_async();
}
// This warp's 16 rows x 64 columns of dQ into the buffer warp 1 adds from: [32 columns][row][column],
// swizzled. Odd rows store the columns 16 further in the same instruction, so that no two rows meet in a bank.
DEV void stage_dq(u32 to, const float (&dq)[32], float gain, int lane) {
  const bool odd = lane / 4 & 1;
  const u32 row = (lane / 4) * 128, swizzle = (lane / 4) << 4, in_chunk = (lane & 1) * 8;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 column = (i % 4) ^ (odd ? 2 : 0);
    #pragma unroll
    for (int down = 0; down < 2; down++) {
      const float x = odd ? dq[4 * (i ^ 2) + 2 * down] : dq[4 * i + 2 * down], y = odd ? dq[4 * (i ^ 2) + 2 * down + 1] : dq[4 * i + 2 * down + 1];
      store_shared(to + (i / 4) * (BQ * 128) + row + down * 1024 + (((column * 32) + (lane & 2) * 8) ^ swizzle) + in_chunk, x * gain, y * gain);
    }
  }
  fence_async();
  __syncwarp();
}
// Adds this thread's share of dK or dV to memory: two rows, every fourth pair of columns from `column` on. Nobody else
// adds to them, so the order is no question; but additions that memory makes need not wait for what is there.
template <int N> DEV void add_rows(float* to, const Job& job, const Shared& m, u32 n, bool blank, int head, const float (&sum)[N], float gain, int key, int column, int lane) {
  #pragma unroll
  for (int down = 0; down < 2; down++) {
    if (key + 8 * down >= job.keys) continue;
    float* row = to + at(job.k, tile_word(m, n, BATCH), tile_word(m, n, SEGMENT), key + 8 * down, head) + column + (lane % 4) * 2;
    #pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float x = fmaf(sum[4 * i + 2 * down], gain, 0.f), y = fmaf(sum[4 * i + 2 * down + 1], gain, 0.f);   // no -0, as nothing that is added to 0
      if (column + i * 8 >= job.dim) continue;
      if (blank) *(float2*)(row + i * 8) = make_float2(x, y); else global_add(row + i * 8, x, y);
    }
  }
}

// The tile's keys and values are needed no more: those of the next one may come.
DEV void release_keys(const Shared& m, int warpgroup, int thread) {
  if (warpgroup == 0 && thread == 0) store_shared(m.sick, 0u);
  if (thread % 32 == 0) barrier_arrive(m.kv_empty);
}
// Multiplies for one tile: what the kernels differ in. Returns how far it has come.
DEV u32 work_on_tile(const HopperBackward& w, const Shared& m, u32 n, int warpgroup, int thread);

extern "C" __global__ void __launch_bounds__(384, 1)
hopper_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap k,
                const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dq, const __grid_constant__ HopperBackward w) {
  SHARED_MEMORY(memory);
  const Shared m = shared_from(SHARED_BASE);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);   // the compiler is told that it is the same for all of a warp
  if (threadIdx.x == 0) {
    check_shared_base(memory);
    barrier_init(m.k_full, 1); barrier_init(m.v_full, 1); barrier_init(m.kv_empty, 8);
    for (int i = 0; i < STAGES; i++) { barrier_init(m.q_full + 8 * i, 1); barrier_init(m.o_full + 8 * i, 1); barrier_init(m.empty + 8 * i, 8); }
    for (int i = 0; i < STAGINGS; i++) { barrier_init(m.dq_full + 8 * i, 8); barrier_init(m.dq_empty + 8 * i, 1); }
    for (int i = 0; i < 2; i++) { barrier_init(m.tile_full + 8 * i, 1); barrier_init(m.tile_empty + 8 * i, 10); }
    barrier_init_fence();
    store_shared(m.sick, 0u);
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_lower<24>();
    if (threadIdx.x == 0) { tma_prefetch(&k); tma_prefetch(&q); load_stream<false>(w, m, &k, &q); }
    if (threadIdx.x == 64) { tma_prefetch(&v); tma_prefetch(&dout); load_stream<true>(w, m, &v, &dout); }
    if (threadIdx.x == 32) { tma_prefetch(&dq); add_dq(w, m, &dq); }
  } else {
    registers_raise<240>();
    #pragma unroll 1
    for (u32 n = 0; hear(m, n); n += ONE_TILE) {
      n = work_on_tile(w, m, n, warpgroup - 1, threadIdx.x % 128);
      __syncwarp();
      if (threadIdx.x % 32 == 0) leave(m, n);
    }
  }
}
