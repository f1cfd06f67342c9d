//! The two precisions in which sums are computed, f32 and f64, and conversion from and to the
//! storage types.
//!
//! The decision here: kernels are generic over this trait, and stored elements are converted a row
//! at a time. So a kernel is compiled once per precision, not once for each combination of types.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use encke_core::dtype::Slice;
use encke_core::{DType, Data, Element, with_typed};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::vector::{self, PORTABLE_WIDTH, PortableVector};

/// A type in which sums are computed.
pub trait Real:
    Element
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// −∞.
    const NEG_INFINITY: Self;

    /// e to the power of `self`.
    fn exp(self) -> Self;
    /// e to the power of each element of a portable vector, as
    /// [`Vector::exp`](vector::Vector::exp).
    fn exp_portable(powers: [Self; PORTABLE_WIDTH]) -> [Self; PORTABLE_WIDTH];
    /// The hyperbolic tangent of each element of a portable vector, as
    /// [`Vector::tanh`](vector::Vector::tanh).
    fn tanh_portable(x: [Self; PORTABLE_WIDTH]) -> [Self; PORTABLE_WIDTH];
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool;
    /// The natural logarithm.
    fn ln(self) -> Self;
    /// Converts the elements of `source` from `at` on to this precision.
    fn load(source: Slice<'_>, at: usize, row: &mut [Self]);
    /// Rounds a row to a storage type.
    fn round<T: Element>(row: &[Self], target: &mut [T]);
    /// Rounds a row to the storage type of `target`, and stores it from `at` on.
    fn store(row: &[Self], target: &mut Data, at: usize) {
        with_typed!(Data, target, x => Self::round(row, &mut x[at..at + row.len()]));
    }

    /// The elements of a buffer of this type; panics if it is of another type.
    fn slice_mut(data: &mut Data) -> &mut [Self] {
        assert_eq!(data.as_slice().dtype(), Self::DTYPE, "the type of sums");
        with_typed!(Data, data, x => bytemuck::cast_slice_mut(x.as_mut_slice()))
    }
    /// The elements of a buffer of this type; panics if it is of another type.
    fn slice(data: &Data) -> &[Self] {
        assert_eq!(data.as_slice().dtype(), Self::DTYPE, "the type of sums");
        with_typed!(Data, data, x => bytemuck::cast_slice(x.as_slice()))
    }

    /// Converts one element.
    fn get(source: Slice<'_>, at: usize) -> Self {
        Self::from_f64(source.get(at))
    }
}

/// Constants and functions that the float types of the standard library have under the same names.
macro_rules! float_functions {
    () => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = Self::NEG_INFINITY;

        fn exp(self) -> Self {
            self.exp()
        }
        #[inline(always)]
        fn is_finite(self) -> bool {
            self.is_finite()
        }
        fn ln(self) -> Self {
            self.ln()
        }
    };
}

impl Real for f64 {
    float_functions!();

    #[inline(always)]
    fn exp_portable(powers: [f64; PORTABLE_WIDTH]) -> [f64; PORTABLE_WIDTH] {
        powers.map(f64::exp)
    }

    #[inline(always)]
    fn tanh_portable(x: [f64; PORTABLE_WIDTH]) -> [f64; PORTABLE_WIDTH] {
        x.map(f64::tanh)
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
    float_functions!();

    #[inline(always)]
    fn exp_portable(powers: [f32; PORTABLE_WIDTH]) -> [f32; PORTABLE_WIDTH] {
        let shift = |x: f32| f32::from_bits(x.to_bits() << 23);
        vector::exp(
            PortableVector::<f32>::new(),
            powers,
            #[inline(always)]
            |shifted| shifted.map(shift),
        )
    }

    #[inline(always)]
    fn tanh_portable(x: [f32; PORTABLE_WIDTH]) -> [f32; PORTABLE_WIDTH] {
        vector::tanh(PortableVector::<f32>::new(), x)
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
