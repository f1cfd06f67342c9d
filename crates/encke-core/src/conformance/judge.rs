//! How far from the oracle a kernel may be.
//!
//! Not a table of constants: what rounding can do to a sum depends on the sizes of its terms, so
//! the judge walks the pairs of the case and adds up their absolute values.
//!
//! The decision here is that of FlashAttention: a narrow type is allowed twice the error of a
//! reference that rounds the same inputs, the weights and the results to that type, and a floor.

use super::case::Case;
use super::kernel::Final;
use crate::dtype::DType;

/// The largest error allowed in each tensor.
pub(super) struct Judge {
    pub out: f64,
    pub lse: f64,
    pub dq: f64,
    /// For each part.
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Relative error that sums in the type which sums `dtype` may show.
pub(super) fn base(dtype: DType) -> f64 {
    match dtype.sum() {
        DType::F64 => 1e-12,
        _ => 2e-5,
    }
}

/// One rounding to `dtype`, where it is narrower than what is summed.
pub(super) fn floor(dtype: DType) -> f64 {
    if dtype == dtype.sum() {
        0.0
    } else {
        dtype.epsilon()
    }
}

/// The largest absolute value, gaps left out.
pub(super) fn largest(values: &[f64]) -> f64 {
    let sizes = values.iter().map(|x| x.abs());
    sizes.filter(|x| !x.is_nan()).fold(0.0, f64::max)
}

impl Judge {
    /// The judge of a case, given its lse and what backward is told.
    pub fn new(case: &Case, dtype: DType, lse: &[f64], told: &Final) -> Judge {
        let scores = largest_score(case);
        let noise = base(dtype) + 4.0 * dtype.sum().epsilon() * scores;
        let tolerance = |tensor: &Sum| {
            let size = largest(&tensor.size);
            let narrow = 2.0 * largest(&tensor.error) + dtype.epsilon() * size;
            noise * size + if floor(dtype) > 0.0 { narrow } else { 0.0 }
        };
        let sums = Sums::new(case, dtype, lse, told);
        Judge {
            out: tolerance(&sums.out),
            lse: (1.0 + scores)
                * match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 1e-6,
                    // Weights that are rounded at once are worth a shorter exponential.
                    DType::Bf16 | DType::F16 => 4e-6,
                },
            dq: tolerance(&sums.dq),
            dk: sums.dk.iter().map(tolerance).collect(),
            dv: sums.dv.iter().map(tolerance).collect(),
        }
    }
}

/// A bound of |scale·q·k| and of what is added up to get it.
fn largest_score(case: &Case) -> f64 {
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let norms = |values: &[f64]| largest(&values.chunks(case.dim).map(norm).collect::<Vec<_>>());
    let q = norms(&case.q);
    let bound = |scale: f64, k: &[f64]| scale.abs() * q * norms(k);
    let each = case.parts.iter().map(|part| bound(part.job.scale, &part.k));
    each.fold(0.0, f64::max)
}

/// A tensor's terms in absolute value, and what rounding weights to a narrow type does to it.
struct Sum {
    size: Vec<f64>,
    error: Vec<f64>,
}

impl Sum {
    fn new(initial: &[f64]) -> Sum {
        let size = initial.iter().map(|x| x.abs()).collect();
        let error = vec![0.0; initial.len()];
        Sum { size, error }
    }

    /// Adds `weight` times a row, given the weight's own size and its rounding error.
    fn add(&mut self, at: usize, size: f64, error: f64, row: &[f64]) {
        for (c, x) in row.iter().enumerate() {
            self.size[at + c] += size * x.abs();
            self.error[at + c] += error * x;
        }
    }
}

struct Sums {
    out: Sum,
    dq: Sum,
    dk: Vec<Sum>,
    dv: Vec<Sum>,
}

impl Sums {
    fn new(case: &Case, dtype: DType, lse: &[f64], told: &Final) -> Sums {
        let dim = case.dim;
        let mut sums = Sums {
            out: Sum::new(&vec![0.0; case.cells * dim]),
            dq: Sum::new(&case.dq),
            dk: case.parts.iter().map(|part| Sum::new(&part.dk)).collect(),
            dv: case.parts.iter().map(|part| Sum::new(&part.dv)).collect(),
        };
        case.pairs(|pair| {
            let part = &case.parts[pair.part];
            let (scale, gain) = (part.job.scale, part.job.gain);
            let q = &case.q[pair.q..pair.q + dim];
            let k = &part.k[pair.key..pair.key + dim];
            let v = &part.v[pair.key..pair.key + dim];
            let dout = &case.dout[pair.cell * dim..(pair.cell + 1) * dim];
            let (score, _) = dot(q, k);
            let p = (scale * score - lse[pair.cell]).exp();
            let p_error = dtype.round(p) - p;
            sums.out.add(pair.cell * dim, p, p_error, v);
            if told.lse[pair.cell] == f64::NEG_INFINITY {
                return; // backward is told that this query saw nothing
            }
            let (product, product_size) = dot(dout, v);
            let ds = p * (gain * product - told.delta[pair.cell]);
            let ds_size =
                scale.abs() * p * (gain.abs() * product_size + told.delta[pair.cell].abs());
            let ds_error = scale * (dtype.round(ds) - ds);
            sums.dv[pair.part].add(pair.key, p * gain, p_error * gain, dout);
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
