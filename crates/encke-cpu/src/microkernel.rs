//! The two products that attention consists of, computed one register block at a time.
//!
//! [`multiply_rows`] sums along rows (scores from keys and queries), [`add_columns`] sums
//! along columns (outputs from values and weights). Both keep `R` rows of `N` vectors in registers
//! for the whole sum, and never reduce across the lanes of a vector.

use crate::shape::VECTORS;
use crate::vector::Vector;

/// Σ_s rows[r][s] · lanes[s·step + first + n]: `R` rows against `N` vectors.
#[inline(always)]
pub(crate) fn multiply_rows<X: Vector, const R: usize, const N: usize>(
    x: X,
    rows: [&[X::A]; R],
    lanes: &[X::V],
    step: usize,
    first: usize,
) -> [[X::V; N]; R] {
    let steps = rows[0].len();
    let mut rows = rows;
    for row in &mut rows {
        *row = &row[..steps];
    }
    let mut sums = [[x.zero(); N]; R];
    for (s, lanes) in lanes.chunks_exact(step).take(steps).enumerate() {
        let lanes: &[X::V; N] = lanes[first..first + N].try_into().expect("N vectors");
        for r in 0..R {
            let factor = x.splat(rows[r][s]);
            for n in 0..N {
                sums[r][n] = x.mul_add(factor, lanes[n], sums[r][n]);
            }
        }
    }
    sums
}

/// sums[r][n] += Σ_s rows[s][first + r] · lanes[s][n]: `R` columns of rows of `width` against `N`
/// vectors from vector `LOW` on.
#[inline(always)]
pub(crate) fn add_columns<X: Vector, const R: usize, const LOW: usize, const N: usize>(
    x: X,
    rows: &[X::A],
    width: usize,
    first: usize,
    lanes: &[X::V],
    sums: &mut [[X::V; VECTORS]; R],
) {
    for (row, lanes) in rows.chunks_exact(width).zip(lanes.chunks_exact(VECTORS)) {
        let row: &[X::A; R] = row[first..first + R].try_into().expect("R columns");
        let lanes: &[X::V; VECTORS] = lanes.try_into().expect("all vectors");
        for r in 0..R {
            let factor = x.splat(row[r]);
            for n in LOW..LOW + N {
                sums[r][n] = x.mul_add(factor, lanes[n], sums[r][n]);
            }
        }
    }
}
