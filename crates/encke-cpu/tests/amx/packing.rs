//! The building blocks of the tile kernels: packing, products of tiles, and the exponential.

use encke_core::Data;
use encke_core::conformance::Random;
use encke_cpu::internals::{Emulated, Hardware, TileUnit};
use half::{bf16, f16};

use crate::kernel::{TestedElement, available, elements};

/// Memory for tiles.
#[repr(C, align(64))]
struct TileBytes([u8; 1 << 14]);

/// Random integers between -`most` and `most`. If those of two factors are small enough, every sum
/// of their products is exact, in any order.
fn integers(count: usize, most: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    let integer = |_| random.below(2 * most + 1) as f64 - most as f64;
    (0..count).map(integer).collect()
}

/// Left and right factors in each of their layouts multiply to the product of plain matrices.
#[test]
fn packed_tiles_multiply_like_matrices() {
    if !available::<Emulated>() {
        return;
    }
    multiply_all::<Emulated>();
    if available::<Hardware>() {
        multiply_all::<Hardware>();
    }
}

/// Elements of one split, and of up to three on each side.
fn multiply_all<T: TileUnit>() {
    multiply::<T, bf16>([16, 16]);
    multiply::<T, f16>([400, 400]);
    multiply::<T, f32>([400, 400]);
    multiply::<T, f32>([90_000, 2]);
    multiply::<T, f32>([2, 90_000]);
}

fn multiply<T: TileUnit, N: TestedElement>(most: [usize; 2]) {
    use encke_cpu::internals::pack::{self, RowSource, Sign};
    use encke_cpu::internals::{ROW_BYTES, SLAB_BYTES, TILE_BYTES, TileProduct};
    // 29 rows of 43 channels, 50 elements apart: x·yᵀ sums over channels, xᵀ·y over rows.
    let (rows, dim, apart) = (29, 43, 50);
    let [x, y] =
        [(most[0], 1), (most[1], 2)].map(|(most, seed)| integers(rows * apart, most, seed));
    let stored = [&x, &y].map(|values| Data::from_f64(N::DTYPE, values));
    let [x_stored, y_stored] = stored.each_ref().map(|data| elements::<N>(data.as_slice()));
    let source = |elements| RowSource {
        elements,
        dim,
        count: rows,
        address: |row: usize| Some(row * apart),
    };
    let mut memory = [(); 5].map(|()| Box::new(TileBytes([0xee; 1 << 14])));
    let [a, b, c, d, sums] = memory.each_mut().map(|memory| memory.0.as_mut_ptr());
    let product = |a: *mut u8, b: *mut u8, steps: usize| TileProduct {
        a,
        a_step: N::STACK_BYTES,
        b: [b, b.wrapping_add(TILE_BYTES)],
        b_step: N::STACK_BYTES,
        b_row: ROW_BYTES,
        c: [sums, sums.wrapping_add(SLAB_BYTES)],
        steps,
    };
    let sum = |row: usize, column: usize| {
        let at = column / 16 * SLAB_BYTES + row * ROW_BYTES + 4 * (column % 16);
        // SAFETY: the sums are 32 by 32 f32.
        unsafe { sums.add(at).cast::<f32>().read() }
    };
    let element = |elements: &[f64], row: usize, c: usize| match row < rows && c < dim {
        true => elements[row * apart + c],
        false => 0.0,
    };
    let usual = pack::Extremes::default();
    // SAFETY: two stacks fit each memory, and the tiles are available.
    unsafe {
        T::configure();
        assert_eq!(pack::rows(&source(x_stored), a), usual);
        assert_eq!(pack::lanes(&source(y_stored), Sign::Minus, b), usual);
        assert_eq!(pack::columns(&source(x_stored), c), usual);
        assert_eq!(pack::pairs(&source(y_stored), d), usual);
        // Twice, to test products that are added to sums.
        N::multiply::<T, false>(product(a, b, 2));
        N::multiply::<T, true>(product(a, b, 2));
    }
    for i in 0..32 {
        for j in 0..32 {
            let terms = (0..dim).map(|c| -2.0 * element(&x, i, c) * element(&y, j, c));
            assert_eq!(f64::from(sum(i, j)), terms.sum::<f64>(), "x·yᵀ at {i}, {j}");
        }
    }
    // `columns` pairs rows (2r, 2r + 1), `pairs` pairs rows (r, r + 16): reorder one to match.
    let reordered = |i: usize| i / 2 + i % 2 * 16;
    let reordered = RowSource {
        elements: x_stored,
        dim,
        count: 32,
        address: |i: usize| (reordered(i) < rows).then_some(reordered(i) * apart),
    };
    // SAFETY: as above.
    unsafe {
        pack::columns(&reordered, c);
        N::multiply::<T, false>(product(c, d, 1));
        T::release();
    }
    for i in 0..32 {
        for j in 0..32 {
            let terms = (0..rows).map(|row| element(&x, row, i) * element(&y, row, j));
            assert_eq!(f64::from(sum(i, j)), terms.sum::<f64>(), "xᵀ·y at {i}, {j}");
        }
    }
}

#[test]
fn packing_reports_huge_and_nonfinite_elements() {
    if !available::<Emulated>() {
        return;
    }
    for (element, nonfinite) in [(f64::NEG_INFINITY, true), (f64::NAN, true), (-1e17, false)] {
        notice::<bf16>(element, nonfinite);
        notice::<f32>(element, nonfinite);
    }
    notice::<f16>(f64::NEG_INFINITY, true);
}

fn notice<N: TestedElement>(element: f64, nonfinite: bool) {
    use encke_cpu::internals::pack::{self, Extremes, RowSource, Sign};
    let mut values = integers(32 * 40, 16, 3);
    values[31 * 40 + 39] = element;
    let data = Data::from_f64(N::DTYPE, &values);
    let mut memory = Box::new(TileBytes([0; 1 << 14]));
    let to = memory.0.as_mut_ptr();
    let found = Extremes {
        huge: true,
        nonfinite,
    };
    for (dim, expected) in [(40, found), (39, Extremes::default())] {
        let source = RowSource {
            elements: elements::<N>(data.as_slice()),
            dim,
            count: 32,
            address: |row: usize| Some(row * 40),
        };
        // SAFETY: two stacks fit the memory, and the processor has AVX-512.
        unsafe {
            assert_eq!(pack::rows(&source, to), expected);
            assert_eq!(pack::columns(&source, to), expected);
            assert_eq!(pack::pairs(&source, to), expected);
            assert_eq!(pack::lanes(&source, Sign::Minus, to), expected);
        }
    }
}

/// The splits of an f32 add up to it, also if its nearest bf16 would be infinite; a NaN stays NaN.
#[test]
fn splits_add_up_to_the_element() {
    if !available::<Emulated>() {
        return;
    }
    let mut random = Random::new(9);
    let usual = |_| (2.0 * random.unit()) as f32 * 2f32.powi(random.below(200) as i32 - 100);
    let mut elements: Vec<f32> = (0..32 * 32).map(usual).collect();
    add_up(&elements);
    let unusual = [
        f32::MAX,
        f32::MIN,
        1.75e38,
        f32::INFINITY,
        -f32::INFINITY,
        f32::NAN,
    ];
    let signalling = f32::from_bits(0x7f80_0001);
    for (i, x) in unusual.into_iter().chain([signalling]).enumerate() {
        elements[37 * i + 5] = x;
    }
    add_up(&elements);
}

fn add_up(elements: &[f32]) {
    use encke_cpu::internals::SLAB_BYTES;
    use encke_cpu::internals::pack::{self, RowSource};
    let mut memory = Box::new(TileBytes([0; 1 << 14]));
    let source = RowSource {
        elements,
        dim: 32,
        count: 32,
        address: |row: usize| Some(row * 32),
    };
    // SAFETY: a stack fits the memory, and the processor has AVX-512.
    let found = unsafe { pack::rows(&source, memory.0.as_mut_ptr()) };
    assert_eq!(found.nonfinite, elements.iter().any(|x| !x.is_finite()));
    for (i, &x) in elements.iter().enumerate() {
        let splits = [0, 1, 2].map(|split| {
            let at = split * SLAB_BYTES + 2 * i;
            bf16::from_le_bytes([memory.0[at], memory.0[at + 1]]).to_f64()
        });
        let sum: f64 = splits.iter().sum();
        let same = sum == f64::from(x) || (x.is_nan() && sum.is_nan());
        assert!(same, "{x:e} is not the sum of {splits:?}");
    }
}

#[test]
fn exp2_error_is_within_its_documented_bound() {
    if !available::<Emulated>() {
        return;
    }
    // SAFETY: the processor has AVX-512.
    let errors = unsafe { [exp2_error::<3>(), exp2_error::<4>(), exp2_error::<5>()] };
    for (error, allowed) in errors.into_iter().zip([7.6e-5, 3.0e-6, 2.5e-7]) {
        assert!(error < allowed, "{error:e}");
    }
}

/// The largest relative error over exponents with normal results; also checks the special values.
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2_error<const DEGREE: usize>() -> f64 {
    use encke_cpu::internals::vector::{exp2, splat};
    use std::arch::x86_64::{_mm512_cvtss_f32, _mm512_loadu_ps, _mm512_storeu_ps};
    let one = |x: f32| _mm512_cvtss_f32(exp2::<DEGREE>(splat(x)));
    assert_eq!(one(f32::NEG_INFINITY), 0.0);
    assert_eq!(one(-2e4), 0.0);
    assert!(one(f32::NAN).is_nan());
    let mut worst: f64 = 0.0;
    for start in 0..100_000 {
        let x: [f32; 16] = std::array::from_fn(|i| (16 * start + i) as f32 * -7.87e-5);
        let mut y = [0.0f32; 16];
        // SAFETY: both are 16 f32.
        unsafe { _mm512_storeu_ps(y.as_mut_ptr(), exp2::<DEGREE>(_mm512_loadu_ps(x.as_ptr()))) };
        for (x, y) in x.into_iter().zip(y) {
            let exact = f64::from(x).exp2();
            worst = worst.max((f64::from(y) - exact).abs() / exact);
        }
    }
    worst
}
