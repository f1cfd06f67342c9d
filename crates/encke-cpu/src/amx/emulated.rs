//! Tiles in plain Rust, for machines without AMX: tests run all code except the assembly on these.
//!
//! Memory layout and pairing are those of the hardware, and so is the order of sums as far as it is
//! documented.

use super::detect;
use super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES, TileProduct, TileUnit, split_products};

/// Emulated tiles.
#[derive(Debug)]
pub struct Emulated;

/// A tile of f32 sums.
type SumTile = [[f32; 16]; 16];

/// Widens a bf16 as the hardware does: subnormal values become zero.
fn widen(bits: u32) -> f32 {
    let exponent = bits & 0x7f80;
    f32::from_bits(if exponent == 0 { bits & 0x8000 } else { bits } << 16)
}

/// A result as the hardware returns it: subnormal values become zero.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}

/// Row `row` of a tile as 16 pairs: the even elements, then the odd ones.
///
/// # Safety
/// The 64 bytes at `tile + row` can be read.
unsafe fn pairs(tile: *const u8, row: usize) -> [[f32; 16]; 2] {
    // SAFETY: the caller's promise; the read is unaligned.
    let words: [u32; 16] = unsafe { tile.add(row).cast::<[u32; 16]>().read_unaligned() };
    [
        words.map(|word| widen(word & 0xffff)),
        words.map(|word| widen(word >> 16)),
    ]
}

impl Emulated {
    /// sums += a · b; even and odd elements of the pairs are summed separately until the end of a
    /// step.
    ///
    /// # Safety
    /// Both tiles can be read.
    unsafe fn step(a: *const u8, b: *const u8, b_row: usize, sums: &mut SumTile) {
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
                *sum = flush(*sum + flush(partial[0][n] + partial[1][n]));
            }
        }
    }
}

impl TileUnit for Emulated {
    const NAME: &'static str = "emulated";

    fn available() -> bool {
        detect::has_avx512()
    }

    unsafe fn configure() {}

    unsafe fn release() {}

    unsafe fn multiply<const ADD: bool, const SPLITS: usize>(product: TileProduct) {
        for half in 0..2 {
            for column in 0..2 {
                let c = product.c[column].wrapping_add(half * TILE_BYTES);
                let c = c.cast::<SumTile>();
                let mut sums = if ADD {
                    // SAFETY: the caller's promise about the sums.
                    unsafe { c.read_unaligned() }
                } else {
                    [[0.0; 16]; 16]
                };
                for step in 0..product.steps {
                    let a = product
                        .a
                        .wrapping_add(step * product.a_step + half * TILE_BYTES);
                    let b = product.b[column].wrapping_add(step * product.b_step);
                    for splits in split_products(SPLITS) {
                        let [a, b] = [(a, splits[0]), (b, splits[1])]
                            .map(|(factor, split)| factor.wrapping_add(split * SLAB_BYTES));
                        // SAFETY: the caller's promise about every step of both factors.
                        unsafe { Emulated::step(a, b, product.b_row, &mut sums) };
                    }
                }
                // SAFETY: the caller's promise about the sums.
                unsafe { c.write_unaligned(sums) };
            }
        }
    }
}
