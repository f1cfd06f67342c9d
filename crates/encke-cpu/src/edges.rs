//! Products of tiles at the edge of a mask: a vector of queries skips the keys that none of its
//! queries sees.
//!
//! The decision here: a tile has three vectors, and the edge of a causal mask or of a window
//! crosses it like a staircase. Without this, each tile computes as many hidden pairs as it has
//! queries, at both edges of a window. Left out are terms that are multiplied by weights of 0, so
//! the bits are those of the whole products.

use std::ops::Range;

use crate::microkernel::{accumulate_by, add_columns};
use crate::shape::VECTORS;
use crate::vector::Vector;

/// The rows of a panel that each vector of a tile sees: from the first that one of its lanes sees
/// to one past the last.
#[derive(Debug, Clone)]
pub(crate) struct SeenRows(pub [Range<usize>; VECTORS]);

impl SeenRows {
    /// The vectors from the first to the last that sees one of some rows.
    #[inline(always)]
    pub fn vectors(&self, rows: Range<usize>) -> Range<usize> {
        let sees = |seen: &Range<usize>| seen.start < rows.end && rows.start < seen.end;
        let first = self.0.iter().position(sees).unwrap_or(0);
        let end = self.0.iter().rposition(sees).map_or(first, |last| last + 1);
        first..end
    }

    /// out[c] = keep · out[c] + Σ_j rows[j][c] · weights[j], where the weights of rows that a lane
    /// does not see are 0.
    #[inline(always)]
    pub fn accumulate<X: Vector, const R: usize>(
        &self,
        x: X,
        (rows, width): (&[X::A], usize),
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
        accumulate_by::<X, R>(
            x,
            keep,
            out,
            #[inline(always)]
            |at, sums| {
                for cut in cuts.windows(2).filter(|cut| cut[0] < cut[1]) {
                    let rows = &rows[cut[0] * width..cut[1] * width];
                    let weights = &weights[cut[0] * VECTORS..cut[1] * VECTORS];
                    let vectors = self.vectors(cut[0]..cut[1]);
                    macro_rules! add {
                        ($first:literal, $count:literal) => {
                            add_columns::<X, R, $first, $count>(x, rows, width, at, weights, sums)
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
            },
        );
    }

    /// The lanes of the vectors that see one of some rows.
    #[inline(always)]
    pub fn lanes<X: Vector>(&self, rows: Range<usize>) -> Range<usize> {
        let vectors = self.vectors(rows);
        vectors.start * X::WIDTH..vectors.end * X::WIDTH
    }
}
