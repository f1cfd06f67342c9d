//! `encke verify`: random configurations on a ring of threads against the f64 reference.
//!
//! The decision here: case i of seed S is the first case of seed S + i, so that a failure is
//! reproduced alone with `--seed` and `--count 1`, whatever was run before it.

mod case;
mod judge;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow, bail};
use clap::Args;

use crate::Verdict;
use crate::number::count;
use crate::terminal::{Paint, bar, say};
use case::Case;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke verify
      300 configurations, at most 5 minutes.
  encke verify --seed 7 --count 5000 --minutes 60
      A longer run that can be repeated.

What is drawn: batch, tokens, heads, key heads, head dimension; dense, group, mix and fkodom
patterns with their options, causal or not; every sharding, empty chunks included, on 1 to 32
ranks; queries sharded or replicated; f64, f32, bf16, f16; a gradient of the lse; both checkpoint
policies. Each is run forward and backward. Held against the reference: out, lse, dq, dk, dv; bytes
sent against the bytes planned; bytes allocated against the bytes planned. In fkodom mode, which
divides by sums of values and is ill-conditioned where they are near 0, values are drawn positive
and f64 is used.

Exit codes: 0 all agree, 1 one does not, 2 any other error.";

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
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.count == 0 {
        bail!("--count is 0; give at least 1 configuration to verify");
    }
    let limit = Duration::try_from_secs_f64(options.minutes * 60.0);
    let limit = limit.ok().filter(|limit| !limit.is_zero());
    let limit = limit.ok_or_else(|| {
        anyhow!(
            "--minutes {} is no length of time; give a number above 0",
            options.minutes
        )
    })?;
    // What no configuration can do without is asked for first: that is an error, not a finding.
    encke::Attention::builder().build()?;
    let seed = options.seed.unwrap_or_else(clock_seed);
    let paint = Paint::stdout();
    say(&format!("seed {seed}\n"))?;

    let begin = Instant::now();
    let progress = bar(options.count);
    let (mut ran, mut failed) = (0, 0);
    let mut worst = judge::Worst::default();
    while ran < options.count && (ran == 0 || begin.elapsed() < limit) {
        let case = Case::new(seed.wrapping_add(ran as u64));
        progress.set_message(format!("{failed} failed"));
        if let Err(wrong) = judge::judge(&case, &mut worst) {
            failed += 1;
            let report = format!(
                "{} {case}\n  {wrong:#}\n  reproduce: encke verify --seed {} --count 1\n",
                paint.red("failed:"),
                case.seed
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
        &worst,
    ))?;
    Ok(match failed {
        0 => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

fn summary(
    options: &Options,
    paint: Paint,
    ran: usize,
    failed: usize,
    took: Duration,
    worst: &judge::Worst,
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
        0 => paint.green("all agree with the reference"),
        _ => paint.red(&format!("{failed} failed")),
    };
    format!(
        "{ran_of} in {:.1} s: {verdict}\n{worst}",
        took.as_secs_f64()
    )
}

/// A seed nobody chose. Small enough to be typed again.
fn clock_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |now| now.as_micros() as u64 % 1_000_000_000)
}
