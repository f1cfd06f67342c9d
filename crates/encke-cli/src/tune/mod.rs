//! `encke tune`: measures this machine and stores the profile that `auto` options use.
//!
//! Measuring is the library's; here the file is written and printed. The decision here: no other
//! command measures on its own, because none should take a minute longer than its work.

mod check;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use encke::cost::Machine;
use encke::tune::{DEFAULT_LIMIT, MachineId, MachineProfile, builtin_machine, measure};
use encke_lab::Verdict;
use encke_lab::format::{flops, seconds};
use encke_lab::number::repeats;
use encke_lab::output::OutputFile;
use encke_lab::table::TextTable;
use encke_lab::terminal::{Paint, bar, say};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke tune
      Measure this machine: kernels in every type, memory, hops between threads.
  encke tune --show
      The stored profile, or that there is none, and its path.
  encke plan --tokens 64k --heads 8 --dim 64 --causal --explain
      The decisions it is used for.
  encke tune --seconds 10
      Measure for a shorter time, with less precision.
  encke tune --check --record auto.json
      Thirty decisions against the best of an exhaustive search; minutes, on an idle machine.

The profile is stored in $XDG_CONFIG_HOME/encke (~/.config/encke) under a name made of the
processor, its cores, the GPU and this version: another machine or another version does not use it.
It is optional; without it, commands use built-in figures and say so.

Exit codes: 0 success, 1 --check found a choice more than 5 % slower than the best, or a
median error of predictions above 15 %, 2 any other error.";

/// Measures this machine.
#[derive(Debug, Args)]
pub struct Options {
    /// Show the stored profile instead of measuring.
    #[arg(long)]
    show: bool,

    /// Seconds to measure; everything is measured at least once [default: 50].
    #[arg(long, value_name = "S", conflicts_with = "show")]
    seconds: Option<f64>,

    /// Print the profile as JSON.
    #[arg(long)]
    json: bool,

    /// Check decisions instead: run all alternatives of thirty mixed configurations, and compare
    /// the choice with the best. For an idle machine.
    #[arg(long, conflicts_with_all = ["show", "json", "seconds"])]
    check: bool,

    /// With --check, how often each alternative runs before the eight fastest run seven times more;
    /// medians are compared [default: 2].
    #[arg(long, value_name = "TIMES", value_parser = repeats)]
    repeats: Option<usize>,

    /// With --check, write every run as JSON.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.check {
        return check::run(options.repeats.unwrap_or(2), options.record.as_deref());
    }
    // Not clap's `requires`, which an option that excludes --check switches off.
    if options.record.is_some() {
        bail!("--record writes what --check measures; add --check, or leave it out");
    }
    if options.repeats.is_some() {
        bail!("--repeats says how often --check runs; add --check, or leave it out");
    }
    let here = MachineId::current();
    if options.show {
        return show(&here, options.json);
    }
    let limit = match options.seconds {
        None => DEFAULT_LIMIT,
        Some(seconds) => match Duration::try_from_secs_f64(seconds) {
            Ok(limit) if !limit.is_zero() => limit,
            _ => bail!("--seconds {seconds} is not a length of time; give seconds, more than 0"),
        },
    };
    let path = MachineProfile::path(&here)?;
    let mut file = OutputFile::create_private(&path)?;
    let progress = bar(100);
    let profile = measure(here, limit, &mut |what, part| {
        progress.set_position((100.0 * part) as u64);
        progress.set_message(what.to_string());
    })?;
    progress.finish_and_clear();
    file.write(|to| Ok(serde_json::to_writer_pretty(to, &profile)?))?;
    file.keep()?;
    let text = match options.json {
        true => serde_json::to_string_pretty(&profile)? + "\n",
        false => to_text(&profile) + &format!("stored in {}\n", path.display()),
    };
    say(&text)?;
    Ok(Verdict::Fine)
}

fn show(here: &MachineId, json: bool) -> Result<Verdict> {
    let path = MachineProfile::path(here)?;
    let text = match (MachineProfile::load(here)?, json) {
        (Some(profile), true) => serde_json::to_string_pretty(&profile)? + "\n",
        (Some(profile), false) => to_text(&profile) + &format!("stored in {}\n", path.display()),
        (None, true) => serde_json::to_string_pretty(&builtin_machine(here))? + "\n",
        (None, false) => format!(
            "{}\nNothing was measured here with this version, so built-in figures are used.\n\
             encke tune measures this machine and stores the profile in {}\n",
            here.to_text(),
            path.display()
        ),
    };
    say(&text)?;
    Ok(Verdict::Fine)
}

fn to_text(profile: &MachineProfile) -> String {
    let paint = Paint::stdout();
    let MachineProfile {
        here,
        machine,
        measured_s,
        misfit,
        gpu,
        ..
    } = profile;
    let mut text = format!(
        "{}\nmeasured in {}; fitted within {:.1} %\n\n",
        here.to_text(),
        seconds(*measured_s),
        100.0 * misfit
    );
    text += &format!("{}\n", paint.bold("Attention on all cores"));
    text += &rates(machine);
    text += &memory(&paint, machine, "a hop between threads");
    if let Some(gpu) = gpu {
        text += &format!(
            "{}\n",
            paint.bold(&format!("Attention on {}", gpu.device.name))
        );
        text += &rates(gpu);
        text += &memory(&paint, gpu, "a task");
    }
    text
}

fn rates(machine: &Machine) -> String {
    let mut table = TextTable::new(2, ["type", "head dimension", "forward", "backward"]);
    for rate in &machine.device.rates {
        table.row([
            rate.dtype.to_string(),
            rate.dim.to_string(),
            flops(rate.forward.flops),
            flops(rate.backward.flops),
        ]);
    }
    table.to_string()
}

fn memory(paint: &Paint, machine: &Machine, hop: &str) -> String {
    let speed = |bytes_per_s: f64| format!("{:.1} GB/s", bytes_per_s / 1e9);
    let device = &machine.device;
    format!(
        "{}\n  copies {} (strided rows {}), cells {}, {hop} {} and {}\n",
        paint.bold("Memory"),
        speed(device.bytes_per_s),
        speed(device.strided_bytes_per_s.unwrap_or(device.bytes_per_s)),
        speed(device.cell_bytes_per_s),
        seconds(machine.intra_node.latency_s),
        speed(machine.intra_node.bytes_per_s),
    )
}
