// The tile scheduler and the shared memory layout of the forward kernel; hopper_forward.cuh
// describes the macros.
//
// The decision here: one thread computes the next tile and publishes it to the other warps through
// shared memory. Its divisions overlap with the current tile, and tiles may come from a counter.
#ifndef WINDOWED
#define WINDOWED 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SLOPES
#define SLOPES 0
#endif
#define TRANSFORMED (SOFTCAP || SLOPES)
#ifdef VD
#define OWN_VALUES 1
#else
#define OWN_VALUES 0
#define VD HD
#endif
#ifndef TILED
#define TILED 0
#endif
// Whether tiles differ in length, come longest first, and are taken from a counter.
#define COUNTED (CAUSAL || TILED)
#define ROWS (CONSUMERS * 64)
#define THREADS ((CONSUMERS + 1) * 128)
#define SLABS ((HD + 63) / 64)
#define V_SLABS ((VD + 63) / 64)
// The outputs of a tile are staged where its queries were.
#define Q_BYTES ((SLABS > V_SLABS ? SLABS : V_SLABS) * ROWS * 128)
#define KEY_BYTES (SLABS * KEYS * 128)
#define VALUE_BYTES (V_SLABS * KEYS * 128)

// The tiles of a job. A sequence is a (batch entry, segment, head).
struct TileParams {
  u32 count;
  int row_tiles, sequences, sequences_in_l2;
  // The mask in 32 bits: row i sees the keys 0..=(lead + i * query_step) / key_step. The host makes
  // sure that nothing overflows and divides by common factors: key_step is almost always 1.
  // With TILED and without a mask: tiles of |key_step| rows; `lead` rows of a tile are before row
  // 0, and `query_step` is added to numbers of rows to count from key 0. Rows see the keys up to
  // the end of their own tile if key_step > 0, those after it if it is negative, and all if it is
  // 0. If it is odd they see all, those up to the end of their own tile first.
  int lead, query_step, key_step;
  // A head offset is a multiple of its operand's unit; its coordinate in a tensor map is
  // (offset >> shift) * inverse modulo 2^32, with the inverse of the unit's odd part: no division.
  u32 q_shift, q_inverse, k_shift, k_inverse;
  // Keys are a chain of at most CHUNKS chunks, numbered consecutively from the last chunk on: chunk
  // i begins at key chunk_starts[i], the last one at 0. Chunk 0, with the highest numbers, has the
  // job's own keys and its mask. All others are fully visible and consist of whole blocks.
  int chunk_starts[CHUNKS];
  // With WINDOWED: three entries for each tile of a sequence, longest first (see `publish_listed`).
  const int4* list;
  // With SLOPES: those of the heads in base 2, f32 in words of 64 bits, and the steps of positions.
  const uint2* slopes;
  int query_position_step, key_position_step;
  // With SOFTCAP or SLOPES, all in base 2: |scale|; the cap, and twice |scale| over it.
  float score_scale, softcap, inverse_cap;
  int pad;
};
struct KvChunkMaps { TensorMap k[CHUNKS], v[CHUNKS]; };

// The number of keys that query row i sees.
DEV int visible_keys(const JobParams& job, const TileParams& tiles, int i) {
  if (!CAUSAL) return tiles.chunk_starts[0] + job.keys;
  int ahead = tiles.lead + i * tiles.query_step;
  if (ahead < 0) return tiles.chunk_starts[0];
  if (tiles.key_step != 1) ahead = (u32)ahead / (u32)tiles.key_step;
  return tiles.chunk_starts[0] + min(ahead + 1, job.keys);
}

// Shared memory layout, in bytes from its start, which is aligned to 1024; FORWARD_BYTES in total.
#define AT_K (Q_STAGES * Q_BYTES)
#define AT_V (AT_K + STAGES * KEY_BYTES)
#define AT_SUMS (AT_V + STAGES * VALUE_BYTES)
// Pitch of a row of sums: 4 banks more than the row. The padding holds m and l of the row, for this
// tile and for the next.
#define SUM_PITCH (VD * 4 + 16)
#define AT_FLAGS (AT_SUMS + (STAGED ? ROWS * SUM_PITCH : 0))
#define AT_TILES (AT_FLAGS + STAGES * 16)
#define TILE_BYTES (48 + WINDOWED * 16 + SLOPES * 16)
#define AT_BARRIERS (AT_TILES + 2 * TILE_BYTES)
#define FORWARD_BYTES \
  (AT_BARRIERS + (2 * Q_STAGES + 6 * STAGES + 4 + (STAGED ? CONSUMERS * 4 + 2 : 0)) * 8)
struct Shared {
  u32 base;
  DEV_MEMBER u32 q(u32 stage) const { return base + stage * Q_BYTES; }
  DEV_MEMBER u32 k(u32 stage) const { return base + AT_K + stage * KEY_BYTES; }
  DEV_MEMBER u32 v(u32 stage) const { return base + AT_V + stage * VALUE_BYTES; }
  DEV_MEMBER u32 sums(u32 row) const { return base + AT_SUMS + row * SUM_PITCH; }
  DEV_MEMBER u32 flags(u32 stage) const { return base + AT_FLAGS + stage * 16; }
  DEV_MEMBER u32 tile(u32 slot) const { return base + AT_TILES + slot * TILE_BYTES; }
  DEV_MEMBER u32 barrier(u32 index) const { return base + AT_BARRIERS + index * 8; }
  DEV_MEMBER u32 q_full(u32 stage) const { return barrier(stage); }
  DEV_MEMBER u32 q_empty(u32 stage) const { return barrier(Q_STAGES + stage); }
  DEV_MEMBER u32 k_full(u32 stage) const { return barrier(2 * Q_STAGES + stage); }
  DEV_MEMBER u32 k_empty(u32 stage) const { return barrier(2 * Q_STAGES + STAGES + stage); }
  DEV_MEMBER u32 v_full(u32 stage) const { return barrier(2 * Q_STAGES + 2 * STAGES + stage); }
  DEV_MEMBER u32 v_empty(u32 stage) const { return barrier(2 * Q_STAGES + 3 * STAGES + stage); }
  DEV_MEMBER u32 masked(u32 stage) const { return barrier(2 * Q_STAGES + 4 * STAGES + stage); }
  DEV_MEMBER u32 checked(u32 stage) const { return barrier(2 * Q_STAGES + 5 * STAGES + stage); }
  DEV_MEMBER u32 tile_full(u32 slot) const { return barrier(2 * Q_STAGES + 6 * STAGES + slot); }
  DEV_MEMBER u32 tile_empty(u32 slot) const {
    return barrier(2 * Q_STAGES + 6 * STAGES + 2 + slot);
  }
  DEV_MEMBER u32 softmax(u32 slot, u32 row) const { return sums(row) + VD * 4 + slot * 8; }
  DEV_MEMBER u32 softmax_full(u32 slot) const {
    return barrier(2 * Q_STAGES + 6 * STAGES + 4 + slot);
  }
  DEV_MEMBER u32 sums_full(u32 warp) const { return barrier(2 * Q_STAGES + 6 * STAGES + 6 + warp); }
};

// A stage of a circular buffer and the parity of its phase.
template <int COUNT> struct StageIndex {
  u32 stage = 0, parity = 0;
  DEV_MEMBER void advance() { if (++stage == COUNT) { stage = 0; parity ^= 1; } }
};
// The same in one register, for the producer thread, which has few.
template <int COUNT> struct StageCounter {
  u32 uses = 0;
  DEV_MEMBER u32 stage() const { return uses % COUNT; }
  DEV_MEMBER u32 parity() const { return uses / COUNT & 1; }
};

// A tile as the producer publishes it; `blocks` is -1 after the last one. `cell` is that of row 0
// of the sequence.
//
// With WINDOWED a tile lies in one piece of the job: its rows end before `end`, and keys are
// counted from `first_key` on, of which there are `all`. The first row sees the keys from `start0`
// to `end0`, as far as they exist, and each next row `query_step` keys further on. Blocks before
// `begin` are not seen, those before `low` only in part. With SLOPES the published tile also has
// `ahead`: how far the first row's position lies after that of `first_key`.
struct Tile {
  int row, head, segment, batch, keys, blocks, masked;
  i64 cell;
#if WINDOWED || TILED
  int begin;
#endif
#if WINDOWED
  int end, first_key, all, end0, start0, low;
#endif
};
// The end of a tile's rows, and the first block that it sees.
DEV int end_row(const JobParams& job, const Tile& tile) {
#if WINDOWED
  return tile.end;
#else
  return job.queries;
#endif
}
DEV int begin_block(const Tile& tile) {
#if WINDOWED || TILED
  return tile.begin;
#else
  return 0;
#endif
}
// The block that is processed when so many are left after it. With TILED and without a mask,
// `tile.masked` blocks come after the others, though they have higher numbers. (A function that
// returned `left` would cost the producer a register that it does not have.)
#if TILED && !CAUSAL
DEV int block_at(const Tile& tile, int left) {
  const int shifted = left - tile.masked;
  return shifted < 0 ? left + tile.blocks - tile.masked : shifted;
}
#else
#define block_at(tile, left) (left)
#endif
// Whether some row of the tile sees only a part of a block.
DEV bool is_masked(const Tile& tile, int block) {
#if WINDOWED
  if (block < tile.low) return true;
#endif
  return block >= tile.blocks - tile.masked;
}
#if WINDOWED
// The same from the published tile, to save registers.
DEV bool is_masked(const Shared& shared, u32 slot, int block) {
  const u32 from = shared.tile(slot);
  const int blocks = (int)load_shared(from + 20), masked = (int)load_shared(from + 24);
  return block < (int)load_shared(from + 40) || block >= blocks - masked;
}
// The first key that a row of the published tile sees.
DEV int start_of_row(const Shared& shared, u32 slot, const TileParams& tiles, int row) {
  const u32 from = shared.tile(slot);
  const int start = (int)load_shared(from + 60) + row * tiles.query_step;
  return max(0, min(start, (int)load_shared(from + 52)));
}
#endif
// The keys that a row sees.
DEV int seen_end(const JobParams& job, const TileParams& tiles, const Tile& tile, int i) {
#if WINDOWED
  return max(0, min(tile.end0 + (i - tile.row) * tiles.query_step, tile.all));
#elif TILED && !CAUSAL
  return tile.keys;
#else
  return visible_keys(job, tiles, i);
#endif
}
DEV int seen_start(const TileParams& tiles, const Tile& tile, int i) {
#if WINDOWED
  return max(0, min(tile.start0 + (i - tile.row) * tiles.query_step, tile.all));
#else
  return 0;
#endif
}

// The sequence and the row of tiles of the tile with this index. Causal tiles are ordered longest
// first within groups of sequences whose keys fit into the L2 cache.
DEV int sequence_of(const JobParams& job, const TileParams& tiles, u32 index, Tile& tile) {
  int sequence, row_tile;
  if (COUNTED) {
    u32 each = tiles.sequences_in_l2 * tiles.row_tiles, group = index / each,
        rest = index - group * each;
    u32 count = min(tiles.sequences_in_l2, tiles.sequences - (int)group * tiles.sequences_in_l2),
        longest = rest / count;
    row_tile = TILED && tiles.key_step < 0 ? (int)longest : tiles.row_tiles - 1 - (int)longest;
    sequence = group * tiles.sequences_in_l2 + (rest - longest * count);
  } else {
    sequence = index / (u32)tiles.row_tiles; row_tile = index - sequence * tiles.row_tiles;
  }
  u32 rest = (u32)sequence / (u32)job.heads;
  tile.head = sequence - rest * job.heads;
  tile.batch = rest / (u32)job.segments;
  tile.segment = rest - tile.batch * job.segments;
  tile.cell = at(job.cells, tile.batch, tile.segment, 0, tile.head);
  return row_tile;
}
#if !WINDOWED
DEV void tile_of(const JobParams& job, const TileParams& tiles, u32 index, Tile& tile) {
  tile.row = sequence_of(job, tiles, index, tile) * ROWS;
#if TILED && !CAUSAL
  // Its rows are in one tile of the grid.
  tile.keys = job.keys; tile.begin = tile.masked = 0;
  if (tiles.key_step != 0) {
    const bool after = tiles.key_step < 0;
    const int size = after ? -tiles.key_step : tiles.key_step & ~1,
              last = (tile.row + tiles.lead) | (size - 1),
              own_end = max(0, min(last + 1 + tiles.query_step, job.keys));
    if (tiles.key_step & 1)
      tile.masked = (job.keys + KEYS - 1) / KEYS - (own_end + KEYS - 1) / KEYS;
    else if (!after) tile.keys = own_end;
    else if (own_end < job.keys) tile.begin = own_end / KEYS;
    else tile.keys = 0;
  }
  tile.blocks = (tile.keys + KEYS - 1) / KEYS;
#else
  tile.keys = visible_keys(job, tiles, min(tile.row + ROWS, job.queries) - 1);
  tile.blocks = (tile.keys + KEYS - 1) / KEYS;
#if TILED
  tile.begin = 0;
#endif
  // Trailing blocks that some row of the tile sees only in part; without a mask, a partial last
  // block.
  int whole = visible_keys(job, tiles, tile.row) / KEYS;
  tile.masked = tile.blocks - min(whole, tile.blocks);
#endif
}
#endif
DEV void publish_tile(const Shared& shared, StageCounter<2>& count, const Tile& tile) {
  barrier_wait(shared.tile_empty(count.stage()), count.parity() ^ 1);
  u32 to = shared.tile(count.stage());
  store_shared(to, make_uint4(tile.row, tile.head, tile.segment, tile.batch));
  store_shared(to + 16, make_uint4(tile.keys, tile.blocks, tile.masked, begin_block(tile)));
  store_shared(to + 32, make_uint4((u32)tile.cell, (u32)(tile.cell >> 32), 0, 0));
  barrier_arrive(shared.tile_full(count.stage()));
  count.uses++;
}
#if WINDOWED
// Publishes a tile of the list; only its origin and its blocks are kept in registers. False if
// there is nothing to load for it.
DEV bool publish_listed(const JobParams& job, const TileParams& tiles, const Shared& shared,
    StageCounter<2>& count, u32 index, Tile& tile) {
  const int4* entry =
      tiles.list + 3 * (tiles.row_tiles - 1 - sequence_of(job, tiles, index, tile));
  int4 part = entry[0];
  tile.blocks = part.y;
  if (LOAD_CARRY && STORE_CARRY && tile.blocks == 0) return false;   // its carry keeps every bit
  barrier_wait(shared.tile_empty(count.stage()), count.parity() ^ 1);
  const u32 to = shared.tile(count.stage());
  store_shared(to + 16, make_uint4(part.x, part.y, part.z, part.w));
  part = entry[1];
  tile.row = part.z;
  store_shared(to, make_uint4(tile.row, tile.head, tile.segment, tile.batch));
  store_shared(
      to + 32, make_uint4((u32)tile.cell, (u32)(tile.cell >> 32), part.x, part.y));
#if SLOPES
  store_shared(to + 64, (u32)part.w);
#endif
  part = entry[2];
  store_shared(to + 48, make_uint4(part.x, part.y, part.z, part.w));
  barrier_arrive(shared.tile_full(count.stage()));
  count.uses++;
  return tile.blocks != 0;
}
#endif
// Waits for the next tile; false after the last one. It stays in shared memory until every warp has
// released it, so that it can be read again rather than kept in registers.
DEV bool wait_tile(const Shared& shared, const StageIndex<2>& tile_stage, Tile& tile) {
  barrier_wait(shared.tile_full(tile_stage.stage), tile_stage.parity);
  u32 from = shared.tile(tile_stage.stage);
  uint4 x = load_shared_16(from), y = load_shared_16(from + 16), z = load_shared_16(from + 32);
  tile.row = x.x;
  tile.head = x.y;
  tile.segment = x.z;
  tile.batch = x.w;
  tile.keys = y.x;
  tile.masked = y.z;
  tile.blocks = __shfl_sync(~0u, (int)y.y, 0);   // uniform, as the compiler sees
  tile.cell = (i64)((u64)z.y << 32 | z.x);
#if WINDOWED || TILED
  tile.begin = __shfl_sync(~0u, (int)y.w, 0);
#endif
#if WINDOWED
  uint4 w = load_shared_16(from + 48);
  tile.low = z.z;
  tile.end = z.w;
  tile.first_key = w.x;
  tile.all = w.y;
  tile.end0 = w.z;
  tile.start0 = w.w;
#endif
  return tile.blocks >= 0;
}
DEV void release_tile(const Shared& shared, StageIndex<2>& tile_stage, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(shared.tile_empty(tile_stage.stage));
  tile_stage.advance();
}
