//! Exact results of a [`RangeCase`], and how far a kernel may be from them.

use super::range::RangeCase;
use super::suite::KernelSuite;
use super::tolerances::{base, floor};
use crate::dtype::DType;

/// An exact value, how far a result may be from it, and the size of its terms.
#[derive(Clone, Copy, Default)]
pub(super) struct Bound {
    pub value: f64,
    pub error: f64,
    pub size: f64,
}

impl Bound {
    /// Adds `weight` times `x`.
    fn add(&mut self, weight: Bound, x: f64) {
        self.value += weight.value * x;
        self.error += weight.error * x.abs();
        self.size += weight.size * x.abs();
    }
}

/// The bounds of all results.
pub(super) struct RangeBounds {
    pub lse: Vec<Bound>,
    pub out: Vec<Bound>,
    pub dq: Vec<Bound>,
    pub dk: Vec<Bound>,
    pub dv: Vec<Bound>,
}

impl RangeBounds {
    pub fn new(case: &RangeCase, suite: KernelSuite) -> RangeBounds {
        let (queries, keys, dim) = (case.job.queries, case.job.keys, case.job.dim);
        let bounds = |rows: usize| vec![Bound::default(); rows * dim];
        let mut results = RangeBounds {
            lse: Vec::new(),
            out: bounds(queries),
            dq: bounds(queries),
            dk: bounds(keys),
            dv: bounds(keys),
        };
        for query in 0..queries {
            results.add_query(case, query, least(case.dtype, suite));
        }
        results
    }

    fn add_query(&mut self, case: &RangeCase, query: usize, least: f64) {
        let dim = case.job.dim;
        let row = |values: &'_ [f64], at: usize| values[at * dim..(at + 1) * dim].to_vec();
        let (q, dout) = (row(&case.q, query), row(&case.dout, query));
        let weights = QueryWeights::new(case, query, least);
        self.lse.push(weights.lse);
        let out = &mut self.out[query * dim..(query + 1) * dim];
        for (key, p) in (weights.first..).zip(&weights.forward) {
            let v = row(&case.v, key);
            out.iter_mut().zip(v).for_each(|(out, v)| out.add(*p, v));
        }
        // One rounding in 2e-5, or of the narrow type, of each term; and what the tiles take as 0.
        let relative = base(case.dtype) + 2.0 * floor(case.dtype);
        let mut delta = Bound::default();
        for (out, dout) in out.iter_mut().zip(&dout) {
            out.error += relative * out.size;
            delta.add(*out, *dout);
        }
        for (key, p) in (weights.first..).zip(&weights.backward) {
            let (k, v) = (row(&case.k, key), row(&case.v, key));
            let mut dp = Bound::default();
            for (dout, v) in dout.iter().zip(&v) {
                dp.value += dout * v;
                dp.size += (dout * v).abs();
            }
            let (value, size) = (dp.value - delta.value, dp.size + delta.size);
            let ds = Bound {
                value: case.job.scale * p.value * value,
                error: case.job.scale.abs()
                    * (p.error * size + p.size * (delta.error + relative * size) + least),
                // Kernels multiply by the scale before or after they sum.
                size: case.job.scale.abs().max(1.0) * p.size * size,
            };
            for c in 0..dim {
                self.dq[query * dim + c].add(ds, k[c]);
                self.dk[key * dim + c].add(ds, q[c]);
                self.dv[key * dim + c].add(*p, dout[c]);
            }
        }
    }
}

/// Weights, and gradients of scores, below this size may count as 0.
fn least(dtype: DType, suite: KernelSuite) -> f64 {
    match dtype {
        // Half of the least f16.
        DType::F16 if suite.narrow_weights => 2f64.powi(-25),
        _ => 4.0 * f64::from(f32::MIN_POSITIVE),
    }
}

/// The weights of one query, for each key that it sees.
struct QueryWeights {
    /// The first of these keys.
    first: usize,
    lse: Bound,
    forward: Vec<Bound>,
    /// Relative to a rounded lse.
    backward: Vec<Bound>,
}

impl QueryWeights {
    fn new(case: &RangeCase, query: usize, least: f64) -> QueryWeights {
        let (job, dim, sum) = (&case.job, case.job.dim, case.dtype.sum());
        let q = &case.q[query * dim..(query + 1) * dim];
        let mut noise = 0.0f64;
        let scores: Vec<f64> = job
            .visible(query)
            .map(|key| {
                let terms = q.iter().zip(&case.k[key * dim..]).map(|(q, k)| q * k);
                let (score, size) = terms.fold((0.0, 0.0), |(s, z), x| (s + x, z + x.abs()));
                // Every term and every sum is rounded once.
                let rounding = (dim + 16) as f64 * sum.epsilon();
                noise = noise.max(rounding * (size * job.scale).abs());
                job.scale * score
            })
            .collect();
        let mut before = vec![f64::NEG_INFINITY];
        for &score in &scores {
            before.push(log_add(before[before.len() - 1], score));
        }
        let lse = before[scores.len()];
        let mut after = f64::NEG_INFINITY;
        let mut logits = vec![0.0; scores.len()];
        for (key, &score) in scores.iter().enumerate().rev() {
            logits[key] = score - log_add(before[key], after);
            after = log_add(after, score);
        }
        // Kernels may subtract a rounded base from a score that is not, as long as that is small.
        let unrounded = (4.0 * sum.epsilon() * lse.abs()).min(2e-3);
        let relative = base(case.dtype) + 2.0 * floor(case.dtype) + unrounded;
        // An lse of several weights is rounded to the type of the sums; that of one key is its
        // score.
        let clear = logits.iter().any(|logit| logit - 2.0 * noise > 20.0);
        let rounded = if clear {
            0.0
        } else {
            2.0 * sum.epsilon() * lse.abs()
        };
        let weights = |rounded: f64| -> Vec<Bound> {
            let bound = |logit: &f64| {
                let value = sigmoid(*logit);
                let high = (sigmoid(logit + 2.0 * noise) * rounded.exp()).min(1.0);
                let low = sigmoid(logit - 2.0 * noise) * (-rounded).exp();
                let error = (high - value).max(value - low) + relative * high + least;
                Bound {
                    value,
                    error,
                    size: high,
                }
            };
            logits.iter().map(bound).collect()
        };
        let allowed = match sum {
            DType::F64 => 1e-12,
            _ => 4e-6,
        };
        QueryWeights {
            first: job.visible(query).start,
            lse: Bound {
                value: lse,
                error: noise + allowed * (1.0 + lse.abs()),
                size: lse.abs(),
            },
            forward: weights(0.0),
            backward: weights(rounded),
        }
    }
}

/// The logarithm of the sum of two exponentials.
fn log_add(x: f64, y: f64) -> f64 {
    let (most, least) = (x.max(y), x.min(y));
    match most == f64::NEG_INFINITY {
        true => most,
        false => most + (least - most).exp().ln_1p(),
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
