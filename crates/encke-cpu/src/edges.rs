//! Products of tiles at the edge of a mask: a vector of queries skips the keys that none of its
//! queries sees.
//!
//! The decision here: a tile has three vectors, and the edge of a causal mask or of a window
//! crosses it like a staircase. Without this, each tile computes as many hidden pairs as it has
//! queries, at both edges of a window. Left out are terms that are multiplied by weights of 0, so
//! the bits are those of the whole products.

use std::ops::Range;

use crate::microkernel::{add_columns, multiply_rows};
use crate::shape::VECTORS;
use crate::vector::Vector;

/// The rows of a panel that each vector of a tile sees: from the first that one of its lanes sees
/// to one past the last.
#[derive(Debug, Clone)]
pub(crate) struct SeenRows(pub [Range<usize>; VECTORS]);

impl SeenRows {
    /// The vectors from the first to the last that sees one of some rows.
    #[inline(always)]
    fn vectors(&self, rows: Range<usize>) -> Range<usize> {
        let sees = |seen: &Range<usize>| seen.start < rows.end && rows.start < seen.end;
        let first = self.0.iter().position(sees).unwrap_or(0);
        let end = self.0.iter().rposition(sees).map_or(first, |last| last + 1);
        first..end
    }

    /// The scores of the rows and vectors that see each other, `R` rows at a time. The others keep
    /// what they are.
    #[inline(always)]
    pub fn products<X: Vector, const R: usize>(
        &self,
        x: X,
        rows: &[X::A],
        width: usize,
        dim: usize,
        lanes: &[X::V],
        scores: &mut [X::V],
    ) {
        let groups = rows.chunks_exact(R * width);
        for (group, (rows, scores)) in groups.zip(scores.chunks_exact_mut(R * VECTORS)).enumerate()
        {
            let mut by_row: [&[X::A]; R] = [&[]; R];
            for (slot, row) in by_row.iter_mut().zip(rows.chunks_exact(width)) {
                *slot = &row[..dim];
            }
            let Range { start, end } = self.vectors(group * R..(group + 1) * R);
            match end - start {
                0 => {}
                1 => scores_of::<X, R, 1>(x, by_row, lanes, start, scores),
                2 => scores_of::<X, R, 2>(x, by_row, lanes, start, scores),
                _ => scores_of::<X, R, VECTORS>(x, by_row, lanes, 0, scores),
            }
        }
    }

    /// out[c] = keep · out[c] + Σ_j rows[j][c] · weights[j], where the weights of rows that a lane
    /// does not see are 0.
    #[inline(always)]
    pub fn accumulate<X: Vector, const R: usize>(
        &self,
        x: X,
        rows: &[X::A],
        width: usize,
        weights: &[X::V],
        keep: &[X::V; VECTORS],
        out: &mut [X::V],
    ) {
        // Between two cuts the vectors that see a row are the same.
        let mut cuts = [0; 2 * VECTORS];
        for (cuts, seen) in cuts.chunks_exact_mut(2).zip(&self.0) {
            cuts.copy_from_slice(&[seen.start, seen.end]);
        }
        cuts.sort_unstable();
        for (group, out) in out.chunks_exact_mut(R * VECTORS).enumerate() {
            let mut sums = [[x.zero(); VECTORS]; R];
            for cut in cuts.windows(2).filter(|cut| cut[0] < cut[1]) {
                let rows = &rows[cut[0] * width..cut[1] * width];
                let weights = &weights[cut[0] * VECTORS..cut[1] * VECTORS];
                let (at, vectors) = (group * R, self.vectors(cut[0]..cut[1]));
                macro_rules! add {
                    ($first:literal, $count:literal) => {
                        add_columns::<X, R, $first, $count>(x, rows, width, at, weights, &mut sums)
                    };
                }
                match (vectors.start, vectors.len()) {
                    (_, 0) => {}
                    (0, 1) => add!(0, 1),
                    (1, 1) => add!(1, 1),
                    (_, 1) => add!(2, 1),
                    (0, 2) => add!(0, 2),
                    (_, 2) => add!(1, 2),
                    _ => add!(0, 3),
                }
            }
            for (out, sums) in out.chunks_exact_mut(VECTORS).zip(sums) {
                for n in 0..VECTORS {
                    out[n] = x.mul_add(keep[n], out[n], sums[n]);
                }
            }
        }
    }

    /// The lanes of the vectors that see one of some rows.
    #[inline(always)]
    pub fn lanes<X: Vector>(&self, rows: Range<usize>) -> Range<usize> {
        let vectors = self.vectors(rows);
        vectors.start * X::WIDTH..vectors.end * X::WIDTH
    }
}

/// The scores of `R` rows and `N` vectors from vector `first` on.
#[inline(always)]
fn scores_of<X: Vector, const R: usize, const N: usize>(
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
