//! The kernels in shapes that differ from the usual ones, each under a name that says how.

use encke_core::job::Job;
use half::bf16;

use crate::amx::backward::backward_shaped;
use crate::amx::forward::forward_shaped;
use crate::amx::shape::{BackwardShape, Shape};
use crate::amx::tiles::Tiles;
use crate::amx::{Given, Pool};
use crate::target::Target;

/// A forward pass.
pub type Forward = fn(&Pool, &Job, [&[bf16]; 3], Target<'_, f32>);
/// A backward pass.
pub type Backward = fn(&Pool, &Job, Given<'_>, &mut [f32], &mut [f32], &mut [f32]);

/// A list of names and functions, from shapes that differ from the usual in the given sizes.
macro_rules! variants {
    ($shape:ident, $run:ident as $kind:ty, [$({$($size:ident: $value:expr),*}),* $(,)?]) => {
        vec![$({
            struct Variant;
            impl $shape for Variant {
                $(variants!(@size $size, $value);)*
            }
            let name = concat!($(stringify!($size), " ", stringify!($value), " "),*);
            (name, $run::<T, Variant> as $kind)
        }),*]
    };
    (@size PREFETCH, $value:expr) => { const PREFETCH: bool = $value; };
    (@size $size:ident, $value:expr) => { const $size: usize = $value; };
}

/// Every forward pass.
pub fn forwards<T: Tiles>() -> Vec<(&'static str, Forward)> {
    variants!(
        Shape,
        forward_shaped as Forward,
        [
            {KEYS: 256},
            {KEYS: 128},
            {KEYS: 64},
            {KEYS: 128, PREFETCH: false},
            {KEYS: 256, PREFETCH: false},
            {KEYS: 512},
            {KEYS: 256, PACKED: 512, NUMBERS: 1 << 17},
            {KEYS: 128, PACKED: 512, NUMBERS: 1 << 17},
            {KEYS: 64, PACKED: 512, NUMBERS: 1 << 17},
            {KEYS: 256, PACKED: 2048},
            {KEYS: 256, DEGREE: 3},
        ]
    )
}

/// Every backward pass.
pub fn backwards<T: Tiles>() -> Vec<(&'static str, Backward)> {
    variants!(
        BackwardShape,
        backward_shaped as Backward,
        [
            {KEYS: 64},
            {KEYS: 64, TILES: 8},
            {KEYS: 64, NUMBERS: 1 << 16},
            {KEYS: 64, TILES: 8, NUMBERS: 1 << 16},
            {KEYS: 128},
            {KEYS: 128, NUMBERS: 1 << 16},
            {KEYS: 32, TILES: 8},
            {KEYS: 128, TILES: 2},
        ]
    )
}
