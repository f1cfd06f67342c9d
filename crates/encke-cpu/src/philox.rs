//! Philox4x32 with ten rounds on vectors: the coins of `encke_core::dropout` for many counters at
//! once.
//!
//! The decision here: the generator is written in the instructions of `pulp`. A loop over lanes,
//! left to the compiler to vectorize, was tried: coins then took most of the time of a pass.

use encke_core::dropout;
use pulp::Simd;

/// Counters that are drawn for at once: as many as the widest vector has lanes.
pub(crate) const COUNTERS: usize = 16;

/// The four words of each counter, and of its coins: first words first.
pub(crate) type Words = [[u32; COUNTERS]; 4];

/// The coins of counters.
#[inline(always)]
pub(crate) fn philox<S: Simd>(s: S, mut words: Words, seed: [u32; 2]) -> Words {
    let [x0, x1, x2, x3] = words
        .each_mut()
        .map(|word| bytemuck::cast_slice_mut::<u32, S::u32s>(word));
    let factors = [s.splat_u32s(0xD251_1F53), s.splat_u32s(0xCD9E_8D57)];
    for (((x0, x1), x2), x3) in x0.iter_mut().zip(x1).zip(x2).zip(x3) {
        let mut seed = seed;
        for _ in 0..10 {
            let keys = [s.splat_u32s(seed[0]), s.splat_u32s(seed[1])];
            let (low0, high0) = s.widening_mul_u32s(factors[0], *x0);
            let (low1, high1) = s.widening_mul_u32s(factors[1], *x2);
            *x0 = s.xor_u32s(s.xor_u32s(high1, *x1), keys[0]);
            *x2 = s.xor_u32s(s.xor_u32s(high0, *x3), keys[1]);
            (*x1, *x3) = (low1, low0);
            seed[0] = seed[0].wrapping_add(0x9E37_79B9);
            seed[1] = seed[1].wrapping_add(0xBB67_AE85);
        }
    }
    words
}

/// The coins of counters, one after the other.
pub(crate) fn philox_portable(mut words: Words, seed: [u32; 2]) -> Words {
    for i in 0..COUNTERS {
        let coins = dropout::philox([0, 1, 2, 3].map(|word| words[word][i]), seed);
        for (word, coin) in words.iter_mut().zip(coins) {
            word[i] = coin;
        }
    }
    words
}
