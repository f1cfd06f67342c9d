//! Decisions held against reality: what is chosen beside the best of everything that could have been.
//!
//! Mixed configurations, each with all alternatives that fit, every one of them really run on threads
//! of this machine. The decision here: alternatives of a configuration take turns, and ratios of one turn
//! are compared, so that a machine that is busy with other things is busy for all of them alike. Of many
//! the fastest is partly the luckiest: those in front run again, who then still beats the chosen one
//! meets it alone, and only the last that was measured counts. Predictions are of the machine as it was
//! when it was measured; the yardstick that was run then runs again beside each configuration, and
//! what a prediction is held against is the time at the pace of then.

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Request};
use encke_core::sharding::Sharding;
use encke_core::{DType, Data, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_cost::{
    CalibrationKind, ClockError, Machine, PATIENCE, Rehearsal, RingCalibration, median,
};
use encke_ring::ThreadRing;
use serde::Serialize;

use super::measure::yardstick;
use crate::choose::{Alternative, Choice, ChoiceError, Constraints, Work, choose};

/// The largest ring that is tried.
const MOST_RANKS: usize = 8;
/// A choice is good if nothing else is faster by more than this part.
pub const GOOD: f64 = 0.05;
/// How long a run takes if it can, and how many calls it is at most.
const RUN_S: f64 = 0.04;
const MOST_CALLS: usize = 15;
/// How many of the fastest run again, so that the best is not merely the luckiest.
const FINALISTS: usize = 8;
/// How often they do.
const FINALS: usize = 7;
/// How often one that was faster than the chosen one runs beside it.
const DUELS: usize = 31;

/// An alternative, predicted and measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tried {
    /// What was predicted.
    pub predicted: Alternative,
    /// The median of its runs.
    pub measured_s: f64,
    /// All of them.
    pub runs_s: Vec<f64>,
    /// For those in front: how many times as long the chosen one took, in the median of the turns.
    pub ahead: Option<f64>,
}

/// A configuration, with everything that was tried.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Checked {
    /// In a few words.
    pub name: String,
    /// Alternatives that fit.
    pub tried: Vec<Tried>,
    /// Which of them was chosen beforehand.
    pub chosen: usize,
    /// How many times as long the yardstick took meanwhile as when the machine was measured; 1 where
    /// that is not known.
    pub pace: f64,
}

impl Checked {
    /// How far the predictions were off, as parts of what was measured, if the machine was so many
    /// times as slow as when it was measured: at its [`pace`](Checked::pace), or at 1.
    pub fn errors(&self, pace: f64) -> impl Iterator<Item = f64> {
        let tried = self.tried.iter();
        tried.map(move |of| of.predicted.seconds * pace / of.measured_s - 1.0)
    }

    /// The alternative that was fastest, of those in front.
    pub fn best(&self) -> &Tried {
        let ahead = |tried: &Tried| tried.ahead.unwrap_or(0.0);
        let tried = self.tried.iter();
        let best = tried.max_by(|a, b| ahead(a).total_cmp(&ahead(b)));
        best.expect("something was tried")
    }

    /// How many times as long as the fastest the chosen one took.
    pub fn behind(&self) -> f64 {
        self.best().ahead.unwrap_or(1.0)
    }
}

/// The median error of all predictions, at the pace of each configuration.
pub fn median_error(checked: &[Checked]) -> f64 {
    error_at(checked, |of| of.pace)
}

/// The same, as if the machine were always as fast as when it was measured.
pub fn raw_median_error(checked: &[Checked]) -> f64 {
    error_at(checked, |_| 1.0)
}

fn error_at(checked: &[Checked], pace: impl Fn(&Checked) -> f64) -> f64 {
    let errors = checked.iter().flat_map(|of| of.errors(pace(of)));
    median(&errors.map(f64::abs).collect::<Vec<f64>>())
}

/// A configuration with what a rank may hold, as a part of what one rank would.
struct Case {
    name: String,
    wish: Constraints,
    part: Option<f64>,
}

/// Five shapes of six kinds: dense and dilated, forward and backward, two types, with and without a
/// limit on memory.
fn cases() -> Result<Vec<Case>, ClockError> {
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
    let mut cases = Vec::new();
    for (tokens, heads, dim) in shapes {
        let shape = Shape::new(1, tokens, heads, heads, dim)?;
        let segments = [tokens / 8, tokens / 2, tokens];
        let dilated = Pattern::dilated(&segments, &[1, 2, 4], mix)?.causal(true);
        let dense = || Pattern::dense().causal(true);
        let kinds = [
            ("full", Pattern::dense(), Work::Forward, DType::F32, None),
            ("causal", dense(), Work::Forward, DType::Bf16, Some(0.5)),
            ("causal", dense(), Work::Backward, DType::F32, Some(0.4)),
            ("dilated", dilated.clone(), Work::Forward, DType::F32, None),
            ("dilated", dilated, Work::Backward, DType::Bf16, Some(0.5)),
            ("causal", dense(), Work::Forward, DType::F32, Some(0.25)),
        ];
        for (words, pattern, work, dtype, part) in kinds {
            let way = match work {
                Work::Backward => "backward",
                _ => "forward",
            };
            let limit = match part {
                Some(part) => format!(", {:.0} % a rank", 100.0 * part),
                None => String::new(),
            };
            cases.push(Case {
                name: format!("{way} {words} {dtype}, {tokens} x {heads} x {dim}{limit}"),
                wish: Constraints {
                    work,
                    ..Constraints::new(shape, pattern, dtype, MOST_RANKS)
                },
                part,
            });
        }
    }
    Ok(cases)
}

/// The yardstick, and what it took when the machine was measured.
struct Pace {
    yardstick: RingCalibration,
    then_s: Option<f64>,
}

impl Pace {
    /// How many times as long as then it took, in the median of some runs.
    fn of(&self, now_s: &[f64]) -> f64 {
        self.then_s.map_or(1.0, |then_s| median(now_s) / then_s)
    }
}

/// Chooses for each configuration, then runs every alternative `repeats` times. `yardstick_s` is what
/// the yardstick took when the machine was measured. `progress` is told the configuration and which
/// part is done.
pub fn check<K: Kernel<Buffer = Data>>(
    kernel: K,
    machine: &Machine,
    yardstick_s: Option<f64>,
    repeats: usize,
    progress: &mut dyn FnMut(&str, f64),
) -> Result<Vec<Checked>, ChoiceError> {
    let pace = Pace {
        yardstick: yardstick()?,
        then_s: yardstick_s,
    };
    let ring = ThreadRing::new(kernel, PATIENCE);
    let cases = cases()?;
    let all = cases.len();
    let mut checked = Vec::new();
    for (at, case) in cases.into_iter().enumerate() {
        progress(&case.name, at as f64 / all as f64);
        checked.push(case.check(&ring, machine, &pace, repeats)?);
    }
    Ok(checked)
}

/// Those that may be the fastest by a first look, and the one that was chosen.
fn finalists(runs_s: &[Vec<f64>], chosen: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..runs_s.len()).collect();
    order.sort_by(|a, b| median(&runs_s[*a]).total_cmp(&median(&runs_s[*b])));
    order.truncate(FINALISTS);
    if !order.contains(&chosen) {
        order.push(chosen);
    }
    order
}

impl Case {
    /// What is decided for it, with every alternative.
    fn choose<K: Kernel>(&mut self, kernel: &K, machine: &Machine) -> Result<Choice, ChoiceError> {
        if let Some(part) = self.part {
            let alone = Constraints {
                ranks: Some(1),
                ..self.wish.clone()
            };
            let alone = choose(kernel, &alone, machine)?;
            let bytes = alone.winner().memory_bytes as f64;
            self.wish.memory_limit = Some((part * bytes) as usize);
        }
        match choose(kernel, &self.wish, machine) {
            // Of a short sequence even the largest ring may hold more than that part.
            Err(ChoiceError::NothingFits { least, .. }) => {
                self.wish.memory_limit = Some(least + least / 16);
                choose(kernel, &self.wish, machine)
            }
            choice => choice,
        }
    }

    /// An alternative as it is carried out.
    fn request(&self, of: &Alternative) -> Result<Request, ChoiceError> {
        let sharding = Sharding::new(of.ranks, of.cut.clone()).map_err(ClockError::from)?;
        let pass = match self.wish.work {
            Work::Backward => Pass::Backward { dlse: false },
            _ => Pass::Forward,
        };
        let Constraints {
            shape,
            pattern,
            dtype,
            ..
        } = &self.wish;
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
        pace: &Pace,
        repeats: usize,
    ) -> Result<Checked, ChoiceError> {
        let Choice {
            alternatives,
            chosen,
            ..
        } = self.choose(ring.kernel(), machine)?;
        // What fits comes first, so places are the same.
        let fitting: Vec<Alternative> = alternatives.into_iter().filter(|of| of.fits).collect();
        let requests: Vec<Request> = fitting
            .iter()
            .map(|of| self.request(of))
            .collect::<Result<_, _>>()?;
        let rehearsal = Rehearsal::new(&requests[0]).map_err(ClockError::from)?;
        let none = || vec![Vec::new(); requests.len()];
        let mut yardstick_s = Vec::new();
        let mut turn = |which: &[usize], runs_s: &mut Vec<Vec<f64>>| {
            for &at in which {
                yardstick_s.push(
                    pace.yardstick
                        .seconds(ring, CalibrationKind::Dense, false)?,
                );
                let call = || rehearsal.seconds(ring, &requests[at]);
                // The first one has all its memory to get, because others have run since.
                let first_s = call().map_err(ClockError::from)?;
                let calls = (0..calls(first_s)).map(|_| call());
                let calls_s: Vec<f64> =
                    calls.collect::<Result<_, _>>().map_err(ClockError::from)?;
                runs_s[at].push(median(&calls_s));
            }
            Ok::<(), ChoiceError>(())
        };
        let everyone: Vec<usize> = (0..requests.len()).collect();
        let (mut runs_s, mut finals_s) = (none(), none());
        for _ in 0..repeats {
            turn(&everyone, &mut runs_s)?;
        }
        let mut ahead_of = vec![None; requests.len()];
        let finalists = finalists(&runs_s, chosen);
        for _ in 0..FINALS {
            turn(&finalists, &mut finals_s)?;
        }
        for &at in &finalists {
            let mut ahead = ratio(&finals_s[chosen], &finals_s[at]);
            if ahead > 1.0 + GOOD {
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
        let tried = tried.map(|((predicted, runs_s), ahead)| Tried {
            predicted,
            measured_s: median(&runs_s),
            runs_s,
            ahead,
        });
        Ok(Checked {
            name: self.name,
            tried: tried.collect(),
            chosen,
            pace: pace.of(&yardstick_s),
        })
    }
}

/// How many calls make a run, whose median is its time: one of a few milliseconds says little.
fn calls(seconds: f64) -> usize {
    ((RUN_S / seconds) as usize).clamp(1, MOST_CALLS)
}

/// How many times as long one took as the other, in the median of their turns.
fn ratio(one_s: &[f64], other_s: &[f64]) -> f64 {
    let ratios = one_s.iter().zip(other_s).map(|(one, other)| one / other);
    median(&ratios.collect::<Vec<f64>>())
}
