//! Operations on single cells and elements: merge, fill, convert, finish and delta.
//!
//! They read and write each element once, so memory bandwidth limits them.

use std::ops::Range;

use encke_core::Data;
use encke_core::dtype::Slice;
use encke_core::host;
use encke_core::job::Block;
use encke_core::kernel::Carry;
use encke_core::{Element, with_typed};
use rayon::prelude::*;

use crate::real::Real;
use crate::shared::SharedRows;

/// Merges the cells of one carry into another.
pub(crate) fn merge<A: Real>(block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) {
    let dim = block.width;
    let (mut source, mut target) = (vec![A::ZERO; dim], vec![A::ZERO; dim]);
    for (from_cell, to_cell) in block.addresses() {
        let l = A::get(from.l.as_slice(), from_cell);
        if l == A::ZERO {
            continue; // an empty cell; its row max is minus infinity
        }
        let (m, old_m) = (
            A::get(from.m.as_slice(), from_cell),
            A::get(to.m.as_slice(), to_cell),
        );
        let old_l = A::get(to.l.as_slice(), to_cell);
        let top = if old_m > m { old_m } else { m };
        let keep = if old_l == A::ZERO {
            A::ZERO
        } else {
            (old_m - top).exp()
        };
        let weight = (m - top).exp();
        A::load(from.acc.as_slice(), from_cell * dim, &mut source);
        A::load(to.acc.as_slice(), to_cell * dim, &mut target);
        for (x, &y) in target.iter_mut().zip(&source) {
            *x = keep * *x + weight * y;
        }
        A::store(&target, &mut to.acc, to_cell * dim);
        A::store(&[top], &mut to.m, to_cell);
        A::store(&[keep * old_l + weight * l], &mut to.l, to_cell);
    }
}

/// Sets every element to `value`.
pub(crate) fn fill(buffer: &mut Data, value: f64) {
    with_typed!(Data, buffer, x => {
        let value = Element::from_f64(value);
        in_chunks(x, ELEMENTS, |_, chunk| chunk.fill(value));
    });
}

/// Copies the first elements of one buffer to a range of another, rounding if their types differ.
pub(crate) fn convert(from: &Data, to: &mut Data, range: Range<usize>) {
    with_typed!(Data, from, source => with_typed!(Data, to, target => {
        in_chunks(&mut target[range], ELEMENTS, |index, target| {
            let first = index * ELEMENTS;
            host::convert(&source[first..first + target.len()], target);
        });
    }));
}

/// Fills rows with zeros.
pub(crate) fn zero_rows(blocks: &[Block], buffer: &mut Data) {
    with_typed!(Data, buffer, x => {
        for block in blocks {
            for_each_row(block, x, |_, row| row.fill(Element::from_f64(0.0)));
        }
    });
}

/// Copies rows of one buffer to another, rounding if their types differ.
pub(crate) fn convert_rows(from: &Data, to: &mut Data, blocks: &[Block]) {
    with_typed!(Data, from, source => with_typed!(Data, to, target => {
        for block in blocks {
            for_each_row(block, target, |from, row| {
                host::convert(&source[from..from + row.len()], row);
            });
        }
    }));
}

/// Calls `work` with the source address and the destination of each row of a block, on the threads
/// of the pool, or on one thread if rows could overlap.
fn for_each_row<T: Send>(block: &Block, elements: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) {
    let block = block.coalesced();
    let Block {
        batch,
        segments,
        rows,
        heads,
        width,
        ..
    } = block;
    let count = batch * segments * rows;
    let apart = block.to.is_apart([batch, segments, rows], width, false);
    let chunk = match apart {
        true => (ELEMENTS / (heads * width).max(1)).max(1),
        false => count.max(1),
    };
    let elements = SharedRows::new(elements);
    let rows_from = |first: usize| {
        for at in first..(first + chunk).min(count) {
            let (outer, row) = (at / rows, at % rows);
            let (batch, segment) = (outer / segments, outer % segments);
            for head in 0..heads {
                let [from, to] =
                    [&block.from, &block.to].map(|of| of.at(batch, segment, row, head));
                // SAFETY: each row is borrowed once, and rows do not overlap or only one thread
                // runs.
                work(from, unsafe { elements.row(to, width) });
            }
        }
    };
    match count <= chunk {
        true => rows_from(0),
        false => encke_pool::install(|| {
            let chunks = (0..count.div_ceil(chunk)).into_par_iter();
            chunks.for_each(|index| rows_from(index * chunk));
        }),
    }
}

/// Cells per task, for finish and delta: enough work to be worth a task.
const CELLS: usize = 1024;
/// Elements per task, for fill and copy.
const ELEMENTS: usize = 64 * CELLS;

/// Calls `work` with chunks of `chunk` elements and their indices, on the threads of the
/// pool. A single chunk is processed by the caller: waking a thread takes longer than a short call.
fn in_chunks<T: Send>(elements: &mut [T], chunk: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    if elements.len() <= chunk {
        return work(0, elements);
    }
    encke_pool::install(|| {
        let chunks = elements.par_chunks_mut(chunk).enumerate();
        chunks.for_each(|(index, chunk)| work(index, chunk));
    });
}

/// Normalizes the sums of cells into out, and computes their lse.
pub(crate) fn finish<A: Real>(
    cells: usize,
    dim: usize,
    gain: f64,
    carry: &Carry<Data>,
    out: &mut Data,
    lse: &mut Data,
) {
    let gain = A::from_f64(gain);
    let lse = &mut A::slice_mut(lse)[..cells];
    let [acc, m, l] = [&carry.acc, &carry.m, &carry.l].map(A::slice);
    let finish_cell = |first: usize, row: &mut [A], lse: &mut A, cell: usize| {
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
        in_chunks(&mut rows, 1, |chunk, rows| {
            let mut row = vec![A::ZERO; dim];
            for (out, lse) in rows {
                let rows = out.chunks_exact_mut(dim).zip(lse.iter_mut()).enumerate();
                for (cell, (out, lse)) in rows {
                    finish_cell(chunk * CELLS, &mut row, lse, cell);
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
    let delta = &mut A::slice_mut(delta)[..cells];
    in_chunks(delta, CELLS, |chunk, delta| {
        let (mut x, mut y) = (vec![A::ZERO; dim], vec![A::ZERO; dim]);
        for (cell, delta) in delta.iter_mut().enumerate() {
            let cell = chunk * CELLS + cell;
            A::load(out, cell * dim, &mut x);
            A::load(dout, cell * dim, &mut y);
            let from_lse = dlse.map_or(A::ZERO, |dlse| A::get(dlse, cell));
            *delta = dot(&x, &y) - from_lse;
        }
    });
}

/// A dot product in eight partial sums, which lets the compiler vectorize it.
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

    /// Every third row of two of four heads, in two segments.
    fn every_third_row(rows: usize) -> Block {
        let at = encke_core::job::Operand {
            offset: 8,
            batch: 0,
            segment: 3 * rows * 32,
            row: 3 * 32,
            heads: [0, 16].into(),
        };
        Block {
            batch: 1,
            segments: 2,
            rows,
            heads: 2,
            width: 8,
            from: at.clone(),
            to: at,
        }
    }

    #[test]
    fn only_the_rows_of_the_block_are_zeroed_and_copied() {
        for rows in [1, 7, 3 * ELEMENTS / 16] {
            let block = every_third_row(rows);
            let count = 2 * 3 * rows * 32;
            let mut expected = vec![1.0; count];
            for (_, to) in block.addresses() {
                expected[to..to + 8].fill(0.0);
            }
            let mut zeroed = Data::F32(vec![1.0; count]);
            zero_rows(std::slice::from_ref(&block), &mut zeroed);
            assert_eq!(zeroed.to_f64(), expected);
            let mut copied = Data::Bf16(vec![half::bf16::ONE; count]);
            let elements: Vec<f32> = (0..count).map(|i| (i % 251) as f32).collect();
            for (from, to) in block.addresses() {
                let row = elements[from..from + 8].iter().map(|&x| f64::from(x));
                expected.splice(to..to + 8, row);
            }
            let from = Data::F32(elements);
            convert_rows(&from, &mut copied, std::slice::from_ref(&block));
            assert_eq!(copied.to_f64(), expected);
        }
        // Rows that overlap are processed by one thread.
        let mut close = every_third_row(2 * ELEMENTS);
        (close.segments, close.to.row) = (1, 1);
        let mut zeroed = Data::F32(vec![1.0; 2 * ELEMENTS + 40]);
        zero_rows(&[close], &mut zeroed);
        assert_eq!(
            zeroed.to_f64().iter().filter(|&&x| x == 0.0).count(),
            2 * ELEMENTS + 8 + 15
        );
    }

    #[test]
    fn chunks_are_converted_to_their_own_positions() {
        let count = 2 * ELEMENTS + 77;
        let elements: Vec<f32> = (0..count + 5).map(|i| (i % 251) as f32).collect();
        let mut to = Data::Bf16(vec![half::bf16::from_f32(-1.0); count + 9]);
        convert(&Data::F32(elements.clone()), &mut to, 3..3 + count);
        let to = to.to_f64();
        assert!(to[..3].iter().chain(&to[3 + count..]).all(|&x| x == -1.0));
        let pairs = to[3..3 + count].iter().zip(&elements);
        assert!(pairs.into_iter().all(|(&x, &y)| x == f64::from(y)));
    }
}
