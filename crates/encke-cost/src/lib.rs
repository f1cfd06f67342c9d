//! Predicts how long a plan takes on a machine that is described or measured, without running it.
//!
//! [`simulate`] turns each rank's program into a list of costs and runs a discrete-event simulation
//! over it: tasks take the time the [`DeviceModel`] gives them, transfers take the time of the
//! [`Link`]s, and a round ends, as in `Transport::exchange`, when its jobs and its transfers have
//! ended. Nothing is computed and no memory grows with the number of tokens, so a billion tokens on
//! 1024 ranks take seconds.
//!
//! A [`Machine`] is written by hand or as a file, taken from the catalogue ([`find_device`],
//! [`find_link`]), or fitted to measurements of a kernel ([`HostProfile`] for ranks that are
//! threads of this process, [`DeviceProfile`] for a device such as a GPU). [`compare()`] measures
//! rings of threads and reports the error of their predictions.
//!
//! This crate does not choose a plan (that is `encke::choose`) and computes no attention.
//!
//! The decision here: there is no closed formula for rings. What is simulated are the programs that
//! ranks execute, round by round, so a new pattern, sharding or schedule needs no change here.

mod benchmark_inputs;
mod catalogue;
mod compare;
mod cores;
mod engine;
mod error;
mod event_queue;
mod job_costs;
mod least_squares;
mod machine;
mod network;
mod probe_sizes;
mod profile;
mod rank_costs;
mod ring_calibration;
mod simulate;
mod simulated_run;
mod statistics;

pub use benchmark_inputs::BenchmarkInputs;
pub use catalogue::{devices, find_device, find_link, links};
pub use compare::{
    ComparedRing, ComparisonReport, PredictedAndMeasured, RingComparison, compare, rings_to_compare,
};
pub use error::CostError;
pub use event_queue::{EventQueue, VirtualTime};
pub use machine::{DeviceModel, Link, MANY_INSTANCES, Machine, Rate, Speed, TransferMode};
pub use probe_sizes::ProbeSizes;
pub use profile::{DeviceProfile, HostProfile, JobFit, TimedWork};
pub use ring_calibration::{CalibrationPattern, RING_DEADLINE, RingCalibration};
pub use simulate::simulate;
pub use simulated_run::{LinkTime, RankTime, SimulatedRun, Transfer};
pub use statistics::{Statistic, median};
