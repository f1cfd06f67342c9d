//! Where the rows of a forward job go: into a carry that is continued, or, where a job is all that
//! its queries ever see, finished into out and lse, without a carry in between.

use encke_core::kernel::Carry;
use encke_core::{Data, Element};
use half::{bf16, f16};

use crate::real::Real;
use crate::shared::Shared;

/// Rows of some type that tasks write.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rows<'a> {
    F64(Shared<'a, f64>),
    F32(Shared<'a, f32>),
    Bf16(Shared<'a, bf16>),
    F16(Shared<'a, f16>),
}

impl<'a> Rows<'a> {
    pub fn new(data: &'a mut Data) -> Rows<'a> {
        match data {
            Data::F64(x) => Rows::F64(Shared::new(x)),
            Data::F32(x) => Rows::F32(Shared::new(x)),
            Data::Bf16(x) => Rows::Bf16(Shared::new(x)),
            Data::F16(x) => Rows::F16(Shared::new(x)),
        }
    }

    /// Rounds numbers into their place.
    ///
    /// # Safety
    /// As for [`Shared::row`].
    #[inline]
    pub unsafe fn write<A: Real>(&self, at: usize, row: &[A]) {
        fn round<A: Real, T: Element>(row: &[A], to: &mut [T]) {
            A::round(row, to);
        }
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Rows::F64(x) => round(row, x.row(at, row.len())),
                Rows::F32(x) => round(row, x.row(at, row.len())),
                Rows::Bf16(x) => round(row, x.row(at, row.len())),
                Rows::F16(x) => round(row, x.row(at, row.len())),
            }
        }
    }
}

/// Where rows go.
#[derive(Debug)]
pub(crate) enum Target<'a, A> {
    /// The carry that they continue.
    Carry(Carry<Shared<'a, A>>),
    /// Their end: out is multiplied with the gain.
    End {
        out: Rows<'a>,
        lse: Shared<'a, A>,
        gain: A,
    },
}

impl<'a, A: Real> Target<'a, A> {
    pub fn carry(carry: &'a mut Carry<Data>) -> Target<'a, A> {
        Target::Carry(Carry {
            acc: Shared::new(A::numbers(&mut carry.acc)),
            m: Shared::new(A::numbers(&mut carry.m)),
            l: Shared::new(A::numbers(&mut carry.l)),
        })
    }

    pub fn end(out: &'a mut Data, lse: &'a mut Data, gain: f64) -> Target<'a, A> {
        Target::End {
            out: Rows::new(out),
            lse: Shared::new(A::numbers(lse)),
            gain: A::from_f64(gain),
        }
    }

    /// What a cell begins with: `row` becomes its sum; its m and l are returned.
    ///
    /// # Safety
    /// No other task may have this cell.
    #[inline]
    pub unsafe fn begin(&self, cell: usize, row: &mut [A]) -> (A, A) {
        match self {
            Target::Carry(Carry { acc, m, l }) => {
                let dim = row.len();
                // SAFETY: the caller's promise.
                unsafe {
                    row.copy_from_slice(acc.row(cell * dim, dim));
                    (m.row(cell, 1)[0], l.row(cell, 1)[0])
                }
            }
            Target::End { .. } => {
                row.fill(A::ZERO);
                (A::NEG_INFINITY, A::ZERO)
            }
        }
    }

    /// What a cell ends with.
    ///
    /// # Safety
    /// As for [`Target::begin`].
    #[inline]
    pub unsafe fn end_with(&self, cell: usize, row: &mut [A], m: A, l: A) {
        let dim = row.len();
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Target::Carry(carry) => {
                    carry.acc.row(cell * dim, dim).copy_from_slice(row);
                    carry.m.row(cell, 1)[0] = m;
                    carry.l.row(cell, 1)[0] = l;
                }
                Target::End { out, lse, gain } => {
                    let (factor, of_row) = ended(m, l, *gain);
                    for x in row.iter_mut() {
                        *x = factor * *x;
                    }
                    if l == A::ZERO {
                        row.fill(A::ZERO);
                    }
                    out.write(cell * dim, row);
                    lse.row(cell, 1)[0] = of_row;
                }
            }
        }
    }
}

/// The factor of a finished row, and its lse.
#[inline]
pub(crate) fn ended<A: Real>(m: A, l: A, gain: A) -> (A, A) {
    if l == A::ZERO {
        (A::ZERO, A::NEG_INFINITY)
    } else {
        (gain / l, m + l.ln())
    }
}
