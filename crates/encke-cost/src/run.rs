//! What a clock's run over a plan comes to.

use std::time::Duration;

use encke_core::plan::Pass;
use encke_ring::Trace;
use serde::Serialize;

/// How long a plan takes, and where the time goes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// The pass that was timed.
    pub pass: Pass,
    /// From the first task to the end of the last rank.
    pub seconds: f64,
    /// Operations of all jobs.
    pub flops: f64,
    /// What one device would take for the same operations if it did nothing else: work / FLOP/s.
    pub one_device_s: f64,
    /// Devices that work side by side.
    pub devices: usize,
    /// one_device_s / (devices x seconds): the share of the devices' time that is arithmetic.
    pub efficiency: f64,
    /// The share of the time in which a rank's hops flew that it spent computing or preparing;
    /// none where nothing travels.
    pub hidden: Option<f64>,
    /// The rank that was busy longest, which the others wait for.
    pub slowest: usize,
    /// Each rank's time, summed up.
    pub ranks: Vec<RankTime>,
    /// What each kind of link moved: first inside nodes, then between them.
    pub links: Vec<LinkTime>,
    /// Every stretch of time of the ranks that were recorded.
    pub trace: Trace,
    /// Every hop that a recorded rank sent or received, by the time it arrived.
    pub transfers: Vec<Transfer>,
}

impl Run {
    /// Bytes that travelled.
    pub fn bytes(&self) -> u64 {
        self.links.iter().map(|link| link.bytes).sum()
    }
}

/// Where the time of one rank went: all but the flying adds up to its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct RankTime {
    /// Copying its inputs in.
    pub load_s: f64,
    /// Packing, combining, finishing.
    pub prepare_s: f64,
    /// Its jobs.
    pub compute_s: f64,
    /// Doing nothing while hops of its own were under way: communication that was not hidden.
    pub exposed_s: f64,
    /// Doing nothing because another rank was not there yet.
    pub idle_s: f64,
    /// Having hops under way, whatever it did meanwhile.
    pub flying_s: f64,
    /// When it was done.
    pub end_s: f64,
    /// Bytes it sent.
    pub sent_bytes: u64,
    /// Bytes it received.
    pub received_bytes: u64,
}

impl RankTime {
    /// Time it did something.
    pub fn busy_s(&self) -> f64 {
        self.load_s + self.prepare_s + self.compute_s
    }
}

/// What one kind of link moved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkTime {
    /// The link's name.
    pub name: String,
    /// Whether it joins nodes.
    pub between_nodes: bool,
    /// Bytes moved.
    pub bytes: u64,
    /// Hops made.
    pub hops: u64,
    /// What the fullest port would take for its bytes at full speed: a bound no run can beat.
    pub busiest_port_s: f64,
}

/// One hop: everything that one rank sent to another in a round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Transfer {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// The round.
    pub round: usize,
    /// How much.
    pub bytes: u64,
    /// Whether it went from node to node.
    pub between_nodes: bool,
    /// When both ends had posted it.
    pub start_s: f64,
    /// When all of it was there.
    pub end_s: f64,
}

/// Seconds as a trace has them; beyond what it can hold, the most it can.
pub(super) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
