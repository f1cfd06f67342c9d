//! The kernels in shapes that differ from the usual ones, each under a name that says how.

use encke_core::job::Job;

use crate::amx::backward::backward_shaped;
use crate::amx::forward::forward_shaped;
use crate::amx::shape::{BackwardShape, Shape};
use crate::amx::tiles::Tiles;
use crate::amx::{Given, Number, Pool};
use crate::target::Target;

/// A forward pass.
pub type Forward<N> = fn(&Pool, &Job, [&[N]; 3], Target<'_, f32>);
/// A backward pass.
pub type Backward<N> = fn(&Pool, &Job, Given<'_, N>, &mut [f32], &mut [f32], &mut [f32]);

/// A list of names and functions, from shapes that differ from the usual in the given sizes.
macro_rules! variants {
    ($shape:ident, $run:ident as $kind:ty, [$({$($size:ident: $value:expr),*}),* $(,)?]) => {
        vec![$({
            struct Variant;
            impl $shape for Variant {
                $(variants!(@size $size, $value);)*
            }
            let name = concat!($(stringify!($size), " ", stringify!($value), " "),*);
            (name, $run::<T, N, Variant> as $kind)
        }),*]
    };
    (@size $size:ident, $value:expr) => { const $size: usize = $value; };
}

/// Every forward pass.
pub fn forwards<T: Tiles, N: Number>() -> Vec<(&'static str, Forward<N>)> {
    variants!(
        Shape,
        forward_shaped as Forward<N>,
        [
            {KEYS: 32},
            {KEYS: 64},
            {KEYS: 64, PACKED: 256},
            {KEYS: 64, PACKED: 256, NUMBERS: 1 << 17},
            {KEYS: 96, PACKED: 960},
            {KEYS: 128},
            {KEYS: 256},
            {KEYS: 64, DEGREE: 3},
            {KEYS: 64, PACKED: 512, NUMBERS: 1 << 17},
            {KEYS: 128, PACKED: 512, NUMBERS: 1 << 17},
            {KEYS: 256, PACKED: 512, NUMBERS: 1 << 17},
        ]
    )
}

/// Every backward pass.
pub fn backwards<T: Tiles, N: Number>() -> Vec<(&'static str, Backward<N>)> {
    variants!(
        BackwardShape,
        backward_shaped as Backward<N>,
        [
            {KEYS: 64},
            {KEYS: 64, TILES: 4, NUMBERS: 1 << 15},
            {KEYS: 128},
            {KEYS: 128, TILES: 4},
            {KEYS: 64, NUMBERS: 1 << 17},
            {KEYS: 128, TILES: 4, NUMBERS: 1 << 17},
            {KEYS: 192, TILES: 4, NUMBERS: 1 << 17},
            {KEYS: 256, TILES: 4, NUMBERS: 1 << 17},
        ]
    )
}
