//! Virtual time: how long the very plan would take on a machine that is only described.
//!
//! [`simulate`] turns each rank's program into a list of costs and lets a clock run over them: tasks
//! take the time the described device needs, hops take the time of the described links, and a
//! round ends, as in `Transport::exchange`, when its jobs and its hops have. Nothing is computed and
//! nothing is allocated by the tokens, so a billion of them on 1024 ranks take seconds.
//!
//! The decision here: no formula for rings. What is timed are the programs that ranks carry out,
//! round by round, so a pattern, a sharding or a schedule that plans something else is timed as
//! something else without a line here. [`compare()`] holds the clock against rings of threads.

mod catalogue;
mod compare;
mod cores;
mod cost;
mod engine;
mod error;
mod event_queue;
mod fit;
mod machine;
mod profile;
mod ring_calibration;
mod run;
mod wires;

pub use catalogue::{devices, find_device, find_link, links};
pub use compare::{Comparison, Findings, Rehearsal, Setting, Times, compare, median, settings};
pub use error::ClockError;
pub use machine::{Carrier, Device, FEW, Link, Machine, Rate, Speed};
pub use profile::{DeviceProfile, DeviceWork, Pick, Profile, Sizes, Told};
pub use ring_calibration::{Kind as CalibrationKind, PATIENCE, RingCalibration};
pub use run::{LinkTime, RankTime, Run, Transfer};

use std::ops::Range;

use encke_core::plan::Plan;

/// Lets the clock run over a plan. Of the ranks in `recorded` every stretch of time is kept; the
/// others are summed up.
pub fn simulate(plan: &Plan, machine: &Machine, recorded: Range<usize>) -> Result<Run, ClockError> {
    machine.check(plan.ranks())?;
    let programs = cost::programs(plan, machine)?;
    let engine = engine::Engine::new(&programs, machine, recorded);
    Ok(engine.run(plan.request().pass))
}
