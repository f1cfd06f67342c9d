//! Where the rows of a forward job come from and go to: what a carry has seen, or nothing where the
//! job is the first that its queries see; into a carry that is continued, or, where it is the last,
//! finished into out and lse.

use encke_core::kernel::{Carry, SoftmaxState};
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

/// What rows had seen before, and where they go. The numbers of a carry are read or written, never
/// both by different tasks.
#[derive(Debug)]
pub(crate) struct Target<'a, A> {
    /// What they go on from; nothing where they begin.
    pub before: Option<Carry<Shared<'a, A>>>,
    /// Where they go.
    pub after: After<'a, A>,
}

/// Where rows go.
#[derive(Debug)]
pub(crate) enum After<'a, A> {
    /// A carry that somebody continues.
    Carry(Carry<Shared<'a, A>>),
    /// Their end: out is multiplied with the gain.
    End {
        out: Rows<'a>,
        lse: Shared<'a, A>,
        gain: A,
    },
}

impl<'a, A: Real> Target<'a, A> {
    /// Where a job's rows start from and go to; out is multiplied by `gain`.
    pub fn new(state: SoftmaxState<'a, Data>, gain: f64) -> Target<'a, A> {
        match state {
            SoftmaxState::Accumulate { carry, starts } => {
                let Carry { acc, m, l } = Carry {
                    acc: Shared::new(A::numbers(&mut carry.acc)),
                    m: Shared::new(A::numbers(&mut carry.m)),
                    l: Shared::new(A::numbers(&mut carry.l)),
                };
                Target {
                    before: (!starts).then_some(Carry { acc, m, l }),
                    after: After::Carry(Carry { acc, m, l }),
                }
            }
            SoftmaxState::Finish { carry, out, lse } => Target {
                before: carry.map(|carry| Carry {
                    acc: Shared::of(A::seen(&carry.acc)),
                    m: Shared::of(A::seen(&carry.m)),
                    l: Shared::of(A::seen(&carry.l)),
                }),
                after: After::End {
                    out: Rows::new(out),
                    lse: Shared::new(A::numbers(lse)),
                    gain: A::from_f64(gain),
                },
            },
        }
    }

    /// m and l that a cell begins with.
    ///
    /// # Safety
    /// No other task may have this cell.
    #[inline]
    pub unsafe fn begin(&self, cell: usize) -> (A, A) {
        match &self.before {
            // SAFETY: the caller's promise.
            Some(Carry { m, l, .. }) => unsafe { (m.read(cell, 1)[0], l.read(cell, 1)[0]) },
            None => (A::NEG_INFINITY, A::ZERO),
        }
    }

    /// Adds what a cell had summed before to what it has summed since.
    ///
    /// # Safety
    /// As for [`Target::begin`].
    #[inline(always)]
    unsafe fn add_before(&self, cell: usize, row: &mut [A], m: A) {
        let Some(before) = &self.before else {
            return;
        };
        // SAFETY: the caller's promise.
        let (acc, old) = unsafe {
            let dim = row.len();
            (before.acc.read(cell * dim, dim), before.m.read(cell, 1)[0])
        };
        // Minus infinity minus itself would be NaN, where nothing has been seen.
        let kept = match old == A::NEG_INFINITY {
            true => A::ZERO,
            false => (old - m).exp(),
        };
        for (x, &before) in row.iter_mut().zip(acc) {
            *x = kept * before + *x;
        }
    }

    /// What a cell ends with, given what it has summed since it began, its m and its l. Always inlined, to
    /// be compiled for the vectors of whoever calls.
    ///
    /// # Safety
    /// As for [`Target::begin`].
    #[inline(always)]
    pub unsafe fn end_with(&self, cell: usize, row: &mut [A], m: A, l: A) {
        let dim = row.len();
        // SAFETY: the caller's promise.
        unsafe {
            self.add_before(cell, row, m);
            match &self.after {
                After::Carry(carry) => {
                    carry.acc.row(cell * dim, dim).copy_from_slice(row);
                    carry.m.row(cell, 1)[0] = m;
                    carry.l.row(cell, 1)[0] = l;
                }
                After::End { out, lse, gain } => {
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
