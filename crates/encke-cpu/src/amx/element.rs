//! Element types of the tile kernels, split into bf16 for multiplication.
//!
//! A bf16 is one split. An f32 has 24 significant bits and a bf16 has 8, so three splits hold it
//! exactly: the nearest bf16, the bf16 nearest to the remainder, and the rest. Of the nine products
//! of the splits of two f32, six are computed; the other three together are at most 2⁻²² of the
//! whole, seldom near that, and of either sign. The tiles multiply sixteen times as fast as the
//! vectors, so six products take less than half the time of one in f32, and their sums are rounded
//! once for 32 terms instead of once for each. An f16 is two splits, and all four products are
//! computed.
//!
//! The first split of a non-finite element is the element itself, the others are 0. So a sum with
//! an infinite term may be NaN where a sum in f32 would be infinite: infinity times a split that is
//! 0.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;

use encke_core::dtype::Slice;
use encke_core::{Element, with_typed};
use half::{bf16, f16};

use super::config::{self, AmxBackwardConfig, AmxForwardConfig};
use super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES, TileProduct, TileUnit};
use super::vector::{TRUNCATION_BIAS_INVERSE, TRUNCATION_BIAS_LOG2, splat};

/// Layout of the weights: bytes from one group of 32 keys to the next, from queries 0..16 to
/// 16..32, and from one pair of keys to the next.
#[derive(Debug, Clone, Copy)]
pub struct WeightStrides {
    /// From one group of 32 keys to the next.
    pub step: usize,
    /// From queries 0..16 to queries 16..32.
    pub half: usize,
    /// From one pair of keys to the next.
    pub row: usize,
}

/// The positive scale of the scores of a job.
#[derive(Debug, Clone, Copy)]
pub struct ScoreScale {
    /// For e to the power of a score.
    pub natural: f32,
    /// Times log2 e, for 2 to the power of a score.
    pub binary: f32,
}

impl ScoreScale {
    /// From the factor of q·k; packing has applied its sign to q.
    pub fn new(scale: f64) -> ScoreScale {
        let size = if scale == 0.0 { 1.0 } else { scale.abs() };
        ScoreScale {
            natural: size as f32,
            binary: (size * std::f64::consts::LOG2_E) as f32,
        }
    }
}

/// The most bf16 that an element is split into.
pub const MAX_SPLITS: usize = 3;

/// An element type that the tiles multiply.
pub trait TileElement: Element {
    /// How many bf16 one element is split into.
    const SPLITS: usize;
    /// Bytes of a stack: 32 by 32 elements, one slab for each split.
    const STACK_BYTES: usize = Self::SPLITS * SLAB_BYTES;
    /// Layout of the weights of a block: stacks, unless they are stored in place of their scores.
    const WEIGHT_STRIDES: WeightStrides = WeightStrides {
        step: Self::STACK_BYTES,
        half: TILE_BYTES,
        row: ROW_BYTES,
    };
    /// Whether weights are stored in place of their scores.
    const IN_PLACE: bool = Self::SPLITS == 1;
    /// Whether the row max is subtracted before the multiplication by log2 e, so that the part
    /// common to both is not rounded.
    const EXACT: bool = false;
    /// The factor of a row max or an lse before `exp2_argument` subtracts it.
    const UNIT: f32 = if Self::EXACT { 1.0 } else { LOG2_E };
    /// Truncation makes weights smaller on average; this log2 factor makes them larger beforehand,
    /// and the second value undoes it in their sum.
    const WEIGHT_BIAS: [f32; 2] = [0.0, 1.0];

    /// Configuration for head dimensions up to `SMALL_DIM_MAX`.
    type SmallDim: AmxForwardConfig + AmxBackwardConfig;
    /// Configuration for larger head dimensions.
    type LargeDim: AmxForwardConfig + AmxBackwardConfig;

    /// The elements of a slice, if they are of this type.
    fn of_slice(slice: Slice<'_>) -> Option<&[Self]> {
        (slice.dtype() == Self::DTYPE)
            .then(|| with_typed!(Slice, slice, x => bytemuck::cast_slice(x)))
    }

    /// The splits of each of 32 elements. `CHECKED` is required if
    /// [`overflows_bf16`](TileElement::overflows_bf16) holds for one of them.
    ///
    /// # Safety
    /// The elements of `mask` can be read at `from`, and the processor has AVX-512.
    unsafe fn splits<const CHECKED: bool>(from: *const Self, mask: u32) -> [__m512i; MAX_SPLITS];

    /// The lane-wise maximum of the magnitudes of 32 elements and `so_far` (initially zero), for
    /// [`TileElement::overflows_bf16`].
    ///
    /// # Safety
    /// As for [`TileElement::splits`].
    unsafe fn max_magnitude(from: *const Self, mask: u32, so_far: __m512i) -> __m512i;

    /// Whether one of these magnitudes belongs to an element that is not finite, or so large that
    /// its nearest bf16 may be infinite.
    ///
    /// # Safety
    /// The processor has AVX-512.
    unsafe fn overflows_bf16(max_magnitude: __m512i) -> bool;

    /// A product of two stacks.
    ///
    /// # Safety
    /// As for [`TileUnit::multiply`].
    #[inline(always)]
    unsafe fn multiply<T: TileUnit, const ADD: bool>(product: TileProduct) {
        // SAFETY: the caller's promise.
        unsafe {
            match Self::SPLITS {
                1 => T::multiply::<ADD, 1>(product),
                2 => T::multiply::<ADD, 2>(product),
                _ => T::multiply::<ADD, 3>(product),
            }
        }
    }
}

impl TileElement for bf16 {
    const SPLITS: usize = 1;
    const WEIGHT_STRIDES: WeightStrides = WeightStrides {
        step: 2 * SLAB_BYTES,
        half: SLAB_BYTES,
        row: 2 * ROW_BYTES,
    };
    const WEIGHT_BIAS: [f32; 2] = [TRUNCATION_BIAS_LOG2, TRUNCATION_BIAS_INVERSE];
    type SmallDim = config::Dim64Split1;
    type LargeDim = config::Dim128Split1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn splits<const CHECKED: bool>(from: *const bf16, mask: u32) -> [__m512i; MAX_SPLITS] {
        // SAFETY: the caller's promise.
        let elements = unsafe {
            match mask {
                u32::MAX => _mm512_loadu_si512(from.cast()),
                _ => _mm512_maskz_loadu_epi16(mask, from.cast()),
            }
        };
        [elements; MAX_SPLITS]
    }

    /// A bf16 is its own split, also if it is not finite.
    #[inline(always)]
    unsafe fn max_magnitude(_: *const bf16, _: u32, so_far: __m512i) -> __m512i {
        so_far
    }

    #[inline(always)]
    unsafe fn overflows_bf16(_: __m512i) -> bool {
        false
    }
}

impl TileElement for f16 {
    const SPLITS: usize = 2;
    type SmallDim = config::MultiSplit;
    type LargeDim = config::MultiSplit;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn splits<const CHECKED: bool>(from: *const f16, mask: u32) -> [__m512i; MAX_SPLITS] {
        // SAFETY: the caller's promise.
        let elements = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
        splits_of::<CHECKED>([
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<0>(elements)),
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(elements)),
        ])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn max_magnitude(from: *const f16, mask: u32, so_far: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
        let size = _mm512_and_si512(bits, _mm512_set1_epi16(i16::MAX));
        _mm512_max_epu16(so_far, size)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn overflows_bf16(max_magnitude: __m512i) -> bool {
        let infinity = _mm512_set1_epi16(f16::INFINITY.to_bits() as i16);
        _mm512_cmpge_epu16_mask(max_magnitude, infinity) != 0
    }
}

impl TileElement for f32 {
    const SPLITS: usize = 3;
    const EXACT: bool = true;
    type SmallDim = config::MultiSplit;
    type LargeDim = config::MultiSplit;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn splits<const CHECKED: bool>(from: *const f32, mask: u32) -> [__m512i; MAX_SPLITS] {
        // SAFETY: the caller's promise.
        let halves = unsafe {
            [
                _mm512_maskz_loadu_ps(mask as u16, from),
                _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16)),
            ]
        };
        splits_of::<CHECKED>(halves)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn max_magnitude(from: *const f32, mask: u32, so_far: __m512i) -> __m512i {
        let sizes = [0, 16].map(|half| {
            let (from, mask) = (from.wrapping_add(half), (mask >> half) as u16);
            // SAFETY: the caller's promise.
            let bits = unsafe { _mm512_maskz_loadu_epi32(mask, from.cast()) };
            // Magnitudes of floats are ordered like their bits.
            _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX))
        });
        _mm512_max_epu32(so_far, _mm512_max_epu32(sizes[0], sizes[1]))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn overflows_bf16(max_magnitude: __m512i) -> bool {
        _mm512_cmpge_epu32_mask(
            max_magnitude,
            _mm512_set1_epi32(OVERFLOW_THRESHOLD.to_bits() as i32),
        ) != 0
    }
}

/// log2 of a weight: score times scale, minus `base`, in units of log2.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp2_argument<N: TileElement>(score: __m512, scale: ScoreScale, base: __m512) -> __m512 {
    if !N::EXACT {
        return _mm512_fmsub_ps(score, splat(scale.binary), base);
    }
    let difference = _mm512_fmsub_ps(score, splat(scale.natural), base);
    _mm512_mul_ps(difference, splat(LOG2_E))
}

/// A row max or lse of this size or above is large: [`exp2_argument`] subtracts it, rounded, from a
/// score that is not, which leaves about a unit in its last place. That is 2⁻¹¹ here; for a base of
/// 10¹⁰ it is 10³, and a weight is infinite or 0.
pub const LARGE_SCORE: f32 = 4096.0;

/// Lanes whose weights [`LargeLanes::exp2_argument`] computes.
#[derive(Clone, Copy)]
pub struct LargeLanes {
    /// Which lanes.
    mask: u16,
    /// The scale of the scores of each lane.
    scale: __m512,
    /// The row max or lse of each lane.
    base: __m512,
}

impl LargeLanes {
    /// The lanes whose base is large, and those of the bit mask `scaled`, whose scores already
    /// include the scale; for all other scores it is `scale`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn new(base: __m512, scale: __m512, scaled: u16) -> LargeLanes {
        let size = _mm512_abs_ps(base);
        let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(size, splat(f32::INFINITY));
        let large = _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(finite, size, splat(LARGE_SCORE));
        LargeLanes {
            mask: large | scaled,
            scale,
            base,
        }
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.mask != 0
    }

    /// `usual`, but in the large lanes log2 of a weight computed from the rounded score: the score
    /// that is the row max gives exactly 0, whatever its size.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn exp2_argument<N: TileElement>(&self, score: __m512, usual: __m512) -> __m512 {
        let argument = self.difference(_mm512_mul_ps(score, self.scale), N::WEIGHT_BIAS[0]);
        _mm512_mask_mov_ps(usual, self.mask, argument)
    }

    /// `usual`, but in the large lanes log2 of the factor that rescales sums relative to `old`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn rescale_argument(&self, old: __m512, usual: __m512) -> __m512 {
        _mm512_mask_mov_ps(usual, self.mask, self.difference(old, 0.0))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn difference(&self, score: __m512, bias: f32) -> __m512 {
        _mm512_fmadd_ps(_mm512_sub_ps(score, self.base), splat(LOG2_E), splat(bias))
    }
}

/// The splits of each of 32 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn splits_of<const CHECKED: bool>(halves: [__m512; 2]) -> [__m512i; MAX_SPLITS] {
    let [low, high] = halves.map(|elements| {
        let nearest = match CHECKED {
            true => round_to_bf16_checked(elements),
            false => round_to_bf16(elements),
        };
        let mut rest = _mm512_sub_ps(elements, nearest);
        if CHECKED {
            let size = _mm512_abs_ps(elements);
            let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(size, splat(f32::INFINITY));
            rest = _mm512_maskz_mov_ps(finite, rest);
        }
        let second = round_to_bf16(rest);
        // The third split fits a bf16.
        [nearest, second, _mm512_sub_ps(rest, second)]
    });
    // SAFETY: the index is 64 bytes long.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    let pair = |split: usize| {
        let [low, high] = [low, high].map(|splits| _mm512_castps_si512(splits[split]));
        _mm512_permutex2var_epi16(low, upper, high)
    };
    [pair(0), pair(1), pair(2)]
}

/// Indices of the upper words of 32 double words.
static UPPER: [u16; 32] = {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 32 {
        index[i] = 2 * i as u16 + 1;
        i += 1;
    }
    index
};

/// From 2¹²⁷ on the nearest bf16 may be infinite.
const OVERFLOW_THRESHOLD: f32 = 1.701_411_8e38;
/// Half a unit in the last place of a bf16.
const HALF: i32 = 0x8000;

/// The nearest bf16, ties away from zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_to_bf16(elements: __m512) -> __m512 {
    let bits = _mm512_add_epi32(_mm512_castps_si512(elements), _mm512_set1_epi32(HALF));
    truncate_to_bf16(_mm512_castsi512_ps(bits))
}

/// [`round_to_bf16`], but large values, which could overflow, are truncated, and a NaN stays a NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_to_bf16_checked(elements: __m512) -> __m512 {
    const QUIET: i32 = 0x40_0000;
    let bits = _mm512_castps_si512(elements);
    let in_range =
        _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(elements), splat(OVERFLOW_THRESHOLD));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(elements, elements);
    let bits = _mm512_mask_add_epi32(bits, in_range, bits, _mm512_set1_epi32(HALF));
    let bits = _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(QUIET));
    truncate_to_bf16(_mm512_castsi512_ps(bits))
}

/// The nearest bf16 towards zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn truncate_to_bf16(elements: __m512) -> __m512 {
    let upper = _mm512_set1_epi32(-0x1_0000);
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(elements), upper))
}

/// Calls `put` with the splits of two vectors in pairs, the first vector in the low halves. Splits
/// are truncated here, which loses nothing as long as the splits of the other factor are rounded.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn for_each_split_pair<N: TileElement>(
    mut low: __m512,
    mut high: __m512,
    mut put: impl FnMut(usize, __m512i),
) {
    for split in 0..N::SPLITS {
        put(split, super::vector::pair(low, high));
        if split + 1 < N::SPLITS {
            low = _mm512_sub_ps(low, truncate_to_bf16(low));
            high = _mm512_sub_ps(high, truncate_to_bf16(high));
        }
    }
}

/// sums = rows · lanes for `key_steps` groups of 32 keys: the products of keys, packed as rows,
/// with 32 queries, packed as lanes.
///
/// # Safety
/// As for [`TileUnit::multiply`], for all groups.
#[inline]
pub unsafe fn multiply_keys<T: TileUnit, N: TileElement>(
    rows: *const u8,
    lanes: *const u8,
    sums: *mut u8,
    channel_steps: usize,
    key_steps: usize,
) {
    for step in 0..key_steps {
        let sums = sums.wrapping_add(2 * step * SLAB_BYTES);
        // SAFETY: the caller's promise.
        unsafe {
            N::multiply::<T, false>(TileProduct {
                a: rows.wrapping_add(step * channel_steps * N::STACK_BYTES),
                a_step: N::STACK_BYTES,
                b: [lanes, lanes.wrapping_add(TILE_BYTES)],
                b_step: N::STACK_BYTES,
                b_row: ROW_BYTES,
                c: [sums, sums.wrapping_add(SLAB_BYTES)],
                steps: channel_steps,
            });
        }
    }
}
