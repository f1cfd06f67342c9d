//! Storage types, and the rule about them: storage may be narrow, accumulation is f32 or wider.

use bytemuck::allocation::try_zeroed_vec;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The storage type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// bfloat16: eight bits of exponent, eight of precision.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl DType {
    /// All storage types, widest first.
    pub const ALL: [DType; 4] = [DType::F64, DType::F32, DType::Bf16, DType::F16];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// The accumulation type: f64 for f64, f32 for all others (spec section 2).
    pub const fn sum(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::F32 | DType::Bf16 | DType::F16 => DType::F32,
        }
    }

    /// The smallest and the largest size of a softmax scale other than 0: a normal value of the
    /// type of the sums, also after a multiplication by log2 e.
    pub const fn scales(self) -> [f64; 2] {
        match self.sum() {
            DType::F64 => [f64::MIN_POSITIVE, f64::MAX / 2.0],
            _ => [f32::MIN_POSITIVE as f64, f32::MAX as f64 / 2.0],
        }
    }

    /// Machine epsilon: the distance between 1 and the next larger value.
    pub const fn epsilon(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON,
            DType::F32 => f32::EPSILON as f64,
            DType::Bf16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
        }
    }

    /// The value nearest to `x` in this type.
    pub fn round(self, x: f64) -> f64 {
        match self {
            DType::F64 => x,
            DType::F32 => x as f32 as f64,
            DType::Bf16 => <bf16 as Element>::from_f64(x).to_f64(),
            DType::F16 => <f16 as Element>::from_f64(x).to_f64(),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        })
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        DType::ALL
            .into_iter()
            .find(|t| t.to_string() == s)
            .ok_or_else(|| Error::Unknown {
                what: "element type",
                got: s.to_string(),
                known: "f64, f32, bf16, f16",
            })
    }
}

/// A Rust type of tensor elements. Sealed: exactly the variants of [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync + private::Sealed {
    /// The type at run time.
    const DTYPE: DType;
    /// Wraps a borrowed slice.
    fn wrap(slice: &[Self]) -> Slice<'_>;
    /// Wraps an owned vector.
    fn own(data: Vec<Self>) -> Data;
    /// Widens one element.
    fn to_f64(self) -> f64;
    /// Rounds to nearest, ties to even.
    fn from_f64(x: f64) -> Self;
}

mod private {
    pub trait Sealed {}
}

/// A borrowed slice of elements whose type is known at run time.
#[derive(Debug, Clone, Copy)]
pub enum Slice<'a> {
    /// 64-bit floats.
    F64(&'a [f64]),
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// Half precision.
    F16(&'a [f16]),
}

/// Owned elements whose type is known at run time.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// Half precision.
    F16(Vec<f16>),
}

macro_rules! element {
    ($type:ty, $variant:ident, $to:expr, $from:expr) => {
        impl private::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$variant;
            fn wrap(slice: &[Self]) -> Slice<'_> {
                Slice::$variant(slice)
            }
            fn own(data: Vec<Self>) -> Data {
                Data::$variant(data)
            }
            #[inline]
            fn to_f64(self) -> f64 {
                $to(self)
            }
            #[inline]
            fn from_f64(x: f64) -> Self {
                $from(x)
            }
        }
    };
}
element!(f64, F64, |x: f64| x, |x: f64| x);
element!(f32, F32, |x: f32| x as f64, |x: f64| x as f32);
element!(bf16, Bf16, bf16::to_f64, |x| bf16::from_f32(to_odd(x)));
element!(f16, F16, f16::to_f64, |x| f16::from_f32(to_odd(x)));

/// Rounds to odd, for a second rounding to a narrower type. If `x` is between two f32, the result
/// is the one with an odd mantissa, which is never a tie between two narrower values, so the second
/// rounding goes to the correct side. (`from_f64` of the narrow types looks only at the upper half
/// of `x` and mistakes a value next to a tie for a tie.)
#[inline]
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || x.is_nan() {
        return nearest;
    }
    let away = f64::from(nearest).abs() > x.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

/// Runs `$body` with `$x` bound to the typed contents of a [`Slice`], [`Data`] or reference to one.
#[macro_export]
macro_rules! with_typed {
    ($kind:ident, $value:expr, $x:ident => $body:expr) => {
        match $value {
            $crate::dtype::$kind::F64($x) => $body,
            $crate::dtype::$kind::F32($x) => $body,
            $crate::dtype::$kind::Bf16($x) => $body,
            $crate::dtype::$kind::F16($x) => $body,
        }
    };
}

impl<'a> Slice<'a> {
    /// The elements as bytes, for files and transports.
    pub fn bytes(&self) -> &[u8] {
        with_typed!(Slice, self, x => bytemuck::cast_slice(x))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Slice::F64(_) => DType::F64,
            Slice::F32(_) => DType::F32,
            Slice::Bf16(_) => DType::Bf16,
            Slice::F16(_) => DType::F16,
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        with_typed!(Slice, self, x => x.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements from index `at` on.
    pub fn skip(self, at: usize) -> Slice<'a> {
        match self {
            Slice::F64(x) => Slice::F64(&x[at..]),
            Slice::F32(x) => Slice::F32(&x[at..]),
            Slice::Bf16(x) => Slice::Bf16(&x[at..]),
            Slice::F16(x) => Slice::F16(&x[at..]),
        }
    }

    /// One element, widened.
    pub fn get(&self, index: usize) -> f64 {
        with_typed!(Slice, self, x => x[index].to_f64())
    }

    /// All elements, widened.
    pub fn to_f64(&self) -> Vec<f64> {
        with_typed!(Slice, self, x => x.iter().map(|v| v.to_f64()).collect())
    }
}

impl Data {
    /// `len` zeros of type `dtype`, for lengths that are known to be small.
    ///
    /// # Panics
    /// Where [`Data::try_zeros`] has an error.
    pub fn zeros(dtype: DType, len: usize) -> Data {
        Data::try_zeros(dtype, len).unwrap_or_else(|error| panic!("{error}"))
    }

    /// `len` zeros of type `dtype`; an error that names the bytes if there is not enough memory.
    pub fn try_zeros(dtype: DType, len: usize) -> Result<Data, Error> {
        // Zero pages from the system: they are mapped by the thread that first touches them.
        let data = match dtype {
            DType::F64 => try_zeroed_vec(len).map(Data::F64),
            DType::F32 => try_zeroed_vec(len).map(Data::F32),
            DType::Bf16 => try_zeroed_vec(len).map(Data::Bf16),
            DType::F16 => try_zeroed_vec(len).map(Data::F16),
        };
        data.map_err(|()| Error::Memory {
            bytes: len.saturating_mul(dtype.bytes()),
        })
    }

    /// Values rounded to `dtype`.
    pub fn from_f64(dtype: DType, values: &[f64]) -> Data {
        fn rounded<T: Element>(values: &[f64]) -> Vec<T> {
            values.iter().map(|&x| T::from_f64(x)).collect()
        }
        match dtype {
            DType::F64 => Data::F64(rounded(values)),
            DType::F32 => Data::F32(rounded(values)),
            DType::Bf16 => Data::Bf16(rounded(values)),
            DType::F16 => Data::F16(rounded(values)),
        }
    }

    /// The elements, borrowed.
    pub fn as_slice(&self) -> Slice<'_> {
        with_typed!(Data, self, x => Element::wrap(x))
    }

    /// All elements, widened.
    pub fn to_f64(&self) -> Vec<f64> {
        self.as_slice().to_f64()
    }

    /// Rounds and stores one element.
    pub fn set(&mut self, index: usize, value: f64) {
        with_typed!(Data, self, x => x[index] = Element::from_f64(value))
    }

    /// The elements as bytes, for files and transports.
    pub fn bytes(&self) -> &[u8] {
        with_typed!(Data, self, x => bytemuck::cast_slice(x))
    }

    /// The elements as mutable bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        with_typed!(Data, self, x => bytemuck::cast_slice_mut(x))
    }

    /// Bytes of the vector's capacity, not of its length.
    pub fn capacity_bytes(&self) -> usize {
        with_typed!(Data, self, x => x.capacity()) * self.as_slice().dtype().bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::{DType, Element};
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// The f64 values directly below and above a tie; an f32 cannot distinguish them from it.
    fn beside(tie: f64) -> [f64; 2] {
        [-1.0, 1.0].map(|way| tie * (1.0 + way * f64::EPSILON))
    }

    #[test]
    fn values_next_to_a_tie_round_to_the_nearer_neighbour() {
        // 1 + 2^-8 is half way between 1 and the next bf16, 1 + 2^-11 between 1 and the next f16.
        for (dtype, half_way) in [(DType::Bf16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)] {
            let [below, above] = beside(1.0 + half_way);
            assert_eq!(
                dtype.round(1.0 + half_way),
                1.0,
                "{dtype}: a tie goes to the even one"
            );
            assert_eq!(dtype.round(below), 1.0, "{dtype}");
            assert_eq!(dtype.round(above), 1.0 + 2.0 * half_way, "{dtype}");
            // The next value is odd, so the tie above it rounds up and values below the tie do not.
            let tie = 1.0 + 3.0 * half_way;
            let [below, above] = beside(tie);
            assert_eq!(dtype.round(tie), 1.0 + 4.0 * half_way, "{dtype}");
            assert_eq!(dtype.round(below), 1.0 + 2.0 * half_way, "{dtype}");
            assert_eq!(dtype.round(above), 1.0 + 4.0 * half_way, "{dtype}");
        }
        // The smallest subnormal f16, and the values next to half of it.
        let least = f64::from(f16::from_bits(1));
        let [below, above] = beside(least / 2.0);
        assert_eq!([below, above].map(|x| DType::F16.round(x)), [0.0, least]);
    }

    #[test]
    fn overflow_rounds_to_infinity_and_nan_stays_nan() {
        for dtype in [DType::Bf16, DType::F16] {
            assert_eq!(dtype.round(1e300), f64::INFINITY);
            assert_eq!(dtype.round(-1e300), f64::NEG_INFINITY);
            assert_eq!(dtype.round(1e-300), 0.0);
            assert!(dtype.round(-1e-300).is_sign_negative());
            assert!(dtype.round(f64::NAN).is_nan());
        }
    }

    /// Whether neither neighbour of the rounded value is nearer to `x`.
    fn nearest<T: Element>(x: f64, bits: impl Fn(T) -> u16, of: impl Fn(u16) -> T) -> bool {
        let rounded = T::from_f64(x);
        let off = |other: T| (other.to_f64() - x).abs();
        let around = [bits(rounded).wrapping_sub(1), bits(rounded).wrapping_add(1)];
        around.into_iter().all(|neighbour| {
            let other = of(neighbour);
            let tied_to_odd = off(other) == off(rounded) && bits(rounded) % 2 == 1;
            !other.to_f64().is_finite() || (off(rounded) <= off(other) && !tied_to_odd)
        })
    }

    proptest! {
        #[test]
        fn rounding_is_to_nearest_even(
            // Inside the finite range, across subnormals, and near ties more often than chance.
            exponent in -30i32..16,
            high in 0u64..1 << 12,
            low in prop_oneof![Just(0u64), Just(1), Just((1 << 40) - 1), 0..1u64 << 40],
            negative: bool,
        ) {
            let fraction = ((high << 40) | low) as f64 / (1u64 << 52) as f64;
            let x = (1.0 + fraction) * 2f64.powi(exponent);
            let x = if negative { -x } else { x };
            prop_assert!(nearest::<bf16>(x, bf16::to_bits, bf16::from_bits), "bf16 of {x:e}");
            prop_assume!(x.abs() < 65504.0);
            prop_assert!(nearest::<f16>(x, f16::to_bits, f16::from_bits), "f16 of {x:e}");
        }
    }
}
