//! `encke verify`: random configurations on a ring of threads against the f64 reference, or under
//! hardship in the simulator.
//!
//! The decision here: case i of seed S is the first case of seed S + i, so that a failure is
//! reproduced alone with `--seed` and `--count 1`, whatever was run before it.

mod case;
mod faults;
mod judge;
#[cfg(feature = "mpi")]
pub mod processes;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail};
use clap::Args;

use crate::Verdict;
use crate::device_option::{Device, DeviceOption};
use crate::number::count;
use crate::terminal::{Paint, bar, say};
use case::Case;
use faults::Faults;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke verify
      300 configurations, at most 5 minutes.
  encke verify --seed 7 --count 5000 --minutes 60
      A longer run that can be repeated.
  encke verify --device cuda
      The same on the first NVIDIA GPU: every kernel a ring can ask for, against the reference.
  encke verify --faults --seed 7 --count 2000
      2000 calls under hardship: what became of them, by the kind of fault.
  encke verify --faults --redundancy 1 --count 10000 --minutes 30
      Calls that survive: where ranks die, the others adopt their tokens and go on.
  mpirun -n 4 encke verify --count 50
      As several processes: whether messages arrive as they were sent, and whether every rank has
      the bits that threads and the simulator have.

What is drawn: batch, tokens, heads, key heads, head dimension; dense, group, mix and fkodom
patterns with their options, causal or not; every sharding, empty chunks included, on 1 to 32
ranks; queries sharded or replicated; f64, f32, bf16, f16; a gradient of the lse; both checkpoint
policies. Each is run forward and backward. BufferSlot against the reference: out, lse, dq, dk, dv; bytes
sent against the bytes planned; bytes allocated against the bytes planned. In fkodom mode, which
divides by sums of values and is ill-conditioned where they are near 0, values are drawn positive
and f64 is used.

With --faults, calls of such kinds run in a simulator whose messages are delayed, reordered, lost,
corrupted or repeated, and whose ranks die or are slow, as the seed has it. Each must end with the
bits of an undisturbed run, or with an error on every rank that names the rank, its peer and the
round, inside its deadline: never with a wrong number, never without end.

With --redundancy as well, each rank's inputs are kept by so many others, up to three ranks die in a
call, and the others go on: with the same numbers up to rounding, or, where every rank that had some
tokens is gone, with an error on every rank that says which tokens are lost.

Exit codes: 0 all agree, 1 one does not, 2 any other error.";

/// The largest drawn ring has 32 ranks.
const MOST_REDUNDANCY: usize = 31;

/// Random configurations against the reference.
#[derive(Debug, Args)]
pub struct Options {
    /// Seed of the first configuration; each next one has the next seed [default: from the clock].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,

    /// How many configurations.
    #[arg(long, value_name = "N", value_parser = count, default_value = "300")]
    count: usize,

    /// Stop after this many minutes, finished or not.
    #[arg(long, value_name = "M", default_value = "5")]
    minutes: f64,

    /// Try calls under hardship (delay, reordering, loss, corruption, repetition, death, slowness)
    /// instead of comparing with the reference.
    #[arg(long)]
    faults: bool,

    /// With --faults: how many other ranks keep each rank's inputs, so that deaths are survived.
    #[arg(long, value_name = "R", value_parser = count, default_value = "0", requires = "faults")]
    redundancy: usize,

    /// Where the configurations are run; the reference is the CPU's in any case.
    #[command(flatten)]
    device: DeviceOption,
}

/// What is verified.
enum Suite {
    /// Numbers against the reference.
    Reference(Box<judge::Works>, judge::Worst),
    /// Calls under hardship.
    Faults(Box<Faults>),
}

impl Suite {
    /// Numbers of a device against the reference.
    fn reference(device: Device) -> Result<Suite> {
        let works = Box::new(judge::Works::new(device)?);
        Ok(Suite::Reference(works, judge::Worst::default()))
    }

    /// Runs the case of a seed; an error says what it was and what is wrong with it.
    fn run(&mut self, seed: u64) -> Result<()> {
        match self {
            Suite::Reference(works, worst) => {
                let case = Case::new(seed);
                judge::judge(&case, works, worst).map_err(|wrong| anyhow!("{case}\n  {wrong:#}"))
            }
            Suite::Faults(faults) => {
                let tried = faults.run(seed);
                tried.map_err(|wrong| anyhow!("seed {seed}: {wrong:#}"))
            }
        }
    }

    fn option(&self, options: &Options) -> String {
        match (self, options.redundancy) {
            (Suite::Reference(..), _) => match options.device.device {
                Device::Cpu => String::new(),
                device => format!("--device {device} "),
            },
            (Suite::Faults(_), 0) => "--faults ".to_string(),
            (Suite::Faults(_), redundancy) => format!("--faults --redundancy {redundancy} "),
        }
    }

    /// What is to be said when nothing failed.
    fn praise(&self) -> &'static str {
        match self {
            Suite::Reference(..) => "all agree with the reference",
            Suite::Faults(_) => {
                "each ended right, or with an error on every rank inside its deadline"
            }
        }
    }

    fn details(&self) -> String {
        match self {
            Suite::Reference(_, worst) => worst.to_string(),
            Suite::Faults(faults) => faults.table().to_string(),
        }
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let limit = limit(options)?;
    // What no configuration can do without is asked for first: that is an error, not a finding.
    let kernel = encke::Attention::builder().build()?;
    let mut suite = match (options.faults, options.device.device) {
        (true, Device::Cpu) => Suite::Faults(Box::new(Faults::new(kernel, options.redundancy))),
        (true, device) => bail!(
            "--faults is about messages and runs in the simulator, on the CPU; leave --device \
             {device} out"
        ),
        (false, device) => Suite::reference(device)?,
    };
    let seed = options.seed.unwrap_or_else(clock_seed);
    let paint = Paint::stdout();
    say(&format!("seed {seed}\n"))?;

    let begin = Instant::now();
    let progress = bar(options.count);
    let (mut ran, mut failed) = (0, 0);
    while ran < options.count && (ran == 0 || begin.elapsed() < limit) {
        let seed = seed.wrapping_add(ran as u64);
        progress.set_message(format!("{failed} failed"));
        if let Err(wrong) = suite.run(seed) {
            failed += 1;
            let report = format!(
                "{} {wrong}\n  reproduce: encke verify {}--seed {seed} --count 1\n",
                paint.red("failed:"),
                suite.option(options),
            );
            progress.suspend(|| say(&report))?;
        }
        ran += 1;
        progress.inc(1);
    }
    progress.finish_and_clear();
    say(&summary(
        options,
        paint,
        ran,
        failed,
        begin.elapsed(),
        &suite,
    ))?;
    Ok(match failed {
        0 => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

/// How long it may take, or why there is nothing to do.
fn limit(options: &Options) -> Result<Duration> {
    if options.count == 0 {
        bail!("--count is 0; give at least 1 configuration to verify");
    }
    if options.redundancy > MOST_REDUNDANCY {
        bail!(
            "--redundancy {} is more than rings of up to 32 ranks have others; use at most \
             {MOST_REDUNDANCY}",
            options.redundancy
        );
    }
    let limit = Duration::try_from_secs_f64(options.minutes * 60.0);
    let limit = limit.ok().filter(|limit| !limit.is_zero());
    limit.ok_or_else(|| {
        anyhow!(
            "--minutes {} is no length of time; give a number above 0",
            options.minutes
        )
    })
}

fn summary(
    options: &Options,
    paint: Paint,
    ran: usize,
    failed: usize,
    took: Duration,
    suite: &Suite,
) -> String {
    let ran_of = match ran == options.count {
        true if ran == 1 => "1 configuration".to_string(),
        true => format!("{ran} configurations"),
        false => format!(
            "{ran} of {} configurations (stopped at the limit of {} minutes)",
            options.count, options.minutes
        ),
    };
    let verdict = match failed {
        0 => paint.green(suite.praise()),
        _ => paint.red(&format!("{failed} failed")),
    };
    format!(
        "{ran_of} in {:.1} s: {verdict}\n{}",
        took.as_secs_f64(),
        suite.details(),
    )
}

/// A seed nobody chose. Small enough to be typed again.
fn clock_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |now| now.as_micros() as u64 % 1_000_000_000)
}
