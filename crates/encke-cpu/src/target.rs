//! Where the softmax state of a forward job comes from and where its result goes.
//!
//! A job starts from a carry, or from nothing if it is the first of its queries. Its result goes to
//! a carry, or, if it is the last job of its queries, normalized to out and lse.

use encke_core::Data;
use encke_core::job::Job;
use encke_core::kernel::{Carry, SoftmaxState};
use half::{bf16, f16};

use crate::real::Real;
use crate::shared::SharedRows;

/// Output rows of any storage type, written by tasks.
#[derive(Debug, Clone, Copy)]
pub enum OutputRows<'a> {
    /// 64-bit floats.
    F64(SharedRows<'a, f64>),
    /// 32-bit floats.
    F32(SharedRows<'a, f32>),
    /// bfloat16.
    Bf16(SharedRows<'a, bf16>),
    /// Half precision.
    F16(SharedRows<'a, f16>),
}

impl<'a> OutputRows<'a> {
    /// Shares the rows of a buffer.
    pub fn new(data: &'a mut Data) -> OutputRows<'a> {
        match data {
            Data::F64(x) => OutputRows::F64(SharedRows::new(x)),
            Data::F32(x) => OutputRows::F32(SharedRows::new(x)),
            Data::Bf16(x) => OutputRows::Bf16(SharedRows::new(x)),
            Data::F16(x) => OutputRows::F16(SharedRows::new(x)),
        }
    }

    /// Rounds a row and stores it from `at` on.
    ///
    /// # Safety
    /// As for [`SharedRows::row`].
    #[inline]
    pub unsafe fn write<A: Real>(&self, at: usize, row: &[A]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                OutputRows::F64(x) => A::round(row, x.row(at, row.len())),
                OutputRows::F32(x) => A::round(row, x.row(at, row.len())),
                OutputRows::Bf16(x) => A::round(row, x.row(at, row.len())),
                OutputRows::F16(x) => A::round(row, x.row(at, row.len())),
            }
        }
    }
}

/// The carry that a forward job starts from, and the destination of its result. Each cell of a
/// carry is read and written by one task only.
#[derive(Debug)]
pub struct Target<'a, A> {
    /// The carry to continue; `None` if the job is the first of its queries.
    pub previous: Option<Carry<SharedRows<'a, A>>>,
    /// The destination.
    pub output: ForwardOutput<'a, A>,
    /// Whether a row's sums start with those of the carry, so that a job continues them in order,
    /// rather than that both are added up at the end.
    pub continues: bool,
}

/// The destination of a forward job's result.
#[derive(Debug)]
pub enum ForwardOutput<'a, A> {
    /// A carry that another job continues.
    Carry(Carry<SharedRows<'a, A>>),
    /// The normalized output and its lse.
    Final {
        /// The output, multiplied by `gain`.
        out: OutputRows<'a>,
        /// The logarithm of the sum of exponentials of each row.
        lse: SharedRows<'a, A>,
        /// The factor of the output.
        gain: A,
    },
}

impl<'a, A: Real> Target<'a, A> {
    /// The target that `state` describes for a job; out is multiplied by its gain.
    pub fn new(state: SoftmaxState<'a, Data>, job: &Job) -> Target<'a, A> {
        let continues = job.tiles.is_some();
        match state {
            SoftmaxState::Accumulate { carry, starts } => {
                let Carry { acc, m, l } = Carry {
                    acc: SharedRows::new(A::slice_mut(&mut carry.acc)),
                    m: SharedRows::new(A::slice_mut(&mut carry.m)),
                    l: SharedRows::new(A::slice_mut(&mut carry.l)),
                };
                Target {
                    previous: (!starts).then_some(Carry { acc, m, l }),
                    output: ForwardOutput::Carry(Carry { acc, m, l }),
                    continues,
                }
            }
            SoftmaxState::Finish { carry, out, lse } => Target {
                previous: carry.map(|carry| Carry {
                    acc: SharedRows::of(A::slice(&carry.acc)),
                    m: SharedRows::of(A::slice(&carry.m)),
                    l: SharedRows::of(A::slice(&carry.l)),
                }),
                output: ForwardOutput::Final {
                    out: OutputRows::new(out),
                    lse: SharedRows::new(A::slice_mut(lse)),
                    gain: A::from_f64(job.gain),
                },
                continues,
            },
        }
    }

    /// The row max and the sum of weights that a cell starts with.
    ///
    /// # Safety
    /// No other task may access this cell.
    #[inline]
    pub unsafe fn initial_max_and_sum(&self, cell: usize) -> (A, A) {
        match &self.previous {
            // SAFETY: the caller's promise.
            Some(Carry { m, l, .. }) => unsafe { (m.read(cell, 1)[0], l.read(cell, 1)[0]) },
            None => (A::NEG_INFINITY, A::ZERO),
        }
    }

    /// The sums that a row starts with, copied to `row`, which is zero.
    ///
    /// # Safety
    /// As for [`Target::initial_max_and_sum`].
    #[inline(always)]
    pub unsafe fn initial_sums(&self, cell: usize, row: &mut [A]) {
        if let Some(previous) = self.previous.as_ref().filter(|_| self.continues) {
            let dim = row.len();
            // SAFETY: the caller's promise.
            row.copy_from_slice(unsafe { previous.acc.read(cell * dim, dim) });
        }
    }

    /// Adds the carry's sums, rescaled to the row max `m`, to the sums of this job.
    ///
    /// # Safety
    /// As for [`Target::initial_max_and_sum`].
    #[inline(always)]
    unsafe fn add_previous(&self, cell: usize, row: &mut [A], m: A) {
        let Some(previous) = &self.previous else {
            return;
        };
        // SAFETY: the caller's promise.
        let (acc, old) = unsafe {
            let dim = row.len();
            (
                previous.acc.read(cell * dim, dim),
                previous.m.read(cell, 1)[0],
            )
        };
        // An empty carry: minus infinity minus itself would be NaN.
        let kept = match old == A::NEG_INFINITY {
            true => A::ZERO,
            false => (old - m).exp(),
        };
        for (x, &previous) in row.iter_mut().zip(acc) {
            *x = kept * previous + *x;
        }
    }

    /// Stores the result of a cell: `row` holds the sums of this job, `m` and `l` the final row max
    /// and sum of weights. Always inlined, so that it is compiled for the instruction set of its
    /// caller.
    ///
    /// # Safety
    /// As for [`Target::initial_max_and_sum`].
    #[inline(always)]
    pub unsafe fn write_row(&self, cell: usize, row: &mut [A], m: A, l: A) {
        let dim = row.len();
        // SAFETY: the caller's promise.
        unsafe {
            if !self.continues {
                self.add_previous(cell, row, m);
            }
            match &self.output {
                ForwardOutput::Carry(carry) => {
                    carry.acc.row(cell * dim, dim).copy_from_slice(row);
                    carry.m.row(cell, 1)[0] = m;
                    carry.l.row(cell, 1)[0] = l;
                }
                ForwardOutput::Final { out, lse, gain } => {
                    let (factor, row_lse) = normalizer(m, l, *gain);
                    for x in row.iter_mut() {
                        *x = factor * *x;
                    }
                    if l == A::ZERO {
                        row.fill(A::ZERO);
                    }
                    out.write(cell * dim, row);
                    lse.row(cell, 1)[0] = row_lse;
                }
            }
        }
    }
}

/// The factor that normalizes a row, and its lse.
#[inline]
pub fn normalizer<A: Real>(m: A, l: A, gain: A) -> (A, A) {
    if l == A::ZERO {
        (A::ZERO, A::NEG_INFINITY)
    } else {
        (gain / l, m + l.ln())
    }
}
