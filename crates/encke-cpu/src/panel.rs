//! Packing: copies rows of a buffer into panels with the layout that the products need.
//!
//! A *row panel* holds rows one after the other, padded with zeros to a multiple of the vector
//! width. A *lane panel* holds up to one tile of rows transposed: all first channels, all second
//! channels, and so on, so that a vector holds one channel of several rows.

use encke_core::dtype::Slice;
use encke_core::with_typed;

use crate::real::Real;
use crate::shared;
use crate::vector::Vector;

/// Declares a struct of panels, made from the panels that a scratch memory is divided into.
macro_rules! panels {
    ($(#[$doc:meta])* $name:ident { $($panel:ident),* }) => {
        $(#[$doc])*
        struct $name<'a, A> {
            $($panel: &'a mut [A]),*
        }

        impl<'a, A> $name<'a, A> {
            #[inline(always)]
            fn new([$($panel),*]: [&'a mut [A]; [$(stringify!($panel)),*].len()]) -> $name<'a, A> {
                $name { $($panel),* }
            }
        }
    };
}
pub(crate) use panels;

/// Copies `count` rows into a row panel, and fills the rest of the panel with zeros.
#[inline(always)]
pub(crate) fn rows<A: Real>(
    source: Slice<'_>,
    dim: usize,
    count: usize,
    address: impl Fn(usize) -> usize,
    width: usize,
    panel: &mut [A],
) {
    let (used, rest) = panel.split_at_mut(count * width);
    for (i, row) in used.chunks_exact_mut(width).enumerate() {
        A::load(source, address(i), &mut row[..dim]);
        row[dim..].fill(A::ZERO);
    }
    rest.fill(A::ZERO);
}

/// Prefetches a row into the L2 cache.
#[inline(always)]
pub(crate) fn prefetch(source: Slice<'_>, at: usize, dim: usize) {
    with_typed!(Slice, source, x => shared::prefetch(x[at..at + dim].as_ptr(), dim));
}

/// Whether all elements of a panel are finite.
#[inline(always)]
pub(crate) fn finite<A: Real>(panel: &[A]) -> bool {
    let mut finite = true;
    for x in panel {
        finite &= x.is_finite();
    }
    finite
}

/// Transposes `rows` rows of `columns` elements: a row panel into a lane panel, or back. Both
/// counts are multiples of the vector width.
#[inline(always)]
pub(crate) fn transpose<X: Vector>(
    x: X,
    panel: &[X::A],
    (rows, columns): (usize, usize),
    to: &mut [X::A],
) {
    for row in (0..rows).step_by(X::WIDTH) {
        for column in (0..columns).step_by(X::WIDTH) {
            let (from, to) = (
                &panel[row * columns + column..],
                &mut to[column * rows + row..],
            );
            x.transpose(from, columns, to, rows);
        }
    }
}

/// Multiplies all elements of a panel by `factor`.
#[inline(always)]
pub(crate) fn scale<A: Real>(panel: &mut [A], factor: A) {
    for x in panel {
        *x = *x * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vector::{F32, PortableVector, SimdTask};

    struct TransposeCheck<X: Vector>(X);

    impl<X: Vector<A = f32>> SimdTask for TransposeCheck<X> {
        #[inline(always)]
        fn run(self) {
            let (rows, columns) = (3 * X::WIDTH, 2 * X::WIDTH);
            let panel: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
            let mut transposed = vec![-1.0; rows * columns];
            transpose(self.0, &panel, (rows, columns), &mut transposed);
            for (i, row) in panel.chunks_exact(columns).enumerate() {
                for (j, x) in row.iter().enumerate() {
                    assert_eq!(transposed[j * rows + i], *x, "row {i}, column {j}");
                }
            }
            let mut back = vec![-1.0; rows * columns];
            transpose(self.0, &transposed, (columns, rows), &mut back);
            assert_eq!(back, panel);
        }
    }

    #[test]
    fn transposing_twice_restores_the_panel() {
        let plain = PortableVector::new();
        plain.run(TransposeCheck(plain));
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(x) = pulp::x86::V3::try_new().map(F32) {
                x.run(TransposeCheck(x));
            }
            if let Some(x) = pulp::x86::V4::try_new().map(F32) {
                x.run(TransposeCheck(x));
            }
        }
    }
}
