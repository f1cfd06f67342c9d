//! Weights from scores, and masks for tiles on the diagonal.

use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS};
use crate::vector::Vector;

/// Turns scores into weights relative to the new row max, and updates m and l. Returns the factors
/// that rescale older sums.
#[inline(always)]
pub(crate) fn weights<X: Vector>(
    x: X,
    scores: &mut [X::V],
    m: &mut [X::V],
    l: &mut [X::V],
) -> [X::V; VECTORS] {
    let (zero, nothing) = (x.zero(), x.splat(X::A::NEG_INFINITY));
    let mut old = [zero; VECTORS];
    old.copy_from_slice(m);
    let mut top = old;
    for row in scores.chunks_exact(VECTORS) {
        for n in 0..VECTORS {
            top[n] = x.max(top[n], row[n]);
        }
    }
    // A lane without visible keys subtracts 0: minus infinity minus itself would be NaN.
    let mut base = top;
    for base in &mut base {
        let empty = x.select_less(*base, zero, zero, *base);
        *base = x.select_less(nothing, *base, *base, empty);
    }
    let mut sums = [zero; VECTORS];
    for row in scores.chunks_exact_mut(VECTORS) {
        for n in 0..VECTORS {
            row[n] = x.exp(x.sub(row[n], base[n]));
            sums[n] = x.add(sums[n], row[n]);
        }
    }
    let mut keep = [zero; VECTORS];
    for n in 0..VECTORS {
        keep[n] = x.exp(x.sub(old[n], base[n]));
        m[n] = top[n];
        l[n] = x.mul_add(keep[n], l[n], sums[n]);
    }
    keep
}

/// The mask of a tile on the diagonal: row j is visible to the lanes whose count exceeds j.
#[derive(Debug)]
pub(crate) struct CausalMask<A> {
    visible: [A; MAX_LANES],
}

impl<A: Real> CausalMask<A> {
    /// The mask of `rows` rows from `start` on; `None` if all of them are visible to every lane.
    #[inline(always)]
    pub fn new<X: Vector<A = A>>(
        visible: &[usize],
        start: usize,
        rows: usize,
    ) -> Option<CausalMask<A>> {
        if visible.iter().all(|&count| count >= start + rows) {
            return None;
        }
        let mut mask = CausalMask {
            visible: [A::ZERO; MAX_LANES],
        };
        for (x, count) in mask.visible.iter_mut().zip(visible) {
            *x = A::from_f64(count.saturating_sub(start).min(rows) as f64);
        }
        Some(mask)
    }

    #[inline(always)]
    fn vectors<X: Vector<A = A>>(&self, x: X) -> [X::V; VECTORS] {
        let mut vectors = [x.zero(); VECTORS];
        vectors.copy_from_slice(X::of(&self.visible[..VECTORS * X::WIDTH]));
        vectors
    }

    /// Replaces the scores of hidden pairs.
    #[inline(always)]
    pub fn hide<X: Vector<A = A>>(&self, x: X, scores: &mut [X::V], hidden: A) {
        let (visible, hidden) = (self.vectors(x), x.splat(hidden));
        for (j, row) in scores.chunks_exact_mut(VECTORS).enumerate() {
            let j = x.splat(A::from_f64(j as f64));
            for n in 0..VECTORS {
                row[n] = x.select_less(j, visible[n], row[n], hidden);
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
        let (visible, zero) = (self.vectors(x), x.zero());
        for (c, out) in out.chunks_exact_mut(VECTORS).enumerate() {
            let mut sums = [zero; VECTORS];
            let rows = rows.chunks_exact(width).zip(weights.chunks_exact(VECTORS));
            for (j, (row, weights)) in rows.enumerate() {
                let (factor, j) = (x.splat(row[c]), x.splat(A::from_f64(j as f64)));
                for n in 0..VECTORS {
                    let sum = x.mul_add(factor, weights[n], sums[n]);
                    sums[n] = x.select_less(j, visible[n], sum, sums[n]);
                }
            }
            for n in 0..VECTORS {
                out[n] = x.mul_add(keep[n], out[n], sums[n]);
            }
        }
    }

    /// sums[j] += Σ_i weights[j][i] · rows[i] over the lanes i that row j is visible to;
    /// [`CausalMask::accumulate`] explains why hidden terms are skipped.
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
                    if j < self.visible[i] {
                        found = x.mul_add(x.splat(weights[i]), row[c], found);
                    }
                }
                *sum = x.add(*sum, found);
            }
        }
    }
}
