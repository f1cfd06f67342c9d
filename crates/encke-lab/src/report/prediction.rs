//! Predicted times for every ring of the page.
//!
//! Nothing is fitted to these rings: the cost model has the plan, measurements of the kernel alone,
//! and two small calibration rings.

use anyhow::Result;
use encke::{Plan, Request};
use encke_cost::{HostProfile, ProbeSizes, RING_DEADLINE, Statistic, simulate};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;

use super::findings::{Prediction, Predictions};
use crate::terminal::spinner;

/// Rows of the largest job with which the kernel is measured.
const ROWS: usize = 1024;

/// Predicts requests, given with their pass and the measured time until the last rank was done,
/// from so many readings of the kernel.
/// `None` if branches keep slots of their own until the end, because then time is also spent after
/// the ring.
pub fn predict(
    measured: &[(&'static str, Request, f64)],
    repeats: usize,
) -> Result<Option<Predictions>> {
    let Some((_, first, _)) = measured.first() else {
        return Ok(None);
    };
    if first.pattern.splits_slots() {
        return Ok(None);
    }
    let progress = spinner("prediction");
    let kernel = CpuKernel::new()?;
    let mut profile = HostProfile::new(
        &kernel,
        ProbeSizes {
            rows: first.shape.tokens.clamp(8, ROWS),
            heads: first.shape.heads,
            dim: first.shape.dim,
            dtype: first.dtype,
        },
    )?;
    let ring = ThreadRing::new(kernel, RING_DEADLINE);
    for _ in 0..repeats {
        profile.measure(&ring)?;
    }
    let machine = profile.machine(Statistic::Median)?;
    let mut rings = Vec::new();
    for (pass, request, measured_s) in measured {
        let plan = Plan::new(request.clone())?;
        rings.push(Prediction {
            pass,
            ranks: plan.ranks(),
            predicted_s: simulate(&plan, &machine, 0..0)?.seconds,
            measured_s: *measured_s,
        });
    }
    progress.finish_and_clear();
    Ok(Some(Predictions {
        runs: repeats,
        rings,
    }))
}
