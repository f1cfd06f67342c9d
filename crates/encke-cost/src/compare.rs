//! The clock held against reality: rings of threads on this machine, predicted and measured.
//!
//! The decision here: readings of the kernel and runs of the rings take turns, and medians of both are
//! compared, so that a machine that is busy with other things is busy for both. The fastest of
//! both are compared as well: they are what is least disturbed.

use encke_core::conformance::Random;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Data, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor, View};
use encke_ring::{RingError, ThreadRing};
use serde::Serialize;

use super::error::ClockError;
use super::machine::Machine;
use super::profile::{Pick, Profile, Sizes, Told};
use super::ring_calibration::PATIENCE;
use super::simulate;

/// A ring to be timed, and what to call it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setting {
    /// In a few words.
    pub name: String,
    /// What is carried out.
    pub request: Request,
}

/// What was said, and what was seen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Times {
    /// By the clock.
    pub predicted_s: f64,
    /// By the wall.
    pub measured_s: f64,
}

impl Times {
    /// How far the prediction was off, as a part of what was measured; positive if it was longer.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measured_s - 1.0
    }
}

/// One ring, predicted and measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The ring.
    pub name: String,
    /// From median readings, and the median of the runs.
    pub median: Times,
    /// From the fastest readings, and the fastest run.
    pub fastest: Times,
    /// The runs.
    pub runs_s: Vec<f64>,
}

/// The middle of some numbers; between the two in the middle of an even count. 0 of none.
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Rings of 1 to 8 threads: dense and dilated, contiguous and zigzag, forward and backward.
pub fn settings(shape: Shape, dtype: DType) -> Result<Vec<Setting>, ClockError> {
    let n = shape.tokens;
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let segments = [(n / 8).max(1), (n / 2).max(1), n];
    let dense = || Pattern::dense().causal(true);
    let dilated = Pattern::dilated(&segments, &[1, 2, 4], mix)?.causal(true);
    let (forward, backward) = (Pass::Forward, Pass::Backward { dlse: false });
    let all = [
        ("full", 2, Pattern::dense(), Cut::Contiguous, forward),
        ("causal", 1, dense(), Cut::Contiguous, forward),
        ("causal", 4, dense(), Cut::Contiguous, forward),
        ("causal", 2, dense(), Cut::Zigzag, forward),
        ("causal", 8, dense(), Cut::Zigzag, forward),
        ("dilated", 1, dilated.clone(), Cut::Contiguous, forward),
        ("dilated", 4, dilated.clone(), Cut::Contiguous, forward),
        ("causal", 1, dense(), Cut::Contiguous, backward),
        ("causal", 4, dense(), Cut::Zigzag, backward),
        ("causal", 8, dense(), Cut::Contiguous, backward),
        ("dilated", 4, dilated, Cut::Contiguous, backward),
    ];
    let setting = |(words, ranks, pattern, cut, pass): (&str, usize, Pattern, Cut, Pass)| {
        let way = match pass {
            Pass::Forward => "forward",
            Pass::Backward { .. } => "backward",
        };
        let cut_name = if cut == Cut::Zigzag {
            "zigzag"
        } else {
            "contiguous"
        };
        Ok(Setting {
            name: format!("{way} {words}, {ranks} {cut_name}"),
            request: Request {
                pass,
                queries: Queries::Sharded,
                ..Request::new(shape, pattern, Sharding::new(ranks, cut)?, dtype)
            },
        })
    };
    all.into_iter().map(setting).collect()
}

/// What [`compare`] found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Findings {
    /// Each ring.
    pub rings: Vec<Comparison>,
    /// The machine that the kernel's median readings amount to.
    pub machine: Machine,
    /// How far that machine is from the very readings it was made of: no ring can do better.
    pub misfit: f64,
    /// The readings it was made of.
    pub readings: Vec<Told>,
}

/// Takes readings of the kernel and runs each ring, in turn, `repeats` times; then predicts each
/// from the readings. A ring runs twice in a turn, and the second run counts: the first one has
/// all its memory to get, because others have run since. `progress` is told before every turn.
pub fn compare<K: Kernel<Buffer = Data>>(
    kernel: K,
    settings: &[Setting],
    repeats: usize,
    progress: &mut dyn FnMut(&str),
) -> Result<Findings, ClockError> {
    let largest = settings.iter().map(|setting| &setting.request);
    let largest = largest.max_by_key(|request| request.shape.tokens);
    let sizes = largest.map_or(NO_SIZES, |request| Sizes {
        rows: request.shape.tokens.max(8),
        heads: request.shape.heads,
        dim: request.shape.dim,
        dtype: request.dtype,
    });
    let mut profile = Profile::new(&kernel, sizes)?;
    let ring = ThreadRing::new(kernel, PATIENCE);
    let mut runs_s = vec![Vec::new(); settings.len()];
    for _ in 0..repeats {
        progress("the kernel alone");
        profile.read(&ring)?;
        for (setting, runs_s) in settings.iter().zip(&mut runs_s) {
            progress(&setting.name);
            let rehearsal = Rehearsal::new(&setting.request)?;
            rehearsal.seconds(&ring, &setting.request)?;
            runs_s.push(rehearsal.seconds(&ring, &setting.request)?);
        }
    }
    let machine = profile.machine(Pick::Median)?;
    let undisturbed = profile.machine(Pick::Fastest)?;
    let mut rings = Vec::new();
    for (setting, runs_s) in settings.iter().zip(runs_s) {
        let plan = Plan::new(setting.request.clone())?;
        let times = |machine: &Machine, pick: Pick| -> Result<Times, ClockError> {
            Ok(Times {
                predicted_s: simulate(&plan, machine, 0..0)?.seconds,
                measured_s: pick.of(&runs_s),
            })
        };
        rings.push(Comparison {
            name: setting.name.clone(),
            median: times(&machine, Pick::Median)?,
            fastest: times(&undisturbed, Pick::Fastest)?,
            runs_s,
        });
    }
    Ok(Findings {
        rings,
        machine,
        misfit: profile.misfit(),
        readings: profile.told(),
    })
}

const NO_SIZES: Sizes = Sizes {
    rows: 8,
    heads: 1,
    dim: 1,
    dtype: DType::F32,
};

/// Random tensors for the calls of a request, whatever ring carries it out.
#[derive(Debug)]
pub struct Rehearsal {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dout: Tensor,
}

impl Rehearsal {
    /// Tensors of the request's shape and type.
    pub fn new(request: &Request) -> Result<Rehearsal, RingError> {
        let shape = &request.shape;
        let mut random = Random::new(11);
        let mut tensor = |heads: usize, dim: usize| {
            let dims = [shape.batch, shape.tokens, heads, dim];
            let values: Vec<f64> = (0..dims.iter().product()).map(|_| random.unit()).collect();
            Tensor::from_f64(request.dtype, dims, &values)
        };
        Ok(Rehearsal {
            q: tensor(shape.heads, shape.dim)?,
            dout: tensor(shape.heads, shape.dim)?,
            k: tensor(shape.kv_heads, shape.dim)?,
            v: tensor(shape.kv_heads, shape.dim)?,
            lse: Tensor::from_f64(
                request.dtype.sum(),
                [shape.batch, shape.tokens, shape.heads, 1],
                &vec![10.0; shape.batch * shape.tokens * shape.heads],
            )?,
        })
    }

    /// What a forward pass is given.
    pub fn inputs(&self) -> [View<'_>; 3] {
        [self.q.view(), self.k.view(), self.v.view()]
    }

    /// What its backward pass is given beside that: the gradient of the output.
    pub fn dout(&self) -> View<'_> {
        self.dout.view()
    }

    /// Seconds from the start of a call to the end of the last rank.
    pub fn seconds<K: Kernel>(
        &self,
        ring: &ThreadRing<K>,
        request: &Request,
    ) -> Result<f64, RingError> {
        let mut inputs = vec![
            (Role::Q, self.q.view()),
            (Role::K, self.k.view()),
            (Role::V, self.v.view()),
        ];
        if request.pass != Pass::Forward {
            // Speed does not depend on what out and lse are, as long as they are finite.
            let of_out = [
                (Role::Out, self.q.view()),
                (Role::Lse, self.lse.view()),
                (Role::Dout, self.dout.view()),
            ];
            inputs.extend(of_out);
        }
        let outcome = ring.run(request, &inputs)?;
        Ok(outcome.trace.end().as_secs_f64())
    }
}
