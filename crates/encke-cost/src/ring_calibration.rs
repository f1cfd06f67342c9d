//! Two small rings that are run and timed: what rings cost beyond their jobs, what dilated branches
//! cost beyond dense ones, and how fast the machine is at present.
//!
//! Measurements of single jobs miss the interaction of ranks (rows from another core's cache,
//! transfers beside jobs, thread wake-ups) and of branches (accumulators written to memory and read
//! back for each). The decision here: each effect is one figure for each pass, found with one ring
//! and used for all others. The dense ring, run again later, separates a machine that has become
//! slower from a description that is wrong.

use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_ring::ThreadRing;

use crate::benchmark_inputs::BenchmarkInputs;
use crate::error::CostError;
use crate::machine::{Machine, Speed};
use crate::probe_sizes::ProbeSizes;
use crate::simulate::simulate;

/// The deadline of measured rings.
pub const RING_DEADLINE: Duration = Duration::from_secs(600);
/// Ranks of both rings.
const RANKS: usize = 4;
/// The largest slowdown that is believed; a larger one comes from other load on the machine.
const MAX_SLOWDOWN: f64 = 1.5;

/// The pattern of a calibration ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CalibrationPattern {
    /// Every query sees every key.
    Dense,
    /// Two branches: short segments, and every fourth row of the whole sequence.
    Dilated,
}

/// The calibration rings, with their inputs.
#[derive(Debug)]
pub struct RingCalibration {
    dense: Request,
    inputs: BenchmarkInputs,
}

impl RingCalibration {
    /// Calibration rings of these sizes on four ranks.
    pub fn new(sizes: ProbeSizes) -> Result<RingCalibration, CostError> {
        let shape = Shape::new(1, sizes.rows, sizes.heads, sizes.heads, sizes.dim)?;
        let sharding = Sharding::new(RANKS, Cut::Contiguous)?;
        let dense = Request::new(shape, Pattern::dense(), sharding, sizes.dtype);
        let inputs = BenchmarkInputs::new(&dense)?;
        Ok(RingCalibration { dense, inputs })
    }

    fn request(&self, pattern: CalibrationPattern, backward: bool) -> Result<Request, CostError> {
        let mut request = self.dense.clone();
        if pattern == CalibrationPattern::Dilated {
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

    /// Runs a ring twice; seconds of the second run, because the first one allocates.
    pub fn seconds<K: Kernel>(
        &self,
        ring: &ThreadRing<K>,
        pattern: CalibrationPattern,
        backward: bool,
    ) -> Result<f64, CostError> {
        let request = self.request(pattern, backward)?;
        Ok(self.inputs.warm_seconds(ring, &request)?)
    }

    /// Sets [`Speed::ring_slowdown`] and [`Speed::strided_slowdown`] of a pass so that simulations
    /// of both rings take the measured times.
    pub(crate) fn set_slowdowns(
        &self,
        machine: &mut Machine,
        backward: bool,
        [dense_s, dilated_s]: [f64; 2],
    ) -> Result<(), CostError> {
        for (pattern, measured_s, slowdown) in [
            (
                CalibrationPattern::Dense,
                dense_s,
                (|speed| &mut speed.ring_slowdown) as SlowdownField,
            ),
            (CalibrationPattern::Dilated, dilated_s, |speed| {
                &mut speed.strided_slowdown
            }),
        ] {
            let plan = Plan::new(self.request(pattern, backward)?)?;
            let predicted_s = |value: f64| {
                let mut machine = machine.clone();
                *slowdown(speed(&mut machine, backward)) = value;
                Ok::<f64, CostError>(simulate(&plan, &machine, 0..0)?.seconds)
            };
            // Linear interpolation: time is linear in the slowdown as long as the same ranks wait
            // for each other.
            let (none_s, max_s) = (predicted_s(0.0)?, predicted_s(MAX_SLOWDOWN)?);
            let found = MAX_SLOWDOWN * (measured_s - none_s) / (max_s - none_s).max(1e-18);
            *slowdown(speed(machine, backward)) = found.clamp(0.0, MAX_SLOWDOWN);
        }
        Ok(())
    }
}

/// One of the slowdowns of a speed.
type SlowdownField = fn(&mut Speed) -> &mut f64;

/// The speed of one pass in the first rate.
fn speed(machine: &mut Machine, backward: bool) -> &mut Speed {
    let rate = &mut machine.device.rates[0];
    match backward {
        true => &mut rate.backward,
        false => &mut rate.forward,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Rate, find_device, find_link};
    use encke_core::DType;

    #[test]
    fn recovers_the_slowdowns_of_simulated_measurements() {
        let sizes = ProbeSizes {
            rows: 4096,
            heads: 4,
            dim: 64,
            dtype: DType::Bf16,
        };
        let calibration = RingCalibration::new(sizes).unwrap();
        let link = find_link("nvlink").unwrap();
        let mut device = find_device("h200").unwrap();
        let of_type = |rate: &Rate| rate.dtype == DType::Bf16 && rate.dim == 64;
        device.rates.retain(of_type);
        let machine = Machine {
            device,
            ranks_per_node: 8,
            intra_node: link.clone(),
            inter_node: link,
            nics: 1,
            stragglers: Default::default(),
        };
        for backward in [false, true] {
            let seconds = |machine: &Machine| {
                [CalibrationPattern::Dense, CalibrationPattern::Dilated].map(|pattern| {
                    let plan = Plan::new(calibration.request(pattern, backward).unwrap()).unwrap();
                    simulate(&plan, machine, 0..0).unwrap().seconds
                })
            };
            for (in_ring, strided) in [(0.0, 0.0), (0.07, 0.2), (0.3, 0.6)] {
                let mut real = machine.clone();
                speed(&mut real, backward).ring_slowdown = in_ring;
                speed(&mut real, backward).strided_slowdown = strided;
                let mut found = machine.clone();
                let measured_s = seconds(&real);
                calibration
                    .set_slowdowns(&mut found, backward, measured_s)
                    .unwrap();
                let found = *speed(&mut found, backward);
                assert!((found.ring_slowdown - in_ring).abs() < 0.02, "{found:?}");
                assert!((found.strided_slowdown - strided).abs() < 0.05, "{found:?}");
            }
            // Any measurement gives slowdowns that a machine may have.
            for (measured_s, slowdown) in [([0.0; 2], 0.0), ([1e9; 2], MAX_SLOWDOWN)] {
                let mut found = machine.clone();
                calibration
                    .set_slowdowns(&mut found, backward, measured_s)
                    .unwrap();
                assert_eq!(speed(&mut found, backward).ring_slowdown, slowdown);
                found.check(4).unwrap();
            }
        }
    }
}
