//! The error that a kernel may have relative to the oracle.
//!
//! Tolerances are not constants: the rounding error of a sum depends on the size of its terms, so
//! they are computed from the absolute values of the terms of every pair of the case.
//!
//! The decision here is that of FlashAttention's tests: a narrow type is allowed twice the error of
//! a reference that rounds inputs, weights and results to that type, plus a floor.

use super::case::Case;
use super::results::ForwardResults;
use crate::dtype::DType;

/// The largest error allowed in each tensor.
pub(super) struct Tolerances {
    pub out: f64,
    pub lse: f64,
    pub dq: f64,
    /// For each job.
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Relative error allowed for sums in the accumulation type of `dtype`.
pub(super) fn base(dtype: DType) -> f64 {
    match dtype.sum() {
        DType::F64 => 1e-12,
        _ => 2e-5,
    }
}

/// One rounding to `dtype`, if it is narrower than the accumulation type.
pub(super) fn floor(dtype: DType) -> f64 {
    if dtype == dtype.sum() {
        0.0
    } else {
        dtype.epsilon()
    }
}

/// The largest absolute value, without gaps (NaN).
pub(super) fn largest(values: &[f64]) -> f64 {
    let sizes = values.iter().map(|x| x.abs());
    sizes.filter(|x| !x.is_nan()).fold(0.0, f64::max)
}

impl Tolerances {
    /// The tolerances of a case, given its lse and the inputs of its backward pass.
    pub fn new(case: &Case, dtype: DType, lse: &[f64], results: &ForwardResults) -> Tolerances {
        let scores = largest_score(case);
        let noise = base(dtype) + 4.0 * dtype.sum().epsilon() * scores;
        let tolerance = |tensor: &SumBounds| {
            let size = largest(&tensor.size);
            let narrow = 2.0 * largest(&tensor.error) + dtype.epsilon() * size;
            noise * size + if floor(dtype) > 0.0 { narrow } else { 0.0 }
        };
        let sums = TensorSums::new(case, dtype, lse, results);
        Tolerances {
            out: tolerance(&sums.out),
            lse: (1.0 + scores)
                * match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 1e-6,
                    // Weights are rounded anyway, so kernels may use a less accurate exponential.
                    DType::Bf16 | DType::F16 => 4e-6,
                },
            dq: tolerance(&sums.dq),
            dk: sums.dk.iter().map(tolerance).collect(),
            dv: sums.dv.iter().map(tolerance).collect(),
        }
    }
}

/// A bound of |scale·q·k|, of its partial sums, and of what slopes subtract.
fn largest_score(case: &Case) -> f64 {
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let norms = |values: &[f64]| largest(&values.chunks(case.dim).map(norm).collect::<Vec<_>>());
    let q = norms(&case.q);
    let bound = |scale: f64, k: &[f64]| scale.abs() * q * norms(k);
    let each = case.parts.iter().map(|part| bound(part.job.scale, &part.k));
    each.fold(0.0, f64::max) + largest_slope(case)
}

/// The most that slopes subtract from a score.
fn largest_slope(case: &Case) -> f64 {
    let mut largest = 0.0f64;
    case.pairs(|pair| {
        let job = &case.parts[pair.part].job;
        if job.transform.is_some() {
            let (score, _) = job.score(pair.at.2, pair.query_row, pair.key_row, 0.0);
            largest = largest.max(score.abs());
        }
    });
    largest
}

/// The sum of the absolute terms of each element, and its error if weights are rounded to a narrow
/// type.
struct SumBounds {
    size: Vec<f64>,
    error: Vec<f64>,
}

impl SumBounds {
    fn new(initial: &[f64]) -> SumBounds {
        let size = initial.iter().map(|x| x.abs()).collect();
        let error = vec![0.0; initial.len()];
        SumBounds { size, error }
    }

    /// Adds `weight` times a row, given the weight's own size and its rounding error.
    fn add(&mut self, at: usize, size: f64, error: f64, row: &[f64]) {
        for (c, x) in row.iter().enumerate() {
            self.size[at + c] += size * x.abs();
            self.error[at + c] += error * x;
        }
    }
}

struct TensorSums {
    out: SumBounds,
    dq: SumBounds,
    dk: Vec<SumBounds>,
    dv: Vec<SumBounds>,
}

impl TensorSums {
    fn new(case: &Case, dtype: DType, lse: &[f64], results: &ForwardResults) -> TensorSums {
        let (dim, value_dim) = (case.dim, case.value_dim);
        let mut sums = TensorSums {
            out: SumBounds::new(&vec![0.0; case.cells * value_dim]),
            dq: SumBounds::new(&case.dq),
            dk: case
                .parts
                .iter()
                .map(|part| SumBounds::new(&part.dk))
                .collect(),
            dv: case
                .parts
                .iter()
                .map(|part| SumBounds::new(&part.dv))
                .collect(),
        };
        case.pairs(|pair| {
            let part = &case.parts[pair.part];
            let (scale, gain) = (part.job.scale, part.job.gain);
            let q = &case.q[pair.q..pair.q + dim];
            let k = &part.k[pair.key..pair.key + dim];
            let v = &part.v[pair.value..pair.value + value_dim];
            let dout = &case.dout[pair.cell * value_dim..(pair.cell + 1) * value_dim];
            let (product, _) = dot(q, k);
            let (score, derivative) =
                part.job
                    .score(pair.at.2, pair.query_row, pair.key_row, product);
            let p = (score - lse[pair.cell]).exp();
            let factor = part
                .job
                .dropout_factor(pair.at, pair.query_row, pair.key_row);
            let kept = p * factor;
            let kept_error = dtype.round(kept) - kept;
            // A dropped pair counts as if it were kept: other jobs of the case may have a sum of
            // their own that the pair makes small.
            let dropout = part.job.dropout.as_ref();
            let most = dropout.map_or(1.0, |of| of.dropout.gain());
            sums.out.add(pair.cell * value_dim, p * most, kept_error, v);
            if results.lse[pair.cell] == f64::NEG_INFINITY {
                return; // the backward pass skips queries without keys
            }
            let (product, product_size) = dot(dout, v);
            let ds = derivative * p * (factor * gain * product - results.delta[pair.cell]);
            let product_size = factor * gain.abs() * product_size;
            let ds_size = scale.abs() * p * (product_size + results.delta[pair.cell].abs());
            let ds_error = scale * (dtype.round(ds) - ds);
            sums.dv[pair.part].add(pair.value, kept * gain, kept_error * gain, dout);
            sums.dq.add(pair.dq, ds_size, ds_error, k);
            sums.dk[pair.part].add(pair.key, ds_size, ds_error, q);
        });
        sums
    }
}

/// A dot product, and the same of absolute values.
fn dot(x: &[f64], y: &[f64]) -> (f64, f64) {
    x.iter().zip(y).fold((0.0, 0.0), |(sum, size), (x, y)| {
        (sum + x * y, size + (x * y).abs())
    })
}
