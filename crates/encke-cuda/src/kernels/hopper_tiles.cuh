// Which tile a block of the grid computes next, and where things lie in its shared memory: for the forward kernel, whose macros
// (hopper_forward.cu) it reads.
//
// The decision here: one thread finds the tiles and tells the other warps through shared memory, so that the divisions it takes to find
// one are done while the last one is computed, and so that tiles may come from a counter.
#define ROWS (CONSUMERS * 64)
#define THREADS ((CONSUMERS + 1) * 128)
#define SLABS ((HD + 63) / 64)
#define Q_BYTES (SLABS * ROWS * 128)
#define KEY_BYTES (SLABS * KEYS * 128)

// How the tiles are numbered (`count` of them; `places` are batch entries x segments x heads), and the mask in numbers of 32 bits: row i sees the keys
// 0..=(lead + i * query_step) / key_step. The host sees to it that nothing overflows, and takes out common factors: key_step is 1 almost always.
// Heads: a share is a multiple of its operand's unit, so its coordinate in a tensor map is (share >> shift) * inverse modulo 2^32, the inverse being
// that of the odd part of the unit: no division.
// Keys are a chain of LINKS pieces of memory at most, numbered one after the other: link i begins at key from[i], the last one at 0. All of them are seen
// whole, and are whole blocks, but for link 0, which has the highest numbers: the job's own keys, with its mask.
struct Tiles { u32 count; int row_tiles, places, together, lead, query_step, key_step; u32 q_shift, q_inverse, k_shift, k_inverse; int from[LINKS]; };
struct Links { TensorMap k[LINKS], v[LINKS]; };

// How many keys query row i sees.
DEV int seen(const Job& job, const Tiles& tiles, int i) {
  if (!CAUSAL) return tiles.from[0] + job.keys;
  int ahead = tiles.lead + i * tiles.query_step;
  if (ahead < 0) return tiles.from[0];
  if (tiles.key_step != 1) ahead = (u32)ahead / (u32)tiles.key_step;
  return tiles.from[0] + min(ahead + 1, job.keys);
}

// Shared memory, in bytes from its beginning, which is aligned to 1024; the host asks for FORWARD_BYTES.
#define AT_K (Q_STAGES * Q_BYTES)
#define AT_V (AT_K + STAGES * KEY_BYTES)
#define AT_SUMS (AT_V + STAGES * KEY_BYTES)
// Bytes of a row of sums: a step of 4 banks from row to row. Behind the sums there is room for m and l of the row, of this tile and of the next.
#define SUM_PITCH (HD * 4 + 16)
#define AT_FLAGS (AT_SUMS + (STAGED ? ROWS * SUM_PITCH : 0))
#define AT_TILES (AT_FLAGS + STAGES * 16)
#define AT_BARRIERS (AT_TILES + 2 * 48)
#define FORWARD_BYTES (AT_BARRIERS + (2 * Q_STAGES + 6 * STAGES + 4 + (STAGED ? CONSUMERS * 4 + 2 : 0)) * 8)
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
  DEV_MEMBER u32 tile_empty(u32 slot) const { return barrier(2 * Q_STAGES + 6 * STAGES + 2 + slot); }
  DEV_MEMBER u32 softmax(u32 slot, u32 row) const { return sums(row) + HD * 4 + slot * 8; }
  DEV_MEMBER u32 softmax_full(u32 slot) const { return barrier(2 * Q_STAGES + 6 * STAGES + 4 + slot); }
  DEV_MEMBER u32 sums_full(u32 warp) const { return barrier(2 * Q_STAGES + 6 * STAGES + 6 + warp); }
};

// A stage of a ring of buffers and the parity of its phase.
template <int COUNT> struct Turn {
  u32 stage = 0, parity = 0;
  DEV_MEMBER void advance() { if (++stage == COUNT) { stage = 0; parity ^= 1; } }
};
// The same in one register, for the thread that loads, which has few.
template <int COUNT> struct Count {
  u32 turns = 0;
  DEV_MEMBER u32 stage() const { return turns % COUNT; }
  DEV_MEMBER u32 parity() const { return turns / COUNT & 1; }
};

// A tile as the loading thread finds it and tells the others; `blocks` is -1 behind the last one.
struct Tile { int row, head, segment, batch, keys, blocks, masked; i64 cell; };   // cell: that of row 0 of the place

// The tile with this number. Causal tiles are ordered longest first within as many places as fit into the L2 cache with their keys.
DEV void tile_of(const Job& job, const Tiles& tiles, u32 index, Tile& tile) {
  int place, of;
  if (CAUSAL) {
    u32 each = tiles.together * tiles.row_tiles, group = index / each, rest = index - group * each;
    u32 count = min(tiles.together, tiles.places - (int)group * tiles.together), longest = rest / count;
    of = tiles.row_tiles - 1 - (int)longest; place = group * tiles.together + (rest - longest * count);
  } else {
    place = index / (u32)tiles.row_tiles; of = index - place * tiles.row_tiles;
  }
  u32 rest = (u32)place / (u32)job.heads;
  tile.head = place - rest * job.heads; tile.batch = rest / (u32)job.segments; tile.segment = rest - tile.batch * job.segments;
  tile.row = of * ROWS; tile.cell = at(job.cells, tile.batch, tile.segment, 0, tile.head);
  tile.keys = seen(job, tiles, min(tile.row + ROWS, job.queries) - 1);
  tile.blocks = (tile.keys + KEYS - 1) / KEYS;
  // Blocks from the end of the walk that some row of the tile sees only in part. Without causality that is the tail of the keys.
  int whole = seen(job, tiles, tile.row) / KEYS;
  tile.masked = tile.blocks - min(whole, tile.blocks);
}
DEV void tell(const Shared& shared, Count<2>& count, const Tile& tile) {
  barrier_wait(shared.tile_empty(count.stage()), count.parity() ^ 1);
  u32 to = shared.tile(count.stage());
  store_shared(to, make_uint4(tile.row, tile.head, tile.segment, tile.batch));
  store_shared(to + 16, make_uint4(tile.keys, tile.blocks, tile.masked, 0));
  store_shared(to + 32, make_uint4((u32)tile.cell, (u32)(tile.cell >> 32), 0, 0));
  barrier_arrive(shared.tile_full(count.stage()));
  count.turns++;
}
// The tile whose turn it is; false behind the last one. It stays where it is until every warp leaves it, so that it can be read again rather than kept in
// registers.
DEV bool hear(const Shared& shared, const Turn<2>& turn, Tile& tile) {
  barrier_wait(shared.tile_full(turn.stage), turn.parity);
  u32 from = shared.tile(turn.stage);
  uint4 x = load_shared_16(from), y = load_shared_16(from + 16), z = load_shared_16(from + 32);
  tile.row = x.x; tile.head = x.y; tile.segment = x.z; tile.batch = x.w; tile.keys = y.x; tile.masked = y.z;
  tile.blocks = __shfl_sync(~0u, (int)y.y, 0);   // what the compiler can see to be the same in all lanes
  tile.cell = (i64)((u64)z.y << 32 | z.x);
  return tile.blocks >= 0;
}
DEV void leave(const Shared& shared, Turn<2>& turn, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(shared.tile_empty(turn.stage));
  turn.advance();
}
