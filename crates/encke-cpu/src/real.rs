//! The two precisions sums are made in, and the way between them and the storage types.
//!
//! The decision here: kernels are written once, over this trait, and everything that is stored is
//! converted a row at a time, so there is one instance of a kernel per precision and not one for
//! each pair of types.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use encke_core::dtype::Slice;
use encke_core::{DType, Data, Element, with_typed};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::vector::{self, PLAIN, Plain};

/// A type to sum in.
pub(crate) trait Real:
    Copy
    + Debug
    + Default
    + bytemuck::Pod
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
    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// e to the power of each of a plain vector's numbers, for powers that are weights.
    fn exp_plain(powers: [Self; PLAIN]) -> [Self; PLAIN];
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// Reads a row.
    fn load(source: Slice<'_>, at: usize, row: &mut [Self]);
    /// Rounds a row.
    fn round<T: Element>(row: &[Self], target: &mut [T]);
    /// Rounds a row into its place.
    fn store(row: &[Self], target: &mut Data, at: usize) {
        with_typed!(Data, target, x => Self::round(row, &mut x[at..at + row.len()]));
    }

    /// The numbers of a buffer that sums are kept in; it has this type.
    fn numbers(data: &mut Data) -> &mut [Self];
    /// The same, to be read.
    fn seen(data: &Data) -> &[Self];

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

    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn exp_plain(powers: [f64; PLAIN]) -> [f64; PLAIN] {
        powers.map(f64::exp)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        f64::is_finite(self)
    }

    fn ln(self) -> f64 {
        f64::ln(self)
    }

    fn seen(data: &Data) -> &[f64] {
        let Data::F64(numbers) = data else {
            unreachable!("sums of f64 are kept in f64");
        };
        numbers
    }

    fn numbers(data: &mut Data) -> &mut [f64] {
        let Data::F64(numbers) = data else {
            unreachable!("sums of f64 are kept in f64");
        };
        numbers
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

    fn round<T: Element>(row: &[f64], target: &mut [T]) {
        for (x, y) in target.iter_mut().zip(row) {
            *x = T::from_f64(*y);
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

    fn exp(self) -> f32 {
        f32::exp(self)
    }

    #[inline(always)]
    fn exp_plain(powers: [f32; PLAIN]) -> [f32; PLAIN] {
        let shift = |x: f32| f32::from_bits(x.to_bits() << 23);
        vector::exp(Plain::<f32>::new(), powers, |shifted| shifted.map(shift))
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }

    fn ln(self) -> f32 {
        f32::ln(self)
    }

    fn seen(data: &Data) -> &[f32] {
        let Data::F32(numbers) = data else {
            unreachable!("sums of f32 are kept in f32");
        };
        numbers
    }

    fn numbers(data: &mut Data) -> &mut [f32] {
        let Data::F32(numbers) = data else {
            unreachable!("sums of f32 are kept in f32");
        };
        numbers
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

    fn round<T: Element>(row: &[f32], target: &mut [T]) {
        match T::DTYPE {
            DType::F32 => bytemuck::cast_slice_mut::<T, f32>(target).copy_from_slice(row),
            DType::Bf16 => bytemuck::cast_slice_mut::<T, bf16>(target).convert_from_f32_slice(row),
            DType::F16 => bytemuck::cast_slice_mut::<T, f16>(target).convert_from_f32_slice(row),
            DType::F64 => {
                for (x, y) in target.iter_mut().zip(row) {
                    *x = T::from_f64(f64::from(*y));
                }
            }
        }
    }
}
