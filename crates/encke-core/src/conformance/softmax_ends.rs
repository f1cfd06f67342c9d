//! Jobs that start a softmax, finish one, or do both: what they must not read and must not write.
//!
//! The decision here: a carry that must not be read is filled with NaN, which every arithmetic
//! operation propagates, and cells that must not be written hold a mark. A finishing job starts
//! from the oracle's carry, rounded, so that its error is its own.

use super::bench::KernelBench;
use super::case::{Case, CaseJob};
use super::failure::Failure;
use super::hidden::same_carry;
use super::results::finished;
use super::tolerances::{Tolerances, largest};
use crate::dtype::Data;
use crate::kernel::{Carry, Kernel, SoftmaxState};
use crate::naive::NaiveKernel;

/// The value of cells that a job must not write.
const MARK: f64 = 7.5;

/// Starts a softmax with the first job of a case, finishes one with the last job, and does both
/// with the first job.
pub(super) fn check<K: Kernel>(
    bench: &KernelBench<'_, K>,
    oracle: &KernelBench<'_, NaiveKernel>,
    case: &Case,
    tolerances: &Tolerances,
) -> Result<(), Failure> {
    begun(bench, oracle, case, tolerances)?;
    concluded(bench, oracle, case, tolerances)?;
    let (exact, got) = (oracle.attend(case)?, bench.attend(case)?);
    same_ends(bench, "attended to the end", case, tolerances, &got, &exact)
}

/// A starting job on a carry that is filled with NaN.
fn begun<K: Kernel>(
    bench: &KernelBench<'_, K>,
    oracle: &KernelBench<'_, NaiveKernel>,
    case: &Case,
    tolerances: &Tolerances,
) -> Result<(), Failure> {
    let (got, exact) = (bench.begin(case)?, oracle.begin(case)?);
    let touched = case.parts[0].touched_cells(case.cells);
    let sum = bench.dtype.sum();
    let unread = |elements: usize| Data::from_f64(sum, &vec![f64::NAN; elements]);
    let before = Carry {
        acc: unread(case.cells * case.value_dim),
        m: unread(case.cells),
        l: unread(case.cells),
    };
    same_carry(
        bench,
        "a beginning outside its cells",
        &before,
        &got,
        |cell| touched[cell],
    )?;
    let live = |width: usize| {
        let touched = &touched;
        move |&(i, _): &(usize, (f64, f64))| touched[i / width]
    };
    let (got, exact) = (finished(&got), finished(&exact));
    let pairs = got.1.into_iter().zip(exact.1).enumerate();
    let pairs = pairs.filter(live(1)).map(|(_, pair)| pair);
    bench.close("the lse of a carry that began", pairs, tolerances.lse)?;
    // The tolerances are sums over all jobs; the weights of a single job can be larger than their
    // share of those, so one rounding of the output is added.
    let room = tolerances.out + bench.dtype.epsilon() * largest(&exact.0);
    let pairs = got.0.into_iter().zip(exact.0).enumerate();
    let pairs = pairs.filter(live(case.value_dim)).map(|(_, pair)| pair);
    bench.close("the output of a carry that began", pairs, room)
}

/// The last job of a case, from the oracle's carry of the others.
fn concluded<K: Kernel>(
    bench: &KernelBench<'_, K>,
    oracle: &KernelBench<'_, NaiveKernel>,
    case: &Case,
    tolerances: &Tolerances,
) -> Result<(), Failure> {
    let before = oracle.forward_some(case, case.parts.len() - 1)?;
    let sum = bench.dtype.sum();
    let rounded = |data: &Data| Data::F64(Data::from_f64(sum, &data.to_f64()).to_f64());
    let before = Carry {
        acc: rounded(&before.acc),
        m: rounded(&before.m),
        l: rounded(&before.l),
    };
    let exact = oracle.conclude(case, &before)?;
    let got = bench.conclude(case, &before)?;
    same_ends(bench, "concluded", case, tolerances, &got, &exact)
}

fn same_ends<K: Kernel>(
    bench: &KernelBench<'_, K>,
    how: &str,
    case: &Case,
    tolerances: &Tolerances,
    (out, lse): &(Data, Data),
    (exact, exact_lse): &(Data, Data),
) -> Result<(), Failure> {
    let untouched = |x: &f64| *x == MARK;
    let differing = |got: &Data, exact: &Data| {
        let (got, exact) = (got.to_f64(), exact.to_f64());
        let pairs = got.iter().zip(&exact);
        pairs.filter(|(x, y)| untouched(x) != untouched(y)).count()
    };
    if differing(out, exact) + differing(lse, exact_lse) > 0 {
        let what = format!("a job that was {how} wrote other cells than its own");
        return Err(bench.failure(what));
    }
    let gain = case.gain.abs().max(1.0);
    let pairs = |got: &Data, exact: &Data| {
        let pairs = got.to_f64().into_iter().zip(exact.to_f64());
        pairs.collect::<Vec<_>>()
    };
    // As in `begun`.
    let room = gain * (tolerances.out + bench.dtype.epsilon() * largest(&exact.to_f64()));
    bench.close(&format!("out, {how},"), pairs(out, exact), room)?;
    bench.close(
        &format!("lse, {how},"),
        pairs(lse, exact_lse),
        tolerances.lse,
    )
}

impl<K: Kernel> KernelBench<'_, K> {
    /// q, k and v of one job.
    fn operands(&self, case: &Case, part: &CaseJob) -> Result<[K::Buffer; 3], Failure> {
        let put = |values: &[f64]| self.put(self.dtype, values);
        Ok([put(&case.q)?, put(&part.k)?, put(&part.v)?])
    }

    /// The carry after the first job of a case, which starts it.
    fn begin(&self, case: &Case) -> Result<Carry<Data>, Failure> {
        let (part, sum) = (&case.parts[0], self.dtype.sum());
        let unread = |elements: usize| self.put(sum, &vec![f64::NAN; elements]);
        let mut carry = Carry {
            acc: unread(case.cells * case.value_dim)?,
            m: unread(case.cells)?,
            l: unread(case.cells)?,
        };
        let operands = self.operands(case, part)?;
        let [q, k, v] = [0, 1, 2].map(|i| self.kernel.input(&operands[i]));
        let state = SoftmaxState::Accumulate {
            carry: &mut carry,
            starts: true,
        };
        self.done(self.kernel.attend(&part.job, q, k, v, state))?;
        self.get_carry(case.cells, case.value_dim, &carry)
    }

    /// out and lse of the last job of a case, which continues from this carry.
    fn conclude(&self, case: &Case, before: &Carry<Data>) -> Result<(Data, Data), Failure> {
        let (part, sum) = (&case.parts[case.parts.len() - 1], self.dtype.sum());
        let carry = Carry {
            acc: self.put(sum, &before.acc.to_f64())?,
            m: self.put(sum, &before.m.to_f64())?,
            l: self.put(sum, &before.l.to_f64())?,
        };
        self.marked(case, part, Some(&carry))
    }

    /// out and lse of the first job of a case alone.
    fn attend(&self, case: &Case) -> Result<(Data, Data), Failure> {
        self.marked(case, &case.parts[0], None)
    }

    /// out and lse of a job, filled with marks before it.
    fn marked(
        &self,
        case: &Case,
        part: &CaseJob,
        carry: Option<&Carry<K::Buffer>>,
    ) -> Result<(Data, Data), Failure> {
        let sum = self.dtype.sum();
        let operands = self.operands(case, part)?;
        let [q, k, v] = [0, 1, 2].map(|i| self.kernel.input(&operands[i]));
        let mut out = self.put(self.dtype, &vec![MARK; case.cells * case.value_dim])?;
        let mut lse = self.put(sum, &vec![MARK; case.cells])?;
        let state = SoftmaxState::Finish {
            carry,
            out: &mut out,
            lse: &mut lse,
        };
        self.done(self.kernel.attend(&part.job, q, k, v, state))?;
        Ok((
            self.get(self.dtype, case.cells * case.value_dim, &out)?,
            self.get(sum, case.cells, &lse)?,
        ))
    }
}
