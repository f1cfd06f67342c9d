//! `encke billion`: attention over a sequence that no memory holds, every pair of the pattern
//! computed, on this machine.
//!
//! Nothing is extrapolated: what is printed is what was done. Ranks live one after another, each
//! with the buffers of its own plan, and what is left of the output is a checksum and samples.

mod gpu;
mod host;
mod options;
#[cfg(feature = "mpi")]
pub mod processes;
mod report;
mod state;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use encke::plan::Plan;
use encke::{CpuKernel, Kernel, RankMemory};
use encke_ring::RankReport;
use encke_ring::out_of_core::{Checksum, Generator, Sampled, Samples, Stream};
use indicatif::ProgressBar;

use crate::Verdict;
use crate::check;
use crate::device_option::{Device, cuda};
use crate::output::OutputFile;
use crate::terminal::{long_bar, note, say};
use gpu::{DeviceMemory, Gpu};
use host::Host;
use options::Settings;
pub use options::{EXAMPLES, Options};
use state::State;

/// Where ranks are carried out. A rank may still be at work when [`Works::rank`] returns; what came
/// of it is there when [`Works::collect`] does.
trait Works<K: Kernel> {
    /// One rank.
    fn rank(
        &mut self,
        stream: &mut Stream<'_, K>,
        number: usize,
        generator: &Generator,
        samples: &mut Samples,
    ) -> Result<RankReport>;

    /// What came of it.
    fn collect(&mut self, done: &RankReport, samples: &mut Samples) -> Result<Harvest>;

    /// What computes.
    fn kernel(&self) -> String;

    /// What was held on a device that has memory of its own, given the largest rank.
    fn memory(&self, largest: Option<&RankMemory>) -> Result<Option<DeviceMemory>>;
}

/// What is kept of a rank's output, and what it took.
struct Harvest {
    checksum: Checksum,
    samples: BTreeMap<(usize, usize), Sampled>,
    /// Making the rows of its own inputs.
    load: Duration,
    /// Attention proper.
    compute: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    match options.device.device {
        Device::Cpu => {
            let settings = options.settings(|settings| Ok(settings.cpu_ranks()))?;
            let kernel = CpuKernel::new()?;
            let works = Host::new(&kernel);
            carry_out(options, settings, &kernel, works)
        }
        Device::Cuda(number) => {
            let kernel = cuda(number)?;
            let settings = options.settings(|settings| gpu::ranks(&kernel, settings))?;
            let works = Gpu::new(&kernel)?;
            carry_out(options, settings, &kernel, works)
        }
    }
}

/// Attends the whole sequence, rank after rank.
fn carry_out<K: Kernel>(
    options: &Options,
    settings: Settings,
    kernel: &K,
    mut works: impl Works<K>,
) -> Result<Verdict> {
    let plan = Plan::new(settings.request()?)?;
    let record = match &options.record {
        Some(path) => {
            let other = ("the state", options.state.as_path());
            Some(OutputFile::create(path, &[other])?)
        }
        None => None,
    };
    let mut state = resumed(options, &settings)?;
    let generator = Generator::new(settings.seed, settings.dim);
    let mut samples = check::samples(plan.request(), &generator, settings.samples);
    let mut stream = Stream::new(kernel, &plan)?;
    let mut largest: Option<RankMemory> = None;
    let mut progress = Progress::new(settings.ranks, state.finished, settings.tokens);
    let mut clock = Instant::now();
    let mut book = |state: &mut State, (done, harvest): (RankReport, Harvest)| {
        let checked = &mut state.checked;
        checked.check(plan.request(), &generator, harvest.samples)?;
        state.checksum = state.checksum + harvest.checksum;
        state.load_seconds += harvest.load.as_secs_f64();
        state.compute_seconds += harvest.compute.as_secs_f64();
        let since = std::mem::replace(&mut clock, Instant::now());
        add(state, &done, since.elapsed());
        state.save(&options.state)?;
        progress.step(state);
        let most = largest.as_ref().map_or(0, RankMemory::planned_bytes);
        if done.memory.planned_bytes() > most {
            largest = Some(done.memory);
        }
        anyhow::Ok(())
    };
    // A rank is booked while the next one is at work, where that is another device.
    let mut before: Option<(RankReport, Harvest)> = None;
    for rank in state.finished..settings.ranks {
        let done = works.rank(&mut stream, rank, &generator, &mut samples)?;
        if let Some(before) = before.take() {
            book(&mut state, before)?;
        }
        let harvest = works.collect(&done, &mut samples)?;
        before = Some((done, harvest));
    }
    if let Some(before) = before.take() {
        book(&mut state, before)?;
    }
    progress.bar.finish_and_clear();
    let device = works.memory(largest.as_ref())?;
    let report = report::Report::new(&plan, &state, largest.as_ref(), works.kernel(), device);
    say(&report.words())?;
    if let Some(mut record) = record {
        record.write(|to| report.write(to))?;
        record.keep()?;
    }
    std::fs::remove_file(&options.state)?;
    let held = device.is_none_or(|memory| memory.as_planned());
    Ok(match (state.checked.wrong, held) {
        (0, true) => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

/// The state to go on from, whose place is then claimed.
fn resumed(options: &Options, settings: &Settings) -> Result<State> {
    let mut state = match options.fresh {
        true => None,
        false => State::load(&options.state, settings)?,
    };
    if let Some(state) = &mut state {
        state.interruptions += 1;
        note(&format!(
            "going on after rank {} of {}, from {}",
            state.finished,
            settings.ranks,
            options.state.display()
        ));
    }
    let state = state.unwrap_or_else(|| State::new(settings.clone()));
    // Claims the place before there is anything to lose.
    state.save(&options.state)?;
    Ok(state)
}

/// Books what a rank did.
fn add(state: &mut State, done: &RankReport, took: Duration) {
    state.finished += 1;
    state.pairs += done.pairs as u64;
    let received = done.events.iter().map(|event| event.received_bytes as u64);
    state.received_bytes += received.sum::<u64>();
    state.seconds += took.as_secs_f64();
}

/// A bar for who looks at a terminal, a line now and then for who reads a log.
struct Progress {
    bar: ProgressBar,
    began: Instant,
    told: Instant,
    first: usize,
    tokens: usize,
}

/// How often a log gets a line.
const TELL: Duration = Duration::from_secs(60);

impl Progress {
    fn new(ranks: usize, finished: usize, tokens: usize) -> Progress {
        let bar = long_bar(ranks);
        bar.set_position(finished as u64);
        bar.reset_eta();
        bar.set_message("ranks");
        bar.enable_steady_tick(Duration::from_millis(500));
        Progress {
            bar,
            began: Instant::now(),
            told: Instant::now(),
            first: finished,
            tokens,
        }
    }

    fn step(&mut self, state: &State) {
        let ranks = state.settings.ranks;
        let speed = self.tokens as f64 / ranks as f64 * state.finished as f64 / state.seconds;
        self.bar.set_position(state.finished as u64);
        self.bar
            .set_message(format!("ranks, {:.2} M tokens/s", speed / 1e6));
        if self.bar.is_hidden() && self.told.elapsed() > TELL {
            self.told = Instant::now();
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
