//! Packing: rows of q, k, v and dout in the layouts that tile products need.
//!
//! Every function packs 32 rows into consecutive stacks of 32 channels each. Rows may lie anywhere
//! (after packing, dilation no longer matters), there may be fewer than 32 rows, and the last step
//! may have fewer than 32 channels: missing elements are zero. There are four layouts, because
//! tiles cannot be transposed:
//!
//! | function | slabs of step s | used as |
//! |---|---|---|
//! | [`rows`] | 32 rows of 32 channels | left factor, sums over channels |
//! | [`columns`] | 32 channels of 32 rows | left factor, sums over rows |
//! | [`lanes`] | channel pairs by 16 + 16 rows | right factor, sums over channels |
//! | [`pairs`] | row pairs (r, r + 16) by 16 + 16 channels | right factor, sums over rows |

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::bf16;

use super::element::{MAX_SPLITS, TileElement};
use super::huge::HUGE;
use super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES};
use crate::transpose::sixteen_registers;

/// Rows of a pack, and channels of a step.
pub const WIDTH: usize = 32;

/// Up to 32 rows of one head in one segment.
#[derive(Clone, Copy)]
pub struct RowSource<'a, N, F> {
    /// The buffer that holds them.
    pub elements: &'a [N],
    /// Elements in a row.
    pub dim: usize,
    /// The number of rows.
    pub count: usize,
    /// The address of row i in the buffer; a row without one is zero.
    pub address: F,
}

/// The rows of a source, with their addresses resolved.
struct RowPointers<N> {
    at: [*const N; WIDTH],
    /// Bit i: row i has an address.
    present: u32,
    dim: usize,
}

impl<N: TileElement> RowPointers<N> {
    fn new<F: Fn(usize) -> Option<usize>>(source: &RowSource<'_, N, F>) -> RowPointers<N> {
        let mut rows = RowPointers {
            at: [std::ptr::null(); WIDTH],
            present: 0,
            dim: source.dim,
        };
        for i in 0..source.count {
            if let Some(at) = (source.address)(i) {
                rows.at[i] = source.elements[at..at + source.dim].as_ptr();
                rows.present |= 1 << i;
            }
        }
        rows
    }

    /// The number of steps of 32 channels; the last one may be partial.
    fn steps(&self) -> usize {
        self.dim.div_ceil(WIDTH)
    }

    /// Whether all 32 rows are present and a step has 32 channels, so that loads need no mask.
    fn full(&self, step: usize) -> bool {
        self.present == u32::MAX && (step + 1) * WIDTH <= self.dim
    }

    /// Whether [`TileElement::overflows_bf16`] holds for an element of a step.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn overflows_bf16(&self, step: usize) -> bool {
        let mut max_magnitude = _mm512_setzero_si512();
        for (i, at) in self.at.iter().enumerate() {
            if self.present >> i & 1 != 0 {
                let from = at.wrapping_add(step * WIDTH);
                // SAFETY: the mask limits the load to the elements of the row.
                max_magnitude = unsafe { N::max_magnitude(from, self.mask(step), max_magnitude) };
            }
        }
        // SAFETY: the processor has AVX-512, as this function requires.
        unsafe { N::overflows_bf16(max_magnitude) }
    }

    /// Bit i: channel i of a step exists.
    fn mask(&self, step: usize) -> u32 {
        u32::MAX >> (WIDTH - WIDTH.min(self.dim - step * WIDTH))
    }

    /// The splits of the channels of one step of row i.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn splits<const MODE: u8>(&self, i: usize, step: usize) -> [__m512i; MAX_SPLITS] {
        let from = self.at[i].wrapping_add(step * WIDTH);
        if MODE == FULL {
            // SAFETY: the row is present and has 32 channels in this step.
            return unsafe { N::splits::<false>(from, u32::MAX) };
        }
        if self.present >> i & 1 == 0 {
            return [_mm512_setzero_si512(); MAX_SPLITS];
        }
        // SAFETY: the mask limits the load to the elements of the row.
        unsafe {
            match MODE {
                MASKED => N::splits::<false>(from, self.mask(step)),
                _ => N::splits::<true>(from, self.mask(step)),
            }
        }
    }

    /// Stores the splits of all rows of a step, a slab of rows for each.
    ///
    /// # Safety
    /// A stack can be written at `to`, aligned to a cache line.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn split<const MODE: u8>(&self, step: usize, to: *mut u8) {
        for i in 0..WIDTH {
            let splits = self.splits::<MODE>(i, step);
            for (split, elements) in splits.into_iter().enumerate().take(N::SPLITS) {
                // SAFETY: the caller's promise.
                unsafe { put(to.add(split * SLAB_BYTES), i, elements) };
            }
        }
    }

    /// [`RowPointers::split`] in the mode that the step needs.
    ///
    /// # Safety
    /// As for [`RowPointers::split`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn split_step(&self, step: usize, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.overflows_bf16(step) {
                self.split::<CHECKED>(step, to);
            } else if self.full(step) {
                self.split::<FULL>(step, to);
            } else {
                self.split::<MASKED>(step, to);
            }
        }
    }
}

/// How the rows of a step are loaded: without a mask ([`RowPointers::full`]), with a mask, or with
/// a mask and with checks for [`TileElement::overflows_bf16`].
const FULL: u8 = 0;
const MASKED: u8 = 1;
const CHECKED: u8 = 2;

/// The splits of 32 rows of a step, a slab for each.
#[repr(C, align(64))]
struct SplitRows([MaybeUninit<u8>; MAX_SPLITS * SLAB_BYTES]);

/// Calls a function that lays out a slab, for each split of each step. It is given the rows of the
/// split: an element that is its own split comes from memory, others are split once for all of
/// them. Evaluates to the [`Extremes`] of the elements.
macro_rules! each_slab {
    ($rows:ident, $function:ident($to:ident $(, $argument:expr)*)) => {{
        let mut largest = MaxMagnitudes::new();
        for step in 0..$rows.steps() {
            let at = $to.wrapping_add(step * N::STACK_BYTES);
            // SAFETY: the enclosing function has the same contract as the called one.
            largest.merge(unsafe {
                if N::SPLITS > 1 {
                    let mut split = SplitRows([MaybeUninit::uninit(); MAX_SPLITS * SLAB_BYTES]);
                    let split = split.0.as_mut_ptr().cast::<u8>();
                    $rows.split_step(step, split);
                    let row = |i: usize| _mm512_load_si512(split.add(i * ROW_BYTES).cast());
                    let largest = $function(row, at $(, $argument)*);
                    for slab in 1..N::SPLITS {
                        let at_slab = slab * SLAB_BYTES;
                        let row = |i: usize| row(at_slab / ROW_BYTES + i);
                        $function(row, at.wrapping_add(at_slab) $(, $argument)*);
                    }
                    largest
                } else if $rows.full(step) {
                    $function(|i| $rows.splits::<FULL>(i, step)[0], at $(, $argument)*)
                } else {
                    $function(|i| $rows.splits::<MASKED>(i, step)[0], at $(, $argument)*)
                }
            });
        }
        largest.extremes()
    }};
}

/// Which unusually large elements were packed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extremes {
    /// Some of `HUGE` or above, or not finite.
    pub huge: bool,
    /// Some that are not finite.
    pub nonfinite: bool,
}

/// The largest magnitudes in 32 lanes of bf16; infinities and NaN compare larger than all others.
#[derive(Clone, Copy)]
struct MaxMagnitudes(__m512i);

impl MaxMagnitudes {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> MaxMagnitudes {
        MaxMagnitudes(_mm512_setzero_si512())
    }

    /// Without mask registers, because they need the port that the transposition is limited by.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn update(&mut self, elements: __m512i) {
        let size = _mm512_and_si512(elements, _mm512_set1_epi16(i16::MAX));
        self.0 = _mm512_max_epu16(self.0, size);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn merge(&mut self, other: MaxMagnitudes) {
        self.0 = _mm512_max_epu16(self.0, other.0);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn extremes(self) -> Extremes {
        let huge = _mm512_set1_epi16(bf16::from_f32(HUGE).to_bits() as i16);
        Extremes {
            huge: _mm512_cmpge_epu16_mask(self.0, huge) != 0,
            nonfinite: self.nonfinite() != 0,
        }
    }

    /// The lanes with an infinity or a NaN.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn nonfinite(self) -> u32 {
        _mm512_cmpge_epu16_mask(self.0, _mm512_set1_epi16(0x7f80))
    }
}

/// Even words of the result are 16 words of `a`, odd words 16 words of `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(a: __m512i, b: __m512i, index: &[u16; 32]) -> __m512i {
    // SAFETY: the index is 64 bytes long.
    let index = unsafe { _mm512_loadu_si512(index.as_ptr().cast()) };
    _mm512_permutex2var_epi16(a, index, b)
}

/// Word indices for [`interleave`]: of the first 16 words, or of the last 16.
const fn interleave_index(first: u16) -> [u16; 32] {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 16 {
        index[2 * i] = first + i as u16;
        index[2 * i + 1] = 32 + first + i as u16;
        i += 1;
    }
    index
}

static LOW: [u16; 32] = interleave_index(0);
static HIGH: [u16; 32] = interleave_index(16);

/// Stores a row of a tile.
///
/// # Safety
/// The slab at `at` can be written and is aligned to a cache line.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put(at: *mut u8, row: usize, value: __m512i) {
    // SAFETY: the caller's promise.
    unsafe { _mm512_store_si512(at.add(row * ROW_BYTES).cast(), value) };
}

/// Packs rows in their own order.
///
/// # Safety
/// The slabs at `to`, aligned to a cache line, can be written, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn rows<N: TileElement, F: Fn(usize) -> Option<usize>>(
    source: &RowSource<'_, N, F>,
    to: *mut u8,
) -> Extremes {
    let rows = RowPointers::new(source);
    let mut largest = MaxMagnitudes::new();
    for step in 0..rows.steps() {
        let at = to.wrapping_add(step * N::STACK_BYTES);
        // SAFETY: the caller's promise.
        unsafe {
            rows.split_step(step, at);
            for i in 0..WIDTH {
                largest.update(_mm512_load_si512(at.add(i * ROW_BYTES).cast()));
            }
        }
    }
    largest.extremes()
}

/// Packs channels as rows.
///
/// # Safety
/// The slabs at `to`, aligned to a cache line, can be written, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn columns<N: TileElement, F: Fn(usize) -> Option<usize>>(
    source: &RowSource<'_, N, F>,
    to: *mut u8,
) -> Extremes {
    let rows = RowPointers::new(source);
    each_slab!(rows, columns_slab(to))
}

/// # Safety
/// As for [`columns`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn columns_slab(row: impl Fn(usize) -> __m512i, slab: *mut u8) -> MaxMagnitudes {
    let mut magnitudes = MaxMagnitudes::new();
    // Sixteen channels at a time, so that all of them stay in registers.
    for upper in 0..2 {
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let (a, b) = (row(2 * i), row(2 * i + 1));
            // Four channels of every eight, in pairs of rows.
            *r = match upper {
                0 => _mm512_unpacklo_epi16(a, b),
                _ => _mm512_unpackhi_epi16(a, b),
            };
            magnitudes.update(*r);
        }
        sixteen_registers(&mut r);
        for (i, r) in r.into_iter().enumerate() {
            let channel = i / 4 * 8 + upper * 4 + i % 4;
            // SAFETY: the caller's promise.
            unsafe { put(slab, channel, r) };
        }
    }
    magnitudes
}

/// Packs rows as lanes, in pairs of channels, multiplied by the sign of the scale.
///
/// # Safety
/// The slabs at `to`, aligned to a cache line, can be written, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn lanes<N: TileElement, F: Fn(usize) -> Option<usize>>(
    source: &RowSource<'_, N, F>,
    sign: Sign,
    to: *mut u8,
) -> Extremes {
    let rows = RowPointers::new(source);
    each_slab!(rows, lanes_slab(to, sign))
}

/// # Safety
/// As for [`lanes`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn lanes_slab(row: impl Fn(usize) -> __m512i, slab: *mut u8, sign: Sign) -> MaxMagnitudes {
    let (keep, flip) = sign.bit_masks();
    let (keep, flip) = (_mm512_set1_epi16(keep), _mm512_set1_epi16(flip));
    let mut magnitudes = MaxMagnitudes::new();
    for half in 0..2 {
        let tile = slab.wrapping_add(half * TILE_BYTES);
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let elements = row(half * 16 + i);
            *r = _mm512_xor_si512(_mm512_and_si512(elements, keep), flip);
            magnitudes.update(elements);
        }
        sixteen_registers(&mut r);
        for (i, r) in r.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { put(tile, i, r) };
        }
    }
    magnitudes
}

/// Packs rows r and r + 16 in pairs.
///
/// # Safety
/// The slabs at `to`, aligned to a cache line, can be written, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn pairs<N: TileElement, F: Fn(usize) -> Option<usize>>(
    source: &RowSource<'_, N, F>,
    to: *mut u8,
) -> Extremes {
    let rows = RowPointers::new(source);
    each_slab!(rows, pairs_slab(to))
}

/// # Safety
/// As for [`pairs`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pairs_slab(row: impl Fn(usize) -> __m512i, slab: *mut u8) -> MaxMagnitudes {
    let mut magnitudes = MaxMagnitudes::new();
    for r in 0..16 {
        let (a, b) = (row(r), row(r + 16));
        magnitudes.update(a);
        magnitudes.update(b);
        // SAFETY: the caller's promise.
        unsafe {
            put(slab, r, interleave(a, b, &LOW));
            put(slab, 16 + r, interleave(a, b, &HIGH));
        }
    }
    magnitudes
}

/// The sign of the scale, applied to q when it is packed, so that the kernels handle positive
/// scales only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// q is unchanged.
    Plus,
    /// q is negated.
    Minus,
    /// q becomes 0.
    Zero,
}

impl Sign {
    /// The sign of a scale.
    pub fn of(scale: f64) -> Sign {
        match scale {
            x if x > 0.0 => Sign::Plus,
            x if x < 0.0 => Sign::Minus,
            _ => Sign::Zero,
        }
    }

    /// (keep, flip): the masks for `and` and `xor` on 16-bit words.
    fn bit_masks(self) -> (i16, i16) {
        match self {
            Sign::Plus => (-1, 0),
            Sign::Minus => (-1, i16::MIN),
            Sign::Zero => (0, 0),
        }
    }
}

/// Copies slabs with 0 in place of every element that is not finite.
///
/// # Safety
/// `count` slabs can be read at `from` and written at `to`.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn zero_nonfinite(from: *const u8, to: *mut u8, count: usize) {
    for slab in 0..count {
        for row in 0..2 * 16 {
            let at = slab * SLAB_BYTES + row * ROW_BYTES;
            // SAFETY: the caller's promise.
            unsafe {
                let elements = _mm512_load_si512(from.add(at).cast());
                let mut magnitudes = MaxMagnitudes::new();
                magnitudes.update(elements);
                let finite = !magnitudes.nonfinite();
                let elements = _mm512_maskz_mov_epi16(finite, elements);
                _mm512_store_si512(to.add(at).cast(), elements);
            }
        }
    }
}

/// The sums of a slab (32 rows of 16 columns), transposed: rows 0..16 of each column, then 16..32.
///
/// # Safety
/// The slab can be read and is aligned to a cache line.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn transpose_sums(slab: *const u8) -> [[__m512; 16]; 2] {
    let mut halves = [[_mm512_setzero_ps(); 16]; 2];
    for (half, columns) in halves.iter_mut().enumerate() {
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let at = slab.wrapping_add(half * TILE_BYTES + i * ROW_BYTES);
            // SAFETY: the caller's promise.
            *r = unsafe { _mm512_load_si512(at.cast()) };
        }
        sixteen_registers(&mut r);
        for (column, r) in columns.iter_mut().zip(r) {
            *column = _mm512_castsi512_ps(r);
        }
    }
    halves
}
