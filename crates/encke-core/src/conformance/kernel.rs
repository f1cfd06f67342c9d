//! The kernel suite: results within tolerance of the oracle, and properties that hold bitwise.
//!
//! The decision here: each operation is tested on inputs that are exact in its own types and that
//! the oracle gets in f64, so an error is always that of the operation itself.

use super::bench::KernelBench;
use super::case::Case;
use super::failure::Failure;
use super::hidden::{self, same_carry, same_gradients};
use super::layout::GAP;
use super::random::Random;
use super::results::{CaseGradients, ForwardResults, finished};
use super::suite::KernelSuite;
use super::tolerances::Tolerances;
use super::{cells, documents, moving, range, softmax_ends};
use crate::dtype::{DType, Data};
use crate::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use crate::naive::NaiveKernel;

/// Random attention cases for each type.
const CASES: u64 = 200;
/// Random attention cases with masks and transforms of scores for each type, after those.
const MASK_CASES: u64 = 150;
/// Random attention cases with values of another width, dropout or both for each type, after those.
const VALUE_CASES: u64 = 100;
/// Random cases of the operations on cells and rows.
const SMALL_CASES: u64 = 100;

/// Runs the whole suite with each of `dtypes` as the type of q, k and v.
pub fn kernel<K: Kernel>(kernel: &K, dtypes: &[DType]) -> Result<(), Failure> {
    KernelSuite::default().run(kernel, dtypes)
}

impl KernelSuite {
    /// Runs the whole suite with each of `dtypes` as the type of q, k and v.
    pub fn run<K: Kernel>(self, kernel: &K, dtypes: &[DType]) -> Result<(), Failure> {
        for &dtype in dtypes {
            let bench = |seed| KernelBench {
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
            for seed in (CASES + MASK_CASES..CASES + MASK_CASES + VALUE_CASES).filter(mine) {
                if let Some(case) = value_case(seed, dtype, self) {
                    attention(&bench(seed), &case)?;
                }
            }
            if self.masks {
                for seed in (CASES..CASES + MASK_CASES).filter(mine) {
                    let case = Case::new(seed, dtype, self).with_masks(seed, self.transforms);
                    attention(&bench(seed), &case)?;
                }
            }
            for seed in (0..CASES).filter(mine) {
                attention(&bench(seed), &Case::new(seed, dtype, self))?;
            }
            range::scores(kernel, &[dtype], self, (0..SMALL_CASES).filter(mine))?;
        }
        Ok(())
    }
}

/// A case with values of another width, dropout or both, as far as the suite tests them.
fn value_case(seed: u64, dtype: DType, suite: KernelSuite) -> Option<Case> {
    let (value_dims, dropout) = match seed % 4 {
        0 => (suite.value_dims, false),
        1 => (false, suite.dropout),
        _ => (suite.value_dims, suite.dropout),
    };
    let mut case = Case::new(seed, dtype, suite);
    if suite.masks {
        case = case.with_masks(seed, suite.transforms);
    }
    if value_dims {
        case = case.with_value_dim(seed, dtype, suite.dims);
    }
    if dropout {
        case = case.with_dropout(seed);
    }
    (value_dims || dropout).then_some(case)
}

fn attention<K: Kernel>(bench: &KernelBench<'_, K>, case: &Case) -> Result<(), Failure> {
    let oracle = KernelBench {
        kernel: &NaiveKernel,
        dtype: DType::F64,
        seed: bench.seed,
        suite: bench.suite,
    };
    let exact = finished(&oracle.forward(case)?);
    let results = results(bench, case, &exact);
    let tolerances = Tolerances::new(case, bench.dtype, &exact.1, &results);

    let carry = bench.forward(case)?;
    check_forward(bench, case, &carry, &exact, &tolerances)?;
    same_carry(
        bench,
        "a second forward",
        &carry,
        &bench.forward(case)?,
        |_| false,
    )?;

    softmax_ends::check(bench, &oracle, case, &tolerances)?;

    let grown = bench.backward(case, &results)?;
    let expected = oracle.backward(case, &results)?;
    check_backward(bench, case, &grown, &expected, &tolerances)?;
    let again = bench.backward(case, &results)?;
    same_gradients(
        bench,
        "a second backward",
        &grown,
        &again,
        |_| false,
        |_, _| false,
    )?;
    hidden::queries(bench, case, &results, &grown)?;
    hidden::broken(bench, case, &results, &grown)?;
    hidden::keys(bench, case, &results, &carry, &grown)?;
    hidden::dropped(bench, case, &results, &carry, &grown)?;
    documents::separate(bench, case, &results, &carry, &grown)
}

impl<K: Kernel> KernelBench<'_, K> {
    /// Runs all jobs of a case into one carry.
    pub fn forward(&self, case: &Case) -> Result<Carry<Data>, Failure> {
        self.forward_some(case, case.parts.len())
    }

    /// Runs the first jobs of a case into one carry.
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
        self.get_carry(case.cells, case.value_dim, &carry)
    }

    /// The gradients of all jobs of a case, added to the case's initial gradients.
    pub fn backward(
        &self,
        case: &Case,
        results: &ForwardResults,
    ) -> Result<CaseGradients, Failure> {
        let sum = self.dtype.sum();
        let q = self.put(self.dtype, &case.q)?;
        let dout = self.put(self.dtype, &case.dout)?;
        let delta = match &case.delta {
            Some(place) => &place.buffer(&results.delta),
            None => &results.delta,
        };
        let (lse, delta) = (self.put(sum, &results.lse)?, self.put(sum, delta)?);
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
            keys.push((
                self.get(sum, part.k.len(), &dk)?,
                self.get(sum, part.v.len(), &dv)?,
            ));
        }
        let dq = self.get(sum, case.dq.len(), &dq)?;
        Ok(CaseGradients { dq, keys })
    }
}

/// An empty carry, with marked gaps that must not change.
fn start(case: &Case) -> Carry<Data> {
    let live: Vec<bool> = case.dlse.iter().map(|x| !x.is_nan()).collect();
    let with = |value: f64, width: usize| {
        let number = |i: usize| {
            if live[i / width] { value } else { GAP }
        };
        Data::F64((0..case.cells * width).map(number).collect())
    };
    Carry {
        acc: with(0.0, case.value_dim),
        m: with(f64::NEG_INFINITY, 1),
        l: with(0.0, 1),
    }
}

fn results<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    finished: &(Vec<f64>, Vec<f64>),
) -> ForwardResults {
    let sum = bench.dtype.sum();
    let delta = |cell: usize| {
        let row = cell * case.value_dim..(cell + 1) * case.value_dim;
        let pairs = finished.0[row.clone()].iter().zip(&case.dout[row]);
        let product: f64 = pairs.map(|(o, g)| case.gain * o * g).sum();
        sum.round(product - case.dlse[cell])
    };
    // Rows with lse = −inf must contribute nothing, even if the mask shows them keys.
    let random = &mut Random::new(bench.seed ^ 0x0ff);
    let some = bench.seed.is_multiple_of(3);
    let lse = |&x: &f64| match some && random.once_in(10) {
        true => f64::NEG_INFINITY,
        false => sum.round(x),
    };
    ForwardResults {
        lse: finished.1.iter().map(lse).collect(),
        delta: (0..case.cells).map(delta).collect(),
    }
}

fn check_forward<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    carry: &Carry<Data>,
    (out, lse): &(Vec<f64>, Vec<f64>),
    tolerances: &Tolerances,
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
    bench.close("the lse of the carry", pairs, tolerances.lse)?;
    let rows = cells
        .iter()
        .flat_map(|cell| cell * case.value_dim..(cell + 1) * case.value_dim);
    let pairs = rows.map(|i| (got_out[i], out[i]));
    bench.close("the output of the carry", pairs, tolerances.out)
}

fn check_backward<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    grown: &CaseGradients,
    expected: &CaseGradients,
    tolerances: &Tolerances,
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
    check(
        "dq",
        &grown.dq,
        &expected.dq,
        &case.dq,
        &touched,
        tolerances.dq,
    )?;
    for (i, part) in case.parts.iter().enumerate() {
        let touched = part.touched_keys();
        let of_value = |i: usize| touched[i * part.dk.len() / part.dv.len()];
        let touched_values: Vec<bool> = (0..part.dv.len()).map(of_value).collect();
        let ((dk, dv), expected) = (&grown.keys[i], &expected.keys[i]);
        let limit = tolerances.dv[i];
        check("dv", dv, &expected.1, &part.dv, &touched_values, limit)?;
        check("dk", dk, &expected.0, &part.dk, &touched, tolerances.dk[i])?;
    }
    Ok(())
}
