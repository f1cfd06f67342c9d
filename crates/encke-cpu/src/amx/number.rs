//! Numbers as the tiles multiply them: in pieces that are bf16.
//!
//! A bf16 is one piece. An f32 has 24 significant bits where a bf16 has 8, so three of them hold it
//! exactly: the nearest bf16, the nearest to what is left, and what is left then. Of the nine
//! products of the pieces of two numbers six are computed; the other three together are at most 2⁻²²
//! of the whole, seldom near that, and of either sign. The tiles multiply sixteen times as fast as the
//! vectors do, so six products take less than half the time of one in f32, and their sums are
//! rounded once for 32 terms instead of once for each. An f16 is two pieces, of which all four
//! products are computed.
//!
//! What is not finite is its own first piece, and has no others. So a sum that sees an infinity may
//! be NaN where a sum in f32 would be infinite: an infinity times a piece that is 0.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;

use encke_core::DType;
use encke_core::dtype::Slice;
use half::{bf16, f16};

use super::shape::{self, BackwardShape, Shape};
use super::tiles::{Product, ROW_BYTES, SLAB_BYTES, TILE_BYTES, Tiles};
use super::vector::{LIFT, LOWER, splat};

/// Where weights lie: bytes from one 32 keys to the next, from queries 0..16 to 16..32, and from
/// one pair of keys to the next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strides {
    pub step: usize,
    pub half: usize,
    pub row: usize,
}

/// The positive scale of a job, and the same for powers of 2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub natural: f32,
    pub binary: f32,
}

impl Scale {
    /// From what q·k is multiplied with; its sign has gone into q.
    pub(crate) fn new(scale: f64) -> Scale {
        let size = if scale == 0.0 { 1.0 } else { scale.abs() };
        Scale {
            natural: size as f32,
            binary: (size * std::f64::consts::LOG2_E) as f32,
        }
    }
}

/// A type of numbers that tiles multiply.
pub(crate) trait Number: Copy + Send + Sync + 'static {
    /// What it is called elsewhere.
    const DTYPE: DType;
    /// How many bf16 it takes.
    const PIECES: usize;
    /// Bytes of a stack: 32 by 32 numbers, a slab for each piece, one behind the other.
    const STACK: usize = Self::PIECES * SLAB_BYTES;
    /// Where the weights of a block lie: in stacks, if not in the place of their scores.
    const WEIGHTS: Strides = Strides {
        step: Self::STACK,
        half: TILE_BYTES,
        row: ROW_BYTES,
    };
    /// Whether they take the place of their scores.
    const IN_PLACE: bool = Self::PIECES == 1;
    /// Whether a difference of scores is taken before it is made a power of 2, so that what is common
    /// to both is not rounded.
    const EXACT: bool = false;
    /// What a maximum or an lse is multiplied with before [`power`] subtracts it.
    const UNIT: f32 = if Self::EXACT { 1.0 } else { LOG2_E };
    /// By how much weights are made larger because cutting makes them smaller, in powers of 2, and
    /// what undoes it.
    const LIFT: [f32; 2] = [0.0, 1.0];

    /// Sizes for up to [`MOST_OF_SHORT`](shape::MOST_OF_SHORT) channels, and for more.
    type Short: Shape + BackwardShape;
    type Long: Shape + BackwardShape;

    /// The numbers of a buffer, where they are of this type.
    fn of(numbers: Slice<'_>) -> Option<&[Self]>;

    /// One piece of each of 32 numbers; `CAREFUL` where one of them is [unusual](Number::unusual).
    ///
    /// # Safety
    /// Those of `mask` can be read at `from`, and the processor has the vectors.
    unsafe fn load<const PIECE: usize, const CAREFUL: bool>(
        from: *const Self,
        mask: u32,
    ) -> __m512i;

    /// The larger sizes of 32 numbers and of those seen `so_far` (none: zero), for
    /// [`Number::unusual`].
    ///
    /// # Safety
    /// As for [`Number::load`].
    unsafe fn largest(from: *const Self, mask: u32, so_far: __m512i) -> __m512i;

    /// Whether one of these sizes is that of a number which is not finite, or so large that its
    /// nearest bf16 may not be.
    ///
    /// # Safety
    /// The processor has the vectors.
    unsafe fn unusual(largest: __m512i) -> bool;

    /// A product of factors that are stacks.
    ///
    /// # Safety
    /// As for [`Tiles::multiply`].
    #[inline(always)]
    unsafe fn multiply<T: Tiles, const ADD: bool>(product: Product) {
        // SAFETY: the caller's promise.
        unsafe {
            match Self::PIECES {
                1 => T::multiply::<ADD, 1>(product),
                2 => T::multiply::<ADD, 2>(product),
                _ => T::multiply::<ADD, 3>(product),
            }
        }
    }
}

impl Number for bf16 {
    const DTYPE: DType = DType::Bf16;
    const PIECES: usize = 1;
    const WEIGHTS: Strides = Strides {
        step: 2 * SLAB_BYTES,
        half: SLAB_BYTES,
        row: 2 * ROW_BYTES,
    };
    const LIFT: [f32; 2] = [LIFT, LOWER];
    type Short = shape::Short;
    type Long = shape::Long;

    fn of(numbers: Slice<'_>) -> Option<&[bf16]> {
        match numbers {
            Slice::Bf16(numbers) => Some(numbers),
            _ => None,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load<const PIECE: usize, const CAREFUL: bool>(
        from: *const bf16,
        mask: u32,
    ) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe {
            match mask {
                u32::MAX => _mm512_loadu_si512(from.cast()),
                _ => _mm512_maskz_loadu_epi16(mask, from.cast()),
            }
        }
    }

    /// It is its own piece, whatever it is.
    #[inline(always)]
    unsafe fn largest(_: *const bf16, _: u32, so_far: __m512i) -> __m512i {
        so_far
    }

    #[inline(always)]
    unsafe fn unusual(_: __m512i) -> bool {
        false
    }
}

impl Number for f16 {
    const DTYPE: DType = DType::F16;
    const PIECES: usize = 2;
    type Short = shape::Wide;
    type Long = shape::Wide;

    fn of(numbers: Slice<'_>) -> Option<&[f16]> {
        match numbers {
            Slice::F16(numbers) => Some(numbers),
            _ => None,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load<const PIECE: usize, const CAREFUL: bool>(
        from: *const f16,
        mask: u32,
    ) -> __m512i {
        // SAFETY: the caller's promise.
        let numbers = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
        pieces::<PIECE, CAREFUL>([
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<0>(numbers)),
            _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(numbers)),
        ])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn largest(from: *const f16, mask: u32, so_far: __m512i) -> __m512i {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
        let size = _mm512_and_si512(bits, _mm512_set1_epi16(i16::MAX));
        _mm512_max_epu16(so_far, size)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unusual(largest: __m512i) -> bool {
        let infinity = _mm512_set1_epi16(f16::INFINITY.to_bits() as i16);
        _mm512_cmpge_epu16_mask(largest, infinity) != 0
    }
}

impl Number for f32 {
    const DTYPE: DType = DType::F32;
    const PIECES: usize = 3;
    const EXACT: bool = true;
    type Short = shape::Wide;
    type Long = shape::Wide;

    fn of(numbers: Slice<'_>) -> Option<&[f32]> {
        match numbers {
            Slice::F32(numbers) => Some(numbers),
            _ => None,
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load<const PIECE: usize, const CAREFUL: bool>(
        from: *const f32,
        mask: u32,
    ) -> __m512i {
        // SAFETY: the caller's promise.
        let halves = unsafe {
            [
                _mm512_maskz_loadu_ps(mask as u16, from),
                _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16)),
            ]
        };
        pieces::<PIECE, CAREFUL>(halves)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn largest(from: *const f32, mask: u32, so_far: __m512i) -> __m512i {
        let sizes = [0, 16].map(|half| {
            let (from, mask) = (from.wrapping_add(half), (mask >> half) as u16);
            // SAFETY: the caller's promise.
            let bits = unsafe { _mm512_maskz_loadu_epi32(mask, from.cast()) };
            // Without their signs numbers are in the order of their bits.
            _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX))
        });
        _mm512_max_epu32(so_far, _mm512_max_epu32(sizes[0], sizes[1]))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unusual(largest: __m512i) -> bool {
        _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(HUGE.to_bits() as i32)) != 0
    }
}

/// The power of 2 that a weight is: of score times scale, less `base`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn power<N: Number>(score: __m512, scale: Scale, base: __m512) -> __m512 {
    if !N::EXACT {
        return _mm512_fmsub_ps(score, splat(scale.binary), base);
    }
    let difference = _mm512_fmsub_ps(score, splat(scale.natural), base);
    _mm512_mul_ps(difference, splat(LOG2_E))
}

/// One piece of each of 32 numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pieces<const PIECE: usize, const CAREFUL: bool>(halves: [__m512; 2]) -> __m512i {
    let [low, high] = halves.map(|numbers| {
        let mut rest = numbers;
        for piece in 0..PIECE {
            let nearest = match CAREFUL && piece == 0 {
                true => nearest_with_care(rest),
                false => nearest(rest),
            };
            rest = _mm512_sub_ps(rest, nearest);
        }
        if CAREFUL && PIECE > 0 {
            let size = _mm512_abs_ps(numbers);
            let finite = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(size, splat(f32::INFINITY));
            rest = _mm512_maskz_mov_ps(finite, rest);
        }
        // The upper words are taken, so that nothing has to be cut off; a third piece has no more.
        match (PIECE, CAREFUL) {
            (0, true) => _mm512_castps_si512(nearest_with_care(rest)),
            (2, _) => _mm512_castps_si512(rest),
            _ => _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(HALF)),
        }
    });
    // SAFETY: the index is 64 bytes long.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    _mm512_permutex2var_epi16(low, upper, high)
}

/// Numbers of the upper words of 32 double words.
static UPPER: [u16; 32] = {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 32 {
        index[i] = 2 * i as u16 + 1;
        i += 1;
    }
    index
};

/// From here on a number may have no nearest bf16 that is finite: 2¹²⁷.
const HUGE: f32 = 1.701_411_8e38;
/// Half of the last place of a bf16.
const HALF: i32 = 0x8000;

/// The nearest bf16, ties away from zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn nearest(numbers: __m512) -> __m512 {
    let bits = _mm512_add_epi32(_mm512_castps_si512(numbers), _mm512_set1_epi32(HALF));
    cut(_mm512_castsi512_ps(bits))
}

/// The same; towards zero where there might be none, and a NaN for a NaN.
#[inline]
#[target_feature(enable = "avx512f")]
fn nearest_with_care(numbers: __m512) -> __m512 {
    const QUIET: i32 = 0x40_0000;
    let bits = _mm512_castps_si512(numbers);
    let usual = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(numbers), splat(HUGE));
    let broken = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(numbers, numbers);
    let bits = _mm512_mask_add_epi32(bits, usual, bits, _mm512_set1_epi32(HALF));
    let bits = _mm512_mask_or_epi32(bits, broken, bits, _mm512_set1_epi32(QUIET));
    cut(_mm512_castsi512_ps(bits))
}

/// The bf16 that is nearest towards zero.
#[inline]
#[target_feature(enable = "avx512f")]
fn cut(numbers: __m512) -> __m512 {
    let upper = _mm512_set1_epi32(-0x1_0000);
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(numbers), upper))
}

/// Calls `put` with pairs of the pieces of two vectors, of which the first is the low half. Pieces
/// are cut off, which is as exact as taking the nearest as long as the other factor does that.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn each_pair<N: Number>(
    mut low: __m512,
    mut high: __m512,
    mut put: impl FnMut(usize, __m512i),
) {
    for piece in 0..N::PIECES {
        put(piece, super::vector::pair(low, high));
        if piece + 1 < N::PIECES {
            low = _mm512_sub_ps(low, cut(low));
            high = _mm512_sub_ps(high, cut(high));
        }
    }
}
