//! The two products that attention consists of, computed one register block at a time.
//!
//! [`multiply_rows`] sums along rows (scores from keys and queries), [`add_columns`] sums
//! along columns (outputs from values and weights). Both keep `R` rows of `N` vectors in registers
//! for the whole sum, and never reduce across the lanes of a vector.

use std::ops::Range;

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
    // Written with iterators, this loop kept one of the twelve sums of AVX2 in memory, and took
    // twice as long: a dozen sums, three vectors and a factor are all of its sixteen registers.
    let (mut s, mut at) = (0, first);
    while s < steps && at + N <= lanes.len() {
        let lanes: &[X::V; N] = lanes[at..at + N].try_into().expect("N vectors");
        for r in 0..R {
            let factor = x.splat(rows[r][s]);
            for n in 0..N {
                sums[r][n] = x.mul_add(factor, lanes[n], sums[r][n]);
            }
        }
        (s, at) = (s + 1, at + step);
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

/// scores[j] = Σ_c rows[j][c] · lanes[c] for the `vectors` of each `R` rows; the others keep what
/// they are. Rows come with their width.
#[inline(always)]
pub(crate) fn products<X: Vector, const R: usize>(
    x: X,
    (rows, width): (&[X::A], usize),
    dim: usize,
    lanes: &[X::V],
    scores: &mut [X::V],
    vectors: impl Fn(Range<usize>) -> Range<usize>,
) {
    let scores = scores.chunks_exact_mut(R * VECTORS);
    for (group, (rows, scores)) in rows.chunks_exact(R * width).zip(scores).enumerate() {
        let mut by_row: [&[X::A]; R] = [&[]; R];
        for (slot, row) in by_row.iter_mut().zip(rows.chunks_exact(width)) {
            *slot = &row[..dim];
        }
        let Range { start, end } = vectors(group * R..(group + 1) * R);
        match end - start {
            0 => {}
            1 => products_of::<X, R, 1>(x, by_row, lanes, start, scores),
            2 => products_of::<X, R, 2>(x, by_row, lanes, start, scores),
            _ => products_of::<X, R, VECTORS>(x, by_row, lanes, 0, scores),
        }
    }
}

/// The products of `R` rows and `N` vectors from vector `first` on.
#[inline(always)]
fn products_of<X: Vector, const R: usize, const N: usize>(
    x: X,
    rows: [&[X::A]; R],
    lanes: &[X::V],
    first: usize,
    scores: &mut [X::V],
) {
    let sums = multiply_rows::<X, R, N>(x, rows, lanes, VECTORS, first);
    for (scores, sums) in scores.chunks_exact_mut(VECTORS).zip(sums) {
        scores[first..first + N].copy_from_slice(&sums);
    }
}

/// out[c] = keep · out[c] + Σ_j rows[j][c] · weights[j]. Rows come with their width.
#[inline(always)]
pub(crate) fn accumulate<X: Vector, const R: usize>(
    x: X,
    (rows, width): (&[X::A], usize),
    weights: &[X::V],
    keep: &[X::V; VECTORS],
    out: &mut [X::V],
) {
    accumulate_by::<X, R>(
        x,
        keep,
        out,
        #[inline(always)]
        |first, sums| {
            add_columns::<X, R, 0, VECTORS>(x, rows, width, first, weights, sums);
        },
    );
}

/// out = keep · out + the sums that `add` makes of `R` columns from the given one on.
#[inline(always)]
pub(crate) fn accumulate_by<X: Vector, const R: usize>(
    x: X,
    keep: &[X::V; VECTORS],
    out: &mut [X::V],
    add: impl Fn(usize, &mut [[X::V; VECTORS]; R]),
) {
    for (group, out) in out.chunks_exact_mut(R * VECTORS).enumerate() {
        let mut sums = [[x.zero(); VECTORS]; R];
        add(group * R, &mut sums);
        for (out, sums) in out.chunks_exact_mut(VECTORS).zip(sums) {
            for n in 0..VECTORS {
                out[n] = x.mul_add(keep[n], out[n], sums[n]);
            }
        }
    }
}
