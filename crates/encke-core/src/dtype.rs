//! Storage types and the one rule about them: what is stored may be narrow, what is summed is not.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// The type numbers are stored in.
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

    /// The type of everything that is summed or carried: f64 for f64, f32 for all others (spec 2).
    pub const fn sum(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::F32 | DType::Bf16 | DType::F16 => DType::F32,
        }
    }

    /// The distance between 1 and the next number: the unit of rounding tolerances.
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
            DType::Bf16 => bf16::from_f64(x).to_f64(),
            DType::F16 => f16::from_f64(x).to_f64(),
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
                what: "number type",
                got: s.to_string(),
                known: "f64, f32, bf16, f16",
            })
    }
}

/// A Rust type that numbers can be stored in. Closed: exactly the variants of [`DType`].
pub trait Element: bytemuck::Pod + Send + Sync + private::Sealed {
    /// Its name at run time.
    const DTYPE: DType;
    /// Wraps a borrowed slice.
    fn wrap(slice: &[Self]) -> Slice<'_>;
    /// Wraps an owned vector.
    fn own(data: Vec<Self>) -> Data;
    /// Widens one number.
    fn to_f64(self) -> f64;
    /// Rounds one number.
    fn from_f64(x: f64) -> Self;
}

mod private {
    pub trait Sealed {}
}

/// A borrowed run of numbers whose type is known at run time.
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

/// Owned numbers whose type is known at run time.
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
element!(bf16, Bf16, |x: bf16| x.to_f64(), bf16::from_f64);
element!(f16, F16, |x: f16| x.to_f64(), f16::from_f64);

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

impl Slice<'_> {
    /// The bytes of the numbers, as a file or a wire wants them.
    pub fn bytes(&self) -> &[u8] {
        with_typed!(Slice, self, x => bytemuck::cast_slice(x))
    }

    /// The type of the numbers.
    pub fn dtype(&self) -> DType {
        match self {
            Slice::F64(_) => DType::F64,
            Slice::F32(_) => DType::F32,
            Slice::Bf16(_) => DType::Bf16,
            Slice::F16(_) => DType::F16,
        }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        with_typed!(Slice, self, x => x.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One number, widened.
    pub fn get(&self, index: usize) -> f64 {
        with_typed!(Slice, self, x => x[index].to_f64())
    }

    /// The numbers, widened.
    pub fn to_f64(&self) -> Vec<f64> {
        with_typed!(Slice, self, x => x.iter().map(|v| v.to_f64()).collect())
    }
}

impl Data {
    /// `len` zeros of type `dtype`.
    pub fn zeros(dtype: DType, len: usize) -> Data {
        match dtype {
            DType::F64 => Data::F64(vec![0.0; len]),
            DType::F32 => Data::F32(vec![0.0; len]),
            DType::Bf16 => Data::Bf16(vec![bf16::ZERO; len]),
            DType::F16 => Data::F16(vec![f16::ZERO; len]),
        }
    }

    /// Numbers rounded to `dtype`.
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

    /// The numbers, borrowed.
    pub fn as_slice(&self) -> Slice<'_> {
        with_typed!(Data, self, x => Element::wrap(x))
    }

    /// The numbers, widened.
    pub fn to_f64(&self) -> Vec<f64> {
        self.as_slice().to_f64()
    }

    /// Rounds and stores one number.
    pub fn set(&mut self, index: usize, value: f64) {
        with_typed!(Data, self, x => x[index] = Element::from_f64(value))
    }

    /// The bytes of the numbers, as a file or a wire wants them.
    pub fn bytes(&self) -> &[u8] {
        with_typed!(Data, self, x => bytemuck::cast_slice(x))
    }

    /// The bytes of the numbers, to be overwritten.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        with_typed!(Data, self, x => bytemuck::cast_slice_mut(x))
    }

    /// Bytes the vector holds on to: its capacity, not its length.
    pub fn capacity_bytes(&self) -> usize {
        with_typed!(Data, self, x => x.capacity()) * self.as_slice().dtype().bytes()
    }
}
