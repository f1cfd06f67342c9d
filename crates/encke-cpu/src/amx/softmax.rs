//! The online softmax of one tile of queries over one block of keys.
//!
//! Lanes are queries. Two rows of scores (two keys, f32) become one row of bf16 pairs for each
//! split of the weights. If weights have only one split, it overwrites the first of the two rows.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::config::AmxForwardConfig;
use super::element::{
    LARGE_SCORE, LargeLanes, ScoreScale, TileElement, exp2_argument, for_each_split_pair,
};
use super::tiles::{ROW_BYTES, SLAB_BYTES};
use super::vector::{exp2, splat};

/// Keys of a group: rows of a slab.
const SLAB_ROWS: usize = SLAB_BYTES / ROW_BYTES;

/// One value for each of 32 queries.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Lanes<A>(pub [A; 32]);

/// The keys that are visible to each of 32 queries: from `starts` on, before `ends`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct VisibleKeys {
    /// The first visible key; 0 if there is none.
    pub starts: Lanes<i32>,
    /// One past the last visible key; 0 if there is none.
    pub ends: Lanes<i32>,
}

impl VisibleKeys {
    /// The keys `of(lane)` for each lane.
    pub fn new(of: impl Fn(usize) -> Range<usize>) -> VisibleKeys {
        let mut keys = VisibleKeys {
            starts: Lanes([0; 32]),
            ends: Lanes([0; 32]),
        };
        for lane in 0..32 {
            let visible = of(lane);
            if !visible.is_empty() {
                keys.starts.0[lane] = visible.start as i32;
                keys.ends.0[lane] = visible.end as i32;
            }
        }
        keys
    }

    /// Whether a lane sees a key.
    pub fn sees(&self, lane: usize, key: usize) -> bool {
        (self.starts.0[lane] as usize..self.ends.0[lane] as usize).contains(&key)
    }

    /// The first key that some lane sees and one past the last; then the same of the keys that all
    /// lanes see.
    pub fn bounds(&self) -> [KeyBounds; 2] {
        let mut some = KeyBounds {
            start: usize::MAX,
            end: 0,
        };
        let mut all = KeyBounds {
            start: 0,
            end: usize::MAX,
        };
        for (&start, &end) in self.starts.0.iter().zip(&self.ends.0) {
            let (start, end) = (start as usize, end as usize);
            if start < end {
                some.start = some.start.min(start);
                some.end = some.end.max(end);
            }
            all.start = all.start.max(start);
            all.end = all.end.min(end);
        }
        [some, all]
    }
}

/// Keys from `start` on, before `end`; none if that is not after `start`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct KeyBounds {
    /// The first key.
    pub start: usize,
    /// One past the last key.
    pub end: usize,
}

impl KeyBounds {
    /// Whether one of these keys is in a range.
    pub fn meets(&self, keys: Range<usize>) -> bool {
        self.start < keys.end && keys.start < self.end
    }

    /// Whether all keys of a range are among these.
    pub fn cover(&self, keys: Range<usize>) -> bool {
        self.start <= keys.start && keys.end <= self.end
    }
}

/// The softmax state of 32 queries, and the keys that are visible to each.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct TileSoftmax {
    /// The row max: the largest score times scale, initially minus infinity.
    pub m: Lanes<f32>,
    /// The sum of weights.
    pub l: Lanes<f32>,
    /// The keys that are visible to each query.
    pub keys: VisibleKeys,
}

/// The factors that rescale the sums of a tile to a new row max.
#[derive(Debug, Clone, Copy)]
pub struct Rescale {
    /// Whether a factor differs from 1.
    pub needed: bool,
    /// The factor of each query.
    pub factors: Lanes<f32>,
}

impl Rescale {
    /// No rescaling.
    pub const NONE: Rescale = Rescale {
        needed: false,
        factors: Lanes([1.0; 32]),
    };
}

/// A block of scores, and where its weights are stored.
#[derive(Debug, Clone, Copy)]
pub struct ScoreBlock {
    /// Slabs of 32 keys by 16 queries: for each 32 keys, one of queries 0..16 and one of 16..32.
    pub scores: *mut u8,
    /// The destination of the weights, laid out as [`TileElement::WEIGHT_STRIDES`].
    pub weights: *mut u8,
    /// The number of groups of 32 keys.
    pub steps: usize,
    /// The index of the first key.
    pub start: usize,
    /// The keys that every query sees.
    pub common: KeyBounds,
}

impl ScoreBlock {
    /// Whether some key of the block is hidden from some query.
    pub fn masked(&self) -> bool {
        !self
            .common
            .cover(self.start..self.start + self.steps * SLAB_ROWS)
    }
}

/// A mask of all 32 lanes.
pub const ALL_LANES: u32 = !0;

/// Turns scores into weights: relative to the new row max in the lanes of the bit mask
/// `new_max_lanes`, and relative to the old one in the others. The scores of `scaled_lanes` include
/// the scale already.
///
/// # Safety
/// The slabs of the block can be read and written, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub unsafe fn softmax<N: TileElement, S: AmxForwardConfig>(
    block: &ScoreBlock,
    scale: ScoreScale,
    state: &mut TileSoftmax,
    new_max_lanes: u32,
    scaled_lanes: u32,
) -> Rescale {
    let lowest = splat(f32::NEG_INFINITY);
    let mut rescale = Rescale::NONE;
    for half in 0..2 {
        let lane = 16 * half;
        // SAFETY: `Lanes` holds 32 values; the slabs are the caller's promise.
        unsafe {
            let old_m = _mm512_load_ps(state.m.0.as_ptr().add(lane));
            let top = if block.masked() {
                let keys = [&state.keys.starts, &state.keys.ends];
                let keys = keys.map(|of| _mm512_load_si512(of.0.as_ptr().add(lane).cast()));
                masked_row_max(block, half, keys)
            } else {
                row_max(block, half)
            };
            let scaled = (scaled_lanes >> lane) as u16;
            let natural = _mm512_mask_mov_ps(splat(scale.natural), scaled, splat(1.0));
            // `max` returns its second operand if one is NaN, so a NaN never becomes the row max.
            let m = _mm512_max_ps(_mm512_mul_ps(top, natural), old_m);
            let m = _mm512_mask_mov_ps(old_m, (new_max_lanes >> lane) as u16, m);
            let nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(m, lowest);
            // A lane without visible keys subtracts 0: minus infinity minus itself is NaN.
            let top = _mm512_mask_mov_ps(m, nothing, splat(0.0));
            let large = LargeLanes::new(top, natural, scaled);
            let base = biased_base_of::<N>(top);
            let usual = |score| exp2_argument::<N>(score, scale, base);
            let sum = match large.any() {
                false => weights::<N, S>(block, half, usual),
                true => weights::<N, S>(block, half, |score| {
                    large.exp2_argument::<N>(score, usual(score))
                }),
            };
            let risen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(m, old_m);
            let l = _mm512_load_ps(state.l.0.as_ptr().add(lane));
            let mut factor = splat(1.0);
            if risen != 0 {
                let risen_by = _mm512_sub_ps(base_of::<N>(old_m), base_of::<N>(top));
                let power = _mm512_mul_ps(risen_by, splat(LOG2_E / N::UNIT));
                let power = large.rescale_argument(old_m, power);
                factor = _mm512_mask_mov_ps(factor, risen, exp2::<5>(power));
                rescale.needed = true;
                _mm512_store_ps(state.m.0.as_mut_ptr().add(lane), m);
            }
            _mm512_store_ps(rescale.factors.0.as_mut_ptr().add(lane), factor);
            let l = _mm512_fmadd_ps(l, factor, sum);
            _mm512_store_ps(state.l.0.as_mut_ptr().add(lane), l);
        }
    }
    rescale
}

/// Turns scores into weights relative to the old row max, without computing a new one. That is as
/// accurate as long as the weights stay small. Returns the lanes that need a new row max, because
/// they have none yet or because their weights are too large or NaN; if there are any, `state` is
/// unchanged, and so are the scores unless weights overwrite them. Lanes with a large row max, and
/// the `scaled_lanes` of [`softmax`], always need a new one. Which path a lane takes depends on its
/// own scores alone, so no query affects the bits of another.
///
/// # Safety
/// As for [`softmax`]; every key of the block is visible to every query.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub unsafe fn softmax_keep_max<N: TileElement, S: AmxForwardConfig>(
    block: &ScoreBlock,
    scale: ScoreScale,
    state: &mut TileSoftmax,
    scaled_lanes: u32,
) -> u32 {
    // Small enough that sums of weights times values do not overflow earlier than they must.
    const LARGE: f32 = 65536.0;
    // SAFETY: `Lanes` holds 32 values; the slabs are the caller's promise.
    unsafe {
        let m = state.m.0.as_ptr();
        let m = [_mm512_load_ps(m), _mm512_load_ps(m.add(16))];
        let both = |masks: [u16; 2]| u32::from(masks[0]) | u32::from(masks[1]) << 16;
        // Lanes that have not started have a row max of minus infinity.
        let usual = |m| _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_abs_ps(m), splat(LARGE_SCORE));
        let started = both(m.map(usual)) & !scaled_lanes;
        if started == 0 {
            return ALL_LANES;
        }
        let sum = |half: usize| {
            let base = biased_base_of::<N>(m[half]);
            weights::<N, S>(block, half, |score| exp2_argument::<N>(score, scale, base))
        };
        let sums = [sum(0), sum(1)];
        let small = both(sums.map(|sum| _mm512_cmp_ps_mask::<_CMP_LT_OQ>(sum, splat(LARGE))));
        if started & small != ALL_LANES {
            return !(started & small);
        }
        let l = state.l.0.as_mut_ptr();
        for (half, sum) in sums.into_iter().enumerate() {
            let l = l.add(16 * half);
            _mm512_store_ps(l, _mm512_add_ps(_mm512_load_ps(l), sum));
        }
        0
    }
}

/// The slab of 32 keys and 16 queries.
#[inline(always)]
fn slab(block: &ScoreBlock, step: usize, half: usize) -> *mut u8 {
    block.scores.wrapping_add((2 * step + half) * SLAB_BYTES)
}

/// The largest score of each lane.
///
/// # Safety
/// As for [`softmax`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn row_max(block: &ScoreBlock, half: usize) -> __m512 {
    let mut top = [splat(f32::NEG_INFINITY); 8];
    for step in 0..block.steps {
        // SAFETY: the caller's promise.
        unsafe { slab_max(slab(block, step, half), &mut top) };
    }
    largest(top)
}

/// Raises `top` to the scores of one slab.
///
/// # Safety
/// The slab can be read, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn slab_max(slab: *const u8, top: &mut [__m512; 8]) {
    for row in 0..32 {
        // SAFETY: the caller's promise.
        let score = unsafe { _mm512_load_ps(slab.add(row * ROW_BYTES).cast()) };
        top[row % 8] = _mm512_max_ps(score, top[row % 8]);
    }
}

/// The largest of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest(mut top: [__m512; 8]) -> __m512 {
    for width in [4, 2, 1] {
        for i in 0..width {
            top[i] = _mm512_max_ps(top[i], top[i + width]);
        }
    }
    top[0]
}

/// [`row_max`] with a mask: hidden scores become minus infinity, in memory too.
///
/// # Safety
/// As for [`softmax`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn masked_row_max(block: &ScoreBlock, half: usize, [starts, ends]: [__m512i; 2]) -> __m512 {
    let lowest = splat(f32::NEG_INFINITY);
    let mut top = [lowest; 8];
    for step in 0..block.steps {
        let slab = slab(block, step, half);
        let start = block.start + SLAB_ROWS * step;
        if block.common.cover(start..start + SLAB_ROWS) {
            // SAFETY: the caller's promise.
            unsafe { slab_max(slab, &mut top) };
            continue;
        }
        for row in 0..SLAB_ROWS {
            let key = _mm512_set1_epi32((start + row) as i32);
            let unmasked = _mm512_cmpgt_epi32_mask(ends, key);
            let unmasked = _mm512_mask_cmple_epi32_mask(unmasked, starts, key);
            // SAFETY: the caller's promise.
            unsafe {
                let at = slab.add(row * ROW_BYTES).cast();
                let score = _mm512_mask_mov_ps(lowest, unmasked, _mm512_load_ps(at));
                _mm512_store_ps(at, score);
                top[row % 8] = _mm512_max_ps(score, top[row % 8]);
            }
        }
    }
    largest(top)
}

/// The row max in the unit that [`exp2_argument`] subtracts.
#[inline]
#[target_feature(enable = "avx512f")]
fn base_of<N: TileElement>(m: __m512) -> __m512 {
    _mm512_mul_ps(m, splat(N::UNIT))
}

/// [`base_of`], less the log2 factor that makes weights larger before they are truncated.
#[inline]
#[target_feature(enable = "avx512f")]
fn biased_base_of<N: TileElement>(m: __m512) -> __m512 {
    _mm512_sub_ps(base_of::<N>(m), splat(N::WEIGHT_BIAS[0]))
}

/// Computes the weights of scores, given `argument`, log2 of the weight of a score. Returns their
/// sums, taken before rounding.
///
/// # Safety
/// As for [`softmax`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn weights<N: TileElement, S: AmxForwardConfig>(
    block: &ScoreBlock,
    half: usize,
    argument: impl Fn(__m512) -> __m512,
) -> __m512 {
    // Four sums, because an addition has the latency of a pair of rows; variables and not an array,
    // because the loop is not unrolled and an indexed array would live in memory.
    let (mut a, mut b, mut c, mut d) = (splat(0.0), splat(0.0), splat(0.0), splat(0.0));
    let weight = |score| exp2_of::<S>(argument(score));
    for step in 0..block.steps {
        let slab = slab(block, step, half);
        let to = step * N::WEIGHT_STRIDES.step + half * N::WEIGHT_STRIDES.half;
        let to = block.weights.wrapping_add(to);
        for row in 0..8 {
            // SAFETY: the caller's promise.
            unsafe {
                let at = slab.add(4 * row * ROW_BYTES).cast::<f32>();
                let first = weight(_mm512_load_ps(at));
                let second = weight(_mm512_load_ps(at.add(16)));
                let third = weight(_mm512_load_ps(at.add(32)));
                let fourth = weight(_mm512_load_ps(at.add(48)));
                a = _mm512_add_ps(a, first);
                b = _mm512_add_ps(b, second);
                c = _mm512_add_ps(c, third);
                d = _mm512_add_ps(d, fourth);
                for (i, [low, high]) in [[first, second], [third, fourth]].into_iter().enumerate() {
                    let to = to.add((2 * row + i) * N::WEIGHT_STRIDES.row);
                    for_each_split_pair::<N>(low, high, |split, pairs| {
                        _mm512_store_si512(to.add(split * SLAB_BYTES).cast(), pairs);
                    });
                }
            }
        }
    }
    let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    _mm512_mul_ps(sum, splat(N::WEIGHT_BIAS[1]))
}

/// 2 to the power of `x` with the configuration's polynomial degree.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2_of<S: AmxForwardConfig>(x: __m512) -> __m512 {
    match S::EXP_DEGREE {
        3 => exp2::<3>(x),
        4 => exp2::<4>(x),
        _ => exp2::<5>(x),
    }
}

/// Multiplies sums (slabs of 32 channels by 16 queries) by the factors of their queries.
///
/// # Safety
/// `slabs` slabs can be read and written from `sums` on, alternately of queries 0..16 and 16..32.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn rescale_sums(sums: *mut u8, slabs: usize, rescale: &Rescale) {
    // SAFETY: `Lanes` holds 32 values; the slabs are the caller's promise.
    unsafe {
        let factors = rescale.factors.0.as_ptr();
        let factors = [_mm512_load_ps(factors), _mm512_load_ps(factors.add(16))];
        for slab in 0..slabs {
            let at = sums.add(slab * SLAB_BYTES).cast::<f32>();
            for row in 0..32 {
                let at = at.add(16 * row);
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factors[slab % 2]));
            }
        }
    }
}
