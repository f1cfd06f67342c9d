//! The record of a benchmark: checks and times of each ring and pass.

use anyhow::Result;
use encke::plan::Plan;
use encke::{Activity, Pass, RankMemory, Report, Request};
use serde::{Deserialize, Serialize};

use super::case::gradient_tolerance;
use super::{BenchSettings, TimedPasses};
use crate::process::MachineInfo;
use crate::row_check::RowCheck;

/// One pass of one ring.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PassTimes {
    /// Forward or backward.
    pub pass: String,
    /// Floating-point operations of all ranks.
    pub flops: f64,
    /// Bytes sent by all ranks.
    pub sent_bytes: usize,
    /// Planned bytes of the rank that holds most.
    pub rank_bytes: usize,
    /// Seconds of each repeat, by the slowest rank.
    pub seconds: Vec<f64>,
    /// Of each repeat, the time that ranks waited for messages, as a fraction of all ranks' time.
    pub waiting: Vec<f64>,
}

/// One ring.
#[derive(Debug, Serialize)]
pub struct RingTimes {
    /// Ring size.
    pub ranks: usize,
    /// Rows of its output, compared with the reference.
    pub checked: RowCheck,
    /// Difference of its gradients from those of the smallest ring, relative to the largest value.
    pub gradients_apart: Option<f64>,
    /// Forward, and backward if it was timed.
    pub passes: Vec<PassTimes>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct BenchRecord {
    /// The machine.
    pub machine: MachineInfo,
    /// The device that computed.
    pub device: String,
    /// The MPI library, where ranks were processes.
    pub library: Option<String>,
    /// The forward pass on the smallest ring.
    pub request: Request,
    seed: u64,
    /// Each ring, by rising size.
    pub rings: Vec<RingTimes>,
}

impl PassTimes {
    /// A pass before it is timed.
    pub(super) fn new(pass: &str, report: &Report) -> Result<PassTimes> {
        let held = report.memory.iter().map(RankMemory::planned_bytes);
        Ok(PassTimes {
            pass: pass.to_string(),
            flops: operations(&report.plan)?,
            sent_bytes: report.trace.sent_bytes(),
            rank_bytes: held.max().unwrap_or(0),
            seconds: Vec::new(),
            waiting: Vec::new(),
        })
    }

    fn add(&mut self, seconds: f64, report: &Report) {
        let ranks = report.memory.len().max(1) as f64;
        let waited = report.trace.total(Activity::Wait).as_secs_f64();
        self.seconds.push(seconds);
        self.waiting.push(waited / (ranks * seconds));
    }

    /// The pass of a ring from those of its ranks, each measured in its own process.
    #[cfg(feature = "mpi")]
    pub(super) fn of_ranks(own: &[PassTimes]) -> Option<PassTimes> {
        let mut all = own.first()?.clone();
        all.sent_bytes = own.iter().map(|rank| rank.sent_bytes).sum();
        all.rank_bytes = own.iter().map(|rank| rank.rank_bytes).max()?;
        for repeat in 0..all.seconds.len() {
            let slowest = own.iter().map(|rank| rank.seconds[repeat]);
            all.seconds[repeat] = slowest.fold(0.0, f64::max);
            let waited = own
                .iter()
                .map(|rank| rank.waiting[repeat] * rank.seconds[repeat]);
            all.waiting[repeat] = waited.sum::<f64>() / (own.len() as f64 * all.seconds[repeat]);
        }
        Some(all)
    }
}

/// Floating-point operations of a pass, counting only the pairs of the pattern.
fn operations(plan: &Plan) -> Result<f64> {
    let each = match plan.request().pass {
        Pass::Forward => 4,
        Pass::Backward { .. } | Pass::BackwardByBranch => 10,
    };
    let mut pairs = 0;
    for rank in 0..plan.ranks() {
        pairs += plan.rank(rank)?.pairs();
    }
    Ok((pairs * each * plan.request().shape.dim as u128) as f64)
}

impl RingTimes {
    /// Adds one repeat.
    pub(super) fn add(&mut self, timed: &TimedPasses) {
        let seconds = &timed.seconds;
        let timed = self.passes.iter_mut().zip(timed.reports()).zip(seconds);
        timed.for_each(|((pass, report), seconds)| pass.add(*seconds, report));
    }

    /// Whether its output and its gradients are within their tolerances.
    pub fn is_right(&self, tolerance: f64) -> bool {
        let apart = self.gradients_apart;
        self.checked.wrong == 0 && apart.is_none_or(|apart| apart <= tolerance)
    }
}

impl BenchRecord {
    pub(super) fn new(request: Request, settings: &BenchSettings) -> BenchRecord {
        BenchRecord {
            machine: MachineInfo::here(),
            device: settings.device.to_string(),
            library: None,
            request,
            seed: settings.seed,
            rings: Vec::new(),
        }
    }

    /// Whether the results of every ring are within their tolerances.
    pub fn is_right(&self) -> bool {
        let tolerance = gradient_tolerance(self.request.dtype);
        self.rings.iter().all(|ring| ring.is_right(tolerance))
    }
}
