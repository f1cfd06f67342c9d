//! Rows of q, k, v and dout as the tiles want them.
//!
//! Every function packs 32 rows into stacks of 32 channels each, one behind the other. Rows
//! lie anywhere (that is where dilation ends) and may be fewer than 32, channels fewer than 32 a
//! step: what is missing is zero. There are four forms, because tiles cannot be transposed:
//!
//! | function | slabs of step s | used as |
//! |---|---|---|
//! | [`rows`] | 32 rows of 32 channels | left factor, sums over channels |
//! | [`columns`] | 32 channels of 32 rows | left factor, sums over rows |
//! | [`lanes`] | channel pairs by 16 + 16 rows | right factor, sums over channels |
//! | [`pairs`] | row pairs (r, r + 16) by 16 + 16 channels | right factor, sums over rows |

use std::arch::x86_64::*;

use super::number::Number;
use super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES};
use super::vector::transpose;

/// Rows of a pack, and channels of a step.
pub(crate) const WIDTH: usize = 32;

/// Up to 32 rows of one head in one segment, with an address for each.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a, N, F> {
    /// The buffer they lie in.
    pub numbers: &'a [N],
    /// Numbers in a row.
    pub dim: usize,
    /// How many rows there are.
    pub count: usize,
    /// Where row i lies; None leaves it zero.
    pub address: F,
}

/// The rows of a source, looked up once.
struct Rows<N> {
    at: [*const N; WIDTH],
    /// A bit for each row that is there.
    present: u32,
    dim: usize,
}

impl<N: Number> Rows<N> {
    fn new<F: Fn(usize) -> Option<usize>>(source: &Source<'_, N, F>) -> Rows<N> {
        let mut rows = Rows {
            at: [std::ptr::null(); WIDTH],
            present: 0,
            dim: source.dim,
        };
        for i in 0..source.count {
            if let Some(at) = (source.address)(i) {
                rows.at[i] = source.numbers[at..at + source.dim].as_ptr();
                rows.present |= 1 << i;
            }
        }
        rows
    }

    /// How many steps of 32 channels there are, the last of them perhaps not full.
    fn steps(&self) -> usize {
        self.dim.div_ceil(WIDTH)
    }

    /// Whether every row is there and a step is full: what can be loaded without a mask.
    fn full(&self, step: usize) -> bool {
        self.present == u32::MAX && (step + 1) * WIDTH <= self.dim
    }

    /// Whether a number of a step is [unusual](Number::unusual).
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn unusual(&self, step: usize) -> bool {
        let mut largest = _mm512_setzero_si512();
        for (i, at) in self.at.iter().enumerate() {
            if self.present >> i & 1 != 0 {
                let from = at.wrapping_add(step * WIDTH);
                // SAFETY: the mask reads the numbers of the row and nothing behind them.
                largest = unsafe { N::largest(from, self.mask(step), largest) };
            }
        }
        // SAFETY: the vectors are there.
        unsafe { N::unusual(largest) }
    }

    /// A bit for each channel of a step.
    fn mask(&self, step: usize) -> u32 {
        u32::MAX >> (WIDTH - WIDTH.min(self.dim - step * WIDTH))
    }

    /// A piece of the channels of one step of row i.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn load<const HOW: u8, const PIECE: usize>(&self, i: usize, step: usize) -> __m512i {
        let from = self.at[i].wrapping_add(step * WIDTH);
        if HOW == FULL {
            // SAFETY: the row is there, and so are 32 channels of the step.
            return unsafe { N::load::<PIECE, false>(from, u32::MAX) };
        }
        if self.present >> i & 1 == 0 {
            return _mm512_setzero_si512();
        }
        // SAFETY: the mask reads the numbers of the row and nothing behind them.
        unsafe {
            match HOW {
                PART => N::load::<PIECE, false>(from, self.mask(step)),
                _ => N::load::<PIECE, true>(from, self.mask(step)),
            }
        }
    }
}

/// How a step is read: without a mask ([`Rows::full`]), with one, or minding
/// [unusual](Number::unusual) numbers, too.
const FULL: u8 = 0;
const PART: u8 = 1;
const CAREFUL: u8 = 2;

/// Calls a function that makes a slab for each piece of each step, in its version for what the step
/// is like.
macro_rules! each_slab {
    ($rows:ident, $function:ident($to:ident $(, $argument:expr)*)) => {{
        let mut odd = 0;
        for step in 0..$rows.steps() {
            let at = $to.wrapping_add(step * N::STACK);
            // SAFETY: the caller of the function around this promises what these ask for.
            odd |= unsafe {
                if $rows.unusual(step) {
                    each_slab!(@ CAREFUL, $function(&$rows, step, at $(, $argument)*))
                } else if $rows.full(step) {
                    each_slab!(@ FULL, $function(&$rows, step, at $(, $argument)*))
                } else {
                    each_slab!(@ PART, $function(&$rows, step, at $(, $argument)*))
                }
            };
        }
        odd
    }};
    (@ $how:ident, $function:ident($rows:expr, $step:ident, $at:ident $(, $argument:expr)*)) => {{
        let odd = $function::<N, $how, 0>($rows, $step, $at $(, $argument)*);
        if N::PIECES > 1 {
            let second = $at.wrapping_add(SLAB_BYTES);
            $function::<N, $how, 1>($rows, $step, second $(, $argument)*);
        }
        if N::PIECES > 2 {
            let third = $at.wrapping_add(2 * SLAB_BYTES);
            $function::<N, $how, 2>($rows, $step, third $(, $argument)*);
        }
        odd
    }};
}

/// The largest absolute values seen in 32 places; infinities and NaN are larger than the rest.
#[derive(Clone, Copy)]
struct Sizes(__m512i);

impl Sizes {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Sizes {
        Sizes(_mm512_setzero_si512())
    }

    /// Without masks, because those need the port that transposing is waiting for.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn note(&mut self, numbers: __m512i) {
        let size = _mm512_and_si512(numbers, _mm512_set1_epi16(i16::MAX));
        self.0 = _mm512_max_epu16(self.0, size);
    }

    /// The places where an infinity or a NaN was seen.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn broken(self) -> u32 {
        _mm512_cmpge_epu16_mask(self.0, _mm512_set1_epi16(0x7f80))
    }
}

/// Even words of the result come from 16 words of `a`, odd ones from those of `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleave(a: __m512i, b: __m512i, index: &[u16; 32]) -> __m512i {
    // SAFETY: the index is 64 bytes long.
    let index = unsafe { _mm512_loadu_si512(index.as_ptr().cast()) };
    _mm512_permutex2var_epi16(a, index, b)
}

/// Word numbers for [`interleave`]: from the first 16 words or the last.
const fn words(first: u16) -> [u16; 32] {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 16 {
        index[2 * i] = first + i as u16;
        index[2 * i + 1] = 32 + first + i as u16;
        i += 1;
    }
    index
}

static LOW: [u16; 32] = words(0);
static HIGH: [u16; 32] = words(16);

/// Stores a row of a tile.
///
/// # Safety
/// The slab at `at` can be written and begins at a cache line.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put(at: *mut u8, row: usize, value: __m512i) {
    // SAFETY: the caller's promise.
    unsafe { _mm512_store_si512(at.add(row * ROW_BYTES).cast(), value) };
}

/// Rows as they lie. Returns whether any number is not finite.
///
/// # Safety
/// The slabs at `to`, a cache line, can be written, and the processor has the vectors.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn rows<N: Number, F: Fn(usize) -> Option<usize>>(
    source: &Source<'_, N, F>,
    to: *mut u8,
) -> bool {
    let rows = Rows::new(source);
    each_slab!(rows, rows_step(to)) != 0
}

/// # Safety
/// As for [`rows`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn rows_step<N: Number, const HOW: u8, const PIECE: usize>(
    rows: &Rows<N>,
    step: usize,
    slab: *mut u8,
) -> u32 {
    let mut sizes = Sizes::new();
    for i in 0..WIDTH {
        let numbers = rows.load::<HOW, PIECE>(i, step);
        sizes.note(numbers);
        // SAFETY: the caller's promise.
        unsafe { put(slab, i, numbers) };
    }
    sizes.broken()
}

/// Channels as rows. Returns whether any number is not finite.
///
/// # Safety
/// The slabs at `to`, a cache line, can be written, and the processor has the vectors.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn columns<N: Number, F: Fn(usize) -> Option<usize>>(
    source: &Source<'_, N, F>,
    to: *mut u8,
) -> bool {
    let rows = Rows::new(source);
    each_slab!(rows, columns_step(to)) != 0
}

/// # Safety
/// As for [`columns`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn columns_step<N: Number, const HOW: u8, const PIECE: usize>(
    rows: &Rows<N>,
    step: usize,
    slab: *mut u8,
) -> u32 {
    let mut sizes = Sizes::new();
    // Sixteen channels at a time, so that everything stays in registers.
    for upper in 0..2 {
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let (a, b) = (
                rows.load::<HOW, PIECE>(2 * i, step),
                rows.load::<HOW, PIECE>(2 * i + 1, step),
            );
            // Four channels of every eight, in pairs of rows.
            *r = match upper {
                0 => _mm512_unpacklo_epi16(a, b),
                _ => _mm512_unpackhi_epi16(a, b),
            };
            sizes.note(*r);
        }
        transpose(&mut r);
        for (i, r) in r.into_iter().enumerate() {
            let channel = i / 4 * 8 + upper * 4 + i % 4;
            // SAFETY: the caller's promise.
            unsafe { put(slab, channel, r) };
        }
    }
    sizes.broken()
}

/// Rows as lanes, in pairs of channels, with the sign of the scale.
///
/// # Safety
/// The slabs at `to`, a cache line, can be written, and the processor has the vectors.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn lanes<N: Number, F: Fn(usize) -> Option<usize>>(
    source: &Source<'_, N, F>,
    sign: Sign,
    to: *mut u8,
) {
    let rows = Rows::new(source);
    each_slab!(rows, lanes_step(to, sign));
}

/// # Safety
/// As for [`lanes`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn lanes_step<N: Number, const HOW: u8, const PIECE: usize>(
    rows: &Rows<N>,
    step: usize,
    slab: *mut u8,
    sign: Sign,
) -> u32 {
    let (keep, flip) = sign.words();
    let (keep, flip) = (_mm512_set1_epi16(keep), _mm512_set1_epi16(flip));
    for half in 0..2 {
        let tile = slab.wrapping_add(half * TILE_BYTES);
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let numbers = rows.load::<HOW, PIECE>(half * 16 + i, step);
            *r = _mm512_xor_si512(_mm512_and_si512(numbers, keep), flip);
        }
        transpose(&mut r);
        for (i, r) in r.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { put(tile, i, r) };
        }
    }
    0
}

/// Rows r and r + 16 in pairs. Returns whether any number is not finite.
///
/// # Safety
/// The slabs at `to`, a cache line, can be written, and the processor has the vectors.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn pairs<N: Number, F: Fn(usize) -> Option<usize>>(
    source: &Source<'_, N, F>,
    to: *mut u8,
) -> bool {
    let rows = Rows::new(source);
    each_slab!(rows, pairs_step(to)) != 0
}

/// # Safety
/// As for [`pairs`].
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pairs_step<N: Number, const HOW: u8, const PIECE: usize>(
    rows: &Rows<N>,
    step: usize,
    slab: *mut u8,
) -> u32 {
    let mut sizes = Sizes::new();
    for r in 0..16 {
        let (a, b) = (
            rows.load::<HOW, PIECE>(r, step),
            rows.load::<HOW, PIECE>(r + 16, step),
        );
        sizes.note(a);
        sizes.note(b);
        // SAFETY: the caller's promise.
        unsafe {
            put(slab, r, interleave(a, b, &LOW));
            put(slab, 16 + r, interleave(a, b, &HIGH));
        }
    }
    sizes.broken()
}

/// What the sign of the scale does to q, so that kernels need to know positive scales only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    /// Nothing.
    Plus,
    /// Every number changes its sign.
    Minus,
    /// Every number becomes 0.
    Zero,
}

impl Sign {
    /// The sign of a scale.
    pub(crate) fn of(scale: f64) -> Sign {
        match scale {
            x if x > 0.0 => Sign::Plus,
            x if x < 0.0 => Sign::Minus,
            _ => Sign::Zero,
        }
    }

    /// (keep, flip) for words.
    fn words(self) -> (i16, i16) {
        match self {
            Sign::Plus => (-1, 0),
            Sign::Minus => (-1, i16::MIN),
            Sign::Zero => (0, 0),
        }
    }
}

/// Copies slabs with 0 in place of every number that is not finite.
///
/// # Safety
/// `count` slabs can be read at `from` and written at `to`.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn clean(from: *const u8, to: *mut u8, count: usize) {
    for slab in 0..count {
        for row in 0..2 * 16 {
            let at = slab * SLAB_BYTES + row * ROW_BYTES;
            // SAFETY: the caller's promise.
            unsafe {
                let numbers = _mm512_load_si512(from.add(at).cast());
                let mut sizes = Sizes::new();
                sizes.note(numbers);
                let finite = !sizes.broken();
                let numbers = _mm512_maskz_mov_epi16(finite, numbers);
                _mm512_store_si512(to.add(at).cast(), numbers);
            }
        }
    }
}

/// The sums of a slab (32 rows of 16 columns) by columns: rows 0..16 of each, then 16..32.
///
/// # Safety
/// The slab can be read and begins at a cache line.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn transpose_sums(slab: *const u8) -> [[__m512; 16]; 2] {
    let mut halves = [[_mm512_setzero_ps(); 16]; 2];
    for (half, columns) in halves.iter_mut().enumerate() {
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let at = slab.wrapping_add(half * TILE_BYTES + i * ROW_BYTES);
            // SAFETY: the caller's promise.
            *r = unsafe { _mm512_load_si512(at.cast()) };
        }
        transpose(&mut r);
        for (column, r) in columns.iter_mut().zip(r) {
            *column = _mm512_castsi512_ps(r);
        }
    }
    halves
}
