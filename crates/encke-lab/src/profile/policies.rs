//! The cost of each checkpoint policy: bytes kept between the passes, bytes sent, and time.

use std::time::Instant;

use anyhow::Result;
use encke::{Attention, Builder, CheckpointPolicy, Kernel, Request};
use encke_cost::{BenchmarkInputs, median};

use super::measure::builder;
use crate::device::{ComputeDevice, open_gpu};
use crate::terminal::bar;

/// Runs of each policy, of which medians are taken.
const RUNS: usize = 3;

/// One checkpoint policy, over all ranks.
#[derive(Debug)]
pub struct PolicyProfile {
    /// The policy as text.
    pub name: &'static str,
    /// Bytes kept in memory between the passes.
    pub memory_bytes: usize,
    /// Bytes kept in a file between the passes.
    pub file_bytes: usize,
    /// Bytes sent in both passes.
    pub sent_bytes: usize,
    /// Median time of the forward pass.
    pub forward_s: f64,
    /// Median time of the backward pass.
    pub backward_s: f64,
}

/// Runs both passes of a request with each policy, in turn.
pub fn measure_policies(request: &Request, device: ComputeDevice) -> Result<Vec<PolicyProfile>> {
    match device {
        ComputeDevice::Cpu => measure(request, |of| Ok(of.build()?)),
        ComputeDevice::Cuda(index) => measure(request, |of| Ok(of.build_on(open_gpu(index)?)?)),
    }
}

fn measure<K: Kernel>(
    request: &Request,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<Vec<PolicyProfile>> {
    let policies = [
        ("output kept", CheckpointPolicy::KeepOutput),
        ("output in a file", CheckpointPolicy::Offload),
        ("recomputed", CheckpointPolicy::Recompute),
    ];
    let rehearsal = BenchmarkInputs::new(request)?;
    let ([q, k, v], dout) = (rehearsal.inputs(), rehearsal.dout());
    let mut times = vec![(Vec::new(), Vec::new()); policies.len()];
    let mut bytes = vec![((0, 0), 0); policies.len()];
    let progress = bar(RUNS * policies.len());
    for _ in 0..RUNS {
        for (at, (name, policy)) in policies.iter().enumerate() {
            progress.set_message(*name);
            let attention = build(builder(request).checkpoint(*policy))?;
            let begin = Instant::now();
            let forward = attention.forward(&q, &k, &v)?;
            times[at].0.push(begin.elapsed().as_secs_f64());
            let begin = Instant::now();
            let checkpoint = &forward.checkpoint;
            let backward = attention.backward(&q, &k, &v, checkpoint, &dout, None)?;
            times[at].1.push(begin.elapsed().as_secs_f64());
            let once = forward.report.trace.sent_bytes();
            let again = usize::from(*policy == CheckpointPolicy::Recompute) * once;
            let sent = once + again + backward.report.trace.sent_bytes();
            bytes[at] = (checkpoint.kept_bytes(), sent);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    let measured = policies.iter().zip(times).zip(bytes);
    let measured =
        measured.map(
            |(((name, _), (forward, backward)), (kept, sent_bytes))| PolicyProfile {
                name,
                memory_bytes: kept.0,
                file_bytes: kept.1,
                sent_bytes,
                forward_s: median(&forward),
                backward_s: median(&backward),
            },
        );
    Ok(measured.collect())
}
