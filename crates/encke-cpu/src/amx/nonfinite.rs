//! Non-finite terms of masked products, which belong to some sums and must not reach others.
//!
//! A product multiplies hidden elements by 0, and 0 times infinity is NaN. So masked blocks are
//! multiplied with 0 in place of every non-finite element ([`zero_nonfinite`]), which changes no
//! bit of the sums those elements are hidden from, and the missing terms are added here to the sums
//! they are visible to. This is slow, but only data with infinities or NaN comes here.
//!
//! [`zero_nonfinite`]: super::pack::zero_nonfinite

use half::bf16;

use super::tiles::{ROW_BYTES, TILE_BYTES, TileProduct};

/// The factor that has non-finite elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactorSide {
    Left,
    Right,
}

/// Adds the terms of a product that [`zero_nonfinite`] removed. `product` has the original factors;
/// `visible(index in the sum, row, column)` tells whether a term belongs to its sum.
///
/// # Safety
/// Every tile of the product can be read, and its sums written.
///
/// [`zero_nonfinite`]: super::pack::zero_nonfinite
pub unsafe fn add_nonfinite_terms(
    product: &TileProduct,
    side: FactorSide,
    visible: impl Fn(usize, usize, usize) -> bool,
) {
    for at in 0..32 * product.steps {
        let (step, index) = (at / 32, at % 32);
        for row in 0..32 {
            for column in 0..32 {
                let a = row / 16 * TILE_BYTES + row % 16 * ROW_BYTES + 2 * index;
                let b = index / 2 * product.b_row + column % 16 * 4 + index % 2 * 2;
                // SAFETY: both elements lie in tiles of the product.
                let [a, b] = unsafe {
                    let a = product.a.add(step * product.a_step + a);
                    let b = product.b[column / 16].add(step * product.b_step + b);
                    [a, b].map(|at| at.cast::<bf16>().read())
                };
                let nonfinite = match side {
                    FactorSide::Left => !a.is_finite(),
                    FactorSide::Right => !b.is_finite(),
                };
                if nonfinite && visible(at, row, column) {
                    let c = row * ROW_BYTES + 4 * (column % 16);
                    // SAFETY: the sum lies in a slab of the product.
                    unsafe {
                        let c = product.c[column / 16].add(c).cast::<f32>();
                        *c += a.to_f32() * b.to_f32();
                    }
                }
            }
        }
    }
}
