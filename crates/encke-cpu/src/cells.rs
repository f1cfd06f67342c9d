//! What is done cell by cell, or number by number: merge, fill, convert, finish and delta.
//!
//! These read and write each number once and are bound by memory.

use std::ops::Range;

use encke_core::Data;
use encke_core::dtype::Slice;
use encke_core::host;
use encke_core::job::Block;
use encke_core::kernel::Carry;
use encke_core::{Element, with_typed};
use rayon::prelude::*;

use crate::real::Real;

/// Merges the cells of one carry into another.
pub(crate) fn merge<A: Real>(block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) {
    let dim = block.width;
    let (mut source, mut target) = (vec![A::ZERO; dim], vec![A::ZERO; dim]);
    for (there, here) in block.addresses() {
        let l = A::get(from.l.as_slice(), there);
        if l == A::ZERO {
            continue; // nothing was seen there, and its maximum is minus infinity
        }
        let (m, old_m) = (
            A::get(from.m.as_slice(), there),
            A::get(to.m.as_slice(), here),
        );
        let old_l = A::get(to.l.as_slice(), here);
        let top = if old_m > m { old_m } else { m };
        let keep = if old_l == A::ZERO {
            A::ZERO
        } else {
            (old_m - top).exp()
        };
        let weight = (m - top).exp();
        A::load(from.acc.as_slice(), there * dim, &mut source);
        A::load(to.acc.as_slice(), here * dim, &mut target);
        for (x, &y) in target.iter_mut().zip(&source) {
            *x = keep * *x + weight * y;
        }
        A::store(&target, &mut to.acc, here * dim);
        A::store(&[top], &mut to.m, here);
        A::store(&[keep * old_l + weight * l], &mut to.l, here);
    }
}

/// Sets every number.
pub(crate) fn fill(buffer: &mut Data, value: f64) {
    with_typed!(Data, buffer, x => {
        let value = Element::from_f64(value);
        in_pieces(x, NUMBERS, |_, piece| piece.fill(value));
    });
}

/// Copies the first numbers of one buffer to a range of another, rounding where their types differ.
pub(crate) fn convert(from: &Data, to: &mut Data, range: Range<usize>) {
    with_typed!(Data, from, source => with_typed!(Data, to, target => {
        in_pieces(&mut target[range], NUMBERS, |place, target| {
            let first = place * NUMBERS;
            host::convert(&source[first..first + target.len()], target);
        });
    }));
}

/// Cells that one task ends or prepares: enough work to be worth a task.
const CELLS: usize = 1024;
/// Numbers that one task fills or copies.
const NUMBERS: usize = 64 * CELLS;

/// Hands out pieces of so many numbers, with their place, to the threads of the current pool. A single
/// one is done by the caller: to wake a thread for it takes longer than a short call.
fn in_pieces<T: Send>(numbers: &mut [T], piece: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    if numbers.len() <= piece {
        return work(0, numbers);
    }
    let pieces = numbers.par_chunks_mut(piece).enumerate();
    pieces.for_each(|(place, piece)| work(place, piece));
}

/// Ends the softmax of cells.
pub(crate) fn finish<A: Real>(
    cells: usize,
    dim: usize,
    gain: f64,
    carry: &Carry<Data>,
    out: &mut Data,
    lse: &mut Data,
) {
    let gain = A::from_f64(gain);
    let lse = &mut A::numbers(lse)[..cells];
    let [acc, m, l] = [&carry.acc, &carry.m, &carry.l].map(A::seen);
    let end = |first: usize, row: &mut [A], lse: &mut A, cell: usize| {
        let cell = first + cell;
        if l[cell] == A::ZERO {
            row.fill(A::ZERO);
            *lse = A::NEG_INFINITY;
            return;
        }
        let factor = gain / l[cell];
        for (x, &y) in row.iter_mut().zip(&acc[cell * dim..][..dim]) {
            *x = factor * y;
        }
        *lse = m[cell] + l[cell].ln();
    };
    with_typed!(Data, out, out => {
        let rows = out[..cells * dim].chunks_mut(CELLS * dim).zip(lse.chunks_mut(CELLS));
        let mut rows: Vec<_> = rows.collect();
        in_pieces(&mut rows, 1, |piece, rows| {
            let mut row = vec![A::ZERO; dim];
            for (out, lse) in rows {
                let rows = out.chunks_exact_mut(dim).zip(lse.iter_mut()).enumerate();
                for (cell, (out, lse)) in rows {
                    end(piece * CELLS, &mut row, lse, cell);
                    A::round(&row, out);
                }
            }
        });
    });
}

/// delta = dout·out − dlse.
pub(crate) fn delta<A: Real>(
    cells: usize,
    dim: usize,
    out: Slice<'_>,
    dout: Slice<'_>,
    dlse: Option<Slice<'_>>,
    delta: &mut Data,
) {
    let delta = &mut A::numbers(delta)[..cells];
    in_pieces(delta, CELLS, |piece, delta| {
        let (mut x, mut y) = (vec![A::ZERO; dim], vec![A::ZERO; dim]);
        for (cell, delta) in delta.iter_mut().enumerate() {
            let cell = piece * CELLS + cell;
            A::load(out, cell * dim, &mut x);
            A::load(dout, cell * dim, &mut y);
            let from_lse = dlse.map_or(A::ZERO, |dlse| A::get(dlse, cell));
            *delta = dot(&x, &y) - from_lse;
        }
    });
}

/// A dot product in eight running sums, which is what lets it be vector code.
fn dot<A: Real>(x: &[A], y: &[A]) -> A {
    let mut sums = [A::ZERO; 8];
    let (x, x_rest) = x.as_chunks::<8>();
    let (y, y_rest) = y.as_chunks::<8>();
    for (x, y) in x.iter().zip(y) {
        for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    let rest = x_rest.iter().zip(y_rest).map(|(&x, &y)| x * y);
    sums.into_iter().chain(rest).fold(A::ZERO, |sum, x| sum + x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_copied_to_where_they_belong() {
        let count = 2 * NUMBERS + 77;
        let numbers: Vec<f32> = (0..count + 5).map(|i| (i % 251) as f32).collect();
        let mut to = Data::Bf16(vec![half::bf16::from_f32(-1.0); count + 9]);
        convert(&Data::F32(numbers.clone()), &mut to, 3..3 + count);
        let to = to.to_f64();
        assert!(to[..3].iter().chain(&to[3 + count..]).all(|&x| x == -1.0));
        let pairs = to[3..3 + count].iter().zip(&numbers);
        assert!(pairs.into_iter().all(|(&x, &y)| x == f64::from(y)));
    }
}
