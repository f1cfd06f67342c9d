//! One device or a ring, of what size, how cut and how scheduled: alternatives are planned, timed and weighed.
//!
//! Nothing is run and nothing is measured here. What a machine can do is told by its description
//! ([`Machine`]); what an alternative would do is its very plan, and how long it would take is what
//! the simulator's clock says of it.
//!
//! The decision here: there is no rule of thumb. Every alternative is planned and timed like a call,
//! which takes milliseconds; of those that fit, the fastest wins, and among those that the clock
//! cannot tell apart the simplest.

mod constraints;
mod threshold;

use encke_core::kernel::Kernel;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::Cut;
use encke_cost::{ClockError, Machine, Run, simulate};
use encke_ring::memory;
use serde::Serialize;

use crate::checkpoint::CheckpointPolicy;
pub use constraints::{Constraints, Work};
pub use threshold::{Threshold, one_device_until};

/// What differs by less than this, as a part, the clock does not tell apart.
pub const ALIKE: f64 = 0.01;

/// One way to do it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alternative {
    /// How many ranks.
    pub ranks: usize,
    /// How tokens are cut.
    pub cut: Cut,
    /// Who holds the queries.
    pub queries: Queries,
    /// How parcels go round.
    pub schedule: Schedule,
    /// What is kept between the passes, where there are two.
    pub checkpoint: Option<CheckpointPolicy>,
    /// Predicted time of the forward pass.
    pub forward_s: Option<f64>,
    /// Predicted time of the backward pass.
    pub backward_s: Option<f64>,
    /// Predicted time of all that is done, a forward pass that is done again included.
    pub seconds: f64,
    /// Bytes that the fullest rank holds, with what is kept for other layers.
    pub memory_bytes: usize,
    /// Bytes that travel.
    pub sent_bytes: u64,
    /// Part of the ranks' time that they wait for hops or for each other.
    pub waiting: f64,
    /// Whether the memory is within the limit.
    pub fits: bool,
}

/// What was considered, and what was chosen.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// Everything that was considered: what fits first, the fastest first.
    pub alternatives: Vec<Alternative>,
    /// Which of them was chosen.
    pub chosen: usize,
    /// Why.
    pub reason: String,
}

impl Choice {
    /// What was chosen.
    pub fn winner(&self) -> &Alternative {
        &self.alternatives[self.chosen]
    }
}

/// Why nothing could be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChoiceError {
    /// No alternative is within the limit.
    #[error(
        "nothing fits {limit} bytes a rank: the least that a rank would hold is {least} bytes, in a \
         ring of {ranks}; allow more memory or more ranks"
    )]
    NothingFits {
        /// Bytes that a rank may hold.
        limit: usize,
        /// Bytes that the fullest rank of the least demanding alternative would.
        least: usize,
        /// Its ranks.
        ranks: usize,
    },
    /// An alternative could not be planned or timed.
    #[error(transparent)]
    Clock(#[from] ClockError),
}

/// Considers every alternative that a wish leaves open, on a machine. The kernel is asked for its
/// scratch memory only.
pub fn choose<K: Kernel>(
    kernel: &K,
    wish: &Constraints,
    machine: &Machine,
) -> Result<Choice, ChoiceError> {
    let mut alternatives = Vec::new();
    for request in wish.requests()? {
        let backward = Pass::Backward { dlse: false };
        let (first, second) = match wish.work {
            Work::Forward => (Some(Pass::Forward), None),
            Work::Backward => (None, Some(backward)),
            Work::Training { .. } => (Some(Pass::Forward), Some(backward)),
        };
        let timed = |pass: Option<Pass>| match pass {
            Some(pass) => Timed::new(kernel, &request, pass, machine).map(Some),
            None => Ok(None),
        };
        let (forward, backward) = (timed(first)?, timed(second)?);
        for policy in policies(wish) {
            let weighed = weigh(wish, &request, [&forward, &backward], policy);
            alternatives.push(weighed);
        }
    }
    // On the way back every round waits for sums of the one before, and with ranks that share their cores for
    // the system to run them: fewer rounds, fewer waits.
    let rounds_wait = wish.work != Work::Forward && machine.device.shared_cores.is_some();
    let simplicity = |of: &Alternative| {
        let Schedule { width, backward } = of.schedule;
        let plain = (of.cut != Cut::Contiguous, backward != Rotating::Keys);
        let parcels = match rounds_wait {
            true => of.ranks.saturating_sub(width),
            false => width,
        };
        (of.ranks, plain.0, parcels, plain.1)
    };
    alternatives.sort_by(|a, b| {
        let by_time = a.seconds.total_cmp(&b.seconds);
        b.fits.cmp(&a.fits).then(by_time)
    });
    let Some(fastest) = alternatives.first().filter(|of| of.fits) else {
        let least = alternatives.iter().min_by_key(|of| of.memory_bytes);
        let least = least.map_or((0, wish.most_ranks), |of| (of.memory_bytes, of.ranks));
        return Err(ChoiceError::NothingFits {
            limit: wish.memory_limit.unwrap_or(0),
            least: least.0,
            ranks: least.1,
        });
    };
    let near = fastest.seconds * (1.0 + ALIKE);
    let alike = alternatives.iter().enumerate();
    let alike = alike.filter(|(_, of)| of.fits && of.seconds <= near);
    let chosen = alike
        .min_by_key(|(_, of)| simplicity(of))
        .map_or(0, |(at, _)| at);
    let reason = reason(wish, &alternatives, chosen);
    Ok(Choice {
        alternatives,
        chosen,
        reason,
    })
}

fn policies(wish: &Constraints) -> Vec<Option<CheckpointPolicy>> {
    match (wish.work, wish.checkpoint) {
        (Work::Training { .. }, None) => {
            vec![
                Some(CheckpointPolicy::KeepOutput),
                Some(CheckpointPolicy::Recompute),
            ]
        }
        (Work::Training { .. }, policy) => vec![policy],
        _ => vec![None],
    }
}

/// One pass of one ring, planned and timed.
struct Timed {
    run: Run,
    /// Of the fullest rank.
    memory_bytes: usize,
}

impl Timed {
    fn new<K: Kernel>(
        kernel: &K,
        request: &Request,
        pass: Pass,
        machine: &Machine,
    ) -> Result<Timed, ClockError> {
        let request = Request {
            pass,
            ..request.clone()
        };
        let plan = Plan::new(request)?;
        let run = simulate(&plan, machine, 0..0)?;
        // Ranks that share a device share its scratch memory.
        let sharing = plan.ranks().div_ceil(machine.devices(plan.ranks()).max(1));
        let mut memory_bytes = 0;
        for rank in 0..plan.ranks() {
            let program = plan.rank(rank)?;
            let planned = memory::planned(kernel, &program, sharing, plan.request());
            memory_bytes = memory_bytes.max(planned.values().sum());
        }
        Ok(Timed { run, memory_bytes })
    }
}

/// An alternative made of its passes and of what is kept between them.
fn weigh(
    wish: &Constraints,
    request: &Request,
    [forward, backward]: [&Option<Timed>; 2],
    checkpoint: Option<CheckpointPolicy>,
) -> Alternative {
    let seconds_of = |of: &Option<Timed>| of.as_ref().map(|timed| timed.run.seconds);
    let (forward_s, backward_s) = (seconds_of(forward), seconds_of(backward));
    let passes = || [forward, backward].into_iter().flatten();
    let again = match checkpoint {
        Some(CheckpointPolicy::Recompute) => forward.as_ref(),
        _ => None,
    };
    let kept = match (wish.work, checkpoint) {
        (Work::Training { layers }, Some(CheckpointPolicy::KeepOutput)) => {
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
        sent_bytes: runs().map(Run::bytes).sum(),
        waiting: if ended > 0.0 { waited / ended } else { 0.0 },
        fits: wish.memory_limit.is_none_or(|limit| memory_bytes <= limit),
    }
}

/// Bytes of out and lse of the fullest rank: what one layer keeps.
fn kept_bytes(request: &Request) -> usize {
    let Request {
        shape, sharding, ..
    } = request;
    let rows = (0..sharding.ranks()).map(|rank| sharding.rows(shape.tokens, rank));
    let rows = match request.queries {
        Queries::Sharded => rows.max().unwrap_or(0),
        Queries::Replicated => shape.tokens,
    };
    let row = shape.dim * request.out_dtype().bytes() + request.dtype.sum().bytes();
    shape.batch * rows * request.pattern.slots(shape.heads).len() * row
}

/// Why the chosen one won, in a sentence.
fn reason(wish: &Constraints, all: &[Alternative], chosen: usize) -> String {
    let winner = &all[chosen];
    let fitting = all.iter().filter(|of| of.fits).count();
    if fitting == 1 && all.len() == 1 {
        return "nothing else was left open".to_string();
    }
    let mut words = Vec::new();
    if fitting < all.len() {
        let one = all.iter().find(|of| of.ranks == 1 && !of.fits);
        words.push(match one {
            Some(one) => format!(
                "one device would hold {} bytes, and {} of {} alternatives fit",
                one.memory_bytes,
                fitting,
                all.len()
            ),
            None => format!("{fitting} of {} alternatives fit the memory", all.len()),
        });
    }
    let fastest = &all[0];
    if chosen != 0 {
        let behind = 100.0 * (winner.seconds / fastest.seconds - 1.0);
        words.push(format!(
            "it is the simplest of those that the clock cannot tell apart ({behind:.1} % behind the \
             fastest)"
        ));
    } else if let Some(next) = all[1..].iter().find(|of| of.fits) {
        let ahead = 100.0 * (next.seconds / winner.seconds - 1.0);
        words.push(format!("it is the fastest, {ahead:.1} % ahead of the next"));
    }
    let rival = |of: &&Alternative| of.fits && (of.ranks == 1) != (winner.ranks == 1);
    if let Some(rival) = all.iter().find(rival) {
        let who = match rival.ranks {
            1 => "one device".to_string(),
            ranks => format!("the best ring ({ranks} ranks)"),
        };
        let times = rival.seconds / winner.seconds;
        words.push(format!("{who} would take {times:.2} times as long"));
    }
    if wish
        .one_device_below
        .is_some_and(|limit| wish.shape.tokens < limit)
    {
        words.push("below the given length only one device is considered".to_string());
    }
    words.join("; ")
}
