//! The keys that are visible to the lanes of a tile, panels of keys that cover them, and masks for
//! tiles that do not see all rows of a panel.

use std::ops::Range;

use crate::edges::SeenRows;
use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS};
use crate::vector::Vector;

/// The keys that are visible to each lane of a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneRanges {
    starts: [usize; MAX_LANES],
    ends: [usize; MAX_LANES],
    /// The first key that is visible to some lane, and one past the last; the same of each vector.
    union: (usize, usize),
    vectors: [(usize, usize); VECTORS],
}

impl LaneRanges {
    /// No lane sees a key.
    pub const EMPTY: LaneRanges = LaneRanges {
        starts: [0; MAX_LANES],
        ends: [0; MAX_LANES],
        union: (usize::MAX, 0),
        vectors: [(usize::MAX, 0); VECTORS],
    };

    /// Sets the keys of a lane, once.
    #[inline(always)]
    pub fn set<X: Vector>(&mut self, lane: usize, visible: Range<usize>) {
        if !visible.is_empty() {
            (self.starts[lane], self.ends[lane]) = (visible.start, visible.end);
            for (start, end) in [&mut self.union, &mut self.vectors[lane / X::WIDTH]] {
                (*start, *end) = ((*start).min(visible.start), (*end).max(visible.end));
            }
        }
    }

    /// The keys that are visible to some lane of some tile: from the first to one past the last.
    #[inline(always)]
    pub fn union(tiles: &[LaneRanges]) -> Range<usize> {
        let start = tiles.iter().map(|tile| tile.union.0).min();
        let end = tiles.iter().map(|tile| tile.union.1).max();
        start.unwrap_or(usize::MAX)..end.unwrap_or(0)
    }

    /// The rows of a panel that the tile computes, in groups of `R`; `None` if no lane sees any.
    #[inline(always)]
    pub fn rows<const R: usize>(&self, panel: &KeyPanel) -> Option<Range<usize>> {
        let first = self.union.0.saturating_sub(panel.first);
        let last = self.union.1.saturating_sub(panel.first).min(panel.count);
        (first < last).then(|| first / R * R..last.next_multiple_of(R))
    }
}

/// Consecutive keys that are packed at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyPanel {
    pub first: usize,
    pub count: usize,
}

impl KeyPanel {
    /// Panels that cover the keys `visible`, as far as they are in `keys`. Panels end at multiples
    /// of `size` from the first key of a piece on, and begin at multiples of `R`: where sums are
    /// rescaled does not depend on the block that the panels are made for.
    #[inline(always)]
    pub fn cover<const R: usize>(
        piece: &Range<usize>,
        visible: Range<usize>,
        keys: Range<usize>,
        size: usize,
    ) -> impl DoubleEndedIterator<Item = KeyPanel> {
        let start = visible.start.max(keys.start);
        let end = visible.end.min(keys.end);
        let before = start.saturating_sub(piece.start);
        let (aligned, first) = (
            piece.start + before / size * size,
            piece.start + before / R * R,
        );
        (aligned..end).step_by(size).map(move |panel| KeyPanel {
            first: panel.max(first),
            count: end.min(panel + size) - panel.max(first),
        })
    }
}

/// The mask of a tile: row j is visible to the lanes whose range it is in.
#[derive(Debug)]
pub(crate) struct RangeMask<A> {
    starts: [A; MAX_LANES],
    ends: [A; MAX_LANES],
    /// The rows that every lane sees; the others are hidden from some.
    common: Range<usize>,
    /// The rows that each vector sees.
    pub seen: SeenRows,
}

impl<A: Real> RangeMask<A> {
    /// The mask of `rows` rows from key `start` on; `None` if all of them are visible to every
    /// lane.
    #[inline(always)]
    pub fn new<X: Vector<A = A>>(
        ranges: &LaneRanges,
        start: usize,
        rows: usize,
    ) -> Option<RangeMask<A>> {
        let lanes = VECTORS * X::WIDTH;
        let (starts, ends) = (&ranges.starts[..lanes], &ranges.ends[..lanes]);
        let row = |key: usize| key.saturating_sub(start).min(rows);
        let from = starts.iter().fold(0, |most, &key| most.max(row(key)));
        let to = ends.iter().fold(rows, |least, &key| least.min(row(key)));
        if from == 0 && to == rows {
            return None;
        }
        let seen = |(start, end)| row(start)..row(end);
        let mut mask = RangeMask {
            starts: [A::ZERO; MAX_LANES],
            ends: [A::ZERO; MAX_LANES],
            common: from..to,
            seen: SeenRows(ranges.vectors.map(seen)),
        };
        for (to, keys) in [(&mut mask.starts, starts), (&mut mask.ends, ends)] {
            for (x, &key) in to.iter_mut().zip(keys) {
                *x = A::from_f64(row(key) as f64);
            }
        }
        Some(mask)
    }

    #[inline(always)]
    fn vectors<X: Vector<A = A>>(x: X, lanes: &[A; MAX_LANES]) -> [X::V; VECTORS] {
        let mut vectors = [x.zero(); VECTORS];
        vectors.copy_from_slice(X::of(&lanes[..VECTORS * X::WIDTH]));
        vectors
    }

    /// Replaces the scores of hidden pairs.
    #[inline(always)]
    pub fn hide<X: Vector<A = A>>(&self, x: X, scores: &mut [X::V], hidden: A) {
        let Range { start, end } = self.common;
        let (ends, hidden) = (Self::vectors(x, &self.ends), x.splat(hidden));
        let rows = scores.chunks_exact_mut(VECTORS).enumerate();
        for (j, row) in rows.skip(end) {
            let j = x.splat(A::from_f64(j as f64));
            for n in 0..VECTORS {
                row[n] = x.select_less(j, ends[n], row[n], hidden);
            }
        }
        let starts = Self::vectors(x, &self.starts);
        let rows = scores.chunks_exact_mut(VECTORS).enumerate();
        for (j, row) in rows.take(start) {
            let j = x.splat(A::from_f64(j as f64));
            for n in 0..VECTORS {
                row[n] = x.select_less(j, starts[n], hidden, row[n]);
            }
        }
    }

    /// out = keep · out + the sum of the visible terms. Hidden terms are skipped rather than
    /// multiplied by 0, because 0 times an infinite value is not 0. The others are summed exactly
    /// as the fast path sums them, to the last bit.
    #[inline(always)]
    pub fn accumulate<X: Vector<A = A>>(
        &self,
        x: X,
        rows: &[A],
        width: usize,
        weights: &[X::V],
        keep: &[X::V; VECTORS],
        out: &mut [X::V],
    ) {
        let (starts, ends) = (Self::vectors(x, &self.starts), Self::vectors(x, &self.ends));
        for (c, out) in out.chunks_exact_mut(VECTORS).enumerate() {
            let mut sums = [x.zero(); VECTORS];
            let rows = rows.chunks_exact(width).zip(weights.chunks_exact(VECTORS));
            for (j, (row, weights)) in rows.enumerate() {
                let (factor, j) = (x.splat(row[c]), x.splat(A::from_f64(j as f64)));
                for n in 0..VECTORS {
                    let sum = x.mul_add(factor, weights[n], sums[n]);
                    let sum = x.select_less(j, ends[n], sum, sums[n]);
                    sums[n] = x.select_less(j, starts[n], sums[n], sum);
                }
            }
            for n in 0..VECTORS {
                out[n] = x.mul_add(keep[n], out[n], sums[n]);
            }
        }
    }

    /// sums[j] += Σ_i weights[j][i] · rows[i] over the lanes i that row j is visible to;
    /// [`RangeMask::accumulate`] explains why hidden terms are skipped.
    #[inline(always)]
    pub fn accumulate_keys<X: Vector<A = A>>(
        &self,
        x: X,
        weights: &[A],
        rows: &[A],
        width: usize,
        sums: &mut [A],
    ) {
        let (lanes, step) = (VECTORS * X::WIDTH, width / X::WIDTH);
        let (rows, sums) = (X::of(rows), X::of_mut(sums));
        let by_row = weights.chunks_exact(lanes).zip(sums.chunks_exact_mut(step));
        for (j, (weights, sums)) in by_row.enumerate() {
            let j = A::from_f64(j as f64);
            for (c, sum) in sums.iter_mut().enumerate() {
                let mut found = x.zero();
                for (i, row) in rows.chunks_exact(step).enumerate() {
                    if self.starts[i] <= j && j < self.ends[i] {
                        found = x.mul_add(x.splat(weights[i]), row[c], found);
                    }
                }
                *sum = x.add(*sum, found);
            }
        }
    }
}
