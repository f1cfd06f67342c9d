//! Weights from scores.

use crate::real::Real;
use crate::shape::VECTORS;
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
