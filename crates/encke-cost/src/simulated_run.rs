//! The result of a simulation: how long the plan takes and where the time goes.

use std::time::Duration;

use encke_core::plan::Pass;
use encke_ring::Trace;
use serde::Serialize;

/// The predicted time of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulatedRun {
    /// The simulated pass.
    pub pass: Pass,
    /// From the first task to the end of the last rank.
    pub seconds: f64,
    /// Floating-point operations of all jobs.
    pub flops: f64,
    /// The time of these operations on one device that does nothing else: operations / FLOP/s.
    pub one_device_s: f64,
    /// Devices that work in parallel.
    pub devices: usize,
    /// one_device_s / (devices x seconds): the share of the devices' time spent on arithmetic.
    pub efficiency: f64,
    /// The share of transfer time that overlaps a rank's computation or preparation; `None` where
    /// nothing is transferred.
    pub hidden: Option<f64>,
    /// The rank with the longest busy time.
    pub slowest: usize,
    /// The time of each rank.
    pub ranks: Vec<RankTime>,
    /// The traffic of each kind of link: intra-node first, then inter-node.
    pub links: Vec<LinkTime>,
    /// Every interval of the recorded ranks.
    pub trace: Trace,
    /// Every transfer that a recorded rank sent or received, in order of arrival.
    pub transfers: Vec<Transfer>,
}

impl SimulatedRun {
    /// Bytes transferred.
    pub fn bytes(&self) -> u64 {
        self.links.iter().map(|link| link.bytes).sum()
    }
}

/// The time of one rank. All fields in seconds but `in_flight_s` and `end_s` add up to `end_s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct RankTime {
    /// Copying inputs into its buffers.
    pub load_s: f64,
    /// Packing, merging and finishing.
    pub prepare_s: f64,
    /// Its jobs.
    pub compute_s: f64,
    /// Waiting while transfers of its own were in flight: exposed communication.
    pub exposed_s: f64,
    /// Waiting for another rank while none of its transfers was in flight.
    pub idle_s: f64,
    /// Time with at least one of its transfers in flight, whether or not it computed meanwhile.
    pub in_flight_s: f64,
    /// When it ended.
    pub end_s: f64,
    /// Bytes it sent.
    pub sent_bytes: u64,
    /// Bytes it received.
    pub received_bytes: u64,
}

impl RankTime {
    /// Time spent loading, preparing and computing.
    pub fn busy_s(&self) -> f64 {
        self.load_s + self.prepare_s + self.compute_s
    }
}

/// The traffic of one kind of link.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LinkTime {
    /// The link's name.
    pub name: String,
    /// Whether it joins nodes.
    pub between_nodes: bool,
    /// Bytes transferred.
    pub bytes: u64,
    /// Transfers.
    pub transfers: u64,
    /// The bytes of the busiest port at its full bandwidth: a lower bound of the run's time.
    pub busiest_port_s: f64,
}

/// One transfer: everything that one rank sent to another in a round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Transfer {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// The round.
    pub round: usize,
    /// Its bytes.
    pub bytes: u64,
    /// Whether it crossed nodes.
    pub between_nodes: bool,
    /// When both ends had posted it.
    pub start_s: f64,
    /// When its last byte arrived.
    pub end_s: f64,
}

/// Seconds as a [`Duration`], saturating.
pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
