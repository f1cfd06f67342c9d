//! Weights from scores, and masks for the diagonal.

use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS};
use crate::vector::Vector;

/// Turns scores into weights relative to the new maximum, continuing m and l; returns what old
/// sums are to be multiplied with.
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
    // A lane that has seen nothing subtracts 0: minus infinity minus itself would be NaN.
    let mut base = top;
    for base in &mut base {
        let unseen = x.select_less(*base, zero, zero, *base);
        *base = x.select_less(nothing, *base, *base, unseen);
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

/// Who sees whom in a tile on the diagonal: row j and the lanes that see more than j rows.
#[derive(Debug)]
pub(crate) struct CausalMask<A> {
    seen: [A; MAX_LANES],
}

impl<A: Real> CausalMask<A> {
    /// The mask for `rows` rows from `start` on; none where every lane sees all of them.
    #[inline(always)]
    pub fn new<X: Vector<A = A>>(
        visible: &[usize],
        start: usize,
        rows: usize,
    ) -> Option<CausalMask<A>> {
        if visible.iter().all(|&seen| seen >= start + rows) {
            return None;
        }
        let mut mask = CausalMask {
            seen: [A::ZERO; MAX_LANES],
        };
        for (x, seen) in mask.seen.iter_mut().zip(visible) {
            *x = A::from_f64(seen.saturating_sub(start).min(rows) as f64);
        }
        Some(mask)
    }

    #[inline(always)]
    fn vectors<X: Vector<A = A>>(&self, x: X) -> [X::V; VECTORS] {
        let mut vectors = [x.zero(); VECTORS];
        vectors.copy_from_slice(X::of(&self.seen[..VECTORS * X::WIDTH]));
        vectors
    }

    /// Replaces what is not seen.
    #[inline(always)]
    pub fn hide<X: Vector<A = A>>(&self, x: X, scores: &mut [X::V], hidden: A) {
        let (seen, hidden) = (self.vectors(x), x.splat(hidden));
        for (j, row) in scores.chunks_exact_mut(VECTORS).enumerate() {
            let j = x.splat(A::from_f64(j as f64));
            for n in 0..VECTORS {
                row[n] = x.select_less(j, seen[n], row[n], hidden);
            }
        }
    }

    /// out = keep · out + the sum of what is seen. Terms that are not are left out rather than
    /// multiplied by 0, because 0 times an infinite value is not 0. The others are summed as the
    /// fast path sums them, to the last bit.
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
        let (seen, zero) = (self.vectors(x), x.zero());
        for (c, out) in out.chunks_exact_mut(VECTORS).enumerate() {
            let mut sums = [zero; VECTORS];
            let rows = rows.chunks_exact(width).zip(weights.chunks_exact(VECTORS));
            for (j, (row, weights)) in rows.enumerate() {
                let (factor, j) = (x.splat(row[c]), x.splat(A::from_f64(j as f64)));
                for n in 0..VECTORS {
                    let sum = x.mul_add(factor, weights[n], sums[n]);
                    sums[n] = x.select_less(j, seen[n], sum, sums[n]);
                }
            }
            for n in 0..VECTORS {
                out[n] = x.mul_add(keep[n], out[n], sums[n]);
            }
        }
    }

    /// sums[j] += Σ_i weights[j][i] · rows[i] over the lanes i that see row j; see
    /// [`CausalMask::accumulate`] for why this is not left to zeros.
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
                    if j < self.seen[i] {
                        found = x.mul_add(x.splat(weights[i]), row[c], found);
                    }
                }
                *sum = x.add(*sum, found);
            }
        }
    }
}
