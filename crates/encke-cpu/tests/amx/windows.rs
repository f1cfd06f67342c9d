//! Windows over more queries than keys stay packed for: the keys of later queries take the place of
//! those of earlier ones.

use std::ops::Range;

use encke_core::Data;
use encke_core::job::{Band, Mask, Piece, Window};
use half::{bf16, f16};

use crate::kernel::{TestedElement, TileKernel, available};
use crate::{TileKernelInputs, TileKernelOutputs, check, job, run};
use encke_cpu::internals::Emulated;

const TOKENS: usize = 1900;

fn window(left: usize, right: usize) -> Window {
    Window {
        left: Some(left),
        right: Some(right),
    }
}

#[test]
fn long_windows_match_the_oracle() {
    if !available::<Emulated>() {
        return;
    }
    for (queries, keys, heads, dim, band) in [
        (TOKENS, TOKENS, 1, 64, ((0, 1), (0, 1), window(99, 0))),
        (TOKENS, TOKENS, 3, 24, ((0, 1), (0, 1), window(300, 40))),
        (700, 2100, 2, 64, ((900, 3), (0, 2), window(1001, 0))),
        (1500, 600, 1, 40, ((0, 2), (55, 5), window(60, 700))),
        (2000, 300, 1, 64, ((0, 1), (1500, 1), window(70, 0))),
    ] {
        let ((query, query_step), (key, key_step), window) = band;
        let band = Band {
            query,
            query_step,
            key,
            key_step,
            window,
        };
        let what = format!("{queries} queries, {keys} keys, {band:?}");
        let job = job(queries, keys, heads, dim, Some(band));
        check::<bf16>(&job, 3, &what);
        check::<f16>(&job, 3, &what);
        check::<f32>(&job, 3, &what);
    }
}

/// The carry of some rows, of all heads.
fn rows(of: &TileKernelOutputs, rows: Range<usize>, [heads, dim]: [usize; 2]) -> Vec<u8> {
    let part = |data: &Data, width: usize| {
        let bytes = 4 * heads * width;
        data.bytes()[rows.start * bytes..rows.end * bytes].to_vec()
    };
    let carry = &of.carry;
    [part(&carry.acc, dim), part(&carry.m, 1), part(&carry.l, 1)].concat()
}

#[test]
fn a_row_has_the_bits_of_a_job_of_its_own_and_forgets_what_it_does_not_see() {
    if available::<Emulated>() {
        advance::<bf16>();
        advance::<f16>();
        advance::<f32>();
    }
}

fn advance<N: TestedElement>() {
    let (heads, dim, left) = (2, 64, 120);
    let band = Band {
        window: window(left, 0),
        ..Band::causal((0, 1), (0, 1))
    };
    let whole = job(TOKENS, TOKENS, heads, dim, Some(band));
    let inputs = TileKernelInputs::new::<N>(&whole, 4);
    let kernel = TileKernel::<Emulated, N>::new();
    let expected = run(&kernel, &whole, &inputs, None);
    // Whole tiles: which blocks are masked depends on all queries of a tile.
    for (first, count) in [(0, 64), (640, 32), (992, 704), (1856, 44)] {
        let mut part = job(count, TOKENS, heads, dim, None);
        part.mask = Some(Mask::Band(band).of_queries(first..first + count));
        let mut inputs = inputs.clone();
        for data in [&mut inputs.q, &mut inputs.dout] {
            let row = heads * dim;
            let rows = &data.to_f64()[first * row..(first + count) * row];
            *data = Data::from_f64(N::DTYPE, rows);
        }
        let got = run(&kernel, &part, &inputs, None);
        let expected = rows(&expected, first..first + count, [heads, dim]);
        let same = rows(&got, 0..count, [heads, dim]) == expected;
        assert!(same, "{}: {count} rows from {first} on", N::DTYPE);
    }
    // Two documents: the second begins anew.
    let cut = 25 * 32;
    let piece = |rows: Range<usize>| Piece {
        queries: rows.clone(),
        keys: rows,
        band: Some(band),
    };
    let documents = Mask::Documents([piece(0..cut), piece(cut..TOKENS)].into());
    let mut packed = job(TOKENS, TOKENS, heads, dim, None);
    packed.mask = Some(documents);
    let packed = run(&kernel, &packed, &inputs, None);
    let first = rows(&packed, 0..cut, [heads, dim]);
    assert!(
        first == rows(&expected, 0..cut, [heads, dim]),
        "{}: a document",
        N::DTYPE
    );
    // A row that is not finite spoils those that see it, and no other.
    let row = 333;
    let mut poisoned = inputs.clone();
    for data in [&mut poisoned.k, &mut poisoned.v] {
        data.set(row * dim + 3, f64::NAN);
    }
    let got = run(&kernel, &whole, &poisoned, None);
    for free in [0..row, row + left + 1..TOKENS] {
        let same = rows(&got, free.clone(), [heads, dim]) == rows(&expected, free, [heads, dim]);
        assert!(same, "{}: rows that do not see row {row}", N::DTYPE);
    }
    let spoilt = got.out.to_f64()[row * heads * dim + 3];
    assert!(spoilt.is_nan(), "{}: row {row} is {spoilt}", N::DTYPE);
}
