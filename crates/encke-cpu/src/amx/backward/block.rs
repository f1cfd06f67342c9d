//! A block of keys against the packed queries: five products and one exponential.

use super::super::gradient::{self, Factors, Known};
use super::super::mend::{Side, mend};
use super::super::number::Number;
use super::super::pack::{self, WIDTH};
use super::super::shape::BackwardShape;
use super::super::tiles::{Product, ROW_BYTES, SLAB_BYTES, TILE_BYTES, Tiles};
use super::{Keys, Run, Tile};

impl<N: Number> Run<'_, N> {
    /// A block of keys against all packed queries: sums dk and dv, and adds to dq.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn block<T: Tiles, S: BackwardShape>(
        &self,
        tiles: &mut [Tile],
        keys: Keys,
        scratch: *mut u8,
    ) {
        let mut fresh = true;
        for start in (0..tiles.len()).step_by(S::TILES) {
            let end = tiles.len().min(start + S::TILES);
            let sees = |tile: &Tile| tile.most > keys.start;
            // Tiles that see nothing of the block are left out at both ends.
            let Some(first) = tiles[start..end].iter().position(sees) else {
                continue;
            };
            let last = tiles[start..end].iter().rposition(sees).unwrap_or(first);
            let first = start + first;
            let tiles = &mut tiles[first..=start + last];
            // SAFETY: the caller's promise.
            unsafe {
                for (i, tile) in tiles.iter().enumerate() {
                    self.scores::<T>(tile, first + i, keys, scratch);
                    self.gradients::<S>(tile, i, keys, scratch);
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

    /// Scores and dout·v of one tile of queries, packed at `tile`.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    unsafe fn scores<T: Tiles>(&self, of: &Tile, tile: usize, keys: Keys, scratch: *mut u8) {
        let layout = &self.layout;
        for (rows, lanes, to) in [
            (layout.k_rows, layout.q_lanes, layout.scores),
            (layout.v_rows, layout.dout_lanes, layout.products),
        ] {
            let b = scratch.wrapping_add(lanes + tile * self.steps * N::STACK);
            for step in 0..of.steps(keys) {
                let c = scratch.wrapping_add(to + 2 * step * SLAB_BYTES);
                // SAFETY: tiles are configured, and all slabs lie in their regions.
                unsafe {
                    N::multiply::<T, false>(Product {
                        a: scratch.wrapping_add(rows + step * self.steps * N::STACK),
                        a_step: N::STACK,
                        b: [b, b.wrapping_add(TILE_BYTES)],
                        b_step: N::STACK,
                        b_row: ROW_BYTES,
                        c: [c, c.wrapping_add(SLAB_BYTES)],
                        steps: self.steps,
                    });
                }
            }
        }
    }

    /// Weights and gradients of the tile at place `i` of those at hand.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn gradients<S: BackwardShape>(
        &self,
        tile: &Tile,
        i: usize,
        keys: Keys,
        scratch: *mut u8,
    ) {
        let layout = &self.layout;
        let steps = tile.steps(keys);
        // What it does not see at all has no part in dk and dv.
        for step in steps..keys.count.div_ceil(WIDTH) {
            for region in [layout.weights, layout.gradients] {
                let stack = region + (step * S::TILES + i) * N::STACK;
                // SAFETY: the stack lies in its region.
                unsafe { scratch.add(stack).write_bytes(0, N::STACK) };
            }
        }
        let block = gradient::Block {
            scores: scratch.wrapping_add(layout.scores),
            products: scratch.wrapping_add(layout.products),
            steps,
            start: keys.start,
            masked: tile.masked(keys.start + steps * WIDTH),
            weights: scratch.wrapping_add(layout.weights + i * N::STACK),
            gradients: scratch.wrapping_add(layout.gradients + i * N::STACK),
            left_stride: S::TILES * N::STACK,
            turned: scratch.wrapping_add(layout.turned + i * S::KEYS / WIDTH * N::STACK),
            right_stride: N::STACK,
        };
        // SAFETY: all slabs lie in their regions.
        unsafe { gradient_of::<N, S>(&block, self.factors, &tile.known) };
    }

    /// dk and dv of the block from the tiles at hand, the first of which is packed at `first`.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn sum_keys<T: Tiles, S: BackwardShape, const ADD: bool>(
        &self,
        tiles: &[Tile],
        first: usize,
        keys: Keys,
        scratch: *mut u8,
    ) {
        let layout = &self.layout;
        let steps = keys.count.div_ceil(WIDTH);
        let end = keys.start + steps * WIDTH;
        for (side, (left, pairs, sums)) in [
            (layout.gradients, layout.q_pairs, layout.dk),
            (layout.weights, layout.dout_pairs, layout.dv),
        ]
        .into_iter()
        .enumerate()
        {
            let pairs = scratch.wrapping_add(pairs + first * self.steps * N::STACK);
            let hurt = |tile: &Tile| tile.broken[side] != 0 && tile.masked(end);
            let mut factor = pairs;
            if tiles.iter().any(hurt) {
                factor = scratch.wrapping_add(layout.clean[1 + side]);
                // SAFETY: both regions have this many slabs.
                unsafe { self.clean_tiles(tiles, hurt, pairs, factor) };
            }
            // Factors of one step of channels meet all keys while the first-level cache has them.
            for step in 0..self.steps {
                for key in 0..steps {
                    let c = sums + (key * self.steps + step) * 2 * SLAB_BYTES;
                    let c = scratch.wrapping_add(c);
                    let product = |factor: *mut u8| {
                        let b = factor.wrapping_add(step * N::STACK);
                        Product {
                            a: scratch.wrapping_add(left + key * S::TILES * N::STACK),
                            a_step: N::STACK,
                            b: [b, b.wrapping_add(TILE_BYTES)],
                            b_step: self.steps * N::STACK,
                            b_row: ROW_BYTES,
                            c: [c, c.wrapping_add(SLAB_BYTES)],
                            steps: tiles.len(),
                        }
                    };
                    // SAFETY: tiles are configured, and all slabs lie in their regions.
                    unsafe { N::multiply::<T, ADD>(product(factor)) };
                    if factor != pairs {
                        let sees = |at: usize, row: usize, _: usize| {
                            let (tile, place) = (&tiles[at / WIDTH], at % WIDTH);
                            let lane = place / 2 + place % 2 * 16;
                            let seen = tile.known.visible.0[lane] as usize;
                            hurt(tile) && seen > keys.start + key * WIDTH + row
                        };
                        // SAFETY: all slabs lie in their regions.
                        unsafe { mend(&product(pairs), Side::Right, sees) };
                    }
                }
            }
        }
    }

    /// Copies the pairs of tiles, those of hurt ones without what is not finite.
    ///
    /// # Safety
    /// Both places have the slabs of as many tiles.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn clean_tiles(
        &self,
        tiles: &[Tile],
        hurt: impl Fn(&Tile) -> bool,
        from: *const u8,
        to: *mut u8,
    ) {
        let bytes = self.steps * N::STACK;
        for (i, tile) in tiles.iter().enumerate() {
            let (from, to) = (from.wrapping_add(i * bytes), to.wrapping_add(i * bytes));
            // SAFETY: the caller's promise.
            unsafe {
                if hurt(tile) {
                    pack::clean(from, to, self.steps * N::PIECES);
                } else {
                    std::ptr::copy_nonoverlapping(from, to, bytes);
                }
            }
        }
    }

    /// dq of the tile packed at `tile` from the gradients at place `i`.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn sum_queries<T: Tiles, S: BackwardShape>(
        &self,
        state: &mut Tile,
        tile: usize,
        i: usize,
        keys: Keys,
        scratch: *mut u8,
    ) {
        let layout = &self.layout;
        let steps = state.steps(keys);
        if steps == 0 {
            return;
        }
        let columns = scratch.wrapping_add(layout.k_columns);
        let mut factor = columns;
        if keys.broken && state.masked(keys.start + steps * WIDTH) {
            factor = scratch.wrapping_add(layout.clean[0]);
            // SAFETY: both regions have this many slabs.
            unsafe { pack::clean(columns, factor, steps * self.steps * N::PIECES) };
        }
        let b = scratch.wrapping_add(layout.turned + i * S::KEYS / WIDTH * N::STACK);
        for step in 0..self.steps {
            let c = layout.dq + (tile * self.steps + step) * 2 * SLAB_BYTES;
            let c = scratch.wrapping_add(c);
            let product = |factor: *mut u8| Product {
                a: factor.wrapping_add(step * N::STACK),
                a_step: self.steps * N::STACK,
                b: [b, b.wrapping_add(TILE_BYTES)],
                b_step: N::STACK,
                b_row: ROW_BYTES,
                c: [c, c.wrapping_add(SLAB_BYTES)],
                steps,
            };
            // SAFETY: tiles are configured, and all slabs lie in their regions.
            unsafe {
                if state.summed == 0 {
                    N::multiply::<T, false>(product(factor));
                } else {
                    N::multiply::<T, true>(product(factor));
                }
            }
            if factor != columns {
                let seen = &state.known.visible.0;
                let sees = |at: usize, _: usize, lane: usize| seen[lane] as usize > keys.start + at;
                // SAFETY: all slabs lie in their regions.
                unsafe { mend(&product(columns), Side::Left, sees) };
            }
        }
        state.summed = 1;
    }
}

/// The pass of a shape.
///
/// # Safety
/// As for [`gradient::gradient`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn gradient_of<N: Number, S: BackwardShape>(
    block: &gradient::Block,
    factors: Factors,
    known: &Known,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match S::DEGREE {
            3 => gradient::gradient::<N, 3>(block, factors, known),
            4 => gradient::gradient::<N, 4>(block, factors, known),
            _ => gradient::gradient::<N, 5>(block, factors, known),
        }
    }
}
