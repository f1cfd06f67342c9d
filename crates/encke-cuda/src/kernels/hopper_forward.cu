// Attention forward on Hopper, second part: loading a carry, storing carries and outputs, and the
// kernel itself. hopper_forward.cuh has the overview, the producer and the softmax.

// The address of a row of values: rows are in the order of the keys.
DEV i64 value_row(const JobParams& job, const Tile& tile, int key) {
  const i64 row = at(job.k, tile.batch, tile.segment, key, tile.head);
  return OWN_VALUES ? row / job.dim * job.value_dim : row;
}
#if TRANSFORMED
// Transforms the scores of a block of the published tile.
DEV void transform_block(float (&s)[KEYS / 2], const TileParams& tiles, const Shared& shared,
    u32 slot, int row, int first_column) {
  int ahead = 0, down = 0;
  float slope = 0.f;
#if SLOPES
  const u32 from = shared.tile(slot);
  slope = __uint_as_float(tiles.slopes[load_shared(from + 4)].x);
  ahead = (int)load_shared(from + 64) + row * tiles.query_position_step -
          first_column * tiles.key_position_step;
  down = 8 * tiles.query_position_step;
#endif
  transform(s, tiles, slope, ahead, ahead + down);
}
#endif
// This thread's two rows of a tile.
struct Rows {
  int row[2], limit[2];   // limit: the end of the visible keys
  i64 cell[2];
  bool exists[2];
};
DEV void rows_of(
    const JobParams& job, const TileParams& tiles, const Tile& tile, int first, Rows& rows) {
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    rows.row[h] = first + 8 * h; rows.exists[h] = rows.row[h] < end_row(job, tile);
    rows.cell[h] = tile.cell + rows.row[h] * job.cells.row;
    rows.limit[h] = seen_end(job, tiles, tile, rows.row[h]);
  }
}
// In partly masked blocks, NaN and infinite values were multiplied as 0: the rows that see them add
// them here.
DEV void add_nonfinite_values(const JobParams& job, const TileParams& tiles, const Tile& tile,
    const Rows& rows, const u16* v, int column, float (&acc)[VD / 2]) {
#if WINDOWED
  int from = tile.begin * KEYS, origin = tile.first_key;
#else
  int from = (tile.blocks - tile.masked) * KEYS, origin = -tiles.chunk_starts[0];
#endif
  #pragma unroll 1
  for (int key = from; key < tile.keys; key++) {
    if (WINDOWED && !is_masked(tile, key / KEYS)) continue;
    const u16* value = v + value_row(job, tile, origin + key) + column;
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
      if (8 * i < job.value_dim)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          u32 x = value[8 * i + (e & 1)];
#if WINDOWED
          if (key < seen_start(tiles, tile, rows.row[e >> 1])) continue;
#endif
          if ((x & EXPONENT) == EXPONENT && key < rows.limit[e >> 1])
            acc[4 * i + e] += unpack((u16)x);
        }
  }
}
// The slot of a lane's row (0..7) in shared memory, and the row of a slot: neighbouring rows are
// two slots apart, so that 16 lanes that write 8 bytes each touch every bank once.
DEV int slot_of_row(int row) { return row % 4 * 2 + row / 4; }
DEV int row_of_slot(int slot) { return slot / 2 + slot % 2 * 4; }
#if LOAD_CARRY
// The state of a continued softmax: m and l of the rows, needed after the first scores. With
// PREFETCH_STATE they are in shared memory by then; otherwise they are loaded first of all. The
// carried sums stay in memory until the tile ends.
struct CarriedState {
  float m[2], l[2];
  DEV_MEMBER void load(const Rows& rows, const float* m_in, const float* l_in) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      m[h] = rows.exists[h] ? m_in[rows.cell[h]] : 0.f;
      l[h] = rows.exists[h] ? l_in[rows.cell[h]] : 0.f;
    }
  }
  // `carried_max`: the rows' carried maxima, -inf if they saw no key yet.
  DEV_MEMBER void init(
      float scale, float c, int column, Softmax& softmax, float (&carried_max)[2]) const {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      // l may be NaN
      softmax.m[h] = carried_max[h] = l[h] != 0.f ? (TILED ? m[h] : m[h] / scale) : neg_inf();
      softmax.l[h] = column == 0 ? l[h] : 0.f;
    }
    softmax.set_reference(c);
  }
};
#endif
#if PREFETCH_SUMS
// Prefetches the carried sums of a warp's rows; they are awaited when the tile ends.
DEV void prefetch_sums(const JobParams& job, const Tile& tile, const float* sums, u32 staged,
    u32 barrier, int first, int lane) {
  fence_async();   // after the output of the last tile was read
  __syncwarp();
  const int rows = min(max(end_row(job, tile) - tile.row - first, 0), 16),
            row = row_of_slot(lane % 8) + lane / 8 * 8;
  if (lane == 0) barrier_expect(barrier, rows * job.value_dim * 4);
  __syncwarp();
  if (lane < 16 && row < rows)
    bulk_load(staged + lane * SUM_PITCH,
        sums + (tile.cell + (tile.row + first + row) * job.cells.row) * job.value_dim,
        job.value_dim * 4, barrier);
}
#endif
#if TILED && LOAD_CARRY
// Loads the carried sums, which the tile continues.
DEV void load_sums(
    const JobParams& job, const Rows& rows, const float* sums, int column, float (&acc)[HD / 2]) {
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const float* from = sums + rows.cell[h] * job.dim + column;
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++) {
      float2 x = make_float2(0.f, 0.f);
      if (rows.exists[h] && 8 * i < job.dim) x = *(const float2*)(from + 8 * i);
      acc[4 * i + 2 * h] = x.x;
      acc[4 * i + 2 * h + 1] = x.y;
    }
  }
}
#endif
#if LOAD_CARRY && !STORE_CARRY && !TILED
// Adds the carried sums to the tile's own.
DEV void add_carried_sums(const JobParams& job, const Rows& rows, const float* sums, float c,
    u32 staged, int lane, float (&acc)[VD / 2], const Softmax& softmax,
    const float (&carried_max)[2]) {
  const int column = lane % 4 * 2;
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!rows.exists[h] || carried_max[h] == neg_inf()) continue;
    const float rescale =
        carried_max[h] == softmax.m[h] ? 1.f : exp2_fast((carried_max[h] - softmax.m[h]) * c);
    const float* from = sums + rows.cell[h] * job.value_dim + column;
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
      if (8 * i < job.value_dim) {
        float x, y;
        if (PREFETCH_SUMS)
          load_shared(
              staged + (slot_of_row(lane / 4) + 8 * h) * SUM_PITCH + (8 * i + column) * 4, x, y);
        else { float2 pair = *(const float2*)(from + 8 * i); x = pair.x; y = pair.y; }
        acc[4 * i + 2 * h] = fmaf(x, rescale, acc[4 * i + 2 * h]);
        acc[4 * i + 2 * h + 1] = fmaf(y, rescale, acc[4 * i + 2 * h + 1]);
      }
  }
}
#endif
#if STORE_CARRY
// Adds the tile's sums to those in memory. Rescaling is LAZY, so most rows still have their carried
// maximum: these are added by reductions in memory, without waiting for the old value. Rows with an
// empty carry are stored, and rows whose maximum rose are read and rescaled first.
// With TILED they hold the carried sums and are stored.
// STAGED: rows to add or store are staged in shared memory for bulk copies, which run during the
// next tile. All tiles end at about the same time, and would otherwise wait for memory together.
DEV void store_carry(const JobParams& job, const Rows& rows, float* sums, float* m_out,
    float* l_out, float scale, float c, u32 staged, int lane, const float (&acc)[VD / 2],
    const Softmax& softmax, const float (&carried_max)[2]) {
  const int column = lane % 4 * 2;
#if STAGED
  u32 raised_rows[2], empty[2];
  bulk_wait_read();   // this lane's bulk copies of the last tile
  __syncwarp();
#endif
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const bool none = TILED || carried_max[h] == neg_inf(),
               raised = !none && !(carried_max[h] == softmax.m[h]);
    float l = quad_sum(softmax.l[h]);
    if (rows.exists[h] && column == 0) {
      m_out[rows.cell[h]] = TILED ? softmax.m[h] : softmax.m[h] * scale;
      l_out[rows.cell[h]] = l;
    }
    float* to = sums + rows.cell[h] * job.value_dim + column;
    if (rows.exists[h] && (raised || !STAGED)) {
      const float rescale = raised ? exp2_fast((carried_max[h] - softmax.m[h]) * c) : 0.f;
      #pragma unroll
      for (int i = 0; i < FRAGMENTS; i++)
        if (8 * i < job.value_dim) {
          if (!none && !raised) {
            global_add(to + 8 * i, acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]);
            continue;
          }
          float2 x = raised ? *(const float2*)(to + 8 * i) : make_float2(0.f, 0.f);
          *(float2*)(to + 8 * i) = make_float2(
              fmaf(x.x, rescale, acc[4 * i + 2 * h]), fmaf(x.y, rescale, acc[4 * i + 2 * h + 1]));
        }
    }
#if STAGED
    raised_rows[h] = __ballot_sync(~0u, raised || !rows.exists[h]);
    empty[h] = __ballot_sync(~0u, none);
    #pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
      store_shared(staged + (slot_of_row(lane / 4) + 8 * h) * SUM_PITCH + (8 * i + column) * 4,
          acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1]);
#endif
  }
#if STAGED
  fence_async();
  __syncwarp();
  // Each of 16 lanes issues the bulk copy of the row in its slot.
  const int of = row_of_slot(lane % 8) * 4, h = lane / 8;
  const i64 first = __shfl_sync(~0u, rows.cell[0], of), second = __shfl_sync(~0u, rows.cell[1], of);
  const u32 stored = h ? raised_rows[1] : raised_rows[0], overwritten = h ? empty[1] : empty[0];
  if (h < 2 && !(stored >> of & 1)) {
    float* to = sums + (h ? second : first) * job.value_dim;
    if (overwritten >> of & 1)
      bulk_store(to, staged + lane * SUM_PITCH, job.value_dim * 4);
    else
      bulk_add(to, staged + lane * SUM_PITCH, job.value_dim * 4);
  }
#endif
}
// Stores an empty carry for rows that see no key.
DEV void store_empty_carry(
    const JobParams& job, const Tile& tile, float* sums, float* m, float* l, int thread) {
  for (int row = thread; row < ROWS && tile.row + row < end_row(job, tile);
       row += CONSUMERS * 128) {
    i64 cell = tile.cell + (tile.row + row) * job.cells.row;
    m[cell] = neg_inf(); l[cell] = 0.f;
    for (int i = 0; i < job.value_dim; i += 4)
      *(float4*)(sums + cell * job.value_dim + i) = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}
#else
// The lse of a row. On a grid it is that of `finish_cells` (cells.cu), which finishes rows where no
// job is the last of all.
DEV float lse_of(float m, float l, float scale) {
  if (l == 0.f) return neg_inf();
  if (TILED) return __fadd_rn(m, logf(l));
  return m * scale + log2_fast(l) * 0.6931471805599453f;
}
// The staging address of 16 bytes of a warp's output row: that of the carried sums, or of the
// queries.
DEV u32 output_slot(u32 q, u32 staged, int first, int row, int piece) {
  return PREFETCH_SUMS ? staged + row * SUM_PITCH + piece * 16
                       : swizzled(q + piece / 8 * (ROWS * 128), first + row, piece % 8);
}
// Finishes the softmax. Output rows are staged in shared memory, so that global memory is written
// 16 bytes per lane and whole sectors at a time.
DEV void store_out(const JobParams& job, const Tile& tile, const Rows& rows, u16* out, float* lse,
    float scale, u32 q, u32 staged, int first, int lane, const float (&acc)[VD / 2],
    const Softmax& softmax) {
  float factor[2];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    float l = quad_sum(softmax.l[h]);
    factor[h] = l == 0.f ? 0.f : (float)job.gain / l;
    if (lane % 4 == 0 && rows.exists[h]) lse[rows.cell[h]] = lse_of(softmax.m[h], l, scale);
  }
  const int address_row = (lane / 8 % 2) * 8 + lane % 8;   // the row whose address this lane gives
  #pragma unroll
  for (int i = 0; i < VD / 16; i++)
    store_matrices(output_slot(q, staged, first, address_row, 2 * i + lane / 16),
        pack(acc[8 * i] * factor[0], acc[8 * i + 1] * factor[0]),
        pack(acc[8 * i + 2] * factor[1], acc[8 * i + 3] * factor[1]),
        pack(acc[8 * i + 4] * factor[0], acc[8 * i + 5] * factor[0]),
        pack(acc[8 * i + 6] * factor[1], acc[8 * i + 7] * factor[1]));
  __syncwarp();
  #pragma unroll
  for (int i = lane; i < 16 * FRAGMENTS; i += 32) {
    int row = i / FRAGMENTS, piece = i % FRAGMENTS;
    uint4 x = load_shared_16(output_slot(q, staged, first, row, piece));
    if (tile.row + first + row < end_row(job, tile) && piece * 8 < job.value_dim)
      *(uint4*)(out + (tile.cell + (tile.row + first + row) * job.cells.row) * job.value_dim +
                piece * 8) = x;
  }
}
// Rows that see no key here: finishes their carry.
DEV void store_empty_rows(const JobParams& job, const Tile& tile, const float* sums, const float* m,
    const float* l, u16* out, float* lse, int thread) {
  for (int row = thread; row < ROWS && tile.row + row < end_row(job, tile);
       row += CONSUMERS * 128) {
    i64 cell = tile.cell + (tile.row + row) * job.cells.row;
    const float sum = LOAD_CARRY ? l[cell] : 0.f, factor = sum == 0.f ? 0.f : (float)job.gain / sum;
    lse[cell] = lse_of(LOAD_CARRY ? m[cell] : 0.f, sum, 1.f);
    for (int i = 0; i < job.value_dim; i += 2) {
      float2 x = sum == 0.f ? make_float2(0.f, 0.f)
                            : *(const float2*)(sums + cell * job.value_dim + i);
      *(u32*)(out + cell * job.value_dim + i) = pack(x.x * factor, x.y * factor);
    }
  }
}
#endif

// `v_values`, those of chunk 0, are read only where values are NaN or infinite. `counter`: two
// zeros, only for CAUSAL. acc, m and l are used with LOAD_CARRY or STORE_CARRY, out and lse without
// STORE_CARRY.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_forward(const __grid_constant__ TensorMap q_map,
        const __grid_constant__ KvChunkMaps kv_maps, const __grid_constant__ JobParams job,
        const __grid_constant__ TileParams tiles, const u16* v_values, float* sums, float* m_cells,
        float* l_cells, u16* out, float* lse, u32* counter) {
  SHARED_MEMORY(memory);
  const Shared shared{SHARED_BASE};
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32,
            lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    check_shared_base(memory);
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(shared.q_full(i), 1);
      barrier_init(shared.q_empty(i), CONSUMERS * 4);
    }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared.k_full(i), 1); barrier_init(shared.k_empty(i), CONSUMERS * 4);
      barrier_init(shared.v_full(i), 1); barrier_init(shared.v_empty(i), CONSUMERS * 4);
      barrier_init(shared.masked(i), 1); barrier_init(shared.checked(i), 3);
    }
    if (PREFETCH_SUMS) for (int i = 0; i < CONSUMERS * 4; i++) barrier_init(shared.sums_full(i), 1);
    if (PREFETCH_STATE) for (int i = 0; i < 2; i++) barrier_init(shared.softmax_full(i), 3);
    for (int i = 0; i < 2; i++) {
      barrier_init(shared.tile_full(i), 1);
      barrier_init(shared.tile_empty(i), CONSUMERS * 4 + (CAUSAL || PREFETCH_STATE ? 3 : 0));
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (group == 0) {
    registers_lower<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      tma_prefetch(&q_map); tma_prefetch(&kv_maps.k[0]); tma_prefetch(&kv_maps.v[0]);
      load(job, tiles, shared, &q_map, kv_maps, counter);
    } else if ((CAUSAL || PREFETCH_STATE) && warp > 0) {
      check(job, shared, m_cells, l_cells, threadIdx.x - 32);
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    const int consumer = group - 1, column = (lane % 4) * 2;
#if SLOPES
    const float scale = 0.6931471805599453f, c = 1.f;
#elif SOFTCAP
    const float scale = tiles.softcap * 0.6931471805599453f, c = tiles.softcap;
#else
    const float scale =
        fmaxf(fabsf((float)job.scale), TINY_SCALE);   // a masked score is -inf: no 0 x -inf
    const float c = scale * 1.4426950408889634f;
#endif
    float acc[VD / 2]; u32 p[KEYS / 4]; Softmax softmax; Rows rows; Tile tile;
    StageIndex<Q_STAGES> q;
    StageIndex<STAGES> k, v;
    StageIndex<2> tile_stage;
    u32 checked_parity = 0;
#if PREFETCH_SUMS
    u32 sums_parity = 0;
#endif
    if (PINGPONG && consumer == 0) named_arrive(1, 256);
    for (; wait_tile(shared, tile_stage, tile); release_tile(shared, tile_stage, lane)) {
      if (tile.blocks == 0) {
#if !STORE_CARRY
        store_empty_rows(job, tile, sums, m_cells, l_cells, out, lse, threadIdx.x - 128);
#elif !LOAD_CARRY
        store_empty_carry(job, tile, sums, m_cells, l_cells, threadIdx.x - 128);
#endif
        continue;
      }
      rows_of(job, tiles, tile, tile.row + consumer * 64 + warp * 16 + lane / 4, rows);
#if LOAD_CARRY
      CarriedState carried_state; float carried_max[2];
#if !PREFETCH_STATE
      carried_state.load(rows, m_cells, l_cells);
#endif
#elif STORE_CARRY
      const float carried_max[2] = {neg_inf(), neg_inf()};
#endif
#if PREFETCH_SUMS
      prefetch_sums(job, tile, sums, shared.sums(consumer * 64 + warp * 16),
          shared.sums_full(consumer * 4 + warp), consumer * 64 + warp * 16, lane);
#endif
#if TILED && LOAD_CARRY
      load_sums(job, rows, sums, column, acc);
#else
      #pragma unroll
      for (int i = 0; i < VD / 2; i++) acc[i] = 0.f;
#endif
      // Blocks below this one need no mask for any row of the warpgroup.
      const int unmasked = seen_end(job, tiles, tile, tile.row + consumer * 64) / KEYS;
#if WINDOWED
      // Blocks from this one on need none at their start.
      const int unmasked_from =
          (seen_start(tiles, tile, tile.row + consumer * 64 + 63) + KEYS - 1) / KEYS;
#endif
      u32 nonfinite = 0;
      int block = tile.blocks - 1;
      barrier_wait(shared.q_full(q.stage), q.parity);
      Queries queries; queries.read(shared.q(q.stage), consumer, warp, lane);
#if RELEASE_Q_EARLY
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.q_empty(q.stage));   // the stage is not used again
#endif
      {
        float s[KEYS / 2];
        barrier_wait(shared.k_full(k.stage), k.parity);
        wgmma_fence(); issue_scores(s, queries, shared.k(k.stage)); wgmma_commit();
#if LOAD_CARRY
#if PREFETCH_STATE
        barrier_wait(shared.softmax_full(tile_stage.stage), tile_stage.parity);
        #pragma unroll
        for (int h = 0; h < 2; h++)
          load_shared(
              shared.softmax(tile_stage.stage, consumer * 64 + warp * 16 + lane / 4 + 8 * h),
              carried_state.m[h], carried_state.l[h]);
#endif
        carried_state.init(scale, c, column, softmax, carried_max);
#endif
        wgmma_wait<0>();
        release(shared.k_empty(k.stage), lane);
        k.advance();
        const int at = block_at(tile, block);
#if TRANSFORMED
        transform_block(s, tiles, shared, tile_stage.stage,
            consumer * 64 + warp * 16 + lane / 4, block * KEYS + column);
#endif
        if (at >= unmasked)
          mask(s, rows.limit[0] - at * KEYS - column, rows.limit[1] - at * KEYS - column);
#if WINDOWED
        if (block < unmasked_from) {
          const int row = consumer * 64 + warp * 16 + lane / 4, before = block * KEYS + column;
          mask_before(s, start_of_row(shared, tile_stage.stage, tiles, row) - before,
              start_of_row(shared, tile_stage.stage, tiles, row + 8) - before);
        }
#endif
        softmax.update<!LOAD_CARRY>(s, c);
        to_weights(s, p);
        if (softmax.rescale) scale_rows(acc, softmax.factor[0], softmax.factor[1]);
      }
      #pragma unroll 1
      for (block--; block >= begin_block(tile); block--) {
        float s[KEYS / 2];
        barrier_wait(shared.k_full(k.stage), k.parity);
        if (PINGPONG) named_sync(1 + consumer, 256);
        wgmma_fence(); issue_scores(s, queries, shared.k(k.stage)); wgmma_commit();
#if WINDOWED
        const bool hides = is_masked(shared, tile_stage.stage, block + 1);
#else
        const bool hides = is_masked(tile, block + 1);
#endif
        if (CAUSAL && hides) {
          barrier_wait(shared.checked(v.stage), checked_parity >> v.stage & 1);
          checked_parity ^= 1u << v.stage;
          uint4 found = load_shared_16(shared.flags(v.stage));
          nonfinite |= found.x | found.y | found.z;
        }
        barrier_wait(shared.v_full(v.stage), v.parity);
        wgmma_fence(); issue_values(acc, p, shared.v(v.stage)); wgmma_commit();
        if (PINGPONG) named_arrive(1 + (consumer + 1) % CONSUMERS, 256);
#if TILED
        softmax.end_tile(block_at(tile, block + 1), column);
#endif
        wgmma_wait<1>();
        release(shared.k_empty(k.stage), lane);
        k.advance();
        const int at = block_at(tile, block);
#if TRANSFORMED
        transform_block(s, tiles, shared, tile_stage.stage,
            consumer * 64 + warp * 16 + lane / 4, block * KEYS + column);
#endif
        if (COUNTED && at >= unmasked)
          mask(s, rows.limit[0] - at * KEYS - column, rows.limit[1] - at * KEYS - column);
#if WINDOWED
        if (block < unmasked_from) {
          const int row = consumer * 64 + warp * 16 + lane / 4, before = block * KEYS + column;
          mask_before(s, start_of_row(shared, tile_stage.stage, tiles, row) - before,
              start_of_row(shared, tile_stage.stage, tiles, row + 8) - before);
        }
#endif
        softmax.update<false>(s, c);
        wgmma_wait<0>();
        release(shared.v_empty(v.stage), lane);
        v.advance();
        to_weights(s, p);
        if (softmax.rescale) scale_rows(acc, softmax.factor[0], softmax.factor[1]);
      }
#if WINDOWED
      const bool hides = is_masked(shared, tile_stage.stage, begin_block(tile));
#else
      const bool hides = is_masked(tile, begin_block(tile));
#endif
      if (CAUSAL && hides) {
        barrier_wait(shared.checked(v.stage), checked_parity >> v.stage & 1);
        checked_parity ^= 1u << v.stage;
        uint4 found = load_shared_16(shared.flags(v.stage));
        nonfinite |= found.x | found.y | found.z;
      }
      barrier_wait(shared.v_full(v.stage), v.parity);
      wgmma_fence(); issue_values(acc, p, shared.v(v.stage)); wgmma_commit();
#if TILED
      softmax.end_tile(block_at(tile, begin_block(tile)), column);
#endif
      wgmma_wait<0>();
      release(shared.v_empty(v.stage), lane);
      v.advance();
      // Read again: the fields needed to store were not kept in registers.
      wait_tile(shared, tile_stage, tile);
      rows_of(job, tiles, tile, tile.row + consumer * 64 + warp * 16 + lane / 4, rows);
      if (CAUSAL && nonfinite) add_nonfinite_values(job, tiles, tile, rows, v_values, column, acc);
#if PREFETCH_SUMS
      barrier_wait(shared.sums_full(consumer * 4 + warp), sums_parity); sums_parity ^= 1;
#endif
#if LOAD_CARRY && !STORE_CARRY && !TILED
      add_carried_sums(job, rows, sums, c, shared.sums(consumer * 64 + warp * 16), lane, acc,
          softmax, carried_max);
#endif
#if STORE_CARRY
      if (!RELEASE_Q_EARLY && lane == 0) barrier_arrive(shared.q_empty(q.stage));
      store_carry(job, rows, sums, m_cells, l_cells, scale, c,
          shared.sums(consumer * 64 + warp * 16), lane, acc, softmax, carried_max);
#else
      // Every warp of the group has read its queries.
      if (PREFETCH_SUMS) __syncwarp(); else named_sync(1 + CONSUMERS + consumer, 128);
      store_out(job, tile, rows, out, lse, scale, shared.q(q.stage),
          shared.sums(consumer * 64 + warp * 16), consumer * 64 + warp * 16, lane, acc, softmax);
      fence_async(); __syncwarp();
      if (!RELEASE_Q_EARLY && lane == 0) barrier_arrive(shared.q_empty(q.stage));
#endif
      q.advance();
    }
    if (STAGED && STORE_CARRY) bulk_wait_all();
  }
}
