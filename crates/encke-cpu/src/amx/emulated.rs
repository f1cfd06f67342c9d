//! Tiles in plain Rust, for machines without them: tests run everything but assembly on these.
//!
//! The same memory, the same pairs and, as far as it is documented, the same order of sums.

use super::detect;
use super::tiles::{Product, ROW_BYTES, SLAB_BYTES, TILE_BYTES, Tiles, products};

/// Tiles that are arrays.
#[derive(Debug)]
pub(crate) struct Emulated;

/// A tile of f32 numbers.
type Sums = [[f32; 16]; 16];

/// Widens a bf16 as the tiles do: what is too small to be normal counts as zero.
fn widen(bits: u32) -> f32 {
    let exponent = bits & 0x7f80;
    f32::from_bits(if exponent == 0 { bits & 0x8000 } else { bits } << 16)
}

/// Row `row` of a tile as 16 pairs of numbers.
///
/// # Safety
/// The 64 bytes at `tile + row` can be read.
unsafe fn pairs(tile: *const u8, row: usize) -> [[f32; 16]; 2] {
    // SAFETY: the caller's promise; a row may lie anywhere.
    let words: [u32; 16] = unsafe { tile.add(row).cast::<[u32; 16]>().read_unaligned() };
    [
        words.map(|word| widen(word & 0xffff)),
        words.map(|word| widen(word >> 16)),
    ]
}

impl Emulated {
    /// sums += a · b, even numbers of a pair apart from odd ones until the end of the step.
    ///
    /// # Safety
    /// Both tiles can be read.
    unsafe fn step(a: *const u8, b: *const u8, b_row: usize, sums: &mut Sums) {
        // SAFETY: the caller's promise.
        let b: [[[f32; 16]; 2]; 16] = std::array::from_fn(|r| unsafe { pairs(b, r * b_row) });
        for (m, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let [even, odd] = unsafe { pairs(a, m * ROW_BYTES) };
            let mut partial = [[0.0f32; 16]; 2];
            for (k, b) in b.iter().enumerate() {
                for n in 0..16 {
                    partial[0][n] += even[k] * b[0][n];
                    partial[1][n] += odd[k] * b[1][n];
                }
            }
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum += partial[0][n] + partial[1][n];
            }
        }
    }
}

impl Tiles for Emulated {
    const NAME: &'static str = "emulated";

    fn available() -> bool {
        detect::vectors()
    }

    unsafe fn configure() {}

    unsafe fn release() {}

    unsafe fn multiply<const ADD: bool, const PIECES: usize>(product: Product) {
        for half in 0..2 {
            for column in 0..2 {
                let c = product.c[column].wrapping_add(half * TILE_BYTES);
                let c = c.cast::<Sums>();
                let mut sums = if ADD {
                    // SAFETY: the caller vouches for the sums.
                    unsafe { c.read_unaligned() }
                } else {
                    [[0.0; 16]; 16]
                };
                for step in 0..product.steps {
                    let a = product
                        .a
                        .wrapping_add(step * product.a_step + half * TILE_BYTES);
                    let b = product.b[column].wrapping_add(step * product.b_step);
                    for pieces in products(PIECES) {
                        let [a, b] = [(a, pieces[0]), (b, pieces[1])]
                            .map(|(factor, piece)| factor.wrapping_add(piece * SLAB_BYTES));
                        // SAFETY: the caller vouches for every step of both factors.
                        unsafe { Emulated::step(a, b, product.b_row, &mut sums) };
                    }
                }
                // SAFETY: the caller vouches for the sums.
                unsafe { c.write_unaligned(sums) };
            }
        }
    }
}
