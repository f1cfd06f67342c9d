//! Benchmarks: the times of rings of several sizes, measured in turn.
//!
//! The decision here: nothing is timed before it is checked. Rows of every ring's output are
//! compared with the f64 reference, and its gradients with those of the smallest ring, before the
//! first timing; then the rings take turns, so that other load of the machine affects all of them
//! alike.

mod case;
#[cfg(feature = "mpi")]
pub mod processes;
mod record;

use std::time::Instant;

use anyhow::{Result, bail};
use encke::{
    Attention, Backward, Builder, DType, Forward, Kernel, Mode, Pass, Pattern, Report, Shape,
};
use encke_core::sharding::Run;

use crate::device::{ComputeDevice, open_gpu};
use crate::ring_memory::check_ring_memory;
use crate::row_check::RowCheck;
use crate::terminal::bar;
use case::GeneratedTensors;
pub use case::gradient_tolerance;
pub use record::{BenchRecord, PassTimes, RingTimes};

/// What is timed.
#[derive(Debug)]
pub struct BenchSettings {
    /// Sizes of the tensors.
    pub shape: Shape,
    /// Type of the tensors.
    pub dtype: DType,
    /// The attention of each ring, by rising size.
    pub rings: Vec<Builder>,
    /// The device that computes.
    pub device: ComputeDevice,
    /// Whether the backward pass is timed too.
    pub grad: bool,
    /// How often each ring is timed.
    pub repeats: usize,
    /// Seed of the tensors.
    pub seed: u64,
}

impl BenchSettings {
    /// Refuses patterns whose rows cannot be checked one by one.
    pub fn check_pattern(pattern: &Pattern) -> Result<()> {
        if pattern.mode() == Mode::Fkodom {
            bail!(
                "fkodom mode divides by sums over the whole sequence, so its rows cannot be \
                 checked one by one; use --mode group, which has the same pairs"
            );
        }
        Ok(())
    }
}

/// The results of both passes, with their times.
struct TimedPasses {
    forward: Forward,
    backward: Option<Backward>,
    seconds: Vec<f64>,
}

impl TimedPasses {
    /// The reports of the passes, in order.
    fn reports(&self) -> impl Iterator<Item = &Report> {
        let backward = self.backward.iter().map(|backward| &backward.report);
        std::iter::once(&self.forward.report).chain(backward)
    }

    /// The passes, before any of them is timed.
    fn untimed(&self) -> Result<Vec<PassTimes>> {
        let named = ["forward", "backward"].into_iter().zip(self.reports());
        named.map(|(name, of)| PassTimes::new(name, of)).collect()
    }
}

/// Checks and times all rings in this process. If a ring is wrong, nothing is timed.
pub fn run(settings: &BenchSettings) -> Result<BenchRecord> {
    match settings.device {
        ComputeDevice::Cpu => run_on(settings, |of| Ok(of.build()?)),
        ComputeDevice::Cuda(index) => run_on(settings, |of| Ok(of.build_on(open_gpu(index)?)?)),
    }
}

/// Checks and times all rings; `build` opens the device of each.
fn run_on<K: Kernel>(
    settings: &BenchSettings,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<BenchRecord> {
    let &BenchSettings {
        shape, dtype, grad, ..
    } = settings;
    let mut rings = Vec::new();
    for builder in &settings.rings {
        let attention = build(builder.clone())?;
        let plan = attention.plan(shape, dtype, Pass::Forward)?;
        if settings.device == ComputeDevice::Cpu {
            check_ring_memory(&plan)?;
        }
        rings.push((attention, plan.request().clone()));
    }
    let Some((_, request)) = rings.first() else {
        bail!("--ranks names no ring; give one or more sizes");
    };
    let whole = Run::leading(shape.tokens);
    let tensors = GeneratedTensors::new(request, settings.seed, &[whole])?;
    let mut record = BenchRecord::new(request.clone(), settings);
    let progress = bar(rings.len() * (1 + settings.repeats));
    let mut smallest: Option<Backward> = None;
    for (attention, request) in &rings {
        let ranks = request.sharding.ranks();
        progress.set_message(format!("ring of {ranks}, checked"));
        let passes = time_passes(attention, &tensors, grad)?;
        let mut checked = RowCheck::default();
        tensors.check(&passes.forward, &mut checked)?;
        let difference = match (&smallest, &passes.backward) {
            (Some(smallest), Some(own)) => Some(case::gradient_difference(smallest, own)),
            _ => None,
        };
        record.rings.push(RingTimes {
            ranks,
            checked,
            gradients_apart: difference,
            passes: passes.untimed()?,
        });
        smallest = smallest.or(passes.backward);
        progress.inc(1);
    }
    drop(smallest);
    if record.is_right() {
        for _ in 0..settings.repeats {
            for ((attention, _), times) in rings.iter().zip(&mut record.rings) {
                progress.set_message(format!("ring of {}", times.ranks));
                times.add(&time_passes(attention, &tensors, grad)?);
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();
    Ok(record)
}

/// One forward pass, and one backward pass after it.
fn time_passes<K: Kernel>(
    attention: &Attention<K>,
    tensors: &GeneratedTensors,
    grad: bool,
) -> Result<TimedPasses> {
    let (q, k, v) = tensors.tensors.views();
    let dout = tensors.tensors.dout.view();
    let begin = Instant::now();
    let forward = attention.forward(&q, &k, &v)?;
    let mut seconds = vec![begin.elapsed().as_secs_f64()];
    let mut backward = None;
    if grad {
        let begin = Instant::now();
        backward = Some(attention.backward(&q, &k, &v, &forward.checkpoint, &dout, None)?);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    Ok(TimedPasses {
        forward,
        backward,
        seconds,
    })
}
