//! Runs a configuration and says whether it agrees with the reference.
//!
//! The decision here is how far apart is too far. Wide types: a share of the largest number of the
//! tensor, plus what rounding can do to the terms it is a sum of, which counts where they cancel.
//! Narrow types are judged as FlashAttention does it: twice the error of rounding the exact result
//! to that type, plus a floor, since what is kept between the passes is rounded as well.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail, ensure};
use encke::{
    Attention, Backward, Builder, CudaKernel, DType, Data, Forward, Kernel, Report, Tensor, View,
    reference,
};

use super::case::{Case, Numbers};
use crate::device_option::{Device, cuda};

/// Largest share of the largest number that a result in this type may be off by.
fn share(dtype: DType) -> f64 {
    match dtype.sum() {
        DType::F64 => 1e-12,
        _ => 1e-5,
    }
}

/// The largest error of each type, as a share of what was allowed.
#[derive(Debug, Default)]
pub struct Worst {
    by_type: BTreeMap<&'static str, (f64, usize)>,
}

impl Worst {
    fn note(&mut self, dtype: DType, share: f64) {
        let name = match dtype {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        };
        let (worst, tensors) = self.by_type.entry(name).or_default();
        *worst = worst.max(share);
        *tensors += 1;
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (dtype, (worst, tensors)) in &self.by_type {
            let percent = 100.0 * worst;
            writeln!(
                f,
                "  {dtype:<5} {tensors:>5} tensors, the worst at {percent:.1} % of its tolerance"
            )?;
        }
        Ok(())
    }
}

/// Where cases are run. A GPU is opened once, and again only where a case took it away.
pub struct Works {
    device: Device,
    gpu: Option<CudaKernel>,
}

impl Works {
    /// The works on a device, or why there are none.
    pub fn new(device: Device) -> Result<Works> {
        let gpu = match device {
            Device::Cpu => None,
            Device::Cuda(number) => Some(cuda(number)?),
        };
        Ok(Works { device, gpu })
    }
}

/// Runs the case forward and backward; an error says what was wrong.
pub fn judge(case: &Case, works: &mut Works, worst: &mut Worst) -> Result<()> {
    match works.device {
        Device::Cpu => judge_on(case, &attention(case)?, worst),
        Device::Cuda(number) => {
            let gpu = works.gpu.take().map_or_else(|| cuda(number), Ok)?;
            let attention = builder(case).build_on(gpu)?;
            let judged = judge_on(case, &attention, worst);
            works.gpu = Some(attention.into_kernel());
            judged
        }
    }
}

fn judge_on<K: Kernel>(case: &Case, attention: &Attention<K>, worst: &mut Worst) -> Result<()> {
    let numbers = case.numbers();
    let (forward, backward) = run(case, attention, &numbers)?;
    hold(case, &numbers, &forward, &backward, worst)?;
    check_report("forward", &forward.report)?;
    check_report("backward", &backward.report)
}

/// Holds results against the reference.
fn hold(
    case: &Case,
    numbers: &Numbers,
    forward: &Forward,
    backward: &Backward,
    worst: &mut Worst,
) -> Result<()> {
    let (pattern, shape, scale) = (&case.pattern, &case.shape, case.scale());
    let Numbers { q, k, v, dout, .. } = numbers;
    let dlse = numbers.dlse.as_deref();
    let out = reference::forward(shape, pattern, scale, q, k, v)?;
    let gradients = reference::backward(shape, pattern, scale, q, k, v, dout, dlse)?;
    let sizes = Sizes::new(case, numbers, &out.out)?;

    let mut compare = |name: &str, got: &Tensor, exact: &[f64], size: f64| {
        let limit = tolerance(case.dtype, &sizes, exact, size);
        let error = largest_difference(&got.to_f64(), exact);
        worst.note(case.dtype, error / limit.max(f64::MIN_POSITIVE));
        // Written so that a NaN fails.
        if error <= limit {
            return Ok(());
        }
        bail!(
            "{name} is off by {error:.3e}, allowed {limit:.3e} (largest {:.3e})",
            largest(exact)
        )
    };
    compare("out", &forward.out, &out.out, sizes.out)?;
    compare("dq", &backward.dq, &gradients.dq, sizes.dq)?;
    compare("dk", &backward.dk, &gradients.dk, sizes.dk)?;
    compare("dv", &backward.dv, &gradients.dv, sizes.dv)?;
    let lse = largest_difference(&forward.lse.to_f64(), &out.lse);
    let limit = (1.0 + sizes.scores) * share(case.dtype);
    ensure!(lse <= limit, "lse is off by {lse:.3e}, allowed {limit:.3e}");
    Ok(())
}

/// The attention of a case, on threads.
pub fn attention(case: &Case) -> Result<Attention> {
    Ok(builder(case).build()?)
}

/// The same, still without a device.
fn builder(case: &Case) -> Builder {
    let mut builder = Attention::builder()
        .pattern(case.pattern.clone())
        .ranks(case.ranks)
        .sharding(case.cut.clone())
        .queries(case.queries)
        .checkpoint(case.policy);
    if let Some(scale) = case.scale {
        builder = builder.scale(scale);
    }
    builder
}

/// Runs the case on a ring.
fn run<K: Kernel>(
    case: &Case,
    attention: &Attention<K>,
    numbers: &Numbers,
) -> Result<(Forward, Backward)> {
    let shape = case.shape;
    let dims = |heads: usize, dim: usize| [shape.batch, shape.tokens, heads, dim];
    let stored = |values: &[f64], heads: usize, dim: usize| {
        Tensor::from_data(Data::from_f64(case.dtype, values), dims(heads, dim))
    };
    let q = stored(&numbers.q, shape.heads, shape.dim)?;
    let k = stored(&numbers.k, shape.kv_heads, shape.dim)?;
    let v = stored(&numbers.v, shape.kv_heads, shape.dim)?;
    let dout = stored(&numbers.dout, shape.heads, shape.dim)?;
    let dlse = match &numbers.dlse {
        Some(dlse) => Some(stored(dlse, shape.heads, 1)?),
        None => None,
    };
    let dlse: Option<View<'_>> = dlse.as_ref().map(Tensor::view);
    let (q, k, v) = (q.view(), k.view(), v.view());
    let forward = attention.forward(&q, &k, &v)?;
    let kept = &forward.checkpoint;
    let backward = attention.backward(&q, &k, &v, kept, &dout.view(), dlse.as_ref())?;
    Ok((forward, backward))
}

/// What the ring did against what the plan said.
fn check_report(pass: &str, report: &Report) -> Result<()> {
    let (sent, planned) = (report.trace.sent_bytes(), report.plan.explain()?.sent_bytes);
    ensure!(
        sent == planned,
        "{pass}: {sent} bytes were sent, {planned} planned"
    );
    for memory in &report.memory {
        let (rank, held, planned) = (memory.rank, memory.allocated_bytes, memory.planned_bytes());
        ensure!(
            held <= planned,
            "{pass}: rank {rank} holds {held} bytes, {planned} planned"
        );
    }
    Ok(())
}

/// How large the terms are of which the numbers of each tensor are sums.
struct Sizes {
    scores: f64,
    out: f64,
    dq: f64,
    dk: f64,
    dv: f64,
}

impl Sizes {
    fn new(case: &Case, numbers: &Numbers, out: &[f64]) -> Result<Sizes> {
        let Numbers { q, k, v, dout, .. } = numbers;
        let dim = case.shape.dim;
        let scale = case.scale();
        let dlse = numbers.dlse.as_deref().map_or(0.0, largest);
        // What each term of dS is at most: dO·v, dO·out, and the gradient of the lse.
        let term = norm(dout, dim) * (norm(v, dim) + norm(out, dim)) + dlse;
        // What all queries together give to one key at most: dv of ones is the sum of weights.
        let ones = vec![1.0; dout.len()];
        let weights =
            reference::backward(&case.shape, &case.pattern, scale, q, k, v, &ones, None)?.dv;
        let weight = largest(&weights).max(1.0);
        Ok(Sizes {
            scores: scale * norm(q, dim) * norm(k, dim),
            out: largest(v),
            dq: scale * largest(k) * term,
            dk: scale * largest(q) * term * weight,
            dv: largest(dout) * weight,
        })
    }
}

/// How far `exact`, a sum of terms that reach `size`, may be missed.
fn tolerance(dtype: DType, sizes: &Sizes, exact: &[f64], size: f64) -> f64 {
    let rounding = dtype.sum().epsilon() * (32.0 + 4.0 * sizes.scores);
    let wide = share(dtype) * largest(exact) + rounding * size;
    if dtype == dtype.sum() {
        return wide;
    }
    let rounded: Vec<f64> = exact.iter().map(|&x| dtype.round(x)).collect();
    2.0 * largest_difference(&rounded, exact) + wide + dtype.epsilon() * size
}

/// The largest absolute value.
fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// The largest length of a row.
fn norm(values: &[f64], dim: usize) -> f64 {
    let squares = values
        .chunks(dim)
        .map(|row| row.iter().map(|x| x * x).sum::<f64>());
    squares.fold(0.0, f64::max).sqrt()
}

/// The largest difference; infinite where a number is missing or is no number.
fn largest_difference(got: &[f64], exact: &[f64]) -> f64 {
    if got.len() != exact.len() {
        return f64::INFINITY;
    }
    let differences = got.iter().zip(exact).map(|(a, b)| match a == b {
        true => 0.0, // also where both are the same infinity
        false => (a - b).abs(),
    });
    differences.fold(0.0, |most: f64, x| {
        if x.is_nan() {
            f64::INFINITY
        } else {
            most.max(x)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke::Mode;

    #[test]
    fn a_result_that_is_slightly_wrong_is_found() {
        let mut found = 0;
        let wide = |case: &Case| case.dtype == DType::F64 && case.pattern.mode() != Mode::Fkodom;
        for case in (0..60).map(Case::new).filter(wide) {
            let mut numbers = case.numbers();
            let (forward, backward) = run(&case, &attention(&case).unwrap(), &numbers).unwrap();
            let mut worst = Worst::default();
            hold(&case, &numbers, &forward, &backward, &mut worst).unwrap();
            if largest(&forward.out.to_f64()) == 0.0 {
                continue; // a pattern may leave out every token there is
            }
            numbers.v.iter_mut().for_each(|v| *v *= 1.0 + 1e-9);
            let wrong = hold(&case, &numbers, &forward, &backward, &mut worst);
            assert!(wrong.is_err(), "{case}");
            found += 1;
        }
        assert!(found > 10);
    }
}
