//! The two precisions sums are made in, and the way between them and the storage types.
//!
//! The decision here: kernels are written once, over this trait, and everything that is stored is
//! converted a row at a time, so there is one instance of a kernel per precision and not one for
//! each pair of types.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use encke_core::dtype::Slice;
use encke_core::{Data, Element};
use half::slice::HalfFloatSliceExt;

/// A type to sum in.
pub(crate) trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    /// The nearest number.
    fn from_f64(x: f64) -> Self;
    /// e to the power of `self`, for powers that are weights: at most 1, give or take rounding.
    fn exp(self) -> Self;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// Reads a row.
    fn load(source: Slice<'_>, at: usize, row: &mut [Self]);
    /// Rounds a row into its place.
    fn store(row: &[Self], target: &mut Data, at: usize);

    /// Reads one number.
    fn get(source: Slice<'_>, at: usize) -> Self {
        Self::from_f64(source.get(at))
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    fn from_f64(x: f64) -> f64 {
        x
    }

    #[inline]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    fn ln(self) -> f64 {
        f64::ln(self)
    }

    fn load(source: Slice<'_>, at: usize, row: &mut [f64]) {
        fn widen<T: Element>(source: &[T], row: &mut [f64]) {
            for (x, y) in row.iter_mut().zip(source) {
                *x = y.to_f64();
            }
        }
        let range = at..at + row.len();
        match source {
            Slice::F64(x) => row.copy_from_slice(&x[range]),
            Slice::F32(x) => widen(&x[range], row),
            Slice::Bf16(x) => widen(&x[range], row),
            Slice::F16(x) => widen(&x[range], row),
        }
    }

    fn store(row: &[f64], target: &mut Data, at: usize) {
        fn round<T: Element>(row: &[f64], target: &mut [T]) {
            for (x, y) in target.iter_mut().zip(row) {
                *x = T::from_f64(*y);
            }
        }
        let range = at..at + row.len();
        match target {
            Data::F64(x) => x[range].copy_from_slice(row),
            Data::F32(x) => round(row, &mut x[range]),
            Data::Bf16(x) => round(row, &mut x[range]),
            Data::F16(x) => round(row, &mut x[range]),
        }
    }
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    fn from_f64(x: f64) -> f32 {
        x as f32
    }

    #[inline]
    fn exp(self) -> f32 {
        exp(self)
    }

    fn ln(self) -> f32 {
        f32::ln(self)
    }

    fn load(source: Slice<'_>, at: usize, row: &mut [f32]) {
        let range = at..at + row.len();
        match source {
            Slice::F64(x) => {
                for (x, y) in row.iter_mut().zip(&x[range]) {
                    *x = *y as f32;
                }
            }
            Slice::F32(x) => row.copy_from_slice(&x[range]),
            Slice::Bf16(x) => x[range].convert_to_f32_slice(row),
            Slice::F16(x) => x[range].convert_to_f32_slice(row),
        }
    }

    fn store(row: &[f32], target: &mut Data, at: usize) {
        let range = at..at + row.len();
        match target {
            Data::F64(x) => {
                for (x, y) in x[range].iter_mut().zip(row) {
                    *x = f64::from(*y);
                }
            }
            Data::F32(x) => x[range].copy_from_slice(row),
            Data::Bf16(x) => x[range].convert_from_f32_slice(row),
            Data::F16(x) => x[range].convert_from_f32_slice(row),
        }
    }
}

/// e^x by Cephes' polynomial, to about one unit in the last place. The library's `exp` is a call
/// and would stop the loop around it from becoming vector code; this one is arithmetic only.
///
/// Powers that would be subnormal give 0. Powers above 88 give e^88: weights are never that large,
/// and lanes that nobody reads may hold anything. A NaN stays one.
#[inline]
fn exp(power: f32) -> f32 {
    const LOW: f32 = -87.0;
    const HIGH: f32 = 88.0;
    // Adding and subtracting 1.5·2^23 rounds to the nearest integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has so few bits that its products with integers are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = if power > HIGH { HIGH } else { power };
    let x = if x < LOW { LOW } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut y = 1.987_569_1e-4;
    y = y * r + 1.398_2e-3;
    y = y * r + 8.333_452e-3;
    y = y * r + 4.166_579_6e-2;
    y = y * r + 1.666_666_5e-1;
    y = y * r + 0.5;
    y = y * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if power < LOW { 0.0 } else { y * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_right_to_two_units_in_the_last_place() {
        let mut worst: f64 = 0.0;
        for i in 0..2_000_000 {
            let x = -86.9 + i as f32 * (90.0 / 2_000_000.0);
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e4), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::INFINITY).is_finite());
    }
}
