//! `encke simulate`: how long the plan would take on a machine that is only described.
//!
//! The clock is the simulator's; here a machine is put together from names, a file and options, and
//! what the clock says is shown. With `--against threads` it is shown beside what really happens.

mod against;
pub mod machine;
pub mod options;
pub mod report;

use std::time::Duration;

use anyhow::Result;
use encke::tune::MachineSource;
use encke::{Attention, DType, Pass};
use encke_cost::{Machine, SimulatedRun, simulate};
use serde::Serialize;

use crate::Verdict;
use crate::chrome::Timeline;
use crate::output::OutputFile;
use crate::terminal::{say, spinner};
pub use options::{EXAMPLES, Options};

/// A dense ring of p ranks has p x p rounds.
const MOST_RANKS: usize = 4096;

/// What `--json` writes.
#[derive(Debug, Serialize)]
struct Record<'a> {
    request: &'a encke::Request,
    machine: &'a Machine,
    forward: &'a SimulatedRun,
    backward: Option<&'a SimulatedRun>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.view.list {
        say(&report::catalogue())?;
        return Ok(Verdict::Fine);
    }
    if options.view.against.is_some() {
        return against::run(options);
    }
    let dtype = options.dtype(DType::Bf16);
    let machine = machine::machine(&options.machine, &options.sizes, dtype)?;
    if options.view.describe {
        say(&(serde_json::to_string_pretty(&machine)? + "\n"))?;
        return Ok(Verdict::Fine);
    }
    let (json, trace) = outputs(options)?;
    let shape = options.sizes.shape()?;
    let builder = Attention::builder().pattern(options.pattern.pattern()?);
    let reason = "the clock would take too long";
    let source = MachineSource::Described(machine.device.name.clone());
    let builder = options
        .ring
        .apply_on(builder, MOST_RANKS, reason, (machine.clone(), source))?;
    let attention = builder.build()?;

    let recorded = match json.is_some() || trace.is_some() {
        true => 0..options.view.record,
        false => 0..0,
    };
    let time = |pass: Pass, name: &'static str| -> Result<SimulatedRun> {
        let progress = spinner(name);
        let plan = attention.plan(shape, dtype, pass)?;
        let run = simulate(&plan, &machine, recorded.clone())?;
        progress.finish_and_clear();
        Ok(run)
    };
    let forward = time(Pass::Forward, "forward")?;
    let backward = match options.view.grad {
        true => Some(time(Pass::Backward { dlse: false }, "backward")?),
        false => None,
    };
    let plan = attention.plan(shape, dtype, Pass::Forward)?;
    if let Some(mut json) = json {
        let record = Record {
            request: plan.request(),
            machine: &machine,
            forward: &forward,
            backward: backward.as_ref(),
        };
        json.write(|to| Ok(serde_json::to_writer_pretty(to, &record)?))?;
        json.keep()?;
    }
    if let Some(mut trace) = trace {
        let timeline = timeline(&forward, backward.as_ref());
        trace.write(|to| timeline.write(to))?;
        trace.keep()?;
    }
    say(&report::words(
        plan.request(),
        &machine,
        &forward,
        backward.as_ref(),
    ))?;
    Ok(Verdict::Fine)
}

/// Claims the places of the record and of the timeline.
fn outputs(options: &Options) -> Result<(Option<OutputFile>, Option<OutputFile>)> {
    let view = &options.view;
    let file = options.machine.file.as_deref();
    let mut others: Vec<(&str, &std::path::Path)> = Vec::new();
    others.extend(file.map(|file| ("the machine", file)));
    let json = match &view.json {
        Some(path) => Some(OutputFile::create(path, &others)?),
        None => None,
    };
    others.extend(view.json.as_deref().map(|path| ("the JSON", path)));
    let trace = match &view.trace {
        Some(path) => Some(OutputFile::create(path, &others)?),
        None => None,
    };
    Ok((json, trace))
}

/// Both passes one after the other: ranks, and the hops they receive.
fn timeline(forward: &SimulatedRun, backward: Option<&SimulatedRun>) -> Timeline {
    let mut timeline = Timeline::default();
    let passes = [("forward", Some(forward)), ("backward", backward)];
    let mut origin = Duration::ZERO;
    for (name, run) in passes {
        let Some(run) = run else { continue };
        timeline.add(name, &run.trace, origin);
        timeline.add_hops(name, &run.transfers, origin);
        origin += Duration::try_from_secs_f64(run.seconds).unwrap_or_default();
    }
    timeline
}
