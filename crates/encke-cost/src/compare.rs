//! Predictions checked against measurements: rings of threads on this machine.
//!
//! The decision here: measurements of the kernel and runs of the rings alternate, and medians of
//! both are compared, so that other load on the machine affects both. The fastest of both are
//! compared as well: they are the least disturbed.

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Data, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_ring::ThreadRing;
use serde::Serialize;

use crate::benchmark_inputs::BenchmarkInputs;
use crate::error::CostError;
use crate::machine::Machine;
use crate::probe_sizes::ProbeSizes;
use crate::profile::{HostProfile, JobFit};
use crate::ring_calibration::RING_DEADLINE;
use crate::simulate::simulate;
use crate::statistics::Statistic;

/// A ring to predict and measure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparedRing {
    /// Its name in reports.
    pub name: String,
    /// The request it runs.
    pub request: Request,
}

/// A prediction and its measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PredictedAndMeasured {
    /// By simulation.
    pub predicted_s: f64,
    /// Wall-clock time.
    pub measured_s: f64,
}

impl PredictedAndMeasured {
    /// The relative error of the prediction; positive if it was too long.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measured_s - 1.0
    }
}

/// One ring, predicted and measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingComparison {
    /// The ring's name.
    pub name: String,
    /// From the medians of the kernel's measurements; the median of the runs.
    pub median: PredictedAndMeasured,
    /// From the fastest of the kernel's measurements; the fastest run.
    pub fastest: PredictedAndMeasured,
    /// Seconds of each run.
    pub runs_s: Vec<f64>,
}

/// Rings of 1 to 8 threads: dense and dilated, contiguous and zigzag, forward and backward.
pub fn rings_to_compare(shape: Shape, dtype: DType) -> Result<Vec<ComparedRing>, CostError> {
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
    let ring = |(kind, ranks, pattern, cut, pass): (&str, usize, Pattern, Cut, Pass)| {
        let direction = pass.name();
        let cut_name = if cut == Cut::Zigzag {
            "zigzag"
        } else {
            "contiguous"
        };
        Ok(ComparedRing {
            name: format!("{direction} {kind}, {ranks} {cut_name}"),
            request: Request {
                pass,
                queries: Queries::Sharded,
                ..Request::new(shape, pattern, Sharding::new(ranks, cut)?, dtype)
            },
        })
    };
    all.into_iter().map(ring).collect()
}

/// The result of [`compare`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparisonReport {
    /// Each ring, predicted and measured.
    pub rings: Vec<RingComparison>,
    /// The machine fitted to the medians of the kernel's measurements.
    pub machine: Machine,
    /// The median relative error of that machine on the measurements it was fitted to.
    pub misfit: f64,
    /// The measurements it was fitted to.
    pub readings: Vec<JobFit>,
}

/// Measures the kernel and runs each ring, alternating, `repeats` times; then predicts each ring
/// from the measurements. A ring runs twice in a row and the second run counts: the first one
/// allocates. `progress` is called with the name of each step before it.
pub fn compare<K: Kernel<Buffer = Data>>(
    kernel: K,
    rings: &[ComparedRing],
    repeats: usize,
    progress: &mut dyn FnMut(&str),
) -> Result<ComparisonReport, CostError> {
    let requests = rings.iter().map(|ring| &ring.request);
    let largest = requests.max_by_key(|request| request.shape.tokens);
    let sizes = largest.map_or(SMALLEST, |request| ProbeSizes {
        rows: request.shape.tokens.max(8),
        heads: request.shape.heads,
        dim: request.shape.dim,
        dtype: request.dtype,
    });
    let mut profile = HostProfile::new(&kernel, sizes)?;
    let threads = ThreadRing::new(kernel, RING_DEADLINE);
    let mut runs_s = vec![Vec::new(); rings.len()];
    for _ in 0..repeats {
        progress("the kernel alone");
        profile.measure(&threads)?;
        for (ring, runs_s) in rings.iter().zip(&mut runs_s) {
            progress(&ring.name);
            let inputs = BenchmarkInputs::new(&ring.request)?;
            runs_s.push(inputs.warm_seconds(&threads, &ring.request)?);
        }
    }
    let machine = profile.machine(Statistic::Median)?;
    let undisturbed = profile.machine(Statistic::Fastest)?;
    let mut compared = Vec::new();
    for (ring, runs_s) in rings.iter().zip(runs_s) {
        let plan = Plan::new(ring.request.clone())?;
        let times =
            |machine: &Machine, statistic: Statistic| -> Result<PredictedAndMeasured, CostError> {
                Ok(PredictedAndMeasured {
                    predicted_s: simulate(&plan, machine, 0..0)?.seconds,
                    measured_s: statistic.of(&runs_s),
                })
            };
        compared.push(RingComparison {
            name: ring.name.clone(),
            median: times(&machine, Statistic::Median)?,
            fastest: times(&undisturbed, Statistic::Fastest)?,
            runs_s,
        });
    }
    Ok(ComparisonReport {
        rings: compared,
        machine,
        misfit: profile.misfit(),
        readings: profile.fits(),
    })
}

/// The sizes measured where there is no ring to compare.
const SMALLEST: ProbeSizes = ProbeSizes {
    rows: 8,
    heads: 1,
    dim: 1,
    dtype: DType::F32,
};
