//! Two small rings that are really run: what rings cost beyond their jobs, what dilated branches cost
//! beyond dense ones, and how fast the machine is right now.
//!
//! Readings of single jobs miss what ranks do to one another: rows that come from another core's
//! cache, hops beside jobs, threads that wake one another; and what branches do: sums that go to memory
//! and come back for each. The decision here: each is one figure for each pass, found with one
//! ring, and used for every other ring there is. The first of them, run again later, tells a machine
//! that has become slower from a description that is wrong.

use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_ring::ThreadRing;

use super::compare::Rehearsal;
use super::error::ClockError;
use super::machine::{Machine, Speed};
use super::profile::Sizes;
use super::simulate;

/// How long ranks of a ring that is timed wait for one another.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// Ranks of both.
const RANKS: usize = 4;
/// Nothing is ever slower by more than this part; what was read so was disturbed.
const MOST: f64 = 1.5;

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Every query sees every key.
    Dense,
    /// Two branches: short segments, and every fourth row of all.
    Dilated,
}

/// The rings, with their numbers.
#[derive(Debug)]
pub struct RingCalibration {
    dense: Request,
    rehearsal: Rehearsal,
}

impl RingCalibration {
    /// Attention of so many rows on four ranks.
    pub fn new(sizes: Sizes) -> Result<RingCalibration, ClockError> {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = sizes;
        let shape = Shape::new(1, rows, heads, heads, dim)?;
        let sharding = Sharding::new(RANKS, Cut::Contiguous)?;
        let dense = Request::new(shape, Pattern::dense(), sharding, dtype);
        let rehearsal = Rehearsal::new(&dense)?;
        Ok(RingCalibration { dense, rehearsal })
    }

    fn request(&self, kind: Kind, backward: bool) -> Result<Request, ClockError> {
        let mut request = self.dense.clone();
        if kind == Kind::Dilated {
            let rows = request.shape.tokens;
            let mode = Mode::Mix {
                offsets: OffsetRule::HeadMod,
                gradient: MixingGradient::Exact,
            };
            request.pattern = Pattern::dilated(&[rows.div_ceil(4), rows], &[1, 4], mode)?;
        }
        if backward {
            request.pass = Pass::Backward { dlse: false };
        }
        Ok(request)
    }

    /// Runs one: seconds of the second of two runs, because the first has its memory to get.
    pub fn seconds<K: Kernel>(
        &self,
        ring: &ThreadRing<K>,
        kind: Kind,
        backward: bool,
    ) -> Result<f64, ClockError> {
        let request = self.request(kind, backward)?;
        self.rehearsal.seconds(ring, &request)?;
        Ok(self.rehearsal.seconds(ring, &request)?)
    }

    /// Completes the speed of a pass, so that the clock says what was measured of both: by what part
    /// jobs take longer in a ring, and where their rows lie apart.
    pub(super) fn complete(
        &self,
        machine: &mut Machine,
        backward: bool,
        [dense_s, dilated_s]: [f64; 2],
    ) -> Result<(), ClockError> {
        let plan = Plan::new(self.request(Kind::Dense, backward)?)?;
        let slower = solve(&plan, machine, dense_s, |machine, part| {
            speed(machine, backward).ring_slower = part;
        })?;
        speed(machine, backward).ring_slower = slower;
        let plan = Plan::new(self.request(Kind::Dilated, backward)?)?;
        let slower = solve(&plan, machine, dilated_s, |machine, part| {
            speed(machine, backward).apart_slower = part;
        })?;
        speed(machine, backward).apart_slower = slower;
        Ok(())
    }
}

/// The speed of one pass, of the type that is being measured.
fn speed(machine: &mut Machine, backward: bool) -> &mut Speed {
    let rate = &mut machine.device.rates[0];
    match backward {
        true => &mut rate.backward,
        false => &mut rate.forward,
    }
}

/// The part for which the clock says what was measured. Its time grows with the part, in a line but for
/// who waits for whom.
fn solve(
    plan: &Plan,
    machine: &Machine,
    measured_s: f64,
    set: impl Fn(&mut Machine, f64),
) -> Result<f64, ClockError> {
    let told = |part: f64| {
        let mut machine = machine.clone();
        set(&mut machine, part);
        Ok::<f64, ClockError>(simulate(plan, &machine, 0..0)?.seconds)
    };
    let (none_s, most_s) = (told(0.0)?, told(MOST)?);
    let part = MOST * (measured_s - none_s) / (most_s - none_s).max(1e-18);
    Ok(part.clamp(0.0, MOST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Rate, find_device, find_link};
    use encke_core::DType;

    #[test]
    fn finds_how_much_slower_rings_and_branches_are() {
        let sizes = Sizes {
            rows: 4096,
            heads: 4,
            dim: 64,
            dtype: DType::Bf16,
        };
        let yardstick = RingCalibration::new(sizes).unwrap();
        let link = find_link("nvlink").unwrap();
        let mut device = find_device("h200").unwrap();
        let of_type = |rate: &Rate| rate.dtype == DType::Bf16 && rate.dim == 64;
        device.rates.retain(of_type);
        let machine = Machine {
            device,
            node: 8,
            inside: link.clone(),
            between: link,
            nics: 1,
            stragglers: Default::default(),
        };
        for backward in [false, true] {
            let seconds = |machine: &Machine| {
                [Kind::Dense, Kind::Dilated].map(|kind| {
                    let plan = Plan::new(yardstick.request(kind, backward).unwrap()).unwrap();
                    simulate(&plan, machine, 0..0).unwrap().seconds
                })
            };
            for (in_ring, apart) in [(0.0, 0.0), (0.07, 0.2), (0.3, 0.6)] {
                let mut real = machine.clone();
                speed(&mut real, backward).ring_slower = in_ring;
                speed(&mut real, backward).apart_slower = apart;
                let mut found = machine.clone();
                let of_both = seconds(&real);
                yardstick.complete(&mut found, backward, of_both).unwrap();
                let found = *speed(&mut found, backward);
                assert!((found.ring_slower - in_ring).abs() < 0.02, "{found:?}");
                assert!((found.apart_slower - apart).abs() < 0.05, "{found:?}");
            }
            // Whatever was read, the figures are ones that a machine may have.
            for (read, most) in [([0.0; 2], 0.0), ([1e9; 2], MOST)] {
                let mut found = machine.clone();
                yardstick.complete(&mut found, backward, read).unwrap();
                assert_eq!(speed(&mut found, backward).ring_slower, most);
                found.check(4).unwrap();
            }
        }
    }
}
