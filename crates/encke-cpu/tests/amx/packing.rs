//! Below attention: tiles that are packed and multiplied, and the exponential.

use encke_core::conformance::Random;
use half::bf16;

use crate::amx::emulated::Emulated;
use crate::amx::tiles::{Hardware, Tiles};
use crate::{amx, here};

/// A page for tiles.
#[repr(C, align(64))]
struct Memory([u8; 1 << 14]);

/// bf16 numbers that are small integers, so that every sum of their products is exact.
fn integers(count: usize, seed: u64) -> Vec<bf16> {
    let mut random = Random::new(seed);
    let number = |_| bf16::from_f64(random.below(33) as f64 - 16.0);
    (0..count).map(number).collect()
}

/// Left and right factors in each of their forms multiply to the product of plain matrices.
#[test]
fn packed_tiles_multiply_like_matrices() {
    if !here::<Emulated>() {
        return;
    }
    multiply::<Emulated>();
    if here::<Hardware>() {
        multiply::<Hardware>();
    }
}

fn multiply<T: Tiles>() {
    use amx::pack::{self, Sign, Source};
    use amx::tiles::{Product, ROW_BYTES, SLAB_BYTES, TILE_BYTES};
    // 29 rows of 43 channels, 50 numbers apart: x·yᵀ sums over channels, xᵀ·y over rows.
    let (rows, dim, apart) = (29, 43, 50);
    let (x, y) = (integers(rows * apart, 1), integers(rows * apart, 2));
    let source = |numbers| Source {
        numbers,
        dim,
        count: rows,
        address: |row: usize| Some(row * apart),
    };
    let mut memory = [(); 5].map(|()| Box::new(Memory([0xee; 1 << 14])));
    let [a, b, c, d, sums] = memory.each_mut().map(|memory| memory.0.as_mut_ptr());
    let product = |a: *mut u8, a_step: usize, b: *mut u8, b_step: usize, steps: usize| Product {
        a,
        a_step,
        b: [b, b.wrapping_add(TILE_BYTES)],
        b_step,
        b_row: ROW_BYTES,
        c: [sums, sums.wrapping_add(SLAB_BYTES)],
        steps,
    };
    let sum = |row: usize, column: usize| {
        let at = column / 16 * SLAB_BYTES + row * ROW_BYTES + 4 * (column % 16);
        // SAFETY: the sums are 32 by 32 numbers.
        unsafe { sums.add(at).cast::<f32>().read() }
    };
    let number = |numbers: &[bf16], row: usize, c: usize| match row < rows && c < dim {
        true => numbers[row * apart + c].to_f32(),
        false => 0.0,
    };
    // SAFETY: two slabs fit each memory, and the tiles are available.
    unsafe {
        T::configure();
        assert!(!pack::rows(&source(&x), a));
        pack::lanes(&source(&y), Sign::Minus, b);
        assert!(!pack::columns(&source(&x), c));
        assert!(!pack::pairs(&source(&y), d));
        // Twice, to see sums that are added to.
        T::multiply::<false>(product(a, SLAB_BYTES, b, SLAB_BYTES, 2));
        T::multiply::<true>(product(a, SLAB_BYTES, b, SLAB_BYTES, 2));
    }
    for i in 0..32 {
        for j in 0..32 {
            let terms = (0..dim).map(|c| -2.0 * number(&x, i, c) * number(&y, j, c));
            assert_eq!(sum(i, j), terms.sum::<f32>(), "x·yᵀ at {i}, {j}");
        }
    }
    // Columns pair rows as (2r, 2r + 1), pairs as (r, r + 16): the same sums from a turned order.
    let turn = |i: usize| i / 2 + i % 2 * 16;
    let turned = Source {
        numbers: &x,
        dim,
        count: 32,
        address: |i: usize| (turn(i) < rows).then_some(turn(i) * apart),
    };
    // SAFETY: as above.
    unsafe {
        pack::columns(&turned, c);
        T::multiply::<false>(product(c, SLAB_BYTES, d, SLAB_BYTES, 1));
        T::release();
    }
    for i in 0..32 {
        for j in 0..32 {
            let terms = (0..rows).map(|row| number(&x, row, i) * number(&y, row, j));
            assert_eq!(sum(i, j), terms.sum::<f32>(), "xᵀ·y at {i}, {j}");
        }
    }
}

#[test]
fn packing_notices_what_is_not_finite() {
    use amx::pack::{self, Source};
    if !here::<Emulated>() {
        return;
    }
    let mut numbers = integers(32 * 40, 3);
    numbers[31 * 40 + 39] = bf16::NEG_INFINITY;
    let mut memory = Box::new(Memory([0; 1 << 14]));
    let to = memory.0.as_mut_ptr();
    for (dim, expected) in [(40, true), (39, false)] {
        let source = Source {
            numbers: &numbers,
            dim,
            count: 32,
            address: |row: usize| Some(row * 40),
        };
        // SAFETY: two slabs fit the memory, and the vectors are there.
        unsafe {
            assert_eq!(pack::rows(&source, to), expected);
            assert_eq!(pack::columns(&source, to), expected);
            assert_eq!(pack::pairs(&source, to), expected);
        }
    }
}

#[test]
fn exp2_is_as_good_as_it_says() {
    if !here::<Emulated>() {
        return;
    }
    // SAFETY: the vectors are there.
    let errors = unsafe { [exp2_error::<3>(), exp2_error::<4>(), exp2_error::<5>()] };
    for (error, allowed) in errors.into_iter().zip([7.6e-5, 3.0e-6, 2.5e-7]) {
        assert!(error < allowed, "{error:e}");
    }
}

/// The largest relative error over all powers with normal results, and the rules at the ends.
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2_error<const DEGREE: usize>() -> f64 {
    use amx::vector::{exp2, splat};
    use std::arch::x86_64::{_mm512_cvtss_f32, _mm512_loadu_ps, _mm512_storeu_ps};
    let one = |x: f32| _mm512_cvtss_f32(exp2::<DEGREE>(splat(x)));
    assert_eq!(one(f32::NEG_INFINITY), 0.0);
    assert_eq!(one(-2e4), 0.0);
    assert!(one(f32::NAN).is_nan());
    let mut worst: f64 = 0.0;
    for start in 0..100_000 {
        let x: [f32; 16] = std::array::from_fn(|i| (16 * start + i) as f32 * -7.87e-5);
        let mut y = [0.0f32; 16];
        // SAFETY: both are 16 numbers.
        unsafe { _mm512_storeu_ps(y.as_mut_ptr(), exp2::<DEGREE>(_mm512_loadu_ps(x.as_ptr()))) };
        for (x, y) in x.into_iter().zip(y) {
            let exact = f64::from(x).exp2();
            worst = worst.max((f64::from(y) - exact).abs() / exact);
        }
    }
    worst
}
