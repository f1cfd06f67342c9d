//! Attention over a generated sequence that no memory holds, every pair of the pattern computed on
//! this machine.
//!
//! The decision here: nothing is extrapolated. Ranks run one after another, each with the buffers
//! of its own plan; of the output, a checksum and sampled rows are kept.

mod gpu;
mod host;
#[cfg(feature = "mpi")]
pub mod processes;
mod rank_runner;
mod record;
mod settings;
mod state;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use encke::plan::Plan;
use encke::{CpuKernel, Kernel, RankMemory};
use encke_ring::RankReport;
use encke_ring::out_of_core::{Generator, Stream};
use indicatif::ProgressBar;

use crate::device::{ComputeDevice, open_gpu};
use crate::row_check;
use crate::terminal::{long_bar, note};
use gpu::GpuRunner;
use host::HostRunner;
pub use rank_runner::DeviceMemory;
use rank_runner::{RankOutput, RankRunner};
pub use record::BillionRecord;
pub use settings::BillionSettings;
use state::RunState;
pub use state::remove_state;

/// A run, and the file that keeps its state.
#[derive(Debug, Clone)]
pub struct BillionRun {
    /// What is computed.
    pub settings: BillionSettings,
    /// Whether the number of ranks of `settings` is replaced: on the CPU by one for each 1M tokens,
    /// on a GPU by the first power of two with which every rank fits into its memory.
    pub choose_ranks: bool,
    /// The state file: written after every rank, read to continue an interrupted run. The caller
    /// removes it after it has written the record.
    pub state: PathBuf,
    /// Whether an existing state is ignored.
    pub fresh: bool,
}

/// Runs all ranks one after another.
pub fn run(run: &BillionRun) -> Result<BillionRecord> {
    let mut settings = run.settings.clone();
    match settings.device {
        ComputeDevice::Cpu => {
            if run.choose_ranks {
                settings.ranks = settings.cpu_ranks();
            }
            let kernel = CpuKernel::new()?;
            run_on(run, settings, &kernel, HostRunner::new(&kernel))
        }
        ComputeDevice::Cuda(index) => {
            let kernel = open_gpu(index)?;
            if run.choose_ranks {
                settings.ranks = gpu::ranks(&kernel, &settings)?;
            }
            run_on(run, settings, &kernel, GpuRunner::new(&kernel)?)
        }
    }
}

fn run_on<K: Kernel>(
    run: &BillionRun,
    settings: BillionSettings,
    kernel: &K,
    mut runner: impl RankRunner<K>,
) -> Result<BillionRecord> {
    let plan = Plan::new(settings.request()?)?;
    let ranks = || (0..settings.ranks).step_by(1);
    let mut state = RunState::open(&run.state, &settings, (&plan, ranks()), run.fresh)?;
    if state.interruptions > 0 {
        note(&format!(
            "continuing after rank {} of {}, from {}",
            state.finished,
            settings.ranks,
            run.state.display()
        ));
    }
    let left = ranks().skip(state.finished);
    let progress = ProgressLog::new(settings.ranks, state.finished, settings.tokens);
    let largest = attend(
        (kernel, &mut runner),
        &plan,
        (&mut state, &run.state),
        left,
        Some(progress),
    )?;
    let device = runner.memory(largest.as_ref())?;
    Ok(BillionRecord::new(
        &plan,
        state,
        largest,
        runner.kernel(),
        device,
    ))
}

/// Runs ranks one after another and adds each to the state, which is saved after every rank;
/// returns the memory of the largest rank.
fn attend<K: Kernel, R: RankRunner<K>>(
    (kernel, runner): (&K, &mut R),
    plan: &Plan,
    (state, path): (&mut RunState, &Path),
    ranks: impl Iterator<Item = usize>,
    mut progress: Option<ProgressLog>,
) -> Result<Option<RankMemory>> {
    let settings = state.settings.clone();
    let generator = Generator::new(settings.seed, settings.dim);
    let mut samples = row_check::samples(plan.request(), &generator, settings.samples);
    let mut stream = Stream::new(kernel, plan)?;
    let mut largest: Option<RankMemory> = None;
    let mut clock = Instant::now();
    let mut finish = |(done, result): (RankReport, RankOutput)| {
        let checked = &mut state.checked;
        checked.check(plan.request(), &generator, result.samples)?;
        state.checksum = state.checksum + result.checksum;
        state.load_seconds += result.load.as_secs_f64();
        state.compute_seconds += result.compute.as_secs_f64();
        let since = std::mem::replace(&mut clock, Instant::now());
        state.add(&done, since.elapsed());
        state.save(path)?;
        progress
            .iter_mut()
            .for_each(|progress| progress.step(state));
        let most = largest.as_ref().map_or(0, RankMemory::planned_bytes);
        if done.memory.planned_bytes() > most {
            largest = Some(done.memory);
        }
        anyhow::Ok(())
    };
    // On a GPU, the host finishes a rank while the device computes the next one.
    let mut before: Option<(RankReport, RankOutput)> = None;
    for rank in ranks {
        let done = runner.start(&mut stream, rank, &generator, &mut samples)?;
        if let Some(before) = before.take() {
            finish(before)?;
        }
        let result = runner.collect(&done, &mut samples)?;
        before = Some((done, result));
    }
    if let Some(before) = before.take() {
        finish(before)?;
    }
    progress
        .iter()
        .for_each(|progress| progress.bar.finish_and_clear());
    Ok(largest)
}

/// A progress bar on a terminal, a line every minute in a log.
struct ProgressLog {
    bar: ProgressBar,
    began: Instant,
    logged: Instant,
    first: usize,
    tokens: usize,
}

/// Time between two lines of a log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

impl ProgressLog {
    fn new(ranks: usize, finished: usize, tokens: usize) -> ProgressLog {
        let bar = long_bar(ranks);
        bar.set_position(finished as u64);
        bar.reset_eta();
        bar.set_message("ranks");
        bar.enable_steady_tick(Duration::from_millis(500));
        ProgressLog {
            bar,
            began: Instant::now(),
            logged: Instant::now(),
            first: finished,
            tokens,
        }
    }

    fn step(&mut self, state: &RunState) {
        let ranks = state.settings.ranks;
        let speed = self.tokens as f64 / ranks as f64 * state.finished as f64 / state.seconds;
        self.bar.set_position(state.finished as u64);
        self.bar
            .set_message(format!("ranks, {:.2} M tokens/s", speed / 1e6));
        if self.bar.is_hidden() && self.logged.elapsed() > LOG_INTERVAL {
            self.logged = Instant::now();
            let each = self.began.elapsed().as_secs_f64() / (state.finished - self.first) as f64;
            let left = each * (ranks - state.finished) as f64;
            note(&format!(
                "{} of {ranks} ranks, {:.2} M tokens/s, about {:.0} s left",
                state.finished,
                speed / 1e6,
                left,
            ));
        }
    }
}
