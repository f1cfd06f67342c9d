//! The running softmax of one tile of queries over one block of keys.
//!
//! Lanes are queries. A pair of score rows (two keys, f32) makes one row of pairs (bf16) for each
//! piece of a weight. Where weights have one piece only, it stays where the first of the two was.

use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;

use super::number::{Number, Scale, each_pair, power};
use super::shape::Shape;
use super::tiles::{ROW_BYTES, SLAB_BYTES};
use super::vector::{exp2, splat};

/// One number for each of 32 queries.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Lanes<A>(pub [A; 32]);

/// The softmax of 32 queries, and what they see.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Running {
    /// The largest score times scale, minus infinity at first.
    pub m: Lanes<f32>,
    /// The sum of weights.
    pub l: Lanes<f32>,
    /// How many keys each query sees.
    pub visible: Lanes<i32>,
}

/// What sums of a tile must be multiplied with before they grow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rescale {
    /// Whether any factor differs from 1.
    pub needed: bool,
    /// The factors.
    pub factors: Lanes<f32>,
}

impl Rescale {
    /// Nothing to do.
    pub(crate) const NONE: Rescale = Rescale {
        needed: false,
        factors: Lanes([1.0; 32]),
    };
}

/// A block of scores on its way to become weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// Slabs (32 keys by 16 queries): for each 32 keys one of queries 0..16 and one of 16..32.
    pub scores: *mut u8,
    /// Where weights go, as [`Number::WEIGHTS`] says.
    pub weights: *mut u8,
    /// How many times 32 keys there are.
    pub steps: usize,
    /// The number of the first key.
    pub start: usize,
    /// Whether some query does not see all keys of the block.
    pub masked: bool,
}

/// All lanes.
pub(crate) const EVERY: u32 = !0;

/// Turns scores into weights relative to the new maximum, in lanes that `look` for one (bit by
/// bit), and to the old one in the others.
///
/// # Safety
/// The slabs of the block can be read and written, and the processor has the vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(crate) unsafe fn softmax<N: Number, S: Shape>(
    block: &Block,
    scale: Scale,
    running: &mut Running,
    look: u32,
) -> Rescale {
    let lowest = splat(f32::NEG_INFINITY);
    let mut rescale = Rescale::NONE;
    for half in 0..2 {
        let lane = 16 * half;
        // SAFETY: lanes are 32 numbers; the slabs are the caller's promise.
        unsafe {
            let old_m = _mm512_load_ps(running.m.0.as_ptr().add(lane));
            let top = if block.masked {
                let visible = _mm512_load_si512(running.visible.0.as_ptr().add(lane).cast());
                largest_masked(block, half, visible)
            } else {
                largest(block, half)
            };
            // Of two operands the second is taken where one is NaN: it never becomes a maximum.
            let m = _mm512_max_ps(_mm512_mul_ps(top, splat(scale.natural)), old_m);
            let m = _mm512_mask_mov_ps(old_m, (look >> lane) as u16, m);
            let nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(m, lowest);
            // A lane that has seen nothing subtracts 0: minus infinity minus itself is NaN.
            let base = _mm512_mask_mov_ps(base_of::<N>(m), nothing, splat(0.0));
            let sum = weights::<N, S>(block, half, scale, base);
            let risen = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(m, old_m);
            let l = _mm512_load_ps(running.l.0.as_ptr().add(lane));
            let mut factor = splat(1.0);
            if risen != 0 {
                let risen_by = _mm512_sub_ps(base_of::<N>(old_m), base);
                let power = _mm512_mul_ps(risen_by, splat(LOG2_E / N::UNIT));
                factor = _mm512_mask_mov_ps(factor, risen, exp2::<5>(power));
                rescale.needed = true;
                _mm512_store_ps(running.m.0.as_mut_ptr().add(lane), m);
            }
            _mm512_store_ps(rescale.factors.0.as_mut_ptr().add(lane), factor);
            let l = _mm512_fmadd_ps(l, factor, sum);
            _mm512_store_ps(running.l.0.as_mut_ptr().add(lane), l);
        }
    }
    rescale
}

/// The same without a look at the maximum: weights stay relative to the old one, which is as good
/// as long as they stay small. Returns the lanes that have to look, because they have no maximum
/// yet or because their weights have grown too large (or are no numbers). If there are any,
/// `running` is as it was, and so are scores unless weights take their place. What a lane has to do
/// depends on its own scores alone, so no query has a part in the bits of another.
///
/// # Safety
/// As for [`softmax`]; every query sees every key of the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(crate) unsafe fn onward<N: Number, S: Shape>(
    block: &Block,
    scale: Scale,
    running: &mut Running,
) -> u32 {
    // Far from where sums of weights times values could overflow sooner than they must.
    const LARGE: f32 = 65536.0;
    // SAFETY: lanes are 32 numbers; the slabs are the caller's promise.
    unsafe {
        let m = running.m.0.as_ptr();
        let m = [_mm512_load_ps(m), _mm512_load_ps(m.add(16))];
        let lowest = splat(f32::NEG_INFINITY);
        let both = |masks: [u16; 2]| u32::from(masks[0]) | u32::from(masks[1]) << 16;
        let started = both(m.map(|m| _mm512_cmp_ps_mask::<_CMP_GT_OQ>(m, lowest)));
        if started == 0 {
            return EVERY;
        }
        let sum = |half: usize| weights::<N, S>(block, half, scale, base_of::<N>(m[half]));
        let sums = [sum(0), sum(1)];
        let small = both(sums.map(|sum| _mm512_cmp_ps_mask::<_CMP_LT_OQ>(sum, splat(LARGE))));
        if started & small != EVERY {
            return !(started & small);
        }
        let l = running.l.0.as_mut_ptr();
        for (half, sum) in sums.into_iter().enumerate() {
            let l = l.add(16 * half);
            _mm512_store_ps(l, _mm512_add_ps(_mm512_load_ps(l), sum));
        }
        0
    }
}

/// The slab of 32 keys and 16 queries.
#[inline(always)]
fn slab(block: &Block, step: usize, half: usize) -> *mut u8 {
    block.scores.wrapping_add((2 * step + half) * SLAB_BYTES)
}

/// The largest score of each lane.
///
/// # Safety
/// As for [`softmax`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn largest(block: &Block, half: usize) -> __m512 {
    let mut top = [splat(f32::NEG_INFINITY); 8];
    for step in 0..block.steps {
        let slab = slab(block, step, half);
        for row in 0..32 {
            // SAFETY: the caller's promise.
            let score = unsafe { _mm512_load_ps(slab.add(row * ROW_BYTES).cast()) };
            top[row % 8] = _mm512_max_ps(score, top[row % 8]);
        }
    }
    for width in [4, 2, 1] {
        for i in 0..width {
            top[i] = _mm512_max_ps(top[i], top[i + width]);
        }
    }
    top[0]
}

/// The same where not every query sees every key: what is hidden becomes minus infinity.
///
/// # Safety
/// As for [`softmax`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn largest_masked(block: &Block, half: usize, visible: __m512i) -> __m512 {
    let lowest = splat(f32::NEG_INFINITY);
    let mut top = lowest;
    for step in 0..block.steps {
        let slab = slab(block, step, half);
        for row in 0..32 {
            let key = _mm512_set1_epi32((block.start + 32 * step + row) as i32);
            let seen = _mm512_cmpgt_epi32_mask(visible, key);
            // SAFETY: the caller's promise.
            unsafe {
                let at = slab.add(row * ROW_BYTES).cast();
                let score = _mm512_mask_mov_ps(lowest, seen, _mm512_load_ps(at));
                _mm512_store_ps(at, score);
                top = _mm512_max_ps(score, top);
            }
        }
    }
    top
}

/// What weights are relative to, as [`power`] subtracts it.
#[inline]
#[target_feature(enable = "avx512f")]
fn base_of<N: Number>(m: __m512) -> __m512 {
    _mm512_mul_ps(m, splat(N::UNIT))
}

/// Weights of scores, relative to `base`; returns their sums, taken before rounding.
///
/// # Safety
/// As for [`softmax`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
unsafe fn weights<N: Number, S: Shape>(
    block: &Block,
    half: usize,
    scale: Scale,
    base: __m512,
) -> __m512 {
    // Four sums, because an addition takes as long as a pair of rows; variables and not an array,
    // because the loop is not unrolled and arrays with an index live in memory.
    let (mut a, mut b, mut c, mut d) = (splat(0.0), splat(0.0), splat(0.0), splat(0.0));
    let base = _mm512_sub_ps(base, splat(N::LIFT[0]));
    let weight = |score| exp2_of::<S>(power::<N>(score, scale, base));
    for step in 0..block.steps {
        let slab = slab(block, step, half);
        let to = step * N::WEIGHTS.step + half * N::WEIGHTS.half;
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
                    let to = to.add((2 * row + i) * N::WEIGHTS.row);
                    each_pair::<N>(low, high, |piece, pairs| {
                        _mm512_store_si512(to.add(piece * SLAB_BYTES).cast(), pairs);
                    });
                }
            }
        }
    }
    let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
    _mm512_mul_ps(sum, splat(N::LIFT[1]))
}

/// The exponential of the shape's degree.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn exp2_of<S: Shape>(x: __m512) -> __m512 {
    match S::DEGREE {
        3 => exp2::<3>(x),
        4 => exp2::<4>(x),
        _ => exp2::<5>(x),
    }
}

/// Multiplies sums (slabs of 32 channels by 16 queries) with the factors of their lanes.
///
/// # Safety
/// `slabs` slabs can be read and written from `sums` on, queries 0..16 and 16..32 in turn.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn multiply_sums(sums: *mut u8, slabs: usize, rescale: &Rescale) {
    // SAFETY: lanes are 32 numbers, sums are the caller's promise.
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
