//! From scores and dout·v to weights and their gradients, for 32 queries and a block of keys.
//!
//! Lanes are queries. Weights are stored once, as left factor of dv; their gradients twice, as
//! left factor of dk and as right factor of dq, because tiles cannot be transposed. All three are
//! blends of two vectors: two halves of the queries for the first two, two keys for the third.

use std::arch::x86_64::*;

use super::number::{Number, Scale, each_pair, power};
use super::softmax::Lanes;
use super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES};
use super::vector::{exp2, splat};

/// What is known of 32 queries.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Known {
    /// The lse, in the unit that [`power`] subtracts.
    pub lse: Lanes<f32>,
    /// dout·out − dlse.
    pub delta: Lanes<f32>,
    /// How many keys each query sees: none, if its lse says so.
    pub visible: Lanes<i32>,
}

/// A block on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// Slabs of scores and of dout·v: for each 32 keys one of queries 0..16 and one of 16..32.
    pub scores: *const u8,
    pub products: *const u8,
    /// How many times 32 keys there are.
    pub steps: usize,
    /// The number of the first key.
    pub start: usize,
    /// Whether some query does not see all keys of the block.
    pub masked: bool,
    /// Weights and gradients as left factors: for each 32 keys a slab, so many bytes apart.
    pub weights: *mut u8,
    pub gradients: *mut u8,
    pub left_stride: usize,
    /// Gradients as right factors: for each 32 keys a slab, so many bytes apart.
    pub turned: *mut u8,
    pub right_stride: usize,
}

/// Factors that all pairs of a job share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Factors {
    pub scale: Scale,
    pub gain: f32,
}

/// Computes weights and gradients of a block.
///
/// # Safety
/// The slabs of the block can be read and written, and the processor has the vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(crate) unsafe fn gradient<N: Number, const DEGREE: usize>(
    block: &Block,
    factors: Factors,
    known: &Known,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if block.masked {
            pass::<N, DEGREE, true>(block, factors, known);
        } else {
            pass::<N, DEGREE, false>(block, factors, known);
        }
    }
}

/// # Safety
/// As for [`gradient`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn pass<N: Number, const DEGREE: usize, const MASKED: bool>(
    block: &Block,
    factors: Factors,
    known: &Known,
) {
    let gain = splat(factors.gain);
    // SAFETY: lanes are 32 numbers.
    let ([lse, delta], visible) = unsafe {
        let visible = known.visible.0.as_ptr();
        (
            [known.lse.0.as_ptr(), known.delta.0.as_ptr()]
                .map(|lanes| [_mm512_load_ps(lanes), _mm512_load_ps(lanes.add(16))]),
            [
                _mm512_load_si512(visible.cast()),
                _mm512_load_si512(visible.add(16).cast()),
            ],
        )
    };
    // Weights, and with them their gradients, are lifted because storing them cuts.
    let lse = lse.map(|lse| _mm512_sub_ps(lse, splat(N::LIFT[0])));
    for step in 0..block.steps {
        let slab = 2 * step * SLAB_BYTES;
        let left = step * block.left_stride;
        let turned = block.turned.wrapping_add(step * block.right_stride);
        for row in (0..32).step_by(2) {
            // Two keys at a time, because the right factor pairs them.
            let mut keys = [[splat(0.0); 2]; 2];
            for (next, gradients) in keys.iter_mut().enumerate() {
                let row = row + next;
                let mut weights = [splat(0.0); 2];
                for half in 0..2 {
                    let at = slab + half * SLAB_BYTES + row * ROW_BYTES;
                    // SAFETY: the caller's promise.
                    let (score, product) = unsafe {
                        (
                            _mm512_load_ps(block.scores.add(at).cast()),
                            _mm512_load_ps(block.products.add(at).cast()),
                        )
                    };
                    let mut p = exp2::<DEGREE>(power::<N>(score, factors.scale, lse[half]));
                    let mut ds = _mm512_mul_ps(p, _mm512_fmsub_ps(product, gain, delta[half]));
                    if MASKED {
                        let key = _mm512_set1_epi32((block.start + 32 * step + row) as i32);
                        let seen = _mm512_cmpgt_epi32_mask(visible[half], key);
                        p = _mm512_maskz_mov_ps(seen, p);
                        ds = _mm512_maskz_mov_ps(seen, ds);
                    }
                    weights[half] = p;
                    gradients[half] = ds;
                }
                let at = left + row * ROW_BYTES;
                // SAFETY: the caller's promise.
                unsafe { put::<N>(block.weights.wrapping_add(at), weights) };
                // SAFETY: the caller's promise.
                unsafe { put::<N>(block.gradients.wrapping_add(at), *gradients) };
            }
            let [first, second] = keys;
            for (half, (first, second)) in first.into_iter().zip(second).enumerate() {
                let at = half * TILE_BYTES + row / 2 * ROW_BYTES;
                // SAFETY: the caller's promise.
                unsafe { put::<N>(turned.wrapping_add(at), [first, second]) };
            }
        }
    }
}

/// Stores a row of pairs, piece by piece.
///
/// # Safety
/// The slabs of all pieces can be written at `at`, a cache line.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put<N: Number>(at: *mut u8, [low, high]: [__m512; 2]) {
    each_pair::<N>(low, high, |piece, pairs| {
        // SAFETY: the caller's promise.
        unsafe { _mm512_store_si512(at.add(piece * SLAB_BYTES).cast(), pairs) };
    });
}
