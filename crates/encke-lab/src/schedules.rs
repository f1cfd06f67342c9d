//! One request with each schedule: predicted time, bytes inside and between nodes, memory.
//!
//! Nothing is run. The decision here: schedules are compared on the same shards, pattern and
//! machine, so a difference is the schedule's alone.

use anyhow::Result;
use encke::plan::Plan;
use encke::{Pass, Request, Schedule};
use encke_cost::{Machine, simulate};
use serde::Serialize;

/// The name of the ring of one level.
pub const RING: &str = "ring";

/// A schedule with its predicted times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScheduleTimes {
    /// Its name.
    pub name: &'static str,
    /// The schedule.
    pub schedule: Schedule,
    /// Predicted time of the forward pass.
    pub forward_s: f64,
    /// Predicted time of the backward pass, if it was asked for.
    pub backward_s: Option<f64>,
    /// The share of the devices' time that is arithmetic, over all passes.
    pub efficiency: f64,
    /// Bytes sent inside nodes, over all passes.
    pub inside_bytes: u64,
    /// Bytes sent between nodes, over all passes.
    pub between_bytes: u64,
    /// The busiest port between nodes at its full speed: a lower bound of the time.
    pub busiest_port_s: f64,
    /// Bytes of the fullest of some ranks ([`sampled`]), in the pass that needs more.
    pub memory_bytes: usize,
}

impl ScheduleTimes {
    /// Predicted time of all passes.
    pub fn seconds(&self) -> f64 {
        self.forward_s + self.backward_s.unwrap_or(0.0)
    }
}

/// The schedules that are compared for a request where a node has so many ranks. Heads are divided
/// where the request allows it.
pub fn compared(request: &Request, node: usize) -> Vec<(&'static str, Schedule)> {
    let divided = request.dividing_heads(node);
    [
        Some((RING, Schedule::RING)),
        Some(("two-level", Schedule::RING.with_node(node))),
        divided.map(|schedule| ("heads x sequence", schedule)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The ranks whose buffers are counted: two at each end, and two in the middle. The others lie
/// between them in everything that makes shards differ.
pub fn sampled(ranks: usize) -> impl Iterator<Item = usize> {
    let middle = ranks / 2;
    let some = [
        0,
        1,
        middle.saturating_sub(1),
        middle,
        ranks.saturating_sub(2),
        ranks - 1,
    ];
    (0..ranks).filter(move |rank| some.contains(rank))
}

/// Predicts a request with another schedule.
pub fn times(
    request: &Request,
    (name, schedule): (&'static str, Schedule),
    machine: &Machine,
    grad: bool,
) -> Result<ScheduleTimes> {
    let passes = [Pass::Forward, Pass::Backward { dlse: false }];
    let (mut seconds, mut memory_bytes) = (Vec::new(), 0);
    let (mut one_device_s, mut busy_s, mut busiest_port_s) = (0.0, 0.0, 0.0);
    let mut bytes = [0; 2];
    for pass in passes.into_iter().take(1 + usize::from(grad)) {
        let schedule = schedule.with_backward(request.schedule.backward);
        let plan = Plan::new(Request {
            pass,
            schedule,
            ..request.clone()
        })?;
        let run = simulate(&plan, machine, 0..0)?;
        for link in &run.links {
            bytes[usize::from(link.between_nodes)] += link.bytes;
            if link.between_nodes {
                busiest_port_s += link.busiest_port_s;
            }
        }
        one_device_s += run.one_device_s;
        busy_s += run.devices as f64 * run.seconds;
        seconds.push(run.seconds);
        for rank in sampled(plan.ranks()) {
            let held = plan.rank(rank)?.memory().values().sum();
            memory_bytes = memory_bytes.max(held);
        }
    }
    Ok(ScheduleTimes {
        name,
        schedule,
        forward_s: seconds[0],
        backward_s: seconds.get(1).copied(),
        efficiency: one_device_s / busy_s,
        inside_bytes: bytes[0],
        between_bytes: bytes[1],
        busiest_port_s,
        memory_bytes,
    })
}

/// The index of the fastest of those whose buffers are within `limit` bytes, or of all if none is;
/// of those within a hundredth of it, the first.
pub fn fastest(all: &[ScheduleTimes], limit: Option<usize>) -> usize {
    let fits = |of: &ScheduleTimes| limit.is_none_or(|limit| of.memory_bytes <= limit);
    let any = all.iter().any(fits);
    let considered = |of: &ScheduleTimes| fits(of) || !any;
    let least = all.iter().filter(|of| considered(of));
    let least = least
        .map(ScheduleTimes::seconds)
        .fold(f64::INFINITY, f64::min);
    let tied = least * (1.0 + encke::choose::TIE_TOLERANCE);
    let best = |of: &ScheduleTimes| considered(of) && of.seconds() <= tied;
    all.iter().position(best).unwrap_or(0)
}
