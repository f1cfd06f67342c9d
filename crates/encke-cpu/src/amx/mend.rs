//! Terms that a masked product must leave out of some sums and keep in others.
//!
//! A product multiplies what is hidden by 0, and 0 times infinity is NaN. So masked blocks are
//! multiplied with every number that is not finite replaced by 0 ([`pack::clean`]), which changes
//! no bit of a sum that those numbers are hidden from, and their terms are added here to the sums
//! that do see them. It is slow, and only data that is broken already comes here.
//!
//! [`pack::clean`]: super::pack::clean

use half::bf16;

use super::tiles::{Product, ROW_BYTES, TILE_BYTES};

/// The factor that holds numbers which are not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Adds the terms of a product (with its original factors) that [`pack::clean`] took away;
/// `sees` is asked with the place in the sum, the row and the column.
///
/// # Safety
/// Every tile of the product can be read, and its sums written.
///
/// [`pack::clean`]: super::pack::clean
pub(crate) unsafe fn mend(
    product: &Product,
    side: Side,
    sees: impl Fn(usize, usize, usize) -> bool,
) {
    for at in 0..32 * product.steps {
        let (step, place) = (at / 32, at % 32);
        for row in 0..32 {
            for column in 0..32 {
                let a = row / 16 * TILE_BYTES + row % 16 * ROW_BYTES + 2 * place;
                let b = place / 2 * product.b_row + column % 16 * 4 + place % 2 * 2;
                // SAFETY: both numbers lie in tiles of the product.
                let [a, b] = unsafe {
                    let a = product.a.add(step * product.a_step + a);
                    let b = product.b[column / 16].add(step * product.b_step + b);
                    [a, b].map(|at| at.cast::<bf16>().read())
                };
                let broken = match side {
                    Side::Left => !a.is_finite(),
                    Side::Right => !b.is_finite(),
                };
                if broken && sees(at, row, column) {
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
