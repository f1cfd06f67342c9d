//! Runs and plans rings of several sizes.

use anyhow::Result;
use encke::{Attention, Bits, Builder, Cut, Kernel, Pass, Plan, Request};
use encke_sim::profile::{ProfileInputs, RingProfile};
use indicatif::ProgressBar;

use crate::device::{ComputeDevice, open_gpu};
use crate::process::check_memory;
use crate::ring_memory::check_ring_memory;
use crate::tensors::input_bytes;
use crate::terminal::bar;

/// What is profiled.
#[derive(Debug)]
pub struct ProfileSettings {
    /// The forward pass on each ring that is run, by rising size.
    pub run: Vec<Request>,
    /// The forward pass on each ring that is only planned.
    pub planned: Vec<Request>,
    /// The device that computes.
    pub device: ComputeDevice,
    /// Whether the backward pass is profiled too.
    pub grad: bool,
    /// Seed of the tensors.
    pub seed: u64,
}

/// One pass on all ring sizes.
pub struct PassProfile {
    /// Forward or backward.
    pub pass: &'static str,
    /// Rings that were run, by rising size.
    pub run: Vec<RingProfile>,
    /// Rings that were only planned.
    pub planned: Vec<RingProfile>,
}

impl PassProfile {
    /// The smallest and largest memory of a rank, as fractions of its plan; `None` if no ring was
    /// run.
    pub fn fractions_of_plan(&self) -> Option<(f64, f64)> {
        let shares = self.run.iter().filter_map(RingProfile::shares);
        shares.reduce(|(low, high), (least, most)| (low.min(least), high.max(most)))
    }

    /// Whether no rank held more than planned.
    pub fn is_within_plan(&self) -> bool {
        self.fractions_of_plan().is_none_or(|(_, most)| most <= 1.0)
    }
}

/// Runs, and plans, every ring of each pass.
pub fn measure(settings: &ProfileSettings) -> Result<Vec<PassProfile>> {
    let passes = [("forward", true), ("backward", settings.grad)];
    let passes = passes.into_iter().filter(|(_, profiled)| *profiled);
    let mut passes: Vec<PassProfile> = passes
        .map(|(pass, _)| PassProfile {
            pass,
            run: Vec::new(),
            planned: Vec::new(),
        })
        .collect();
    let progress = bar(settings.run.len() + settings.planned.len());
    let inputs = settings.run.first();
    if let Some(Request { shape, dtype, .. }) = inputs {
        check_memory(
            "the input tensors",
            input_bytes(shape, *dtype, shape.tokens),
        )?;
    }
    for request in &settings.run {
        if settings.device == ComputeDevice::Cpu {
            check_ring_memory(&Plan::new(request.clone())?)?;
        }
    }
    let inputs = inputs.map(|request| ProfileInputs::random(request, settings.seed));
    for request in &settings.run {
        progress.set_message(format!("ring of {}", request.sharding.ranks()));
        let Some(inputs) = &inputs else { break };
        // A kernel for each ring: a kernel keeps the workspace of earlier rings.
        let measured = match settings.device {
            ComputeDevice::Cpu => {
                let attention = Attention::builder().build()?;
                inputs.measure(attention.kernel(), request, settings.grad)?
            }
            ComputeDevice::Cuda(index) => {
                inputs.measure(&open_gpu(index)?, request, settings.grad)?
            }
        };
        for (pass, profile) in passes.iter_mut().zip(measured) {
            pass.run.push(profile);
        }
        progress.inc(1);
    }
    match settings.device {
        ComputeDevice::Cpu => {
            let attention = Attention::builder().build()?;
            plan_rings(attention.kernel(), settings, &mut passes, &progress)?;
        }
        ComputeDevice::Cuda(index) => {
            plan_rings(&open_gpu(index)?, settings, &mut passes, &progress)?;
        }
    }
    progress.finish_and_clear();
    Ok(passes)
}

/// Adds the rings that are only planned, with the workspace of a kernel.
fn plan_rings<K: Kernel>(
    kernel: &K,
    settings: &ProfileSettings,
    passes: &mut [PassProfile],
    progress: &ProgressBar,
) -> Result<()> {
    for request in &settings.planned {
        progress.set_message(format!("plan for {}", request.sharding.ranks()));
        for pass in passes.iter_mut() {
            let request = Request {
                pass: match pass.pass {
                    "forward" => Pass::Forward,
                    _ => Pass::Backward { dlse: false },
                },
                ..request.clone()
            };
            pass.planned.push(RingProfile::planned(kernel, &request)?);
        }
        progress.inc(1);
    }
    Ok(())
}

/// The attention of a request, still without a device.
pub(super) fn builder(request: &Request) -> Builder {
    // Tiles cut a sequence of another length elsewhere.
    let cut = match request.bits {
        Bits::Planned => request.sharding.cut().clone(),
        _ => Cut::Contiguous,
    };
    let builder = Attention::builder()
        .pattern(request.pattern.clone())
        .ranks(request.sharding.ranks())
        .sharding(cut)
        .queries(request.queries)
        .schedule(request.schedule)
        .redundancy(request.redundancy)
        .bits(request.bits)
        .softcap(request.softcap)
        .slopes(request.slopes.clone());
    match request.scale {
        None => builder,
        Some(scale) => builder.scale(scale),
    }
}
