//! The kernels in configurations that differ from the defaults; the name of each lists its values.

use encke_core::job::Job;
use encke_cpu::internals::{
    AmxBackwardConfig, AmxBackwardInputs, AmxForwardConfig, Hardware, PagePool, Target,
    TileElement, backward_with_config, forward_with_config,
};

/// A forward pass.
pub type ForwardFn<N> = fn(&PagePool, &Job, [&[N]; 3], Target<'_, f32>);
/// A backward pass.
pub type BackwardFn<N> =
    fn(&PagePool, &Job, AmxBackwardInputs<'_, N>, &mut [f32], &mut [f32], &mut [f32]);

/// A list of (name, function), one for each set of values that override the default configuration.
macro_rules! variants {
    ($config:ident, $run:ident as $kind:ty, [$({$($size:ident: $value:expr),*}),* $(,)?]) => {
        vec![$({
            struct AmxVariant;
            impl $config for AmxVariant {
                $(variants!(@size $size, $value);)*
            }
            let name = concat!($(stringify!($size), " ", stringify!($value), " "),*);
            (name, $run::<Hardware, N, AmxVariant> as $kind)
        }),*]
    };
    (@size $size:ident, $value:expr) => { const $size: usize = $value; };
}

/// All variants of the forward pass.
pub fn forwards<N: TileElement>() -> Vec<(&'static str, ForwardFn<N>)> {
    variants!(
        AmxForwardConfig,
        forward_with_config as ForwardFn<N>,
        [
            {KEYS: 32},
            {KEYS: 64},
            {KEYS: 64, PACKED_KEYS: 256},
            {KEYS: 128},
            {KEYS: 256},
            {KEYS: 64, EXP_DEGREE: 3},
            {KEYS: 64, PACKED_KEYS: 512, QUERY_ELEMENTS: 1 << 17},
        ]
    )
}

/// All variants of the backward pass.
pub fn backwards<N: TileElement>() -> Vec<(&'static str, BackwardFn<N>)> {
    variants!(
        AmxBackwardConfig,
        backward_with_config as BackwardFn<N>,
        [
            {KEYS: 64},
            {KEYS: 128},
            {KEYS: 128, QUERY_TILES: 4},
            {KEYS: 256, QUERY_TILES: 4, QUERY_ELEMENTS: 1 << 17},
        ]
    )
}
