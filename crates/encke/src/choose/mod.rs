//! Chooses between one device and a ring, and the ring's size, sharding and schedule.
//!
//! Nothing is run or measured here. [`Machine`] describes the hardware, an alternative's plan says
//! what it would do, and the cost model (`encke-cost`) predicts how long that takes.
//!
//! The decision here: there is no rule of thumb. Every alternative is planned and simulated, which
//! takes milliseconds; of those that fit in memory the fastest wins, and among those within
//! [`TIE_TOLERANCE`] of it the simplest.

mod constraints;
mod threshold;

use encke_core::kernel::Kernel;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::Cut;
use encke_cost::{CostError, Machine, SimulatedRun, simulate};
use encke_ring::memory;
use serde::Serialize;

use crate::checkpoint::CheckpointPolicy;
pub use constraints::{Constraints, Workload};
pub use threshold::{Threshold, one_device_until};

/// Ranks of the largest ring that is compared with others.
pub const MOST_RANKS: usize = 128;

/// Predicted times within this fraction of each other count as equal.
pub const TIE_TOLERANCE: f64 = 0.01;

/// A ring with its predicted times and memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alternative {
    /// Number of ranks.
    pub ranks: usize,
    /// How tokens are divided.
    pub cut: Cut,
    /// Sharded or replicated queries.
    pub queries: Queries,
    /// How parcels travel.
    pub schedule: Schedule,
    /// What is saved between the passes, where there are two.
    pub checkpoint: Option<CheckpointPolicy>,
    /// Predicted time of the forward pass.
    pub forward_s: Option<f64>,
    /// Predicted time of the backward pass.
    pub backward_s: Option<f64>,
    /// Predicted time of all passes, a recomputed forward pass included.
    pub seconds: f64,
    /// Peak bytes of the fullest rank, with the outputs saved for other layers.
    pub memory_bytes: usize,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Fraction of the ranks' time spent waiting for hops or for each other.
    pub waiting: f64,
    /// Whether the memory is within the limit.
    pub fits: bool,
}

/// The alternatives, the one chosen, and the reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// All alternatives: those that fit first, each group by time.
    pub alternatives: Vec<Alternative>,
    /// Index of the chosen one.
    pub chosen: usize,
    /// Why it was chosen, in a sentence.
    pub reason: String,
}

impl Choice {
    /// The chosen alternative.
    pub fn winner(&self) -> &Alternative {
        &self.alternatives[self.chosen]
    }
}

/// Why no alternative could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChoiceError {
    /// No alternative is within the limit.
    #[error(
        "nothing fits {limit} bytes per rank: the smallest alternative, with {ranks} ranks, needs \
         {least} bytes per rank; allow more memory or more ranks"
    )]
    NothingFits {
        /// Bytes that a rank may hold.
        limit: usize,
        /// Bytes of the fullest rank of the smallest alternative.
        least: usize,
        /// Ranks of that alternative.
        ranks: usize,
    },
    /// Rings of too many ranks.
    #[error(
        "rings of {ranks} ranks are too large to compare: every alternative is planned rank by \
         rank; use at most {MOST_RANKS} ranks, or choose every setting yourself"
    )]
    TooManyRanks {
        /// Ranks of the largest alternative.
        ranks: usize,
    },
    /// An alternative could not be planned or timed.
    #[error(transparent)]
    Clock(#[from] CostError),
}

/// Times every alternative that the constraints leave open, and chooses one. The kernel is only
/// used for the size of its workspace.
pub fn choose<K: Kernel>(
    kernel: &K,
    constraints: &Constraints,
    machine: &Machine,
) -> Result<Choice, ChoiceError> {
    let ranks = constraints.ranks.unwrap_or(constraints.most_ranks);
    if ranks > MOST_RANKS {
        return Err(ChoiceError::TooManyRanks { ranks });
    }
    let (mut alternatives, mut refusal) = (Vec::new(), None);
    for request in constraints.requests(machine.ranks_per_node)? {
        let backward = Pass::Backward { dlse: false };
        let (first, second) = match constraints.work {
            Workload::Forward => (Some(Pass::Forward), None),
            Workload::Backward => (None, Some(backward)),
            Workload::Training { .. } => (Some(Pass::Forward), Some(backward)),
        };
        let timed = |pass: Option<Pass>| match pass {
            Some(pass) => TimedPass::new(kernel, &request, pass, machine).map(Some),
            None => Ok(None),
        };
        // What is fixed may exclude some of what is open: replicated queries in two levels.
        let (forward, backward) = match (timed(first), timed(second)) {
            (Ok(forward), Ok(backward)) => (forward, backward),
            (Err(error @ CostError::Plan(_)), _) | (_, Err(error @ CostError::Plan(_))) => {
                refusal.get_or_insert(error);
                continue;
            }
            (Err(error), _) | (_, Err(error)) => return Err(error.into()),
        };
        for policy in policies(constraints) {
            let passes = [&forward, &backward];
            alternatives.push(alternative(constraints, &request, passes, policy));
        }
    }
    if let (true, Some(error)) = (alternatives.is_empty(), refusal) {
        return Err(error.into());
    }
    // In the backward pass every round waits for gradient sums of the round before; ranks that
    // share cores also wait for the scheduler. Fewer rounds mean fewer waits.
    let rounds_wait =
        constraints.work != Workload::Forward && machine.device.shared_cores.is_some();
    let simplicity = |of: &Alternative| {
        let Schedule {
            width,
            backward,
            node,
            heads,
        } = of.schedule;
        let plain = (of.cut != Cut::Contiguous, backward != Rotating::Keys);
        let parcels = match rounds_wait {
            true => of.ranks.saturating_sub(width),
            false => width,
        };
        (of.ranks, plain.0, node, heads, parcels, plain.1)
    };
    alternatives.sort_by(|a, b| {
        let by_time = a.seconds.total_cmp(&b.seconds);
        b.fits.cmp(&a.fits).then(by_time)
    });
    let Some(fastest) = alternatives.first().filter(|of| of.fits) else {
        let least = alternatives.iter().min_by_key(|of| of.memory_bytes);
        let least = least.map_or((0, constraints.most_ranks), |of| {
            (of.memory_bytes, of.ranks)
        });
        return Err(ChoiceError::NothingFits {
            limit: constraints.memory_limit.unwrap_or(0),
            least: least.0,
            ranks: least.1,
        });
    };
    let limit = fastest.seconds * (1.0 + TIE_TOLERANCE);
    let tied = alternatives.iter().enumerate();
    let tied = tied.filter(|(_, of)| of.fits && of.seconds <= limit);
    let chosen = tied
        .min_by_key(|(_, of)| simplicity(of))
        .map_or(0, |(at, _)| at);
    let reason = reason(constraints, &alternatives, chosen);
    Ok(Choice {
        alternatives,
        chosen,
        reason,
    })
}

fn policies(constraints: &Constraints) -> Vec<Option<CheckpointPolicy>> {
    match (constraints.work, constraints.checkpoint) {
        (Workload::Training { .. }, None) => {
            vec![
                Some(CheckpointPolicy::KeepOutput),
                Some(CheckpointPolicy::Recompute),
            ]
        }
        (Workload::Training { .. }, policy) => vec![policy],
        _ => vec![None],
    }
}

/// One pass of one ring, planned and timed.
struct TimedPass {
    run: SimulatedRun,
    /// Peak bytes of the fullest rank.
    memory_bytes: usize,
}

impl TimedPass {
    fn new<K: Kernel>(
        kernel: &K,
        request: &Request,
        pass: Pass,
        machine: &Machine,
    ) -> Result<TimedPass, CostError> {
        let request = Request {
            pass,
            ..request.clone()
        };
        let plan = Plan::new(request)?;
        let run = simulate(&plan, machine, 0..0)?;
        // Ranks that share a device share its workspace.
        let sharing = plan.ranks().div_ceil(machine.devices(plan.ranks()).max(1));
        let mut memory_bytes = 0;
        for rank in 0..plan.ranks() {
            let program = plan.rank(rank)?;
            let planned = memory::planned(kernel, &program, sharing, plan.request());
            memory_bytes = memory_bytes.max(planned.values().sum());
        }
        Ok(TimedPass { run, memory_bytes })
    }
}

/// The alternative with these passes and this checkpoint policy.
fn alternative(
    constraints: &Constraints,
    request: &Request,
    [forward, backward]: [&Option<TimedPass>; 2],
    checkpoint: Option<CheckpointPolicy>,
) -> Alternative {
    let seconds_of = |of: &Option<TimedPass>| of.as_ref().map(|timed| timed.run.seconds);
    let (forward_s, backward_s) = (seconds_of(forward), seconds_of(backward));
    let passes = || [forward, backward].into_iter().flatten();
    let again = match checkpoint {
        Some(CheckpointPolicy::Recompute) => forward.as_ref(),
        _ => None,
    };
    let kept = match (constraints.work, checkpoint) {
        (Workload::Training { layers }, Some(CheckpointPolicy::KeepOutput)) => {
            layers.saturating_sub(1) * kept_bytes(request)
        }
        _ => 0,
    };
    let most = passes().map(|timed| timed.memory_bytes).max();
    let memory_bytes = most.unwrap_or(0) + kept;
    let runs = || passes().chain(again).map(|timed| &timed.run);
    let ranks = || runs().flat_map(|run| &run.ranks);
    let waited: f64 = ranks().map(|rank| rank.exposed_s + rank.idle_s).sum();
    let ended: f64 = ranks().map(|rank| rank.end_s).sum();
    Alternative {
        ranks: request.sharding.ranks(),
        cut: request.sharding.cut().clone(),
        queries: request.queries,
        schedule: request.schedule,
        checkpoint,
        forward_s,
        backward_s,
        seconds: runs().map(|run| run.seconds).sum(),
        memory_bytes,
        sent_bytes: runs().map(SimulatedRun::bytes).sum(),
        waiting: if ended > 0.0 { waited / ended } else { 0.0 },
        fits: constraints
            .memory_limit
            .is_none_or(|limit| memory_bytes <= limit),
    }
}

/// Bytes of out and lse of the fullest rank: what one layer saves.
fn kept_bytes(request: &Request) -> usize {
    let Request {
        shape, sharding, ..
    } = request;
    let queries = |rank: usize| -> usize {
        let runs = request.query_runs(rank);
        runs.iter().map(|run| run.count).sum()
    };
    let rows = match request.queries {
        Queries::Sharded => (0..sharding.ranks()).map(queries).max().unwrap_or(0),
        Queries::Replicated => shape.queries,
    };
    let row = shape.value_dim * request.out_dtype().bytes() + request.dtype.sum().bytes();
    shape.batch * rows * request.pattern.slots(shape.heads).len() * row
}

/// Why the chosen alternative won, in a sentence.
fn reason(constraints: &Constraints, all: &[Alternative], chosen: usize) -> String {
    let winner = &all[chosen];
    let fitting = all.iter().filter(|of| of.fits).count();
    if fitting == 1 && all.len() == 1 {
        return "it is the only alternative".to_string();
    }
    let mut clauses = Vec::new();
    if fitting < all.len() {
        let one = all.iter().find(|of| of.ranks == 1 && !of.fits);
        clauses.push(match one {
            Some(one) => format!(
                "one device would hold {} bytes, and {} of {} alternatives fit in memory",
                one.memory_bytes,
                fitting,
                all.len()
            ),
            None => format!("{fitting} of {} alternatives fit in memory", all.len()),
        });
    }
    let fastest = &all[0];
    if chosen != 0 {
        let behind = 100.0 * (winner.seconds / fastest.seconds - 1.0);
        clauses.push(format!(
            "it is the simplest of those whose predicted times are equal within {:.0} % \
             ({behind:.1} % behind the fastest)",
            100.0 * TIE_TOLERANCE
        ));
    } else if let Some(next) = all[1..].iter().find(|of| of.fits) {
        let ahead = 100.0 * (next.seconds / winner.seconds - 1.0);
        clauses.push(format!("it is the fastest, {ahead:.1} % ahead of the next"));
    }
    let rival = |of: &&Alternative| of.fits && (of.ranks == 1) != (winner.ranks == 1);
    if let Some(rival) = all.iter().find(rival) {
        let name = match rival.ranks {
            1 => "one device".to_string(),
            ranks => format!("the best ring ({ranks} ranks)"),
        };
        let times = rival.seconds / winner.seconds;
        clauses.push(format!("{name} would take {times:.2} times as long"));
    }
    if constraints
        .one_device_below
        .is_some_and(|limit| constraints.shape.tokens < limit)
    {
        clauses.push("below the given length only one device is considered".to_string());
    }
    clauses.join("; ")
}
