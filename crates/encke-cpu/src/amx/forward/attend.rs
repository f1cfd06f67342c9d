//! One tile of queries against the packed keys: scores, softmax and values, block by block.

use super::super::config::AmxForwardConfig;
use super::super::element::{TileElement, multiply_keys};
use super::super::huge::{HugeScores, ScoreRows};
use super::super::nonfinite::{FactorSide, add_nonfinite_terms};
use super::super::pack::{self, WIDTH};
use super::super::softmax::{self, Rescale, ScoreBlock};
use super::super::tiles::{SLAB_BYTES, TileProduct, TileUnit};
use super::call::{AmxForwardCall, AmxForwardTile, PackedKeys};
use super::tasks::AmxForwardTask;

/// One block of keys for one tile.
#[derive(Debug, Clone, Copy)]
struct KeyBlock {
    /// The index of the tile among the packed ones.
    tile: usize,
    /// The index of the first key in the job, and among the packed keys.
    key: usize,
    from: usize,
    /// How many groups of 32 keys of the block are visible to the tile.
    steps: usize,
}

impl AmxForwardTile {
    /// Whether some key of a block is hidden from some query.
    fn masked(&self, block: KeyBlock) -> bool {
        let end = block.key + block.steps * WIDTH;
        !self.common.cover(block.key..end)
    }
}

impl KeyBlock {
    /// Whether one of the bits of packed keys is set for this block.
    fn has(&self, bits: u128) -> bool {
        bits >> (self.from / WIDTH) & ((1 << self.steps) - 1) != 0
    }
}

impl<N: TileElement> AmxForwardCall<'_, N> {
    /// Attends a tile to all packed keys that are visible to it; `index` is its index among the
    /// packed ones.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn attend<T: TileUnit, S: AmxForwardConfig>(
        &self,
        task: &AmxForwardTask<'_>,
        tile: &mut AmxForwardTile,
        index: usize,
        packed: PackedKeys,
        scratch: *mut u8,
    ) {
        let end = tile.seen.end.min(packed.end);
        if tile.seen.start >= end {
            return;
        }
        let before = tile.seen.start.saturating_sub(packed.origin);
        // Blocks end at multiples of their size from the first key of the piece on; keys before the
        // first visible one are left out, 32 at a time. A job on a grid takes them from the last
        // to the first, so that a row's bits do not depend on where its keys are cut into jobs.
        let size = self.block_keys::<S>();
        let (aligned, start) = (
            packed.origin + before / size * size,
            packed.origin + before / WIDTH * WIDTH,
        );
        let mut blocks = (aligned..end).step_by(size);
        while let Some(block_start) = match self.job.tiles {
            None => blocks.next(),
            Some(_) => blocks.next_back(),
        } {
            let key = block_start.max(start);
            let block = KeyBlock {
                tile: index,
                key,
                from: (key - packed.origin) % self.layout.packed_keys,
                steps: (end.min(block_start + size) - key).div_ceil(WIDTH),
            };
            let huge = (tile.huge != 0 || block.has(packed.huge))
                .then(|| self.huge_scores(task, tile, block));
            // SAFETY: the caller's promise.
            unsafe {
                self.scores::<T>(block, scratch);
                let rescale = self.weights::<T, S>(tile, block, huge.as_ref(), scratch);
                self.values::<T>(tile, block, packed, &rescale, scratch);
            }
        }
    }

    /// Scores of one block.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[inline]
    unsafe fn scores<T: TileUnit>(&self, block: KeyBlock, scratch: *mut u8) {
        let q = self.queries(block.tile, scratch);
        let k = self.packed(self.layout.keys, block.from, scratch);
        let scores = scratch.wrapping_add(self.layout.scores);
        // SAFETY: tiles are configured, and all slabs lie in their regions.
        unsafe { multiply_keys::<T, N>(k, q, scores, self.steps, block.steps) };
    }

    /// The scores of one block that are computed in f64.
    #[cold]
    fn huge_scores(
        &self,
        task: &AmxForwardTask<'_>,
        tile: &AmxForwardTile,
        block: KeyBlock,
    ) -> HugeScores<'_, N> {
        let rows = ScoreRows {
            job: self.job,
            q: self.q,
            k: self.k,
            batch: task.batch,
            segment: task.segment,
            head: tile.head,
            queries: (tile.first, tile.count),
            key: block.key,
            steps: block.steps,
        };
        rows.huge_scores(&tile.softmax.keys)
    }

    /// The softmax of one block.
    ///
    /// Weights first stay relative to the row max so far. If some lanes need a new one, the block
    /// is done again with it; its scores are recomputed if the weights have overwritten them.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn weights<T: TileUnit, S: AmxForwardConfig>(
        &self,
        tile: &mut AmxForwardTile,
        block: KeyBlock,
        huge: Option<&HugeScores<'_, N>>,
        scratch: *mut u8,
    ) -> Rescale {
        let scores = ScoreBlock {
            scores: scratch.wrapping_add(self.layout.scores),
            weights: scratch.wrapping_add(self.layout.weights),
            steps: block.steps,
            start: block.key,
            common: tile.common,
        };
        // SAFETY: the region of scores has these slabs.
        unsafe {
            let (scale, state) = (self.scale, &mut tile.softmax);
            let scaled_lanes = huge.map_or(0, |huge| huge.lanes);
            let mut new_max_lanes = softmax::ALL_LANES;
            if !scores.masked() {
                new_max_lanes =
                    softmax::softmax_keep_max::<N, S>(&scores, scale, state, scaled_lanes);
                if new_max_lanes == 0 {
                    return Rescale::NONE;
                }
                if N::IN_PLACE {
                    self.scores::<T>(block, scratch);
                }
            }
            if let Some(huge) = huge {
                huge.store(scale, scores.scores);
            }
            softmax::softmax::<N, S>(&scores, scale, state, new_max_lanes, scaled_lanes)
        }
    }

    /// Adds weights times values of one block to the sums.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn values<T: TileUnit>(
        &self,
        tile: &AmxForwardTile,
        block: KeyBlock,
        packed: PackedKeys,
        rescale: &Rescale,
        scratch: *mut u8,
    ) {
        let sums = self.sums(block.tile, scratch);
        if rescale.needed {
            // SAFETY: the tile has this many slabs of sums.
            unsafe { softmax::rescale_sums(sums, 2 * self.steps, rescale) };
        }
        let values = self.packed(self.layout.values, block.from, scratch);
        let weights = scratch.wrapping_add(self.layout.weights);
        let mut factor = values;
        if tile.masked(block) && block.has(packed.nonfinite) {
            factor = scratch.wrapping_add(self.layout.finite_values);
            // SAFETY: both regions have this many slabs.
            unsafe { pack::zero_nonfinite(values, factor, block.steps * self.steps * N::SPLITS) };
        }
        for step in 0..self.steps {
            let sums = sums.wrapping_add(2 * step * SLAB_BYTES);
            let product = |factor: *mut u8| TileProduct {
                a: factor.wrapping_add(step * N::STACK_BYTES),
                a_step: self.steps * N::STACK_BYTES,
                b: [weights, weights.wrapping_add(N::WEIGHT_STRIDES.half)],
                b_step: N::WEIGHT_STRIDES.step,
                b_row: N::WEIGHT_STRIDES.row,
                c: [sums, sums.wrapping_add(SLAB_BYTES)],
                steps: block.steps,
            };
            // SAFETY: tiles are configured, and all slabs lie in their regions.
            unsafe { N::multiply::<T, true>(product(factor)) };
            if factor != values {
                let keys = &tile.softmax.keys;
                let is_visible = |at: usize, _: usize, lane: usize| keys.sees(lane, block.key + at);
                // SAFETY: all slabs lie in their regions.
                unsafe { add_nonfinite_terms(&product(values), FactorSide::Left, is_visible) };
            }
        }
    }
}
