//! A small ring that is really run: what rings cost beyond their jobs, and how fast the machine is
//! right now.
//!
//! Readings of single jobs miss what ranks do to one another: rows that come from another core's
//! cache, hops beside jobs, threads that wake one another. The decision here: that is one figure for
//! each pass, found with one ring, and used for every other ring there is. The same ring, run again
//! later, tells a machine that has become slower from a description that is wrong.

use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Pattern, Shape};
use encke_ring::ThreadRing;

use super::compare::Rehearsal;
use super::error::ClockError;
use super::machine::Machine;
use super::profile::Sizes;
use super::simulate;

/// How long ranks of a ring that is timed wait for one another.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// Ranks of the ring.
const RANKS: usize = 4;
/// A ring of threads is never this much slower than its jobs; what was read so was disturbed.
const MOST: f64 = 1.0;

/// The ring, with its numbers.
#[derive(Debug)]
pub struct Yardstick {
    forward: Request,
    rehearsal: Rehearsal,
}

impl Yardstick {
    /// Dense attention of so many rows on four ranks.
    pub fn new(sizes: Sizes) -> Result<Yardstick, ClockError> {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = sizes;
        let shape = Shape::new(1, rows, heads, heads, dim)?;
        let sharding = Sharding::new(RANKS, Cut::Contiguous)?;
        let forward = Request::new(shape, Pattern::dense(), sharding, dtype);
        let rehearsal = Rehearsal::new(&forward)?;
        Ok(Yardstick { forward, rehearsal })
    }

    fn request(&self, backward: bool) -> Request {
        let mut request = self.forward.clone();
        if backward {
            request.pass = Pass::Backward { dlse: false };
        }
        request
    }

    /// Runs it: seconds of the second of two runs, because the first has its memory to get.
    pub fn seconds<K: Kernel>(
        &self,
        ring: &ThreadRing<K>,
        backward: bool,
    ) -> Result<f64, ClockError> {
        let request = self.request(backward);
        self.rehearsal.seconds(ring, &request)?;
        Ok(self.rehearsal.seconds(ring, &request)?)
    }

    /// By what part jobs have to take longer on a machine, so that the clock says what was measured.
    pub(super) fn slower(
        &self,
        machine: &Machine,
        backward: bool,
        measured_s: f64,
    ) -> Result<f64, ClockError> {
        let plan = Plan::new(self.request(backward))?;
        let told = |slower: f64| {
            let mut machine = machine.clone();
            for rate in &mut machine.device.rates {
                rate.forward.ring_slower = slower;
                rate.backward.ring_slower = slower;
            }
            Ok::<f64, ClockError>(simulate(&plan, &machine, 0..0)?.seconds)
        };
        // The clock's time grows with what jobs take, in a line but for who waits for whom.
        let (none_s, most_s) = (told(0.0)?, told(MOST)?);
        let slower = MOST * (measured_s - none_s) / (most_s - none_s).max(1e-18);
        Ok(slower.clamp(0.0, MOST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{find_device, find_link};
    use encke_core::DType;

    #[test]
    fn finds_how_much_slower_a_ring_is() {
        let sizes = Sizes {
            rows: 4096,
            heads: 4,
            dim: 64,
            dtype: DType::Bf16,
        };
        let yardstick = Yardstick::new(sizes).unwrap();
        let link = find_link("nvlink").unwrap();
        let mut machine = Machine {
            device: find_device("h200").unwrap(),
            node: 8,
            inside: link.clone(),
            between: link,
            nics: 1,
            stragglers: Default::default(),
        };
        for backward in [false, true] {
            let plan = Plan::new(yardstick.request(backward)).unwrap();
            for slower in [0.0, 0.07, 0.3] {
                for rate in &mut machine.device.rates {
                    rate.forward.ring_slower = slower;
                    rate.backward.ring_slower = slower;
                }
                let seconds = simulate(&plan, &machine, 0..0).unwrap().seconds;
                let found = yardstick.slower(&machine, backward, seconds).unwrap();
                assert!((found - slower).abs() < 0.02, "{found} for {slower}");
            }
            // Whatever was read, the figure is one that a machine may have.
            assert_eq!(yardstick.slower(&machine, backward, 0.0).unwrap(), 0.0);
            assert_eq!(yardstick.slower(&machine, backward, 1e9).unwrap(), MOST);
        }
    }
}
