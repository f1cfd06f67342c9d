// The tile scheduler and the shared memory layout of the forward kernel; hopper_forward.cuh
// describes the macros.
//
// The decision here: one thread computes the next tile and publishes it to the other warps through
// shared memory. Its divisions overlap with the current tile, and tiles may come from a counter.
#define ROWS (CONSUMERS * 64)
#define THREADS ((CONSUMERS + 1) * 128)
#define SLABS ((HD + 63) / 64)
#define Q_BYTES (SLABS * ROWS * 128)
#define KEY_BYTES (SLABS * KEYS * 128)

// The tiles of a job. A sequence is a (batch entry, segment, head).
struct TileParams {
  u32 count;
  int row_tiles, sequences, sequences_in_l2;
  // The mask in 32 bits: row i sees the keys 0..=(lead + i * query_step) / key_step. The host makes
  // sure that nothing overflows and divides by common factors: key_step is almost always 1.
  int lead, query_step, key_step;
  // A head offset is a multiple of its operand's unit; its coordinate in a tensor map is
  // (offset >> shift) * inverse modulo 2^32, with the inverse of the unit's odd part: no division.
  u32 q_shift, q_inverse, k_shift, k_inverse;
  // Keys are a chain of at most CHUNKS chunks, numbered consecutively from the last chunk on: chunk
  // i begins at key chunk_starts[i], the last one at 0. Chunk 0, with the highest numbers, has the
  // job's own keys and its mask. All others are fully visible and consist of whole blocks.
  int chunk_starts[CHUNKS];
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
#define AT_SUMS (AT_V + STAGES * KEY_BYTES)
// Pitch of a row of sums: 4 banks more than the row. The padding holds m and l of the row, for this
// tile and for the next.
#define SUM_PITCH (HD * 4 + 16)
#define AT_FLAGS (AT_SUMS + (STAGED ? ROWS * SUM_PITCH : 0))
#define AT_TILES (AT_FLAGS + STAGES * 16)
#define AT_BARRIERS (AT_TILES + 2 * 48)
#define FORWARD_BYTES \
  (AT_BARRIERS + (2 * Q_STAGES + 6 * STAGES + 4 + (STAGED ? CONSUMERS * 4 + 2 : 0)) * 8)
struct Shared {
  u32 base;
  DEV_MEMBER u32 q(u32 stage) const { return base + stage * Q_BYTES; }
  DEV_MEMBER u32 k(u32 stage) const { return base + AT_K + stage * KEY_BYTES; }
  DEV_MEMBER u32 v(u32 stage) const { return base + AT_V + stage * KEY_BYTES; }
  DEV_MEMBER u32 sums(u32 row) const { return base + AT_SUMS + row * SUM_PITCH; }
  DEV_MEMBER u32 flags(u32 stage) const { return base + AT_FLAGS + stage * 16; }
  DEV_MEMBER u32 tile(u32 slot) const { return base + AT_TILES + slot * 48; }
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
  DEV_MEMBER u32 softmax(u32 slot, u32 row) const { return sums(row) + HD * 4 + slot * 8; }
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
struct Tile { int row, head, segment, batch, keys, blocks, masked; i64 cell; };

// The tile with this index. Causal tiles are ordered longest first within groups of sequences whose
// keys fit into the L2 cache.
DEV void tile_of(const JobParams& job, const TileParams& tiles, u32 index, Tile& tile) {
  int sequence, row_tile;
  if (CAUSAL) {
    u32 each = tiles.sequences_in_l2 * tiles.row_tiles, group = index / each,
        rest = index - group * each;
    u32 count = min(tiles.sequences_in_l2, tiles.sequences - (int)group * tiles.sequences_in_l2),
        longest = rest / count;
    row_tile = tiles.row_tiles - 1 - (int)longest;
    sequence = group * tiles.sequences_in_l2 + (rest - longest * count);
  } else {
    sequence = index / (u32)tiles.row_tiles; row_tile = index - sequence * tiles.row_tiles;
  }
  u32 rest = (u32)sequence / (u32)job.heads;
  tile.head = sequence - rest * job.heads;
  tile.batch = rest / (u32)job.segments;
  tile.segment = rest - tile.batch * job.segments;
  tile.row = row_tile * ROWS; tile.cell = at(job.cells, tile.batch, tile.segment, 0, tile.head);
  tile.keys = visible_keys(job, tiles, min(tile.row + ROWS, job.queries) - 1);
  tile.blocks = (tile.keys + KEYS - 1) / KEYS;
  // Trailing blocks that some row of the tile sees only in part; without a mask, a partial last
  // block.
  int whole = visible_keys(job, tiles, tile.row) / KEYS;
  tile.masked = tile.blocks - min(whole, tile.blocks);
}
DEV void publish_tile(const Shared& shared, StageCounter<2>& count, const Tile& tile) {
  barrier_wait(shared.tile_empty(count.stage()), count.parity() ^ 1);
  u32 to = shared.tile(count.stage());
  store_shared(to, make_uint4(tile.row, tile.head, tile.segment, tile.batch));
  store_shared(to + 16, make_uint4(tile.keys, tile.blocks, tile.masked, 0));
  store_shared(to + 32, make_uint4((u32)tile.cell, (u32)(tile.cell >> 32), 0, 0));
  barrier_arrive(shared.tile_full(count.stage()));
  count.uses++;
}
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
  return tile.blocks >= 0;
}
DEV void release_tile(const Shared& shared, StageIndex<2>& tile_stage, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(shared.tile_empty(tile_stage.stage));
  tile_stage.advance();
}
