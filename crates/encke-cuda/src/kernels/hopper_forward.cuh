// Attention forward on Hopper: exact softmax over blocks of keys, wgmma fed by TMA, a persistent
// grid.
//
// A tile is ROWS query rows of one sequence (batch entry, segment, head). Warpgroup 0 is the
// producer: one thread issues TMA, the other warps examine values that a mask hides. CONSUMERS
// warpgroups compute 64 rows each. Blocks of keys are processed from the last visible one
// backwards, so that only the first blocks of a tile need a mask. Keys may be a chain of several
// chunks of memory (hopper_tiles.cuh).
//
// The decisions that shaped it:
// - K runs one block ahead of V: the scores of block j are computed while the values of block j-1
//   are multiplied, so that a softmax always overlaps with a matmul of its own warpgroup; PINGPONG
//   additionally alternates warpgroups.
// - Loads of the next tile begin before this one ends: stages and phases of K and V continue across
//   tiles.
// - A hidden value may be NaN or infinite, and 0 times it is NaN. In partly masked blocks, the idle
//   warps zero such values before they are multiplied, and rows that see them add them at the end.
// - A row's bits depend only on what the row sees: every decision at run time is taken per row.
//
// Macros given by the host:
//   T_BF16 or T_F16         storage type
//   HD                      head dimension, rounded up to 16
//   VD                      that of values, if they have another
//   CONSUMERS, KEYS         consumer warpgroups; keys of a block
//   STAGES, Q_STAGES        pipeline stages of K and of V; of Q
//   CHUNKS                  chunks of memory that keys may be in, at most
//   CAUSAL, PINGPONG        whether there is a mask; whether warpgroups alternate
//   WINDOWED                rows see ranges of keys (windows, documents); CAUSAL is set too
//   SOFTCAP, SLOPES         scores are transformed; WINDOWED is set too
//   TILED                   blocks in a tile of the grid (spec, section 12); 0: there is no grid
//   LOAD_CARRY              continue (acc, m, l) rather than start a softmax
//   STORE_CARRY             leave (acc, m, l) rather than finish in (out, lse)
//   STAGED                  shared memory has room for a tile's sums
//   NEGATIVE                the scale is negative
//   LAZY                    rescale only when the maximum has risen by more than 2^8
//   Q_REGISTERS             keep queries in registers
//   POLYNOMIAL              every POLYNOMIAL-th exponential is a polynomial (0: none)
//   PRODUCER_REGISTERS, CONSUMER_REGISTERS
#define FRAGMENTS (VD / 8)
#if NEGATIVE
#define SIGN(name) JOIN(name, neg_n)
#else
#define SIGN(name) JOIN(name, n)
#endif
#define SCORES JOIN(SIGN(wgmma_ss_), KEYS)
#define SCORES_OF_REGISTERS JOIN(SIGN(wgmma_rs_), KEYS)
#define VALUES JOIN(wgmma_rs_tb_n, VD)
// Carried sums are prefetched to shared memory during a tile, and its output is staged there.
#define PREFETCH_SUMS (STAGED && LOAD_CARRY && !STORE_CARRY && !TILED)
// m and l of the carry are prefetched too, one tile ahead, by otherwise idle warps.
#define PREFETCH_STATE (STAGED && LOAD_CARRY)
// The stage of the queries is not needed after they were read into registers.
#define RELEASE_Q_EARLY (Q_REGISTERS && (STORE_CARRY || PREFETCH_SUMS))

// ---- the producer thread ----
template <int COUNT> DEV void load_slabs(
    u32 to, const TensorMap* map, u32 barrier, int rows, int row, int head, const Tile& tile) {
  barrier_expect(barrier, COUNT * rows * 128);
  #pragma unroll
  for (int slab = 0; slab < COUNT; slab++)
    tma_load(to + slab * rows * 128, map, barrier, slab * 64, row, head, tile.segment, tile.batch);
}
// Tiles of equal length are assigned round-robin. Causal tiles are taken from a counter as blocks
// become free; the last block resets it to 0 for the next launch (launches that share a counter
// must not overlap).
DEV void load(const JobParams& job, const TileParams& tiles, const Shared& shared,
    const TensorMap* q_map, const KvChunkMaps& kv_maps, u32* counter) {
  StageCounter<Q_STAGES> q;
  StageCounter<STAGES> k, v;
  StageCounter<2> tile_stage;
  Tile tile;
  u32 index = blockIdx.x;
  while (index < tiles.count) {
#if WINDOWED
    const bool loads = publish_listed(job, tiles, shared, tile_stage, index, tile);
    index = gridDim.x + atomicAdd(counter, 1u);
    if (!loads) continue;
    // What the published tile has is read from there: registers are scarce here.
    const u32 slot = (tile_stage.uses - 1) % 2;
#else
    tile_of(job, tiles, index, tile);
    index = COUNTED ? gridDim.x + atomicAdd(counter, 1u) : index + gridDim.x;
    if (LOAD_CARRY && STORE_CARRY && tile.blocks == 0) continue;   // their carry keeps every bit
    publish_tile(shared, tile_stage, tile);
    if (tile.blocks == 0) continue;
#endif
    int q_head = (u32)(job.q.heads[tile.head] >> tiles.q_shift) * tiles.q_inverse,
        k_head = (u32)(job.k.heads[tile.head] >> tiles.k_shift) * tiles.k_inverse;
    barrier_wait(shared.q_empty(q.stage()), q.parity() ^ 1);
    load_slabs<SLABS>(
        shared.q(q.stage()), q_map, shared.q_full(q.stage()), ROWS, tile.row, q_head, tile);
    q.uses++;
    int chunk = 0;
    // K runs one block ahead of V, and is sometimes in the next chunk already.
#if WINDOWED
    for (int block = tile.blocks; block >= (int)load_shared(shared.tile(slot) + 28); block--) {
#else
    for (int block = tile.blocks; block >= begin_block(tile); block--) {
#endif
      v.uses = k.uses - 1;
      if (block < tile.blocks) chunk += block * KEYS < tiles.chunk_starts[chunk];
#if WINDOWED
      const int origin = (int)load_shared(shared.tile(slot) + 48),
                begin = (int)load_shared(shared.tile(slot) + 28);
#else
      const int origin = 0, begin = begin_block(tile);
#endif
      if (block > begin) {
        const int key = block_at(tile, block - 1) * KEYS,
                  of = chunk + (key < tiles.chunk_starts[chunk]);
        barrier_wait(shared.k_empty(k.stage()), k.parity() ^ 1);
        load_slabs<SLABS>(shared.k(k.stage()), &kv_maps.k[of], shared.k_full(k.stage()), KEYS,
            origin + key - tiles.chunk_starts[of], k_head, tile);
        k.uses++;
      }
      if (block < tile.blocks) {
        barrier_wait(shared.v_empty(v.stage()), v.parity() ^ 1);
        load_slabs<V_SLABS>(shared.v(v.stage()), &kv_maps.v[chunk], shared.v_full(v.stage()), KEYS,
            origin + block_at(tile, block) * KEYS - tiles.chunk_starts[chunk], k_head, tile);
#if WINDOWED
        const bool hides = is_masked(shared, slot, block);
#else
        const bool hides = is_masked(tile, block);
#endif
        if (CAUSAL && hides) barrier_arrive(shared.masked(v.stage()));
      }
    }
  }
  tile.blocks = -1;
  publish_tile(shared, tile_stage, tile);
  if (COUNTED && atomicAdd(counter + 1, 1u) == gridDim.x - 1) { counter[0] = 0; counter[1] = 0; }
}

// ---- the warps that examine hidden values ----
#ifdef T_F16
#define EXPONENT 0x7c00u
#else
#define EXPONENT 0x7f80u
#endif
// A pair of elements with NaN and infinity set to 0.
DEV u32 zero_nonfinite(u32 x) {
  if ((x & EXPONENT) == EXPONENT) x &= 0xffff0000u;
  if ((x & (EXPONENT << 16)) == (EXPONENT << 16)) x &= 0x0000ffffu;
  return x;
}
#if PREFETCH_STATE
// Prefetches m and l of a tile's rows to shared memory.
DEV void prefetch_state(const JobParams& job, const Tile& tile, const Shared& shared, u32 slot,
    const float* m, const float* l, int thread) {
  for (int row = thread; row < ROWS; row += 96) {
    const i64 cell = tile.cell + (tile.row + row) * job.cells.row;
    const bool exists = tile.row + row < end_row(job, tile);
    store_shared(shared.softmax(slot, row), exists ? m[cell] : 0.f, exists ? l[cell] : 0.f);
  }
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(shared.softmax_full(slot));
}
#endif
// A parity distinguishes a phase only from its neighbours. These warps skip most blocks, so they
// wait for values only after the producer has signalled that the phase has begun; it cannot end
// before the consumers, which wait for `checked`, release it.
DEV void check(
    const JobParams& job, const Shared& shared, const float* m, const float* l, int thread) {
  StageIndex<STAGES> v; StageIndex<2> tile_stage; Tile tile; u32 masked_parity = 0;
  for (; wait_tile(shared, tile_stage, tile); release_tile(shared, tile_stage, thread % 32)) {
#if PREFETCH_STATE
    prefetch_state(job, tile, shared, tile_stage.stage, m, l, thread);
#endif
    for (int block = tile.blocks - 1; block >= begin_block(tile); block--, v.advance()) {
      if (!CAUSAL || !is_masked(tile, block)) continue;
      barrier_wait(shared.masked(v.stage), masked_parity >> v.stage & 1);
      masked_parity ^= 1u << v.stage;
      barrier_wait(shared.v_full(v.stage), v.parity);
      u32 at = shared.v(v.stage), found = 0;
      #pragma unroll 1
      for (int i = thread; i < VALUE_BYTES / 16; i += 96) {
        uint4 x = load_shared_16(at + i * 16),
              y = make_uint4(zero_nonfinite(x.x), zero_nonfinite(x.y), zero_nonfinite(x.z),
                  zero_nonfinite(x.w));
        u32 differs = (x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w);
        if (differs) store_shared(at + i * 16, y);
        found |= differs;
      }
      fence_async();
      u32 any = __any_sync(~0u, found != 0);
      if (thread % 32 == 0) {
        store_shared(shared.flags(v.stage) + thread / 32 * 4, any);
        barrier_arrive(shared.checked(v.stage));
      }
    }
  }
}

// ---- the consumer warpgroups ----
// Signals that a warp has read its part of a block of keys or values.
DEV void release(u32 barrier, int lane) {
  if (lane == 0) barrier_arrive(barrier);
}
// The queries of a warpgroup as wgmma reads them: a descriptor of shared memory, or (Q_REGISTERS)
// the queries themselves, which saves a fifth of the reads of shared memory.
struct Queries {
#if Q_REGISTERS
  uint4 part[HD / 16];
  DEV_MEMBER void read(u32 q, int consumer, int warp, int lane) {
    const int row = consumer * 64 + warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
    #pragma unroll
    for (int i = 0; i < HD / 16; i++)
      part[i] = load_matrices(swizzled(q + (i / 4) * (ROWS * 128), row, (2 * i + lane / 16) % 8));
  }
#else
  u64 rows;
  DEV_MEMBER void read(u32 q, int consumer, int, int) {
    rows = matrix(q + consumer * 64 * 128, 16, 1024);
  }
#endif
};
// Scores of 64 query rows and KEYS keys.
DEV void issue_scores(float (&s)[KEYS / 2], const Queries& q, u32 k) {
  const u64 keys = matrix(k, 16, 1024);
  #pragma unroll
  for (int i = 0; i < HD / 16; i++)
#if Q_REGISTERS
    SCORES_OF_REGISTERS(s, q.part[i].x, q.part[i].y, q.part[i].z, q.part[i].w,
        further(keys, (i / 4) * (KEYS * 128) + (i % 4) * 32), i != 0);
#else
    SCORES(s, further(q.rows, (i / 4) * (ROWS * 128) + (i % 4) * 32),
        further(keys, (i / 4) * (KEYS * 128) + (i % 4) * 32), i != 0);
#endif
}
// acc += weights x values: weights in registers, values MN-major.
DEV void issue_values(float (&acc)[VD / 2], const u32 (&p)[KEYS / 4], u32 v) {
  const u64 values = matrix(v, KEYS * 128, 1024);
  #pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
    VALUES(acc, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], further(values, i * 2048), 1);
}
// Masks the scores from column `first` or `second` on, counted from the thread's first column.
DEV void mask(float (&s)[KEYS / 2], int first, int second) {
  #pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * j + (e & 1) >= (e < 2 ? first : second)) s[4 * j + e] = neg_inf();
}
#if WINDOWED
// Masks the scores before column `first` or `second`.
DEV void mask_before(float (&s)[KEYS / 2], int first, int second) {
  #pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++)
      if (8 * j + (e & 1) < (e < 2 ? first : second)) s[4 * j + e] = neg_inf();
}
#endif
#if TRANSFORMED
// What becomes of scores (spec section 11): in base 2 with slopes, otherwise as shares of the cap.
// `slope`: of this head; `ahead`: how far this thread's rows lie after its first key of the block.
DEV void transform(float (&s)[KEYS / 2], const TileParams& tiles, float slope, int first_ahead,
    int second_ahead) {
  #pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      float& x = s[4 * j + e];
#if SOFTCAP
      // tanh(x) = 1 - 2 / (exp(2x) + 1): its error is that of one rounding of 1.
      x = fmaf(-2.f, reciprocal_fast(exp2_fast(x * tiles.inverse_cap) + 1.f), 1.f);
#endif
#if SLOPES
      x *= SOFTCAP ? tiles.softcap : tiles.score_scale;
      const float distance = (float)(e < 2 ? first_ahead : second_ahead) -
                             (float)(8 * j + (e & 1)) * (float)tiles.key_position_step;
      x = fmaf(-slope, fabsf(distance), x);
#endif
    }
}
#endif
#if POLYNOMIAL
// 2^x for x <= 8 without the special function unit: 2^n times a polynomial in [-1/2, 1/2] with a
// relative error of 2.6e-6.
DEV float exp2_polynomial(float x) {
  x = fmaxf(x, -126.f);
  float shifted = x + 12582912.f, rest = x - (shifted - 12582912.f);
  float y = fmaf(
      fmaf(fmaf(fmaf(0.00957010179f, rest, 0.0559178603f), rest, 0.240247448f), rest, 0.693121815f),
      rest, 0.999999261f);
  return __int_as_float(__float_as_int(y) + (__float_as_int(shifted) << 23));
}
#endif
// The online softmax of two rows. Scores are unscaled; weights are relative to `m`, which is
// uniform in a quad; `l` is this lane's part.
//
// With TILED a row has the same bits wherever its keys are cut between tiles, because its state at
// the end of a tile is one that memory holds exactly: `m` is scaled, as in memory, `l` is summed
// over the quad, and the sums are continued, not added. Programs differ in masks and in tilings, so
// no product here may be fused with a sum unless it says so.
struct Softmax {
  float m[2], l[2], factor[2];
  // What is subtracted from scores in base 2: 0 for rows that saw no key, and for rows whose scores
  // are large, whose maximum is subtracted before.
  float reference[2];
  u32 rescale, large;   // large: whether some row of the warp has large scores
  // Turns scores into weights. If `rescale`, the accumulator must be multiplied by `factor`.
  template <bool FIRST> DEV_MEMBER void update(float (&s)[KEYS / 2], float c) {
    float block_max[2];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      block_max[h] = fmaxf(s[2 * h], s[2 * h + 1]);
      #pragma unroll
      for (int j = 1; j < KEYS / 8; j++)
        block_max[h] = fmaxf(block_max[h], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      if (TILED) block_max[h] = __fmul_rn(block_max[h], c * 0.6931471805599453f);
    }
    const float unit = unit_of_max(c);
    u32 first = ~0u, second = ~0u;
    if (LAZY && !FIRST) {
      // Per row: a row's own quad decides, so that no row's bits depend on another row's scores.
      first = __ballot_sync(~0u, (block_max[0] - m[0]) * unit > 8.f || m[0] == neg_inf());
      second = __ballot_sync(~0u, (block_max[1] - m[1]) * unit > 8.f || m[1] == neg_inf());
    }
    rescale = FIRST ? 0 : first | second;
    // One branch for both, which is not taken in most blocks.
    if (FIRST || (rescale | large)) {
      if (FIRST || rescale) {
        u32 quad = 15u << (threadIdx.x & 28);
        update_max<FIRST>(0, block_max[0], unit, first & quad);
        update_max<FIRST>(1, block_max[1], unit, second & quad);
        set_reference(c);
      }
      if (large) subtract_max(s, c);
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = 0;
      #pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * h + e];
          x = fmaf(x, c, -reference[h]);
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
  // The factor of `m`, in base 2.
  DEV_MEMBER static float unit_of_max(float c) { return TILED ? 1.4426950408889634f : c; }
  DEV_MEMBER bool is_large_row(int h, float c) const {
    return m[h] != neg_inf() && fabsf(m[h] * unit_of_max(c)) >= LARGE_SCORE;
  }
  // After every change of `m`.
  DEV_MEMBER void set_reference(float c) {
    bool any = false;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool apart = m[h] == neg_inf() || is_large_row(h, c);
      reference[h] = apart ? 0.f : m[h] * unit_of_max(c);
      any |= apart && m[h] != neg_inf();
    }
    large = __any_sync(~0u, any);
  }
  // Subtracts the maximum of rows whose scores are large before they are multiplied: its rounding
  // would be seen in their weights.
  DEV_MEMBER void subtract_max(float (&s)[KEYS / 2], float c) const {
    const float scale = c * 0.6931471805599453f, inverse = 1.f / scale;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool apart = is_large_row(h, c);
      #pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[4 * j + 2 * h + e];
          const float above = TILED ? (__fmul_rn(x, scale) - m[h]) * inverse : x - m[h];
          x = apart ? above : x;
        }
    }
  }
  template <bool FIRST>
  DEV_MEMBER void update_max(int h, float block_max, float unit, bool needed) {
    float new_max = quad_max(FIRST ? block_max : fmaxf(m[h], block_max));
    if (FIRST) { m[h] = new_max; return; }
    factor[h] = 1.f;
    if (needed) {
      // No infinity is subtracted from itself: a row that saw no key is scaled by 0.
      factor[h] = exp2_fast((m[h] - (new_max == neg_inf() ? 0.f : new_max)) * unit);
      m[h] = new_max; l[h] = TILED ? __fmul_rn(l[h], factor[h]) : l[h] * factor[h];
    }
  }
#if TILED
  // Ends a tile of the grid after its first block of keys; called beside the products that follow.
  DEV_MEMBER void end_tile(int block, int column) {
    if (block % TILED != 0) return;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = quad_sum(l[h]);
      l[h] = column == 0 ? sum : 0.f;
    }
  }
#endif
};
DEV void scale_rows(float (&acc)[VD / 2], float first, float second) {
  #pragma unroll
  for (int i = 0; i < FRAGMENTS; i++) {
    acc[4 * i] *= first;
    acc[4 * i + 1] *= first;
    acc[4 * i + 2] *= second;
    acc[4 * i + 3] *= second;
  }
}
DEV void to_weights(const float (&s)[KEYS / 2], u32 (&p)[KEYS / 4]) {
  #pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}
