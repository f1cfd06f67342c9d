//! A tile against the packed keys: scores, softmax, values, block by block.

use super::super::mend::{Side, mend};
use super::super::number::Number;
use super::super::pack::{self, WIDTH};
use super::super::shape::Shape;
use super::super::softmax::{self, Block, Rescale};
use super::super::tiles::{Product, ROW_BYTES, SLAB_BYTES, TILE_BYTES, Tiles};
use super::{Packed, Run, Tile};

/// One block of keys for one tile.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// The number of the tile in its task.
    tile: usize,
    /// The number of the first key, and its place among the packed ones.
    key: usize,
    from: usize,
    /// How many times 32 keys the tile sees of the block.
    steps: usize,
}

impl Tile {
    /// Whether some query does not see all keys of a turn.
    fn masked(&self, turn: Turn) -> bool {
        self.least < turn.key + turn.steps * WIDTH
    }
}

impl Packed {
    /// Whether a value of a turn is not finite.
    fn broken(&self, turn: Turn) -> bool {
        self.broken >> (turn.from / WIDTH) & ((1 << turn.steps) - 1) != 0
    }
}

impl<N: Number> Run<'_, N> {
    /// All packed keys that a tile sees, `number` being its place in the task.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn attend<T: Tiles, S: Shape>(
        &self,
        tile: &mut Tile,
        number: usize,
        packed: Packed,
        scratch: *mut u8,
    ) {
        let end = tile.most.min(packed.first + packed.count);
        for key in (packed.first..end).step_by(S::KEYS) {
            let turn = Turn {
                tile: number,
                key,
                from: key - packed.first,
                steps: (end - key).min(S::KEYS).div_ceil(WIDTH),
            };
            // SAFETY: the caller's promise.
            unsafe {
                self.scores::<T>(turn, scratch);
                let rescale = self.weights::<T, S>(tile, turn, scratch);
                self.values::<T>(tile, turn, packed, &rescale, scratch);
            }
        }
    }

    /// Scores of one turn.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    unsafe fn scores<T: Tiles>(&self, turn: Turn, scratch: *mut u8) {
        let q = self.queries(turn.tile, scratch);
        let k = self.block(self.layout.keys, turn.from, scratch);
        let scores = self.block_of_scores(scratch);
        for step in 0..turn.steps {
            let sums = scores.wrapping_add(2 * step * SLAB_BYTES);
            // SAFETY: tiles are configured, and all slabs lie in their regions.
            unsafe {
                N::multiply::<T, false>(Product {
                    a: k.wrapping_add(step * self.steps * N::STACK),
                    a_step: N::STACK,
                    b: [q, q.wrapping_add(TILE_BYTES)],
                    b_step: N::STACK,
                    b_row: ROW_BYTES,
                    c: [sums, sums.wrapping_add(SLAB_BYTES)],
                    steps: self.steps,
                });
            }
        }
    }

    /// The softmax of one turn.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn weights<T: Tiles, S: Shape>(
        &self,
        tile: &mut Tile,
        turn: Turn,
        scratch: *mut u8,
    ) -> Rescale {
        let block = Block {
            scores: self.block_of_scores(scratch),
            weights: self.block_of_weights(scratch),
            steps: turn.steps,
            start: turn.key,
            masked: tile.masked(turn),
        };
        // SAFETY: the buffer of scores has these slabs.
        unsafe {
            let mut look = softmax::EVERY;
            if !block.masked {
                look = softmax::onward::<N, S>(&block, self.scale, &mut tile.running);
                if look == 0 {
                    return Rescale::NONE;
                }
                if N::IN_PLACE {
                    self.scores::<T>(turn, scratch);
                }
            }
            softmax::softmax::<N, S>(&block, self.scale, &mut tile.running, look)
        }
    }

    /// Weights times values of one turn.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn values<T: Tiles>(
        &self,
        tile: &Tile,
        turn: Turn,
        packed: Packed,
        rescale: &Rescale,
        scratch: *mut u8,
    ) {
        let sums = self.sums(turn.tile, scratch);
        if rescale.needed {
            // SAFETY: the tile has this many slabs of sums.
            unsafe { softmax::multiply_sums(sums, 2 * self.steps, rescale) };
        }
        let values = self.block(self.layout.values, turn.from, scratch);
        let weights = self.block_of_weights(scratch);
        let mut factor = values;
        if tile.masked(turn) && packed.broken(turn) {
            factor = scratch.wrapping_add(self.layout.clean);
            // SAFETY: both regions have this many slabs.
            unsafe { pack::clean(values, factor, turn.steps * self.steps * N::PIECES) };
        }
        for step in 0..self.steps {
            let sums = sums.wrapping_add(2 * step * SLAB_BYTES);
            let product = |factor: *mut u8| Product {
                a: factor.wrapping_add(step * N::STACK),
                a_step: self.steps * N::STACK,
                b: [weights, weights.wrapping_add(N::WEIGHTS.half)],
                b_step: N::WEIGHTS.step,
                b_row: N::WEIGHTS.row,
                c: [sums, sums.wrapping_add(SLAB_BYTES)],
                steps: turn.steps,
            };
            // SAFETY: tiles are configured, and all slabs lie in their regions.
            unsafe { N::multiply::<T, true>(product(factor)) };
            if factor != values {
                let seen = &tile.running.visible.0;
                let sees = |at: usize, _: usize, lane: usize| seen[lane] as usize > turn.key + at;
                // SAFETY: all slabs lie in their regions.
                unsafe { mend(&product(values), Side::Left, sees) };
            }
        }
    }
}
