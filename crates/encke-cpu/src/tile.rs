//! Products of small matrices whose rows are vectors of [`LANES`] numbers.
//!
//! Everything attention multiplies is one of two products: [`scores`] (rows times lanes, a sum
//! over channels) and [`accumulate`] (a sum over rows for each channel). There is no general
//! matrix product here.
//!
//! The decision here: sums run in arrays of fixed size that fit the vector registers, and each
//! block is summed from zero before it joins the total, so that errors grow with the number of
//! blocks and not with the number of rows.

use encke_core::dtype::Slice;

use crate::real::Real;

/// Queries (or keys, for dk and dv) that a task works on at once: eight SSE registers of f32.
pub(crate) const LANES: usize = 32;
/// Rows of the other side in a block.
pub(crate) const ROWS: usize = 64;

/// One number for each lane.
pub(crate) type Lanes<A> = [A; LANES];

/// Who sees whom in a block on the diagonal: row r and lane x where `row[r] < lane[x]`.
#[derive(Debug)]
pub(crate) struct Mask {
    pub row: [i32; ROWS],
    pub lane: [i32; LANES],
}

impl Mask {
    /// Replaces what is not seen.
    pub fn hide<A: Real>(&self, tile: &mut [Lanes<A>], hidden: A) {
        for (values, row) in tile.iter_mut().zip(self.row) {
            for (x, lane) in values.iter_mut().zip(self.lane) {
                *x = if row < lane { *x } else { hidden };
            }
        }
    }
}

/// tile[r] = scale · Σ_c rows[r][c] · lanes[c].
pub(crate) fn scores<A: Real>(rows: &[A], lanes: &[Lanes<A>], scale: A, tile: &mut [Lanes<A>]) {
    for (row, out) in rows.chunks_exact(lanes.len()).zip(tile) {
        let mut sum = [A::ZERO; LANES];
        for (&x, lanes) in row.iter().zip(lanes) {
            for (sum, &y) in sum.iter_mut().zip(lanes) {
                *sum += x * y;
            }
        }
        *out = sum.map(|x| scale * x);
    }
}

/// sums[c] = keep · sums[c] + Σ_r rows[r][c] · weights[r].
///
/// With a mask, terms that are not seen are left out rather than multiplied by 0, because 0 times
/// an infinite value is not 0.
pub(crate) fn accumulate<A: Real>(
    rows: &[A],
    weights: &[Lanes<A>],
    mask: Option<&Mask>,
    keep: &Lanes<A>,
    sums: &mut [Lanes<A>],
) {
    let dim = sums.len();
    for (c, sum) in sums.iter_mut().enumerate() {
        let column = rows[c..].iter().step_by(dim);
        let mut block = [A::ZERO; LANES];
        match mask {
            None => {
                for (&x, weights) in column.zip(weights) {
                    for (sum, &y) in block.iter_mut().zip(weights) {
                        *sum += x * y;
                    }
                }
            }
            Some(mask) => {
                for ((&x, weights), row) in column.zip(weights).zip(mask.row) {
                    for ((sum, &y), lane) in block.iter_mut().zip(weights).zip(mask.lane) {
                        *sum += if row < lane { x * y } else { A::ZERO };
                    }
                }
            }
        }
        for ((sum, &keep), &block) in sum.iter_mut().zip(keep).zip(&block) {
            *sum = keep * *sum + block;
        }
    }
}

/// Reads `count` rows one below the other.
pub(crate) fn load_rows<A: Real>(
    source: Slice<'_>,
    dim: usize,
    count: usize,
    address: impl Fn(usize) -> usize,
    rows: &mut [A],
) {
    for (i, row) in rows.chunks_exact_mut(dim).take(count).enumerate() {
        A::load(source, address(i), row);
    }
}

/// Reads `count` rows as lanes: lanes[c][i] is number c of row i. Lanes without a row hold zeros.
pub(crate) fn load_lanes<A: Real>(
    source: Slice<'_>,
    count: usize,
    address: impl Fn(usize) -> usize,
    row: &mut [A],
    lanes: &mut [Lanes<A>],
) {
    if count < LANES {
        lanes.fill([A::ZERO; LANES]);
    }
    for i in 0..count {
        A::load(source, address(i), row);
        for (lanes, &x) in lanes.iter_mut().zip(&*row) {
            lanes[i] = x;
        }
    }
}

/// One lane as a row.
pub(crate) fn lane<A: Real>(lanes: &[Lanes<A>], i: usize, row: &mut [A]) {
    for (x, lanes) in row.iter_mut().zip(lanes) {
        *x = lanes[i];
    }
}
