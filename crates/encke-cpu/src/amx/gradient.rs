//! Weights p and their gradients ds from scores and dp = dout·v, for 32 queries and a block of
//! keys.
//!
//! Lanes are queries. p is stored once, as left factor of dv; ds is stored twice, as left factor of
//! dk and as right factor of dq, because tiles cannot be transposed. Each stored row interleaves
//! two vectors: the two halves of the queries in the left factors, two keys in the right factor.

use std::arch::x86_64::*;
use std::ops::Range;

use super::element::{LargeLanes, ScoreScale, TileElement, exp2_argument, for_each_split_pair};
use super::pack::WIDTH;
use super::softmax::{KeyBounds, Lanes, VisibleKeys};
use super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES};
use super::vector::{exp2, splat};

/// Per-query inputs of the gradient, for 32 queries.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct QueryStats {
    /// The lse.
    pub lse: Lanes<f32>,
    /// dout·out − dlse.
    pub delta: Lanes<f32>,
    /// The keys that are visible to each query; none if its lse is minus infinity.
    pub keys: VisibleKeys,
}

/// A block of scores and dp, and where its weights and gradients are stored.
#[derive(Debug, Clone)]
pub struct GradientBlock {
    /// Slabs of scores and of dp: for each 32 keys, one of queries 0..16 and one of 16..32.
    pub scores: *const u8,
    pub dp: *const u8,
    /// The groups of 32 keys that are computed.
    pub steps: Range<usize>,
    /// The index of the first key of the block.
    pub start: usize,
    /// The keys that every query sees.
    pub common: KeyBounds,
    /// The lanes whose scores include the scale.
    pub scaled_lanes: u32,
    /// Weights and ds as left factors: one stack for each 32 keys, `left_stride` bytes apart.
    pub weights: *mut u8,
    pub ds: *mut u8,
    pub left_stride: usize,
    /// ds as right factor: one stack for each 32 keys, `right_stride` bytes apart.
    pub ds_right: *mut u8,
    pub right_stride: usize,
}

impl GradientBlock {
    /// The groups of keys of which every query sees all.
    fn unmasked_steps(&self) -> Range<usize> {
        let group = |key: usize| key.saturating_sub(self.start);
        let Range { start, end } = self.steps;
        let first = group(self.common.start).div_ceil(WIDTH).clamp(start, end);
        let last = (group(self.common.end) / WIDTH).clamp(first, end);
        first..last
    }
}

/// Factors that all pairs of a job share.
#[derive(Debug, Clone, Copy)]
pub struct Factors {
    pub scale: ScoreScale,
    pub gain: f32,
}

/// Computes the weights of a block and their gradients.
///
/// # Safety
/// The slabs of the block can be read and written, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub unsafe fn gradient<N: TileElement, const DEGREE: usize>(
    block: &GradientBlock,
    factors: Factors,
    stats: &QueryStats,
) {
    let large = [0, 1].map(|half| {
        // SAFETY: `Lanes` holds 32 values.
        let lse = unsafe { _mm512_load_ps(stats.lse.0.as_ptr().add(16 * half)) };
        let scaled = (block.scaled_lanes >> (16 * half)) as u16;
        let scale = _mm512_mask_mov_ps(splat(factors.scale.natural), scaled, splat(1.0));
        LargeLanes::new(lse, scale, scaled)
    });
    let usual = |_: usize, _: __m512, argument: __m512| argument;
    // SAFETY: the caller's promise.
    unsafe {
        if large[0].any() || large[1].any() {
            let argument =
                |half: usize, score, argument| large[half].exp2_argument::<N>(score, argument);
            let steps = block.steps.clone();
            gradient_pass::<N, DEGREE, true>(block, steps, factors, stats, argument);
            return;
        }
        // Groups that every query sees need no mask: those from `unmasked.start` on, before its
        // end.
        let unmasked = block.unmasked_steps();
        let Range { start, end } = block.steps;
        let masked = |steps| gradient_pass::<N, DEGREE, true>(block, steps, factors, stats, usual);
        masked(start..unmasked.start);
        gradient_pass::<N, DEGREE, false>(block, unmasked.clone(), factors, stats, usual);
        masked(unmasked.end..end);
    }
}

/// Some groups of keys. `argument(half, score, usual)` is log2 of the weight of a score, usually
/// `usual`.
///
/// # Safety
/// As for [`gradient`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn gradient_pass<N: TileElement, const DEGREE: usize, const MASKED: bool>(
    block: &GradientBlock,
    steps: Range<usize>,
    factors: Factors,
    stats: &QueryStats,
    argument: impl Fn(usize, __m512, __m512) -> __m512,
) {
    let gain = splat(factors.gain);
    // SAFETY: `Lanes` holds 32 values.
    let ([lse, delta], [starts, ends]) = unsafe {
        let keys = [&stats.keys.starts, &stats.keys.ends].map(|keys| keys.0.as_ptr());
        (
            [stats.lse.0.as_ptr(), stats.delta.0.as_ptr()]
                .map(|lanes| [_mm512_load_ps(lanes), _mm512_load_ps(lanes.add(16))]),
            keys.map(|lanes| {
                [
                    _mm512_load_si512(lanes.cast()),
                    _mm512_load_si512(lanes.add(16).cast()),
                ]
            }),
        )
    };
    // Storing truncates weights and their gradients; the bias compensates that in both.
    let lse = lse.map(|lse| {
        let base = _mm512_mul_ps(lse, splat(N::UNIT));
        _mm512_sub_ps(base, splat(N::WEIGHT_BIAS[0]))
    });
    for step in steps {
        let slab = 2 * step * SLAB_BYTES;
        let left = step * block.left_stride;
        let ds_right = block.ds_right.wrapping_add(step * block.right_stride);
        for row in (0..32).step_by(2) {
            // Two keys at a time, because the right factor stores them in pairs.
            let mut keys = [[splat(0.0); 2]; 2];
            for (next, gradients) in keys.iter_mut().enumerate() {
                let row = row + next;
                let mut weights = [splat(0.0); 2];
                for half in 0..2 {
                    let at = slab + half * SLAB_BYTES + row * ROW_BYTES;
                    // SAFETY: the caller's promise.
                    let (score, dp_row) = unsafe {
                        (
                            _mm512_load_ps(block.scores.add(at).cast()),
                            _mm512_load_ps(block.dp.add(at).cast()),
                        )
                    };
                    let usual = exp2_argument::<N>(score, factors.scale, lse[half]);
                    let mut p = exp2::<DEGREE>(argument(half, score, usual));
                    let mut ds = _mm512_mul_ps(p, _mm512_fmsub_ps(dp_row, gain, delta[half]));
                    if MASKED {
                        let key = _mm512_set1_epi32((block.start + 32 * step + row) as i32);
                        let unmasked = _mm512_cmpgt_epi32_mask(ends[half], key);
                        let unmasked = _mm512_mask_cmple_epi32_mask(unmasked, starts[half], key);
                        p = _mm512_maskz_mov_ps(unmasked, p);
                        ds = _mm512_maskz_mov_ps(unmasked, ds);
                    }
                    weights[half] = p;
                    gradients[half] = ds;
                }
                let at = left + row * ROW_BYTES;
                // SAFETY: the caller's promise.
                unsafe { store_splits::<N>(block.weights.wrapping_add(at), weights) };
                // SAFETY: the caller's promise.
                unsafe { store_splits::<N>(block.ds.wrapping_add(at), *gradients) };
            }
            let [first, second] = keys;
            for (half, (first, second)) in first.into_iter().zip(second).enumerate() {
                let at = half * TILE_BYTES + row / 2 * ROW_BYTES;
                // SAFETY: the caller's promise.
                unsafe { store_splits::<N>(ds_right.wrapping_add(at), [first, second]) };
            }
        }
    }
}

/// Stores a row of pairs, one split after the other.
///
/// # Safety
/// The slabs of all splits can be written at `at`, which is aligned to a cache line.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_splits<N: TileElement>(at: *mut u8, [low, high]: [__m512; 2]) {
    for_each_split_pair::<N>(low, high, |split, pairs| {
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_si512(at.add(split * SLAB_BYTES).cast(), pairs) };
    });
}
