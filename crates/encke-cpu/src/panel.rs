//! Packing: rows as they lie in a buffer become panels that fit the products.
//!
//! A *row panel* holds rows one below the other, padded with zeros to a width that vectors divide.
//! A *lane panel* holds up to one tile of rows transposed: all first numbers, all second numbers, …
//! so that a vector holds one channel of several rows.

use encke_core::dtype::Slice;

use crate::real::Real;

/// Copies `count` rows into a row panel, and zeros into the rest of its rows.
#[inline(always)]
pub(crate) fn rows<A: Real>(
    source: Slice<'_>,
    dim: usize,
    count: usize,
    address: impl Fn(usize) -> usize,
    width: usize,
    panel: &mut [A],
) {
    let (used, rest) = panel.split_at_mut(count * width);
    for (i, row) in used.chunks_exact_mut(width).enumerate() {
        A::load(source, address(i), &mut row[..dim]);
        row[dim..].fill(A::ZERO);
    }
    rest.fill(A::ZERO);
}

/// Whether all numbers of a panel are finite.
#[inline(always)]
pub(crate) fn finite<A: Real>(panel: &[A]) -> bool {
    let mut finite = true;
    for x in panel {
        finite &= x.is_finite();
    }
    finite
}

/// Transposes a row panel of `count` rows into a lane panel of `lanes` lanes; lanes without a row
/// hold zeros.
#[inline(always)]
pub(crate) fn transpose<A: Real>(
    rows: &[A],
    width: usize,
    count: usize,
    factor: A,
    lanes: usize,
    panel: &mut [A],
) {
    for (c, channel) in panel.chunks_exact_mut(lanes).enumerate() {
        let column = rows[c..].iter().step_by(width);
        for (x, &y) in channel.iter_mut().zip(column.take(count)) {
            *x = factor * y;
        }
        channel[count..].fill(A::ZERO);
    }
}

/// The way back for one lane.
#[inline(always)]
pub(crate) fn lane<A: Real>(panel: &[A], lanes: usize, lane: usize, row: &mut [A]) {
    for (x, channel) in row.iter_mut().zip(panel.chunks_exact(lanes)) {
        *x = channel[lane];
    }
}
