//! Runs a configuration and compares its results with the f64 reference.
//!
//! The decision here is the tolerance. For f64 and f32: a fraction of the largest value of the
//! tensor, plus the rounding error of the terms it is a sum of, which counts where they cancel. For
//! bf16 and f16, as FlashAttention does it: twice the error of rounding the exact result to that
//! type, plus a floor, because the tensors kept between the passes are rounded as well.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail, ensure};
use encke::{
    Attention, Backward, Builder, CudaKernel, DType, Data, Forward, Kernel, Report, Tensor, View,
    reference,
};

use super::configuration::{RandomConfiguration, ReferenceInputs};
use crate::device::{ComputeDevice, open_gpu};

/// The allowed error of a result in this type, relative to the largest value.
fn relative_tolerance(dtype: DType) -> f64 {
    match dtype.sum() {
        DType::F64 => 1e-12,
        _ => 1e-5,
    }
}

/// The largest error of each type, as a fraction of its tolerance.
#[derive(Debug, Default)]
pub struct WorstErrors {
    by_type: BTreeMap<&'static str, (f64, usize)>,
}

impl WorstErrors {
    fn record(&mut self, dtype: DType, fraction: f64) {
        let name = match dtype {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        };
        let (worst, tensors) = self.by_type.entry(name).or_default();
        *worst = worst.max(fraction);
        *tensors += 1;
    }
}

impl fmt::Display for WorstErrors {
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

/// The device on which configurations run. A GPU is opened once, and again only after a
/// configuration that failed before it returned the kernel.
pub struct Comparer {
    device: ComputeDevice,
    gpu: Option<CudaKernel>,
}

impl Comparer {
    /// Opens the device.
    pub fn new(device: ComputeDevice) -> Result<Comparer> {
        let gpu = match device {
            ComputeDevice::Cpu => None,
            ComputeDevice::Cuda(index) => Some(open_gpu(index)?),
        };
        Ok(Comparer { device, gpu })
    }

    /// Runs both passes of a configuration; the error says what is wrong.
    pub fn run(&mut self, case: &RandomConfiguration, worst: &mut WorstErrors) -> Result<()> {
        match self.device {
            ComputeDevice::Cpu => compare_on(case, &attention(case)?, worst),
            ComputeDevice::Cuda(index) => {
                let gpu = self.gpu.take().map_or_else(|| open_gpu(index), Ok)?;
                let attention = builder(case).build_on(gpu)?;
                let compared = compare_on(case, &attention, worst);
                self.gpu = attention.into_kernel();
                compared
            }
        }
    }
}

fn compare_on<K: Kernel>(
    case: &RandomConfiguration,
    attention: &Attention<K>,
    worst: &mut WorstErrors,
) -> Result<()> {
    let inputs = case.inputs();
    let (forward, backward) = run(case, attention, &inputs)?;
    compare(case, &inputs, &forward, &backward, worst)?;
    check_report("forward", &forward.report)?;
    check_report("backward", &backward.report)
}

/// Compares results with the reference.
fn compare(
    case: &RandomConfiguration,
    inputs: &ReferenceInputs,
    forward: &Forward,
    backward: &Backward,
    worst: &mut WorstErrors,
) -> Result<()> {
    let (pattern, shape, scores) = (&case.pattern, &case.shape, case.scores());
    let ReferenceInputs { q, k, v, dout, .. } = inputs;
    let dlse = inputs.dlse.as_deref();
    let out = reference::forward(shape, pattern, scores.clone(), q, k, v)?;
    let gradients = reference::backward(shape, pattern, scores, q, k, v, dout, dlse)?;
    let terms = TermSizes::new(case, inputs, &out.out)?;

    let mut check = |name: &str, got: &Tensor, exact: &[f64], size: f64| {
        let limit = tolerance(case.dtype, &terms, exact, size);
        let error = largest_difference(&got.to_f64(), exact);
        worst.record(case.dtype, error / limit.max(f64::MIN_POSITIVE));
        // A NaN fails this comparison.
        if error <= limit {
            return Ok(());
        }
        bail!(
            "{name} is off by {error:.3e}, allowed {limit:.3e} (largest {:.3e})",
            largest(exact)
        )
    };
    check("out", &forward.out, &out.out, terms.out)?;
    check("dq", &backward.dq, &gradients.dq, terms.dq)?;
    check("dk", &backward.dk, &gradients.dk, terms.dk)?;
    check("dv", &backward.dv, &gradients.dv, terms.dv)?;
    if let Some(dsinks) = &backward.dsinks {
        let error = largest_difference(dsinks, &gradients.dsinks);
        let all = (shape.batch * shape.tokens) as f64 * (terms.dq + terms.dv + 1.0);
        let limit = all * relative_tolerance(case.dtype).max(case.dtype.epsilon());
        ensure!(
            error <= limit,
            "dsinks is off by {error:.3e}, allowed {limit:.3e}"
        );
    }
    let lse = largest_difference(&forward.lse.to_f64(), &out.lse);
    let limit = (1.0 + terms.scores) * relative_tolerance(case.dtype);
    ensure!(lse <= limit, "lse is off by {lse:.3e}, allowed {limit:.3e}");
    Ok(())
}

/// The attention of a configuration, with threads as ranks.
pub fn attention(case: &RandomConfiguration) -> Result<Attention> {
    Ok(builder(case).build()?)
}

/// The attention of a configuration, still without a device.
fn builder(case: &RandomConfiguration) -> Builder {
    let mut builder = Attention::builder()
        .pattern(case.pattern.clone())
        .ranks(case.ranks)
        .sharding(case.cut.clone())
        .queries(case.queries)
        .checkpoint(case.policy)
        .softcap(case.softcap)
        .alibi(case.alibi)
        .dropout(case.dropout);
    if let Some(scale) = case.scale {
        builder = builder.scale(scale);
    }
    builder
}

/// Runs both passes of a configuration.
fn run<K: Kernel>(
    case: &RandomConfiguration,
    attention: &Attention<K>,
    inputs: &ReferenceInputs,
) -> Result<(Forward, Backward)> {
    let shape = case.shape;
    let stored = |values: &[f64], rows: usize, heads: usize, dim: usize| {
        let dims = [shape.batch, rows, heads, dim];
        Tensor::from_data(Data::from_f64(case.dtype, values), dims)
    };
    let of_queries = |values: &[f64], dim| stored(values, shape.queries, shape.heads, dim);
    let of_keys = |values: &[f64], dim| stored(values, shape.tokens, shape.kv_heads, dim);
    let q = of_queries(&inputs.q, shape.dim)?;
    let k = of_keys(&inputs.k, shape.dim)?;
    let v = of_keys(&inputs.v, shape.value_dim)?;
    let dout = of_queries(&inputs.dout, shape.value_dim)?;
    let dlse = match &inputs.dlse {
        Some(dlse) => Some(of_queries(dlse, 1)?),
        None => None,
    };
    let dlse: Option<View<'_>> = dlse.as_ref().map(Tensor::view);
    let (q, k, v) = (q.view(), k.view(), v.view());
    let forward = match &case.sinks {
        None => attention.forward(&q, &k, &v)?,
        Some(sinks) => attention.forward_with_sinks(&q, &k, &v, sinks)?,
    };
    let kept = &forward.checkpoint;
    let backward = attention.backward(&q, &k, &v, kept, &dout.view(), dlse.as_ref())?;
    Ok((forward, backward))
}

/// Compares the bytes sent and allocated with the plan.
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

/// Upper bounds of the terms whose sums are the elements of each tensor.
struct TermSizes {
    scores: f64,
    out: f64,
    dq: f64,
    dk: f64,
    dv: f64,
}

impl TermSizes {
    fn new(case: &RandomConfiguration, inputs: &ReferenceInputs, out: &[f64]) -> Result<TermSizes> {
        let ReferenceInputs { q, k, v, dout, .. } = inputs;
        let (dim, value_dim) = (case.shape.dim, case.shape.value_dim);
        let scale = case.scale();
        let gain = case.dropout.map_or(1.0, |dropout| dropout.gain());
        let dlse = inputs.dlse.as_deref().map_or(0.0, largest);
        // Upper bound of a term of dS: dO·v, dO·out, and the gradient of the lse.
        let values = gain * norm(v, value_dim) + norm(out, value_dim);
        let term = norm(dout, value_dim) * values + dlse;
        // The largest sum of weights over all queries of one key: dv for dout = 1.
        let ones = vec![1.0; dout.len()];
        let scores = case.scores();
        let weights =
            reference::backward(&case.shape, &case.pattern, scores, q, k, v, &ones, None)?.dv;
        let weight = largest(&weights).max(1.0);
        Ok(TermSizes {
            scores: scale * norm(q, dim) * norm(k, dim),
            out: gain * largest(v),
            dq: scale * largest(k) * term,
            dk: scale * largest(q) * term * weight,
            dv: largest(dout) * weight,
        })
    }
}

/// The allowed error of `exact`, whose elements are sums of terms up to `size`.
fn tolerance(dtype: DType, terms: &TermSizes, exact: &[f64], size: f64) -> f64 {
    let rounding = dtype.sum().epsilon() * (32.0 + 4.0 * terms.scores);
    let wide = relative_tolerance(dtype) * largest(exact) + rounding * size;
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

/// The largest Euclidean norm of a row.
fn norm(values: &[f64], dim: usize) -> f64 {
    let squares = values
        .chunks(dim)
        .map(|row| row.iter().map(|x| x * x).sum::<f64>());
    squares.fold(0.0, f64::max).sqrt()
}

/// The largest difference; infinite if the lengths differ or a difference is NaN.
fn largest_difference(got: &[f64], exact: &[f64]) -> f64 {
    if got.len() != exact.len() {
        return f64::INFINITY;
    }
    let differences = got.iter().zip(exact).map(|(a, b)| match a == b {
        true => 0.0, // equal infinities included
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
    fn a_relative_error_of_1e_9_in_f64_is_found() {
        let mut found = 0;
        let is_f64 = |case: &RandomConfiguration| {
            case.dtype == DType::F64 && case.pattern.mode() != Mode::Fkodom
        };
        for case in (0..60).map(RandomConfiguration::new).filter(is_f64) {
            let mut inputs = case.inputs();
            let (forward, backward) = run(&case, &attention(&case).unwrap(), &inputs).unwrap();
            let mut worst = WorstErrors::default();
            compare(&case, &inputs, &forward, &backward, &mut worst).unwrap();
            if largest(&forward.out.to_f64()) == 0.0 {
                continue; // a pattern may leave out every token
            }
            inputs.v.iter_mut().for_each(|v| *v *= 1.0 + 1e-9);
            let wrong = compare(&case, &inputs, &forward, &backward, &mut worst);
            assert!(wrong.is_err(), "{case}");
            found += 1;
        }
        assert!(found > 10);
    }
}
