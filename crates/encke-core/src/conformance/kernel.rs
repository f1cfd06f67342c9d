//! What every kernel must satisfy: the oracle's numbers, and properties no tolerance can hide.
//!
//! The decision here: each operation is judged on inputs exact in its own types, handed to the
//! oracle in f64, so that an error is the operation's own and never that of an earlier one.

use super::bench::Bench;
use super::case::{Case, DIMS};
use super::hidden::{self, same_carry, same_gradients};
use super::judge::Judge;
use super::layout::GAP;
use super::{Failure, Random, cells, moving, softmax_ends};
use crate::dtype::{DType, Data};
use crate::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use crate::naive::NaiveKernel;

/// Random attention cases for each type.
const CASES: u64 = 200;
/// Random cases of everything that is not attention.
const SMALL_CASES: u64 = 100;

/// Runs the whole suite with each of `dtypes` as the type of q, k and v.
pub fn kernel<K: Kernel>(kernel: &K, dtypes: &[DType]) -> Result<(), Failure> {
    Suite::default().run(kernel, dtypes)
}

/// What the suite asks of a kernel beyond what it asks of all of them.
#[derive(Debug, Clone, Copy)]
pub struct Suite {
    /// Head dimensions of the cases.
    pub dims: &'static [usize],
    /// Whether gradients have the same bits whenever they are computed. Where a kernel does not
    /// promise that, what must not change may change by the rounding of its sums.
    pub repeatable: bool,
    /// Whether scales may be negative or zero.
    pub signs: bool,
    /// Which of how many shares of the cases, for those who run shares side by side.
    pub share: (u64, u64),
}

impl Default for Suite {
    fn default() -> Suite {
        Suite {
            dims: &DIMS,
            repeatable: true,
            signs: false,
            share: (0, 1),
        }
    }
}

impl Suite {
    /// Runs the whole suite with each of `dtypes` as the type of q, k and v.
    pub fn run<K: Kernel>(self, kernel: &K, dtypes: &[DType]) -> Result<(), Failure> {
        for &dtype in dtypes {
            let bench = |seed| Bench {
                kernel,
                dtype,
                seed,
                suite: self,
            };
            let (share, of) = self.share;
            let mine = |seed: &u64| seed % of == share;
            for seed in (0..SMALL_CASES).filter(mine) {
                moving::check(&bench(seed))?;
                cells::check(&bench(seed))?;
            }
            for seed in (0..CASES).filter(mine) {
                attention(&bench(seed))?;
            }
        }
        Ok(())
    }
}

/// Gradients of a case: dq, and dk and dv of each part.
pub(super) struct Grown {
    pub dq: Data,
    pub keys: Vec<(Data, Data)>,
}

/// What backward is told of the forward pass, exact in the type that is summed.
#[derive(Clone)]
pub(super) struct Final {
    pub lse: Vec<f64>,
    pub delta: Vec<f64>,
}

fn attention<K: Kernel>(bench: &Bench<'_, K>) -> Result<(), Failure> {
    let case = Case::new(bench.seed, bench.dtype, bench.suite);
    let oracle = Bench {
        kernel: &NaiveKernel,
        dtype: DType::F64,
        seed: bench.seed,
        suite: bench.suite,
    };
    let exact = finished(&oracle.forward(&case)?);
    let told = told(bench, &case, &exact);
    let judge = Judge::new(&case, bench.dtype, &exact.1, &told);

    let carry = bench.forward(&case)?;
    judge_forward(bench, &case, &carry, &exact, &judge)?;
    same_carry(
        bench,
        "a second forward",
        &carry,
        &bench.forward(&case)?,
        |_| false,
    )?;

    softmax_ends::check(bench, &oracle, &case, &judge)?;

    let grown = bench.backward(&case, &told)?;
    let expected = oracle.backward(&case, &told)?;
    judge_backward(bench, &case, &grown, &expected, &judge)?;
    let again = bench.backward(&case, &told)?;
    same_gradients(
        bench,
        "a second backward",
        &grown,
        &again,
        |_| false,
        |_, _| false,
    )?;
    hidden::queries(bench, &case, &told, &grown)?;
    hidden::broken(bench, &case, &told, &grown)?;
    hidden::keys(bench, &case, &told, &carry, &grown)
}

impl<K: Kernel> Bench<'_, K> {
    /// All parts of a case into one carry.
    pub fn forward(&self, case: &Case) -> Result<Carry<Data>, Failure> {
        self.forward_some(case, case.parts.len())
    }

    /// The first parts of a case into one carry.
    pub fn forward_some(&self, case: &Case, parts: usize) -> Result<Carry<Data>, Failure> {
        let q = self.put(self.dtype, &case.q)?;
        let start = start(case);
        let sum = self.dtype.sum();
        let mut carry = Carry {
            acc: self.put(sum, &start.acc.to_f64())?,
            m: self.put(sum, &start.m.to_f64())?,
            l: self.put(sum, &start.l.to_f64())?,
        };
        for part in &case.parts[..parts] {
            let (k, v) = (
                self.put(self.dtype, &part.k)?,
                self.put(self.dtype, &part.v)?,
            );
            let [q, k, v] = [&q, &k, &v].map(|buffer| self.kernel.input(buffer));
            let state = SoftmaxState::Accumulate {
                carry: &mut carry,
                starts: false,
            };
            self.done(self.kernel.attend(&part.job, q, k, v, state))?;
        }
        self.get_carry(case.cells, case.dim, &carry)
    }

    /// The gradients of all parts of a case, added to what its gradients held before.
    pub fn backward(&self, case: &Case, told: &Final) -> Result<Grown, Failure> {
        let sum = self.dtype.sum();
        let q = self.put(self.dtype, &case.q)?;
        let dout = self.put(self.dtype, &case.dout)?;
        let (lse, delta) = (self.put(sum, &told.lse)?, self.put(sum, &told.delta)?);
        let mut dq = self.put(sum, &case.dq)?;
        let mut keys = Vec::new();
        for part in &case.parts {
            let (k, v) = (
                self.put(self.dtype, &part.k)?,
                self.put(self.dtype, &part.v)?,
            );
            let (mut dk, mut dv) = (self.put(sum, &part.dk)?, self.put(sum, &part.dv)?);
            let upstream = Upstream {
                dout: self.kernel.input(&dout),
                lse: self.kernel.input(&lse),
                delta: self.kernel.input(&delta),
            };
            let gradients = Gradients {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
            };
            let job = &part.job;
            let [q, k, v] = [&q, &k, &v].map(|buffer| self.kernel.input(buffer));
            self.done(self.kernel.backward(job, q, k, v, upstream, gradients))?;
            let elements = part.k.len();
            keys.push((self.get(sum, elements, &dk)?, self.get(sum, elements, &dv)?));
        }
        let dq = self.get(sum, case.dq.len(), &dq)?;
        Ok(Grown { dq, keys })
    }
}

/// An empty carry, with gaps that must stay what they are.
fn start(case: &Case) -> Carry<Data> {
    let live: Vec<bool> = case.dlse.iter().map(|x| !x.is_nan()).collect();
    let with = |value: f64, width: usize| {
        let number = |i: usize| {
            if live[i / width] { value } else { GAP }
        };
        Data::F64((0..case.cells * width).map(number).collect())
    };
    Carry {
        acc: with(0.0, case.dim),
        m: with(f64::NEG_INFINITY, 1),
        l: with(0.0, 1),
    }
}

/// Output and lse of every cell of a carry, by the definition and not by the kernel.
pub(super) fn finished(carry: &Carry<Data>) -> (Vec<f64>, Vec<f64>) {
    let (acc, m, l) = (carry.acc.to_f64(), carry.m.to_f64(), carry.l.to_f64());
    let dim = acc.len() / l.len();
    let mean = |(i, x): (usize, &f64)| {
        if l[i / dim] == 0.0 {
            0.0
        } else {
            x / l[i / dim]
        }
    };
    let out = acc.iter().enumerate().map(mean).collect();
    let lse = m.iter().zip(&l).map(|(m, l)| {
        if *l == 0.0 {
            f64::NEG_INFINITY
        } else {
            m + l.ln()
        }
    });
    (out, lse.collect())
}

fn told<K: Kernel>(bench: &Bench<'_, K>, case: &Case, finished: &(Vec<f64>, Vec<f64>)) -> Final {
    let sum = bench.dtype.sum();
    let delta = |cell: usize| {
        let row = cell * case.dim..(cell + 1) * case.dim;
        let pairs = finished.0[row.clone()].iter().zip(&case.dout[row]);
        let product: f64 = pairs.map(|(o, g)| case.gain * o * g).sum();
        sum.round(product - case.dlse[cell])
    };
    // Rows said to have seen nothing must contribute nothing, whatever the mask shows them.
    let random = &mut Random::new(bench.seed ^ 0x0ff);
    let some = bench.seed.is_multiple_of(3);
    let lse = |&x: &f64| match some && random.once_in(10) {
        true => f64::NEG_INFINITY,
        false => sum.round(x),
    };
    Final {
        lse: finished.1.iter().map(lse).collect(),
        delta: (0..case.cells).map(delta).collect(),
    }
}

fn judge_forward<K: Kernel>(
    bench: &Bench<'_, K>,
    case: &Case,
    carry: &Carry<Data>,
    (out, lse): &(Vec<f64>, Vec<f64>),
    judge: &Judge,
) -> Result<(), Failure> {
    let touched = case.touched_cells();
    let start = start(case);
    let sum = bench.dtype.sum();
    let narrow = |data: &Data| Data::from_f64(sum, &data.to_f64());
    let start = Carry {
        acc: narrow(&start.acc),
        m: narrow(&start.m),
        l: narrow(&start.l),
    };
    same_carry(bench, "forward outside its cells", &start, carry, |cell| {
        touched[cell]
    })?;
    let (got_out, got_lse) = finished(carry);
    let cells: Vec<usize> = (0..case.cells).filter(|&cell| touched[cell]).collect();
    let pairs = cells.iter().map(|&cell| (got_lse[cell], lse[cell]));
    bench.close("the lse of the carry", pairs, judge.lse)?;
    let rows = cells
        .iter()
        .flat_map(|cell| cell * case.dim..(cell + 1) * case.dim);
    let pairs = rows.map(|i| (got_out[i], out[i]));
    bench.close("the output of the carry", pairs, judge.out)
}

fn judge_backward<K: Kernel>(
    bench: &Bench<'_, K>,
    case: &Case,
    grown: &Grown,
    expected: &Grown,
    judge: &Judge,
) -> Result<(), Failure> {
    let sum = bench.dtype.sum();
    let check =
        |what: &str, got: &Data, expected: &Data, before: &[f64], touched: &[bool], limit| {
            let before = Data::from_f64(sum, before);
            bench.unchanged(what, &before, got, |i| touched[i])?;
            let pairs = got.to_f64().into_iter().zip(expected.to_f64());
            let live = pairs.enumerate().filter(|(i, _)| touched[*i]);
            bench.close(what, live.map(|(_, pair)| pair), limit)
        };
    let touched = case.touched_dq();
    check("dq", &grown.dq, &expected.dq, &case.dq, &touched, judge.dq)?;
    for (i, part) in case.parts.iter().enumerate() {
        let touched = part.touched_keys();
        let ((dk, dv), expected) = (&grown.keys[i], &expected.keys[i]);
        check("dv", dv, &expected.1, &part.dv, &touched, judge.dv[i])?;
        check("dk", dk, &expected.0, &part.dk, &touched, judge.dk[i])?;
    }
    Ok(())
}
