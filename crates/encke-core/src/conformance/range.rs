//! Scores of any size: from 1e-40 to 1e30, with rows and elements of all sizes in one case.
//!
//! Large scores are known to their rounding only, so two keys may change places where the softmax
//! has no room for that. The decision here: tolerances are conditions, not constants. Every score
//! may be off by the rounding of its sum, and a weight by what that does to the softmax: nothing
//! where one key wins clearly, anything between 0 and 1 where keys are too close.
//!
//! The backward pass gets the kernel's own lse and delta: an exact lse of 1e9 would be rounded by
//! more than a score.

use super::bench::KernelBench;
use super::failure::Failure;
use super::random::Random;
use super::range_bounds::{Bound, RangeBounds};
use super::suite::KernelSuite;
use crate::dtype::DType;
use crate::job::{Band, Job, Mask, Operand, Window};
use crate::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};

/// Checks the cases of `seeds` on a kernel, each in a type of `dtypes`.
pub fn scores<K: Kernel>(
    kernel: &K,
    dtypes: &[DType],
    suite: KernelSuite,
    seeds: impl IntoIterator<Item = u64>,
) -> Result<(), Failure> {
    for seed in seeds {
        let dtype = dtypes[seed as usize % dtypes.len()];
        let bench = KernelBench {
            kernel,
            dtype,
            seed,
            suite,
        };
        check(&bench, &RangeCase::new(seed, dtype, suite))?;
    }
    Ok(())
}

/// One head of queries, and keys in two jobs.
pub(super) struct RangeCase {
    pub dtype: DType,
    pub job: Job,
    /// The keys of the first job; the second one has the others.
    split: usize,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub dout: Vec<f64>,
}

/// The sizes of elements.
#[derive(Clone, Copy)]
enum Sizes {
    /// All elements have one size.
    Equal,
    /// All keys are the same, so that all weights of a row are equal.
    SameKeys,
    /// Each row has its own.
    Rows,
    /// Each element has its own.
    Elements,
}

impl RangeCase {
    fn new(seed: u64, dtype: DType, suite: KernelSuite) -> RangeCase {
        let mut random = Random::new(seed ^ 0x5c0e);
        let dim = random.pick(suite.dims);
        let most_keys = if suite.long_keys { 2000 } else { 80 };
        let (queries, keys) = (1 + random.below(40), 2 + random.below(most_keys));
        let usual = 1.0 / (dim as f64).sqrt();
        let mut scale = random.pick(&[usual, usual, usual, 1.0, 1e-3, 1e3]);
        if suite.signs {
            scale = -scale;
        }
        // Decimal exponents of the smallest and the largest elements, and of the largest scores.
        let (least, most, top): (f64, f64, f64) = match dtype {
            DType::F16 => (-8.0, 4.5, 9.0),
            _ => (-44.0, 38.0, 30.0),
        };
        let between = |random: &mut Random, low: f64, high: f64| {
            low + (high - low) * (random.unit() + 1.0) / 2.0
        };
        let score = between(&mut random, (2.0 * least).max(-40.0), top);
        // Kernels may multiply q by the scale.
        let most_q = most.min(38.0 - scale.abs().log10());
        let q = between(
            &mut random,
            (score - most).max(least),
            (score - least).min(most_q),
        );
        let sizes = random.pick(&[Sizes::Equal, Sizes::SameKeys, Sizes::Rows, Sizes::Elements]);
        let mut tensor = |rows: usize, exponent: f64| -> Vec<f64> {
            let (mut size, mut values) = (exponent, Vec::new());
            for i in 0..rows * dim {
                let next = match sizes {
                    Sizes::Equal | Sizes::SameKeys => false,
                    Sizes::Rows => i % dim == 0,
                    Sizes::Elements => true,
                };
                if next {
                    size = match random.below(3) {
                        0 => exponent,
                        1 => exponent - random.unit().abs(),
                        _ => between(&mut random, least, exponent),
                    };
                }
                values.push(dtype.round(random.unit() * 10f64.powf(size)));
            }
            values
        };
        let mut case = RangeCase {
            dtype,
            q: tensor(queries, q),
            k: tensor(keys, score - q),
            v: Vec::new(),
            dout: Vec::new(),
            split: 1 + random.below(keys - 1),
            job: job(queries, keys, dim, scale),
        };
        if matches!(sizes, Sizes::SameKeys) {
            for i in dim..case.k.len() {
                case.k[i] = case.k[i - dim];
            }
        }
        let mut unit = |rows: usize| {
            (0..rows * dim)
                .map(|_| dtype.round(random.unit()))
                .collect()
        };
        (case.v, case.dout) = (unit(keys), unit(queries));
        if random.once_in(2) {
            let query = (random.below(keys), 1 + random.below(3));
            let mut band = Band::causal(query, (0, 1));
            if suite.masks && random.once_in(2) {
                let [left, right] = [40, 20].map(|most| Some(random.below(most)));
                band.window = Window { left, right };
            }
            case.job.mask = Some(Mask::Band(band));
        }
        case
    }

    /// Both jobs: key rows, and the range of their elements in k.
    fn jobs(&self) -> [(Job, std::ops::Range<usize>); 2] {
        let (job, dim) = (&self.job, self.job.dim);
        [0..self.split, self.split..job.keys].map(|rows| {
            let mut part = job.clone();
            part.keys = rows.len();
            if let Some(Mask::Band(band)) = &mut part.mask {
                band.key = rows.start;
            }
            (part, rows.start * dim..rows.end * dim)
        })
    }
}

/// A job of one head whose rows are contiguous.
fn job(queries: usize, keys: usize, dim: usize, scale: f64) -> Job {
    let rows = |row: usize| Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row,
        heads: [0].into(),
    };
    Job {
        batch: 1,
        segments: 1,
        queries,
        keys,
        heads: 1,
        dim,
        value_dim: dim,
        q: rows(dim),
        k: rows(dim),
        cells: rows(1),
        delta: None,
        dq: None,
        mask: None,
        transform: None,
        dropout: None,
        scale,
        gain: 1.0,
        tiles: None,
    }
}

/// Runs both passes of a case and compares every result with its bound.
fn check<K: Kernel>(bench: &KernelBench<'_, K>, case: &RangeCase) -> Result<(), Failure> {
    let (kernel, sum) = (bench.kernel, bench.dtype.sum());
    let (cells, dim) = (case.job.queries, case.job.dim);
    let put = |values: &[f64]| bench.put(bench.dtype, values);
    let zeros = |elements: usize| bench.put(sum, &vec![0.0; elements]);
    let (q, dout) = (put(&case.q)?, put(&case.dout)?);
    let mut carry = Carry {
        acc: zeros(cells * dim)?,
        m: zeros(cells)?,
        l: zeros(cells)?,
    };
    let jobs = case.jobs();
    for (i, (job, elements)) in jobs.iter().enumerate() {
        let (k, v) = (
            put(&case.k[elements.clone()])?,
            put(&case.v[elements.clone()])?,
        );
        let [q, k, v] = [&q, &k, &v].map(|buffer| kernel.input(buffer));
        let state = SoftmaxState::Accumulate {
            carry: &mut carry,
            starts: i == 0,
        };
        bench.done(kernel.attend(job, q, k, v, state))?;
    }
    let (mut out, mut lse, mut delta) = (zeros(cells * dim)?, zeros(cells)?, zeros(cells)?);
    bench.done(kernel.finish(cells, dim, 1.0, &carry, &mut out, &mut lse))?;
    let [of_out, of_dout] = [&out, &dout].map(|buffer| kernel.input(buffer));
    bench.done(kernel.delta(cells, dim, of_out, of_dout, None, &mut delta))?;
    let mut dq = zeros(cells * dim)?;
    let (mut dk, mut dv) = (Vec::new(), Vec::new());
    for (job, elements) in &jobs {
        let (k, v) = (
            put(&case.k[elements.clone()])?,
            put(&case.v[elements.clone()])?,
        );
        let [mut part_dk, mut part_dv] = [zeros(elements.len())?, zeros(elements.len())?];
        let [q, k, v] = [&q, &k, &v].map(|buffer| kernel.input(buffer));
        let upstream = Upstream {
            dout: kernel.input(&dout),
            lse: kernel.input(&lse),
            delta: kernel.input(&delta),
        };
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut part_dk,
            dv: &mut part_dv,
        };
        bench.done(kernel.backward(job, q, k, v, upstream, gradients))?;
        dk.extend(bench.get(sum, elements.len(), &part_dk)?.to_f64());
        dv.extend(bench.get(sum, elements.len(), &part_dv)?.to_f64());
    }
    let bounds = RangeBounds::new(case, bench.suite);
    let get = |buffer, bounds: &[Bound]| {
        bench
            .get(sum, bounds.len(), buffer)
            .map(|data| data.to_f64())
    };
    within(bench, "the lse", &get(&lse, &bounds.lse)?, &bounds.lse)?;
    within(bench, "out", &get(&out, &bounds.out)?, &bounds.out)?;
    within(bench, "dv", &dv, &bounds.dv)?;
    within(bench, "dq", &get(&dq, &bounds.dq)?, &bounds.dq)?;
    within(bench, "dk", &dk, &bounds.dk)
}

/// The sum of a case's terms that may count as 0 because an element is subnormal.
const FLUSHED: f64 = 1e-32;

/// Fails if an element is outside its bound. Elements that may overflow are not compared.
fn within<K: Kernel>(
    bench: &KernelBench<'_, K>,
    what: &str,
    got: &[f64],
    bounds: &[Bound],
) -> Result<(), Failure> {
    for (i, (got, bound)) in got.iter().zip(bounds).enumerate() {
        let error = (got - bound.value).abs();
        let fits = bound.size < 1e36 || bench.dtype == DType::F64;
        if fits && *got != bound.value && (error.is_nan() || error > bound.error + FLUSHED) {
            return Err(bench.failure(format!(
                "{what} of large and small scores has an error of {error:e}, allowed {:e} \
                 (element {i}: {got:e} instead of {:e})",
                bound.error, bound.value
            )));
        }
    }
    Ok(())
}
