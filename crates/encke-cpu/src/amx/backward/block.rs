//! A block of keys against the packed queries: five products and one exponential.

use super::super::config::AmxBackwardConfig;
use super::super::element::{TileElement, multiply_keys};
use super::super::gradient::{self, Factors, QueryStats};
use super::super::huge::ScoreRows;
use super::super::nonfinite::{FactorSide, add_nonfinite_terms};
use super::super::pack::{self, WIDTH};
use super::super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES, TileProduct, TileUnit};
use super::call::{AmxBackwardCall, AmxBackwardTile, PackedKeyBlock};
use super::chain::AmxBackwardTask;

/// Groups of 32 keys of the largest block.
const MAX_KEY_STEPS: usize = 8;

impl<N: TileElement> AmxBackwardCall<'_, N> {
    /// Processes a block of keys against all packed queries: sums dk and dv, and adds to dq.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn block<T: TileUnit, S: AmxBackwardConfig>(
        &self,
        task: &AmxBackwardTask<'_>,
        tiles: &mut [AmxBackwardTile],
        keys: PackedKeyBlock,
        scratch: *mut u8,
    ) {
        let mut fresh = true;
        for start in (0..tiles.len()).step_by(S::QUERY_TILES) {
            let end = tiles.len().min(start + S::QUERY_TILES);
            let visible = |tile: &AmxBackwardTile| tile.sees(keys.start, keys.count);
            // Tiles to which no key of the block is visible are skipped at both ends.
            let Some(first) = tiles[start..end].iter().position(visible) else {
                continue;
            };
            let last = tiles[start..end].iter().rposition(visible).unwrap_or(first);
            let first = start + first;
            let tiles = &mut tiles[first..=start + last];
            // SAFETY: the caller's promise.
            unsafe {
                for (i, tile) in tiles.iter().enumerate() {
                    self.scores::<T>(tile, first + i, keys, scratch);
                    let mut scaled_lanes = 0;
                    if tile.huge != 0 || keys.huge {
                        scaled_lanes = self.huge_scores(task, tile, keys, scratch);
                    }
                    self.gradients::<S>(tile, i, keys, scaled_lanes, scratch);
                }
                if fresh {
                    self.sum_keys::<T, S, false>(tiles, first, keys, scratch);
                } else {
                    self.sum_keys::<T, S, true>(tiles, first, keys, scratch);
                }
                fresh = false;
                for (i, tile) in tiles.iter_mut().enumerate() {
                    self.sum_queries::<T, S>(tile, first + i, i, keys, scratch);
                }
            }
        }
    }

    /// Scores and dp of one tile of queries, packed at index `tile`.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[inline]
    unsafe fn scores<T: TileUnit>(
        &self,
        state: &AmxBackwardTile,
        tile: usize,
        keys: PackedKeyBlock,
        scratch: *mut u8,
    ) {
        let (layout, steps) = (&self.layout, state.steps(keys));
        let first = steps.start * self.steps * N::STACK_BYTES;
        let first_sums = steps.start * 2 * SLAB_BYTES;
        for (rows, lanes, to) in [
            (layout.k_rows, layout.q_lanes, layout.scores),
            (layout.v_rows, layout.dout_lanes, layout.dp),
        ] {
            let lanes = lanes + tile * self.steps * N::STACK_BYTES;
            let all = [rows + first, lanes, to + first_sums];
            let [rows, lanes, to] = all.map(|at| scratch.wrapping_add(at));
            // SAFETY: tiles are configured, and all slabs lie in their regions.
            unsafe { multiply_keys::<T, N>(rows, lanes, to, self.steps, steps.len()) };
        }
    }

    /// Computes scores of huge rows in f64, and returns the lanes whose scores include the scale
    /// afterwards.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[cold]
    unsafe fn huge_scores(
        &self,
        task: &AmxBackwardTask<'_>,
        tile: &AmxBackwardTile,
        keys: PackedKeyBlock,
        scratch: *mut u8,
    ) -> u32 {
        let steps = tile.steps(keys);
        let rows = ScoreRows {
            job: self.job,
            q: self.inputs.q,
            k: self.inputs.k,
            batch: task.batch,
            segment: task.segment,
            head: task.head,
            queries: (tile.first, tile.count),
            key: keys.start + steps.start * WIDTH,
            steps: steps.len(),
        };
        let huge = rows.huge_scores(&tile.stats.keys);
        let scores = self.layout.scores + steps.start * 2 * SLAB_BYTES;
        // SAFETY: the region of scores has these slabs.
        unsafe { huge.store(self.factors.scale, scratch.add(scores)) };
        huge.lanes
    }

    /// Weights and ds of a tile, which is number `i` of the current group.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn gradients<S: AmxBackwardConfig>(
        &self,
        tile: &AmxBackwardTile,
        i: usize,
        keys: PackedKeyBlock,
        scaled_lanes: u32,
        scratch: *mut u8,
    ) {
        let layout = &self.layout;
        let steps = tile.steps(keys);
        // Keys that are hidden from the whole tile get nothing from it in dk and dv.
        for step in (0..steps.start).chain(steps.end..keys.count.div_ceil(WIDTH)) {
            for region in [layout.weights, layout.ds] {
                let stack = region + (step * S::QUERY_TILES + i) * N::STACK_BYTES;
                // SAFETY: the stack lies in its region.
                unsafe { scratch.add(stack).write_bytes(0, N::STACK_BYTES) };
            }
        }
        let block = gradient::GradientBlock {
            scores: scratch.wrapping_add(layout.scores),
            dp: scratch.wrapping_add(layout.dp),
            steps,
            start: keys.start,
            common: tile.common,
            scaled_lanes,
            weights: scratch.wrapping_add(layout.weights + i * N::STACK_BYTES),
            ds: scratch.wrapping_add(layout.ds + i * N::STACK_BYTES),
            left_stride: S::QUERY_TILES * N::STACK_BYTES,
            ds_right: scratch.wrapping_add(layout.ds_right + i * S::KEYS / WIDTH * N::STACK_BYTES),
            right_stride: N::STACK_BYTES,
        };
        // SAFETY: all slabs lie in their regions.
        unsafe { gradient_of::<N, S>(&block, self.factors, &tile.stats) };
    }

    /// Sums dk and dv of the block over the current group of tiles, packed from index `first` on.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn sum_keys<T: TileUnit, S: AmxBackwardConfig, const ADD: bool>(
        &self,
        tiles: &[AmxBackwardTile],
        first: usize,
        keys: PackedKeyBlock,
        scratch: *mut u8,
    ) {
        let layout = &self.layout;
        let steps = keys.count.div_ceil(WIDTH);
        const { assert!(S::KEYS <= MAX_KEY_STEPS * WIDTH) };
        // From the first to the last tile that sees a group of keys.
        let mut seeing = [const { 0..0 }; MAX_KEY_STEPS];
        for (key, seeing) in seeing[..steps].iter_mut().enumerate() {
            let sees = |tile: &AmxBackwardTile| tile.steps(keys).contains(&key);
            if let Some(first) = tiles.iter().position(sees) {
                *seeing = first..tiles.iter().rposition(sees).unwrap_or(first) + 1;
            }
        }
        for (side, (left, pairs, sums)) in [
            (layout.ds, layout.q_pairs, layout.dk),
            (layout.weights, layout.dout_pairs, layout.dv),
        ]
        .into_iter()
        .enumerate()
        {
            let pairs = scratch.wrapping_add(pairs + first * self.steps * N::STACK_BYTES);
            let needs_cleaning =
                |tile: &AmxBackwardTile| tile.nonfinite[side] != 0 && tile.masked(keys, 0..steps);
            let mut factor = pairs;
            if tiles.iter().any(needs_cleaning) {
                factor = scratch.wrapping_add(layout.finite[1 + side]);
                // SAFETY: both regions have this many slabs.
                unsafe { self.clean_tiles(tiles, needs_cleaning, pairs, factor) };
            }
            // The factors of one step of channels are used with all keys while they are in the L1
            // cache.
            for step in 0..self.steps {
                for (key, seeing) in seeing[..steps].iter().enumerate() {
                    let c = sums + (key * self.steps + step) * 2 * SLAB_BYTES;
                    let c = scratch.wrapping_add(c);
                    if seeing.is_empty() {
                        if !ADD {
                            // SAFETY: both slabs lie in their region.
                            unsafe { c.write_bytes(0, 2 * SLAB_BYTES) };
                        }
                        continue;
                    }
                    let product = |factor: *mut u8| {
                        let from = seeing.start * self.steps + step;
                        let b = factor.wrapping_add(from * N::STACK_BYTES);
                        let at = left + (key * S::QUERY_TILES + seeing.start) * N::STACK_BYTES;
                        TileProduct {
                            a: scratch.wrapping_add(at),
                            a_step: N::STACK_BYTES,
                            b: [b, b.wrapping_add(TILE_BYTES)],
                            b_step: self.steps * N::STACK_BYTES,
                            b_row: ROW_BYTES,
                            c: [c, c.wrapping_add(SLAB_BYTES)],
                            steps: seeing.len(),
                        }
                    };
                    // SAFETY: tiles are configured, and all slabs lie in their regions.
                    unsafe { N::multiply::<T, ADD>(product(factor)) };
                    if factor != pairs {
                        let is_visible = |at: usize, row: usize, _: usize| {
                            let (tile, pair) = (&tiles[seeing.start + at / WIDTH], at % WIDTH);
                            let lane = pair / 2 + pair % 2 * 16;
                            let key = keys.start + key * WIDTH + row;
                            needs_cleaning(tile) && tile.stats.keys.sees(lane, key)
                        };
                        // SAFETY: all slabs lie in their regions.
                        unsafe {
                            add_nonfinite_terms(&product(pairs), FactorSide::Right, is_visible)
                        };
                    }
                }
            }
        }
    }

    /// Copies the packed pairs of tiles, without non-finite elements where `needs_cleaning` holds.
    ///
    /// # Safety
    /// `from` and `to` have the slabs of all these tiles.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn clean_tiles(
        &self,
        tiles: &[AmxBackwardTile],
        needs_cleaning: impl Fn(&AmxBackwardTile) -> bool,
        from: *const u8,
        to: *mut u8,
    ) {
        let bytes = self.steps * N::STACK_BYTES;
        for (i, tile) in tiles.iter().enumerate() {
            let (from, to) = (from.wrapping_add(i * bytes), to.wrapping_add(i * bytes));
            // SAFETY: the caller's promise.
            unsafe {
                if needs_cleaning(tile) {
                    pack::zero_nonfinite(from, to, self.steps * N::SPLITS);
                } else {
                    std::ptr::copy_nonoverlapping(from, to, bytes);
                }
            }
        }
    }

    /// dq of the tile packed at index `tile`, from ds number `i` of the current group.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn sum_queries<T: TileUnit, S: AmxBackwardConfig>(
        &self,
        state: &mut AmxBackwardTile,
        tile: usize,
        i: usize,
        keys: PackedKeyBlock,
        scratch: *mut u8,
    ) {
        let layout = &self.layout;
        let steps = state.steps(keys);
        if steps.is_empty() {
            return;
        }
        let columns = layout.k_columns + steps.start * self.steps * N::STACK_BYTES;
        let columns = scratch.wrapping_add(columns);
        let mut factor = columns;
        if keys.nonfinite && state.masked(keys, steps.clone()) {
            factor = scratch.wrapping_add(layout.finite[0]);
            let slabs = steps.len() * self.steps * N::SPLITS;
            // SAFETY: both regions have this many slabs.
            unsafe { pack::zero_nonfinite(columns, factor, slabs) };
        }
        let b = layout.ds_right + (i * (S::KEYS / WIDTH) + steps.start) * N::STACK_BYTES;
        let b = scratch.wrapping_add(b);
        let first_key = keys.start + steps.start * WIDTH;
        for step in 0..self.steps {
            let c = layout.dq + (tile * self.steps + step) * 2 * SLAB_BYTES;
            let c = scratch.wrapping_add(c);
            let product = |factor: *mut u8| TileProduct {
                a: factor.wrapping_add(step * N::STACK_BYTES),
                a_step: self.steps * N::STACK_BYTES,
                b: [b, b.wrapping_add(TILE_BYTES)],
                b_step: N::STACK_BYTES,
                b_row: ROW_BYTES,
                c: [c, c.wrapping_add(SLAB_BYTES)],
                steps: steps.len(),
            };
            // SAFETY: tiles are configured, and all slabs lie in their regions.
            unsafe {
                if state.dq_started == 0 {
                    N::multiply::<T, false>(product(factor));
                } else {
                    N::multiply::<T, true>(product(factor));
                }
            }
            if factor != columns {
                let visible = &state.stats.keys;
                let is_visible =
                    |at: usize, _: usize, lane: usize| visible.sees(lane, first_key + at);
                // SAFETY: all slabs lie in their regions.
                unsafe { add_nonfinite_terms(&product(columns), FactorSide::Left, is_visible) };
            }
        }
        state.dq_started = 1;
    }
}

/// [`gradient::gradient`] with the configuration's polynomial degree.
///
/// # Safety
/// As for [`gradient::gradient`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn gradient_of<N: TileElement, S: AmxBackwardConfig>(
    block: &gradient::GradientBlock,
    factors: Factors,
    stats: &QueryStats,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match S::EXP_DEGREE {
            3 => gradient::gradient::<N, 3>(block, factors, stats),
            4 => gradient::gradient::<N, 4>(block, factors, stats),
            _ => gradient::gradient::<N, 5>(block, factors, stats),
        }
    }
}
