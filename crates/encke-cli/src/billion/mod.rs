//! `encke billion`: attention over a sequence that no memory holds, every pair of the pattern
//! computed, on this machine.
//!
//! Nothing is extrapolated: what is printed is what was done. Ranks live one after another, each
//! with the buffers of its own plan, and what is left of the output is a checksum and samples.

mod check;
mod options;
mod report;
mod state;

use std::time::{Duration, Instant};

use anyhow::Result;
use encke::plan::Plan;
use encke::trace::Activity;
use encke::{Attention, Data, RankMemory};
use encke_sim::stream::{
    Checksum, Generator, RankDone, Samples, Sink, Stream, StreamError, Stretch,
};
use indicatif::ProgressBar;

use crate::Verdict;
use crate::output::OutputFile;
use crate::terminal::{long_bar, note, say};
pub use options::{EXAMPLES, Options};
use state::State;

/// Where the output goes.
struct Output<'a> {
    checksum: &'a mut Checksum,
    samples: &'a mut Samples,
}

impl Sink for Output<'_> {
    fn write(&mut self, stretch: &Stretch<'_>, from: &Data) -> Result<(), StreamError> {
        self.checksum.write(stretch, from)?;
        self.samples.write(stretch, from)
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let settings = options.settings()?;
    let request = settings.request()?;
    let record = match &options.record {
        Some(path) => {
            let other = ("the state", options.state.as_path());
            Some(OutputFile::create(path, &[other])?)
        }
        None => None,
    };
    let mut state = match options.fresh {
        true => None,
        false => State::load(&options.state, &settings)?,
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
    let mut state = state.unwrap_or_else(|| State::new(settings.clone()));
    // Claims the place before there is anything to lose.
    state.save(&options.state)?;
    let attention = Attention::builder().build()?;
    let plan = Plan::new(request)?;
    let generator = Generator::new(settings.seed, settings.dim);
    let mut samples = check::samples(plan.request(), &generator, settings.samples);
    let mut stream = Stream::new(attention.kernel(), &plan)?;
    let mut largest: Option<RankMemory> = None;
    let mut progress = Progress::new(settings.ranks, state.finished, settings.tokens);
    for rank in state.finished..settings.ranks {
        let begin = Instant::now();
        let mut output = Output {
            checksum: &mut state.checksum,
            samples: &mut samples,
        };
        let done = stream.rank(rank, &generator, &mut output, None)?;
        state
            .checked
            .check(plan.request(), &generator, &mut samples)?;
        add(&mut state, &done, begin.elapsed());
        state.save(&options.state)?;
        progress.step(&state);
        if largest
            .as_ref()
            .is_none_or(|m| m.planned_bytes() < done.memory.planned_bytes())
        {
            largest = Some(done.memory);
        }
    }
    progress.bar.finish_and_clear();
    let report = report::Report::new(
        &plan,
        &state,
        largest.as_ref(),
        attention.kernel().arm().to_string(),
    );
    say(&report.words())?;
    if let Some(mut record) = record {
        record.write(|to| report.write(to))?;
        record.keep()?;
    }
    std::fs::remove_file(&options.state)?;
    Ok(match state.checked.wrong {
        0 => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

/// Books what a rank did.
fn add(state: &mut State, done: &RankDone, took: Duration) {
    let time = |of: Activity| -> f64 {
        let events = done.events.iter().filter(|event| event.activity == of);
        events.map(|event| event.duration.as_secs_f64()).sum()
    };
    state.finished += 1;
    state.pairs += done.pairs as u64;
    let received = done.events.iter().map(|event| event.received_bytes as u64);
    state.received_bytes += received.sum::<u64>();
    state.seconds += took.as_secs_f64();
    state.load_seconds += time(Activity::Load);
    state.compute_seconds += time(Activity::Compute);
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
