// Attention forward on Hopper: exact softmax over blocks of keys, wgmma fed by TMA, a persistent grid.
//
// A tile is ROWS query rows of one place (batch entry, segment, head). Warpgroup 0 loads: one thread issues TMA, the
// other warps look at values that a mask hides. CONSUMERS warpgroups compute 64 rows each. Blocks of keys are walked from the
// last visible one backwards, so that masks only touch the first blocks of a tile. Keys may be a chain of several pieces of memory (hopper_tiles.cuh).
//
// The decisions that shaped it:
// - K runs one block ahead of V, and the scores of block j are formed while the values of block j-1 are multiplied, so that a
//   softmax always has a matmul of its own warpgroup under it; PINGPONG lets warpgroups take turns besides.
// - Loads of the next tile begin while this one ends: stages and phases of K and V count on over tiles.
// - A hidden value may be NaN or infinite, and 0 times it is NaN. Where a block is partly hidden, the idle warps set
//   such values to 0 before they are multiplied, and rows that do see them add them at the end.
// - A row's bits depend on what the row sees and nothing else: every decision taken at run time is taken row by row.
//
// Macros given by the host: T_BF16 or T_F16; HD: the head dimension rounded up to 16; CONSUMERS; KEYS: keys of a block;
// STAGES of K and of V; Q_STAGES; LINKS: pieces of memory that keys may be in; CAUSAL; PINGPONG; BEFORE: continue (acc, m, l) rather than begin with nothing; AFTER: leave (acc, m, l) rather than
// end in (out, lse); STAGED: with room for a tile's sums;
// NEGATIVE: the scale is below 0; LAZY: the reference of the weights follows the maximum only when it falls 2^8 behind;
// Q_REGISTERS: queries are held in registers; POLYNOMIAL: of so many exponentials one is a polynomial (0: none); LOADER_REGISTERS and CONSUMER_REGISTERS.
#define FRAGMENTS (HD / 8)
#if NEGATIVE
#define SIGN(name) JOIN(name, neg_n)
#else
#define SIGN(name) JOIN(name, n)
#endif
#define SCORES JOIN(SIGN(wgmma_ss_), KEYS)
#define SCORES_OF_REGISTERS JOIN(SIGN(wgmma_rs_), KEYS)
#define VALUES JOIN(wgmma_rs_tb_n, HD)
// Sums of before are brought to shared memory while a tile is computed, and its output leaves through the same place.
#define FETCHED (STAGED && BEFORE && !AFTER)
// m and l of before are brought there too, a tile ahead, by warps that have nothing else to do.
#define AHEAD (STAGED && BEFORE)
// Nothing lies where the queries were after they have been read into registers.
#define Q_LEAVES (Q_REGISTERS && (AFTER || FETCHED))

// ---- the thread that loads ----
DEV void load_slabs(u32 to, const TensorMap* map, u32 barrier, int rows, int row, int head, const Tile& tile) {
  barrier_expect(barrier, SLABS * rows * 128);
  #pragma unroll
  for (int slab = 0; slab < SLABS; slab++) tma_load(to + slab * rows * 128, map, barrier, slab * 64, row, head, tile.segment, tile.batch);
}
// Tiles of equal length are dealt out in turn. Causal ones are taken from a counter as blocks of the grid become free; the last block sets it back to 0
// for the next launch (launches that share a counter must not overlap).
DEV void load(const Job& job, const Tiles& tiles, const Shared& shared, const TensorMap* q_map, const Links& links, u32* counter) {
  Count<Q_STAGES> q; Count<STAGES> k, v; Count<2> turn; Tile tile; u32 index = blockIdx.x;
  while (index < tiles.count) {
    tile_of(job, tiles, index, tile);
    index = CAUSAL ? gridDim.x + atomicAdd(counter, 1u) : index + gridDim.x;
    if (BEFORE && AFTER && tile.blocks == 0) continue;   // they keep every bit of what they have
    tell(shared, turn, tile);
    if (tile.blocks == 0) continue;
    int q_head = (u32)(job.q.heads[tile.head] >> tiles.q_shift) * tiles.q_inverse, k_head = (u32)(job.k.heads[tile.head] >> tiles.k_shift) * tiles.k_inverse;
    barrier_wait(shared.q_empty(q.stage()), q.parity() ^ 1);
    load_slabs(shared.q(q.stage()), q_map, shared.q_full(q.stage()), ROWS, tile.row, q_head, tile);
    q.turns++;
    int link = 0;
    for (int block = tile.blocks; block >= 0; block--) {   // K one block ahead of V, and so in the next link sometimes
      v.turns = k.turns - 1;
      if (block < tile.blocks) link += block * KEYS < tiles.from[link];
      if (block > 0) {
        const int key = (block - 1) * KEYS, of = link + (key < tiles.from[link]);
        barrier_wait(shared.k_empty(k.stage()), k.parity() ^ 1);
        load_slabs(shared.k(k.stage()), &links.k[of], shared.k_full(k.stage()), KEYS, key - tiles.from[of], k_head, tile);
        k.turns++;
      }
      if (block < tile.blocks) {
        barrier_wait(shared.v_empty(v.stage()), v.parity() ^ 1);
        load_slabs(shared.v(v.stage()), &links.v[link], shared.v_full(v.stage()), KEYS, block * KEYS - tiles.from[link], k_head, tile);
        if (CAUSAL && block >= tile.blocks - tile.masked) barrier_arrive(shared.masked(v.stage()));
      }
    }
  }
  tile.blocks = -1;
  tell(shared, turn, tile);
  if (CAUSAL && atomicAdd(counter + 1, 1u) == gridDim.x - 1) { counter[0] = 0; counter[1] = 0; }
}

// ---- the warps that look at hidden values ----
#ifdef T_F16
#define EXPONENT 0x7c00u
#else
#define EXPONENT 0x7f80u
#endif
// The word with what is NaN or infinite in it set to 0.
DEV u32 finite(u32 x) {
  if ((x & EXPONENT) == EXPONENT) x &= 0xffff0000u;
  if ((x & (EXPONENT << 16)) == (EXPONENT << 16)) x &= 0x0000ffffu;
  return x;
}
#if AHEAD
// m and l of a tile's rows, into shared memory.
DEV void bring_softmax(const Job& job, const Tile& tile, const Shared& shared, u32 slot, const float* m, const float* l, int thread) {
  for (int row = thread; row < ROWS; row += 96) {
    const i64 cell = tile.cell + (tile.row + row) * job.cells.row;
    const bool exists = tile.row + row < job.queries;
    store_shared(shared.softmax(slot, row), exists ? m[cell] : 0.f, exists ? l[cell] : 0.f);
  }
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(shared.softmax_full(slot));
}
#endif
// A parity tells a phase only from its neighbours. So these warps, which skip most blocks, do not wait for values before the loading thread has said that the
// phase they mean is under way; it cannot end before consumers, who wait for `checked`, let it.
DEV void check(const Job& job, const Shared& shared, const float* m, const float* l, int thread) {
  Turn<STAGES> v; Turn<2> turn; Tile tile; u32 masked_parity = 0;
  for (; hear(shared, turn, tile); leave(shared, turn, thread % 32)) {
#if AHEAD
    bring_softmax(job, tile, shared, turn.stage, m, l, thread);
#endif
    for (int step = 0; step < tile.blocks; step++, v.advance()) {
      if (!CAUSAL || step >= tile.masked) continue;
      barrier_wait(shared.masked(v.stage), masked_parity >> v.stage & 1); masked_parity ^= 1u << v.stage;
      barrier_wait(shared.v_full(v.stage), v.parity);
      u32 at = shared.v(v.stage), found = 0;
      #pragma unroll 1
      for (int i = thread; i < KEY_BYTES / 16; i += 96) {
        uint4 x = load_shared_16(at + i * 16), y = make_uint4(finite(x.x), finite(x.y), finite(x.z), finite(x.w));
        u32 differs = (x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w);
        if (differs) store_shared(at + i * 16, y);
        found |= differs;
      }
      fence_async();
      u32 any = __any_sync(~0u, found != 0);
      if (thread % 32 == 0) { store_shared(shared.flags(v.stage) + thread / 32 * 4, any); barrier_arrive(shared.checked(v.stage)); }
    }
  }
}

// ---- the warpgroups that compute ----
// A warp has read its part of a block of keys or values.
DEV void release(u32 barrier, int lane) {
  if (lane == 0) barrier_arrive(barrier);
}
// The queries of a warpgroup as products read them: where they lie in shared memory, or (Q_REGISTERS) the queries themselves, which spares shared memory
// a fifth of its reads.
struct Queries {
#if Q_REGISTERS
  uint4 part[HD / 16];
  DEV_MEMBER void read(u32 q, int own, int warp, int lane) {
    const int row = own * 64 + warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
    #pragma unroll
    for (int i = 0; i < HD / 16; i++)
      part[i] = load_matrices(swizzled(q + (i / 4) * (ROWS * 128), row, (2 * i + lane / 16) % 8));
  }
#else
  u64 rows;
  DEV_MEMBER void read(u32 q, int own, int, int) { rows = matrix(q + own * 64 * 128, 16, 1024); }
#endif
};
// Scores of 64 query rows and KEYS keys.
DEV void issue_scores(float (&s)[KEYS / 2], const Queries& q, u32 k) {
  const u64 keys = matrix(k, 16, 1024);
  #pragma unroll
  for (int i = 0; i < HD / 16; i++)
#if Q_REGISTERS
    SCORES_OF_REGISTERS(s, q.part[i].x, q.part[i].y, q.part[i].z, q.part[i].w, further(keys, (i / 4) * (KEYS * 128) + (i % 4) * 32), i != 0);
#else
    SCORES(s, further(q.rows, (i / 4) * (ROWS * 128) + (i % 4) * 32), further(keys, (i / 4) * (KEYS * 128) + (i % 4) * 32), i != 0);
#endif
}
// acc += weights x values: the weights in registers, the values across their rows.
DEV void issue_values(float (&acc)[HD / 2], const u32 (&p)[KEYS / 4], u32 v) {
  const u64 values = matrix(v, KEYS * 128, 1024);
  #pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
    VALUES(acc, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], further(values, i * 2048), 1);
}
// Hides the scores from column `limit` on, counted from the thread's first column.
DEV void mask(float (&s)[KEYS / 2], int first, int second) {
  #pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * j + (e & 1) >= (e < 2 ? first : second)) s[4 * j + e] = neg_inf();
}
#if POLYNOMIAL
// 2^x for x <= 8 without the special-function unit: 2^n times a polynomial of the rest in [-1/2, 1/2], whose relative error is 2.6e-6.
DEV float exp2_polynomial(float x) {
  x = fmaxf(x, -126.f);
  float shifted = x + 12582912.f, rest = x - (shifted - 12582912.f);
  float y = fmaf(fmaf(fmaf(fmaf(0.00957010179f, rest, 0.0559178603f), rest, 0.240247448f), rest, 0.693121815f), rest, 0.999999261f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}
#endif
// The rows' softmax so far. Scores are kept unscaled; weights are relative to `m`, which every lane of a quad knows; `l` is the lane's own part.
struct Softmax {
  float m[2], l[2], shrink[2];
  bool rescale;
  // Turns scores into weights; what was summed before must be multiplied with `shrink` where `rescale` says so.
  template <bool FIRST> DEV_MEMBER void absorb(float (&s)[KEYS / 2], float c) {
    float top[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      top[h] = fmaxf(s[2 * h], s[2 * h + 1]);
      #pragma unroll
      for (int j = 1; j < KEYS / 8; j++) top[h] = fmaxf(top[h], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    }
    if (LAZY && !FIRST) {
      // Row by row: a row's own four lanes decide, so that no row's bits depend on another's scores.
      u32 first = __ballot_sync(~0u, (top[0] - m[0]) * c > 8.f || m[0] == neg_inf()), second = __ballot_sync(~0u, (top[1] - m[1]) * c > 8.f || m[1] == neg_inf());
      rescale = (first | second) != 0;
      if (rescale) {
        u32 quad = 15u << (threadIdx.x & 28);
        raise<FIRST>(0, top[0], c, first & quad); raise<FIRST>(1, top[1], c, second & quad);
      }
    } else {
      rescale = !FIRST;
      raise<FIRST>(0, top[0], c, true); raise<FIRST>(1, top[1], c, true);
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float reference = (m[h] == neg_inf() ? 0.f : m[h]) * c, sum = 0.f;
      #pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * h + e];
          x = fmaf(x, c, -reference);
#if POLYNOMIAL
          x = (2 * j + e) % POLYNOMIAL == POLYNOMIAL - 1 ? exp2_polynomial(x) : exp2_fast(x);
#else
          x = exp2_fast(x);
#endif
          sum += x;
        }
      l[h] = FIRST ? sum : l[h] + sum;
    }
  }
  template <bool FIRST> DEV_MEMBER void raise(int h, float top, float c, bool needed) {
    float highest = quad_max(FIRST ? top : fmaxf(m[h], top));
    if (FIRST) { m[h] = highest; return; }
    shrink[h] = 1.f;
    if (needed) {
      // Nothing is ever subtracted from an infinity of its own kind: a row that saw nothing shrinks to 0.
      shrink[h] = exp2_fast((m[h] - (highest == neg_inf() ? 0.f : highest)) * c);
      m[h] = highest; l[h] *= shrink[h];
    }
  }
};
DEV void scale_rows(float (&acc)[HD / 2], float first, float second) {
  #pragma unroll
  for (int i = 0; i < FRAGMENTS; i++) { acc[4 * i] *= first; acc[4 * i + 1] *= first; acc[4 * i + 2] *= second; acc[4 * i + 3] *= second; }
}
DEV void to_weights(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 4]) {
  #pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// What a thread knows of its two rows of a tile.
struct Rows {
  int row[2], limit[2];   // limit: keys the row sees
  i64 cell[2];
  bool exists[2];
};
DEV void rows_of(const Job& job, const Tiles& tiles, const Tile& tile, int first, Rows& rows) {
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    rows.row[h] = first + 8 * h; rows.exists[h] = rows.row[h] < job.queries;
    rows.cell[h] = tile.cell + rows.row[h] * job.cells.row;
    rows.limit[h] = seen(job, tiles, rows.row[h]);
  }
}
// Values that are NaN or infinite were multiplied as 0 in blocks that some row sees only in part: the rows that see them add them here.
DEV void add_unbounded(const Job& job, const Tiles& tiles, const Tile& tile, const Rows& rows, const u16* v, int column, float (&acc)[HD / 2]) {
  int from = (tile.blocks - tile.masked) * KEYS;
  #pragma unroll 1
  for (int key = from; key < tile.keys; key++) {
    const u16* value = v + at(job.k, tile.batch, tile.segment, key - tiles.from[0], tile.head) + column;
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
      if (8 * i < job.dim)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          u32 x = value[8 * i + (e & 1)];
          if ((x & EXPONENT) == EXPONENT && key < rows.limit[e >> 1]) acc[4 * i + e] += unpack((u16)x);
        }
  }
}
// A lane's row of 0..7 in shared memory, and the row at a place: rows side by side lie two places apart, so that 16 lanes that write 8 bytes each
// meet all banks once.
DEV int place_of_row(int row) { return row % 4 * 2 + row / 4; }
DEV int row_at_place(int place) { return place / 2 + place % 2 * 4; }
#if BEFORE
// The softmax goes on from where it was: m and l of the rows, used only when the first scores are there. AHEAD they are in shared memory by then;
// otherwise they are asked for before anything else of a tile.
// What was summed stays in memory until the tile ends.
struct Carried {
  float m[2], l[2];
  DEV_MEMBER void load(const Rows& rows, const float* m_in, const float* l_in) {
    #pragma unroll
    for (int h = 0; h < 2; h++) { m[h] = rows.exists[h] ? m_in[rows.cell[h]] : 0.f; l[h] = rows.exists[h] ? l_in[rows.cell[h]] : 0.f; }
  }
  // `before` are the rows' references, -inf where they saw nothing yet.
  DEV_MEMBER void begin(float scale, int column, Softmax& softmax, float (&before)[2]) const {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      softmax.m[h] = before[h] = l[h] != 0.f ? m[h] / scale : neg_inf();   // l may be NaN
      softmax.l[h] = column == 0 ? l[h] : 0.f;
    }
  }
};
#endif
#if FETCHED
// Asks for the sums of a warp's rows: nobody waits for them before the tile ends.
DEV void fetch_sums(const Job& job, const Tile& tile, const float* sums, u32 staged, u32 barrier, int first, int lane) {
  fence_async();   // the output of the last tile has left
  __syncwarp();
  const int there = min(max(job.queries - tile.row - first, 0), 16), row = row_at_place(lane % 8) + lane / 8 * 8;
  if (lane == 0) barrier_expect(barrier, there * job.dim * 4);
  __syncwarp();
  if (lane < 16 && row < there) bulk_load(staged + lane * SUM_PITCH, sums + (tile.cell + (tile.row + first + row) * job.cells.row) * job.dim, job.dim * 4, barrier);
}
#endif
#if BEFORE && !AFTER
// Adds what was summed before to the tile's own sums.
DEV void add_before(const Job& job, const Rows& rows, const float* sums, float c, u32 staged, int lane, float (&acc)[HD / 2], const Softmax& softmax, const float (&before)[2]) {
  const int column = lane % 4 * 2;
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!rows.exists[h] || before[h] == neg_inf()) continue;
    const float kept = before[h] == softmax.m[h] ? 1.f : exp2_fast((before[h] - softmax.m[h]) * c);
    const float* from = sums + rows.cell[h] * job.dim + column;
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
      if (8 * i < job.dim) {
        float x, y;
        if (FETCHED) load_shared(staged + (place_of_row(lane / 4) + 8 * h) * SUM_PITCH + (8 * i + column) * 4, x, y);
        else { float2 pair = *(const float2*)(from + 8 * i); x = pair.x; y = pair.y; }
        acc[4 * i + 2 * h] = fmaf(x, kept, acc[4 * i + 2 * h]); acc[4 * i + 2 * h + 1] = fmaf(y, kept, acc[4 * i + 2 * h + 1]);
      }
  }
}
#endif
#if AFTER
// Adds the tile's sums to those in memory. References are LAZY, so that most rows still have the one they came with: memory adds these itself, and
// nobody waits for what was there. Rows that had nothing are written, and those whose reference rose are read and shrunk first.
// STAGED: what is added or written lies in shared memory for the copy engine, which takes it away while the next tile is computed. All tiles end at
// about the same time, and would otherwise wait for memory together.
DEV void store_carry(const Job& job, const Rows& rows, float* sums, float* m_out, float* l_out, float scale, float c, u32 staged, int lane, const float (&acc)[HD / 2], const Softmax& softmax, const float (&before)[2]) {
  const int column = lane % 4 * 2;
#if STAGED
  u32 rose[2], fresh[2];
  bulk_wait_read();   // what this lane gave away of the last tile
  __syncwarp();
#endif
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const bool none = before[h] == neg_inf(), raised = !none && !(before[h] == softmax.m[h]);
    float l = quad_sum(softmax.l[h]);
    if (rows.exists[h] && column == 0) { m_out[rows.cell[h]] = softmax.m[h] * scale; l_out[rows.cell[h]] = l; }
    float* to = sums + rows.cell[h] * job.dim + column;
    if (rows.exists[h] && (raised || !STAGED)) {
      const float kept = raised ? exp2_fast((before[h] - softmax.m[h]) * c) : 0.f;
      #pragma unroll
      for (int i = 0; i < FRAGMENTS; i++)
        if (8 * i < job.dim) {
          if (!none && !raised) { global_add(to + 8 * i, acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]); continue; }
          float2 x = raised ? *(const float2*)(to + 8 * i) : make_float2(0.f, 0.f);
          *(float2*)(to + 8 * i) = make_float2(fmaf(x.x, kept, acc[4 * i + 2 * h]), fmaf(x.y, kept, acc[4 * i + 2 * h + 1]));
        }
    }
#if STAGED
    rose[h] = __ballot_sync(~0u, raised || !rows.exists[h]); fresh[h] = __ballot_sync(~0u, none);
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++) store_shared(staged + (place_of_row(lane / 4) + 8 * h) * SUM_PITCH + (8 * i + column) * 4, acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]);
#endif
  }
#if STAGED
  fence_async();
  __syncwarp();
  // Each of 16 lanes gives away the row at its place.
  const int of = row_at_place(lane % 8) * 4, h = lane / 8;
  const i64 first = __shfl_sync(~0u, rows.cell[0], of), second = __shfl_sync(~0u, rows.cell[1], of);
  const u32 by_hand = h ? rose[1] : rose[0], written = h ? fresh[1] : fresh[0];
  if (h < 2 && !(by_hand >> of & 1)) {
    float* to = sums + (h ? second : first) * job.dim;
    if (written >> of & 1) bulk_store(to, staged + lane * SUM_PITCH, job.dim * 4); else bulk_add(to, staged + lane * SUM_PITCH, job.dim * 4);
  }
#endif
}
// Rows that see no key at all and begin with it: an empty carry.
DEV void store_nothing(const Job& job, const Tile& tile, float* sums, float* m, float* l, int thread) {
  for (int row = thread; row < ROWS && tile.row + row < job.queries; row += CONSUMERS * 128) {
    i64 cell = tile.cell + (tile.row + row) * job.cells.row;
    m[cell] = neg_inf(); l[cell] = 0.f;
    for (int i = 0; i < job.dim; i += 4) *(float4*)(sums + cell * job.dim + i) = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}
#else
// Where 16 bytes of a row of a warp's output lie on their way: where the sums of before were, or the queries.
DEV u32 passing(u32 q, u32 staged, int first, int row, int piece) {
  return FETCHED ? staged + row * SUM_PITCH + piece * 16 : swizzled(q + piece / 8 * (ROWS * 128), first + row, piece % 8);
}
// Ends the softmax. The rows of a warp pass through shared memory, so that global memory is written 16 bytes a lane and whole sectors at a time.
DEV void store_out(const Job& job, const Tile& tile, const Rows& rows, u16* out, float* lse, float scale, u32 q, u32 staged, int first, int lane, const float (&acc)[HD / 2], const Softmax& softmax) {
  float factor[2];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float l = quad_sum(softmax.l[h]);
    factor[h] = l == 0.f ? 0.f : (float)job.gain / l;
    if (lane % 4 == 0 && rows.exists[h]) lse[rows.cell[h]] = l == 0.f ? neg_inf() : softmax.m[h] * scale + log2_fast(l) * 0.6931471805599453f;
  }
  const int own = (lane / 8 % 2) * 8 + lane % 8;   // the row whose address this lane gives
  #pragma unroll
  for (int i = 0; i < HD / 16; i++)
    store_matrices(passing(q, staged, first, own, 2 * i + lane / 16),
                   pack(acc[8 * i] * factor[0], acc[8 * i + 1] * factor[0]), pack(acc[8 * i + 2] * factor[1], acc[8 * i + 3] * factor[1]),
                   pack(acc[8 * i + 4] * factor[0], acc[8 * i + 5] * factor[0]), pack(acc[8 * i + 6] * factor[1], acc[8 * i + 7] * factor[1]));
  __syncwarp();
  #pragma unroll
  for (int i = lane; i < 16 * FRAGMENTS; i += 32) {
    int row = i / FRAGMENTS, piece = i % FRAGMENTS;
    uint4 x = load_shared_16(passing(q, staged, first, row, piece));
    if (tile.row + first + row < job.queries && piece * 8 < job.dim) *(uint4*)(out + (tile.cell + (tile.row + first + row) * job.cells.row) * job.dim + piece * 8) = x;
  }
}
// Rows that see no key at all: the end of what they saw before.
DEV void store_unseen(const Job& job, const Tile& tile, const float* sums, const float* m, const float* l, u16* out, float* lse, int thread) {
  for (int row = thread; row < ROWS && tile.row + row < job.queries; row += CONSUMERS * 128) {
    i64 cell = tile.cell + (tile.row + row) * job.cells.row;
    const float sum = BEFORE ? l[cell] : 0.f, factor = sum == 0.f ? 0.f : (float)job.gain / sum;
    lse[cell] = sum == 0.f ? neg_inf() : m[cell] + log2_fast(sum) * 0.6931471805599453f;
    for (int i = 0; i < job.dim; i += 2) {
      float2 x = sum == 0.f ? make_float2(0.f, 0.f) : *(const float2*)(sums + cell * job.dim + i);
      *(u32*)(out + cell * job.dim + i) = pack(x.x * factor, x.y * factor);
    }
  }
}
#endif

// `v_values`, those of link 0, are read only where values are NaN or infinite; `counter`: two zeros, only for CAUSAL. acc, m and l only for BEFORE and AFTER, out and lse only without AFTER.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_forward(const __grid_constant__ TensorMap q_map, const __grid_constant__ Links links, const __grid_constant__ Job job,
               const __grid_constant__ Tiles tiles, const u16* v_values, float* sums, float* m_cells, float* l_cells, u16* out, float* lse, u32* counter) {
  SHARED_MEMORY(memory);
  const Shared shared{SHARED_BASE};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    check_shared_base(memory);
    for (int i = 0; i < Q_STAGES; i++) { barrier_init(shared.q_full(i), 1); barrier_init(shared.q_empty(i), CONSUMERS * 4); }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared.k_full(i), 1); barrier_init(shared.k_empty(i), CONSUMERS * 4);
      barrier_init(shared.v_full(i), 1); barrier_init(shared.v_empty(i), CONSUMERS * 4);
      barrier_init(shared.masked(i), 1); barrier_init(shared.checked(i), 3);
    }
    if (FETCHED) for (int i = 0; i < CONSUMERS * 4; i++) barrier_init(shared.sums_full(i), 1);
    if (AHEAD) for (int i = 0; i < 2; i++) barrier_init(shared.softmax_full(i), 3);
    for (int i = 0; i < 2; i++) { barrier_init(shared.tile_full(i), 1); barrier_init(shared.tile_empty(i), CONSUMERS * 4 + (CAUSAL || AHEAD ? 3 : 0)); }
    barrier_init_fence();
  }
  __syncthreads();

  if (group == 0) {
    registers_lower<LOADER_REGISTERS>();
    if (threadIdx.x == 0) {
      tma_prefetch(&q_map); tma_prefetch(&links.k[0]); tma_prefetch(&links.v[0]);
      load(job, tiles, shared, &q_map, links, counter);
    } else if ((CAUSAL || AHEAD) && warp > 0) {
      check(job, shared, m_cells, l_cells, threadIdx.x - 32);
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    const int own = group - 1, column = (lane % 4) * 2;
    float scale = fabsf((float)job.scale);
    if (scale < 1e-37f) scale = 1e-37f;   // a hidden score is -inf, and 0 x -inf would be NaN
    const float c = scale * 1.4426950408889634f;
    float acc[HD / 2]; u32 p[KEYS / 4]; Softmax softmax; Rows rows; Tile tile;
    Turn<Q_STAGES> q; Turn<STAGES> k, v; Turn<2> turn; u32 checked_parity = 0;
#if FETCHED
    u32 sums_parity = 0;
#endif
    if (PINGPONG && own == 0) named_arrive(1, 256);
    for (; hear(shared, turn, tile); leave(shared, turn, lane)) {
      if (tile.blocks == 0) {
#if !AFTER
        store_unseen(job, tile, sums, m_cells, l_cells, out, lse, threadIdx.x - 128);
#elif !BEFORE
        store_nothing(job, tile, sums, m_cells, l_cells, threadIdx.x - 128);
#endif
        continue;
      }
      rows_of(job, tiles, tile, tile.row + own * 64 + warp * 16 + lane / 4, rows);
#if BEFORE
      Carried carried; float before[2];
#if !AHEAD
      carried.load(rows, m_cells, l_cells);
#endif
#elif AFTER
      const float before[2] = {neg_inf(), neg_inf()};
#endif
#if FETCHED
      fetch_sums(job, tile, sums, shared.sums(own * 64 + warp * 16), shared.sums_full(own * 4 + warp), own * 64 + warp * 16, lane);
#endif
      #pragma unroll
      for (int i = 0; i < HD / 2; i++) acc[i] = 0.f;
      const int unmasked = seen(job, tiles, tile.row + own * 64) / KEYS;   // blocks below this one no row of the warpgroup sees in part
      u32 unbounded = 0;
      int block = tile.blocks - 1;
      barrier_wait(shared.q_full(q.stage), q.parity);
      Queries queries; queries.read(shared.q(q.stage), own, warp, lane);
#if Q_LEAVES
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.q_empty(q.stage));   // nothing else will lie there
#endif
      {
        float s[KEYS / 2];
        barrier_wait(shared.k_full(k.stage), k.parity);
        wgmma_fence(); issue_scores(s, queries, shared.k(k.stage)); wgmma_commit();
#if BEFORE
#if AHEAD
        barrier_wait(shared.softmax_full(turn.stage), turn.parity);
        #pragma unroll
        for (int h = 0; h < 2; h++) load_shared(shared.softmax(turn.stage, own * 64 + warp * 16 + lane / 4 + 8 * h), carried.m[h], carried.l[h]);
#endif
        carried.begin(scale, column, softmax, before);
#endif
        wgmma_wait<0>();
        release(shared.k_empty(k.stage), lane);
        k.advance();
        if (block >= unmasked) mask(s, rows.limit[0] - block * KEYS - column, rows.limit[1] - block * KEYS - column);
        softmax.absorb<!BEFORE>(s, c);
        to_weights(s, p);
        if (softmax.rescale) scale_rows(acc, softmax.shrink[0], softmax.shrink[1]);
      }
      #pragma unroll 1
      for (block--; block >= 0; block--) {
        float s[KEYS / 2];
        barrier_wait(shared.k_full(k.stage), k.parity);
        if (PINGPONG) named_sync(1 + own, 256);
        wgmma_fence(); issue_scores(s, queries, shared.k(k.stage)); wgmma_commit();
        if (CAUSAL && block + 1 >= tile.blocks - tile.masked) {
          barrier_wait(shared.checked(v.stage), checked_parity >> v.stage & 1); checked_parity ^= 1u << v.stage;
          uint4 found = load_shared_16(shared.flags(v.stage)); unbounded |= found.x | found.y | found.z;
        }
        barrier_wait(shared.v_full(v.stage), v.parity);
        wgmma_fence(); issue_values(acc, p, shared.v(v.stage)); wgmma_commit();
        if (PINGPONG) named_arrive(1 + (own + 1) % CONSUMERS, 256);
        wgmma_wait<1>();
        release(shared.k_empty(k.stage), lane);
        k.advance();
        if (CAUSAL && block >= unmasked) mask(s, rows.limit[0] - block * KEYS - column, rows.limit[1] - block * KEYS - column);
        softmax.absorb<false>(s, c);
        wgmma_wait<0>();
        release(shared.v_empty(v.stage), lane);
        v.advance();
        to_weights(s, p);
        if (softmax.rescale) scale_rows(acc, softmax.shrink[0], softmax.shrink[1]);
      }
      if (CAUSAL && tile.masked == tile.blocks) {
        barrier_wait(shared.checked(v.stage), checked_parity >> v.stage & 1); checked_parity ^= 1u << v.stage;
        uint4 found = load_shared_16(shared.flags(v.stage)); unbounded |= found.x | found.y | found.z;
      }
      barrier_wait(shared.v_full(v.stage), v.parity);
      wgmma_fence(); issue_values(acc, p, shared.v(v.stage)); wgmma_commit(); wgmma_wait<0>();
      release(shared.v_empty(v.stage), lane);
      v.advance();
      hear(shared, turn, tile);   // again: what it takes to store was not kept
      rows_of(job, tiles, tile, tile.row + own * 64 + warp * 16 + lane / 4, rows);
      if (CAUSAL && unbounded) add_unbounded(job, tiles, tile, rows, v_values, column, acc);
#if FETCHED
      barrier_wait(shared.sums_full(own * 4 + warp), sums_parity); sums_parity ^= 1;
#endif
#if BEFORE && !AFTER
      add_before(job, rows, sums, c, shared.sums(own * 64 + warp * 16), lane, acc, softmax, before);
#endif
#if AFTER
      if (!Q_LEAVES && lane == 0) barrier_arrive(shared.q_empty(q.stage));
      store_carry(job, rows, sums, m_cells, l_cells, scale, c, shared.sums(own * 64 + warp * 16), lane, acc, softmax, before);
#else
      if (FETCHED) __syncwarp(); else named_sync(1 + CONSUMERS + own, 128);   // every warp of the group has read its queries
      store_out(job, tile, rows, out, lse, scale, shared.q(q.stage), shared.sums(own * 64 + warp * 16), own * 64 + warp * 16, lane, acc, softmax);
      fence_async(); __syncwarp();
      if (!Q_LEAVES && lane == 0) barrier_arrive(shared.q_empty(q.stage));
#endif
      q.advance();
    }
    if (STAGED && AFTER) bulk_wait_all();
  }
}
