//! Checks the automatic choice by exhaustive search: every alternative is run and compared with the
//! one chosen.
//!
//! Mixed configurations, each with all alternatives that fit, run on threads of this machine. The
//! decision here: the alternatives of a configuration take turns, and times of the same turn are
//! compared, so that other load on the machine affects all of them alike. The minimum of many noisy
//! times is biased, so the fastest run again (the finals), an alternative that still beats the
//! chosen one runs against it alone (the duel), and only the last measurement counts. Predictions
//! are for the speed that the machine had when it was measured; the calibration ring of that
//! measurement runs again beside each configuration, and predictions are scaled by the ratio of its
//! times (the pace).

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Request};
use encke_core::sharding::Sharding;
use encke_core::{DType, Data, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_cost::{
    BenchmarkInputs, CalibrationPattern, CostError, Machine, RING_DEADLINE, RingCalibration, median,
};
use encke_ring::ThreadRing;
use serde::Serialize;

use super::measure::calibration_ring;
use crate::choose::{Alternative, Choice, ChoiceError, Constraints, Workload, choose};

/// The largest ring tried.
const MOST_RANKS: usize = 8;
/// A choice is good if no alternative is faster by more than this fraction.
pub const GOOD_MARGIN: f64 = 0.05;
/// Target seconds of a run, and the most calls it consists of.
const RUN_S: f64 = 0.04;
const MOST_CALLS: usize = 15;
/// How many of the fastest alternatives run again.
const FINALISTS: usize = 8;
/// Turns of the finals.
const FINALS: usize = 7;
/// Turns of a duel.
const DUELS: usize = 31;

/// An alternative, predicted and measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MeasuredAlternative {
    /// The prediction.
    pub predicted: Alternative,
    /// Median seconds of the runs.
    pub measured_s: f64,
    /// Seconds of every run.
    pub runs_s: Vec<f64>,
    /// For finalists: the chosen alternative's time divided by this one's, median of the turns.
    pub ahead: Option<f64>,
}

/// A configuration with the alternatives measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChoiceCheck {
    /// Pass, pattern, type and sizes.
    pub name: String,
    /// The alternatives that fit in memory.
    pub tried: Vec<MeasuredAlternative>,
    /// Index of the one that the prediction chose.
    pub chosen: usize,
    /// Seconds of the calibration ring during this check divided by its seconds when the machine
    /// was measured; 1 if the latter is unknown.
    pub pace: f64,
}

impl ChoiceCheck {
    /// Relative errors of the predictions, scaled by `pace`: the configuration's
    /// [`pace`](ChoiceCheck::pace), or 1 for unscaled predictions.
    pub fn errors(&self, pace: f64) -> impl Iterator<Item = f64> {
        let tried = self.tried.iter();
        tried.map(move |of| of.predicted.seconds * pace / of.measured_s - 1.0)
    }

    /// The fastest of the finalists.
    pub fn best(&self) -> &MeasuredAlternative {
        let ahead = |tried: &MeasuredAlternative| tried.ahead.unwrap_or(0.0);
        let tried = self.tried.iter();
        let best = tried.max_by(|a, b| ahead(a).total_cmp(&ahead(b)));
        best.expect("at least one alternative was measured")
    }

    /// The chosen alternative's time divided by the fastest one's.
    pub fn behind(&self) -> f64 {
        self.best().ahead.unwrap_or(1.0)
    }
}

/// The median error of all predictions, each scaled by the pace of its configuration.
pub fn median_error(checked: &[ChoiceCheck]) -> f64 {
    error_at(checked, |of| of.pace)
}

/// The same without scaling.
pub fn raw_median_error(checked: &[ChoiceCheck]) -> f64 {
    error_at(checked, |_| 1.0)
}

fn error_at(checked: &[ChoiceCheck], pace: impl Fn(&ChoiceCheck) -> f64) -> f64 {
    let errors = checked.iter().flat_map(|of| of.errors(pace(of)));
    median(&errors.map(f64::abs).collect::<Vec<f64>>())
}

/// A configuration. `memory_share` limits a rank's bytes to this share of what one rank would hold.
struct CheckConfig {
    name: String,
    constraints: Constraints,
    memory_share: Option<f64>,
}

/// Five shapes in six variants: dense and dilated, forward and backward, two types, with and
/// without a limit on memory.
fn configurations() -> Result<Vec<CheckConfig>, CostError> {
    let shapes = [
        (1024, 4, 64),
        (4096, 4, 64),
        (2048, 8, 128),
        (6000, 2, 64),
        (3000, 6, 128),
    ];
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let mut configurations = Vec::new();
    for (tokens, heads, dim) in shapes {
        let shape = Shape::new(1, tokens, heads, heads, dim)?;
        let segments = [tokens / 8, tokens / 2, tokens];
        let dilated = Pattern::dilated(&segments, &[1, 2, 4], mix)?.causal(true);
        let dense = || Pattern::dense().causal(true);
        let variants = [
            (
                "full",
                Pattern::dense(),
                Workload::Forward,
                DType::F32,
                None,
            ),
            ("causal", dense(), Workload::Forward, DType::Bf16, Some(0.5)),
            ("causal", dense(), Workload::Backward, DType::F32, Some(0.4)),
            (
                "dilated",
                dilated.clone(),
                Workload::Forward,
                DType::F32,
                None,
            ),
            (
                "dilated",
                dilated,
                Workload::Backward,
                DType::Bf16,
                Some(0.5),
            ),
            ("causal", dense(), Workload::Forward, DType::F32, Some(0.25)),
        ];
        for (mask, pattern, work, dtype, memory_share) in variants {
            let pass = match work {
                Workload::Backward => "backward",
                _ => "forward",
            };
            let limit = match memory_share {
                Some(share) => format!(", {:.0} % a rank", 100.0 * share),
                None => String::new(),
            };
            configurations.push(CheckConfig {
                name: format!("{pass} {mask} {dtype}, {tokens} x {heads} x {dim}{limit}"),
                constraints: Constraints {
                    work,
                    ..Constraints::new(shape, pattern, dtype, MOST_RANKS)
                },
                memory_share,
            });
        }
    }
    Ok(configurations)
}

/// The calibration ring, and its seconds when the machine was measured.
struct SpeedBaseline {
    calibration_ring: RingCalibration,
    seconds: Option<f64>,
}

impl SpeedBaseline {
    /// The median of `now_s` divided by the seconds of the baseline.
    fn pace(&self, now_s: &[f64]) -> f64 {
        self.seconds.map_or(1.0, |then_s| median(now_s) / then_s)
    }
}

/// Chooses for each configuration, then runs every alternative `repeats` times. `yardstick_s` is
/// the time of the calibration ring when the machine was measured. `progress` gets the name of the
/// configuration and the fraction done.
pub fn check<K: Kernel<Buffer = Data>>(
    kernel: K,
    machine: &Machine,
    yardstick_s: Option<f64>,
    repeats: usize,
    progress: &mut dyn FnMut(&str, f64),
) -> Result<Vec<ChoiceCheck>, ChoiceError> {
    let baseline = SpeedBaseline {
        calibration_ring: calibration_ring()?,
        seconds: yardstick_s,
    };
    let ring = ThreadRing::new(kernel, RING_DEADLINE);
    let configurations = configurations()?;
    let all = configurations.len();
    let mut checked = Vec::new();
    for (at, configuration) in configurations.into_iter().enumerate() {
        progress(&configuration.name, at as f64 / all as f64);
        checked.push(configuration.check(&ring, machine, &baseline, repeats)?);
    }
    Ok(checked)
}

/// The alternatives that were fastest in the first turns, and the chosen one.
fn finalists(runs_s: &[Vec<f64>], chosen: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..runs_s.len()).collect();
    order.sort_by(|a, b| median(&runs_s[*a]).total_cmp(&median(&runs_s[*b])));
    order.truncate(FINALISTS);
    if !order.contains(&chosen) {
        order.push(chosen);
    }
    order
}

impl CheckConfig {
    /// The automatic choice, with every alternative.
    fn choose<K: Kernel>(&mut self, kernel: &K, machine: &Machine) -> Result<Choice, ChoiceError> {
        if let Some(share) = self.memory_share {
            let alone = Constraints {
                ranks: Some(1),
                ..self.constraints.clone()
            };
            let alone = choose(kernel, &alone, machine)?;
            let bytes = alone.winner().memory_bytes as f64;
            self.constraints.memory_limit = Some((share * bytes) as usize);
        }
        match choose(kernel, &self.constraints, machine) {
            // For a short sequence even the largest ring may exceed that share.
            Err(ChoiceError::NothingFits { least, .. }) => {
                self.constraints.memory_limit = Some(least + least / 16);
                choose(kernel, &self.constraints, machine)
            }
            choice => choice,
        }
    }

    /// The request of an alternative.
    fn request(&self, of: &Alternative) -> Result<Request, ChoiceError> {
        let sharding = Sharding::new(of.ranks, of.cut.clone()).map_err(CostError::from)?;
        let pass = match self.constraints.work {
            Workload::Backward => Pass::Backward { dlse: false },
            _ => Pass::Forward,
        };
        let Constraints {
            shape,
            pattern,
            dtype,
            ..
        } = &self.constraints;
        Ok(Request {
            pass,
            queries: of.queries,
            schedule: of.schedule,
            ..Request::new(*shape, pattern.clone(), sharding, *dtype)
        })
    }

    fn check<K: Kernel<Buffer = Data>>(
        mut self,
        ring: &ThreadRing<K>,
        machine: &Machine,
        baseline: &SpeedBaseline,
        repeats: usize,
    ) -> Result<ChoiceCheck, ChoiceError> {
        let Choice {
            alternatives,
            chosen,
            ..
        } = self.choose(ring.kernel(), machine)?;
        // Alternatives that fit come first, so `chosen` indexes `fitting` too.
        let fitting: Vec<Alternative> = alternatives.into_iter().filter(|of| of.fits).collect();
        let requests: Vec<Request> = fitting
            .iter()
            .map(|of| self.request(of))
            .collect::<Result<_, _>>()?;
        let rehearsal = BenchmarkInputs::new(&requests[0]).map_err(CostError::from)?;
        let none = || vec![Vec::new(); requests.len()];
        let mut calibration_s = Vec::new();
        let mut turn = |which: &[usize], runs_s: &mut Vec<Vec<f64>>| {
            for &at in which {
                let calibration = &baseline.calibration_ring;
                calibration_s.push(calibration.seconds(ring, CalibrationPattern::Dense, false)?);
                let call = || rehearsal.seconds(ring, &requests[at]);
                // The first call allocates, because other alternatives have run since; it is not
                // counted.
                let first_s = call().map_err(CostError::from)?;
                let calls = (0..calls(first_s)).map(|_| call());
                let calls_s: Vec<f64> = calls.collect::<Result<_, _>>().map_err(CostError::from)?;
                runs_s[at].push(median(&calls_s));
            }
            Ok::<(), ChoiceError>(())
        };
        let every: Vec<usize> = (0..requests.len()).collect();
        let (mut runs_s, mut finals_s) = (none(), none());
        for _ in 0..repeats {
            turn(&every, &mut runs_s)?;
        }
        let mut ahead_of = vec![None; requests.len()];
        let finalists = finalists(&runs_s, chosen);
        for _ in 0..FINALS {
            turn(&finalists, &mut finals_s)?;
        }
        for &at in &finalists {
            let mut ahead = ratio(&finals_s[chosen], &finals_s[at]);
            if ahead > 1.0 + GOOD_MARGIN {
                let mut duel_s = none();
                for number in 0..DUELS {
                    let pair = match number % 2 {
                        0 => [chosen, at],
                        _ => [at, chosen],
                    };
                    turn(&pair, &mut duel_s)?;
                }
                ahead = ratio(&duel_s[chosen], &duel_s[at]);
                runs_s[at] = std::mem::take(&mut duel_s[at]);
            } else {
                runs_s[at] = finals_s[at].clone();
            }
            ahead_of[at] = Some(ahead);
        }
        let tried = fitting.into_iter().zip(runs_s).zip(ahead_of);
        let tried = tried.map(|((predicted, runs_s), ahead)| MeasuredAlternative {
            predicted,
            measured_s: median(&runs_s),
            runs_s,
            ahead,
        });
        Ok(ChoiceCheck {
            name: self.name,
            tried: tried.collect(),
            chosen,
            pace: baseline.pace(&calibration_s),
        })
    }
}

/// Calls in a run; its time is their median, because a single call of a few milliseconds is noisy.
fn calls(seconds: f64) -> usize {
    ((RUN_S / seconds) as usize).clamp(1, MOST_CALLS)
}

/// The median over the turns of one time divided by the other.
fn ratio(one_s: &[f64], other_s: &[f64]) -> f64 {
    let ratios = one_s.iter().zip(other_s).map(|(one, other)| one / other);
    median(&ratios.collect::<Vec<f64>>())
}
