//! `encke simulate`: the predicted time of a plan on a described machine.
//!
//! The prediction is `encke-cost`'s; here the machine is built from names, a file and options, and
//! the result is printed. `--against threads` compares predictions with measurements.

mod against;
pub mod machine;
mod options;
mod scale;
mod schedules;
mod text;

use std::time::Duration;

use anyhow::Result;
use encke::tune::MachineSource;
use encke::{Attention, DType, Pass};
use encke_cost::{Machine, SimulatedRun, simulate};
use encke_lab::Verdict;
use encke_lab::chrome_trace::ChromeTrace;
use encke_lab::output::OutputFile;
use encke_lab::schedules::ScheduleTimes;
use encke_lab::terminal::{say, spinner};
use serde::Serialize;

pub use options::{EXAMPLES, Options};

/// A dense ring of p ranks has p x p rank-rounds to predict.
const MOST_RANKS: usize = 4096;

/// What `--json` writes.
#[derive(Debug, Serialize)]
struct SimulationRecord<'a> {
    request: &'a encke::Request,
    machine: &'a Machine,
    forward: &'a SimulatedRun,
    backward: Option<&'a SimulatedRun>,
    schedules: &'a [ScheduleTimes],
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.list {
        say(&text::catalogue())?;
        return Ok(Verdict::Fine);
    }
    if options.against.is_some() {
        return against::run(options);
    }
    if let Some(path) = &options.scale {
        return scale::run(options, path);
    }
    let dtype = options.dtype(DType::Bf16);
    let machine = options.machine.machine(&options.sizes, dtype)?;
    if options.describe {
        say(&(serde_json::to_string_pretty(&machine)? + "\n"))?;
        return Ok(Verdict::Fine);
    }
    let (json, trace_file) = outputs(options)?;
    let shape = options.sizes.shape()?;
    let builder = options.pattern.apply(Attention::builder(), None)?;
    let reason = "the prediction would take too long";
    let source = MachineSource::Described(machine.device.name.clone());
    let builder = options
        .ring
        .apply_on(builder, MOST_RANKS, reason, (machine.clone(), source))?;
    let attention = builder.build()?;

    let recorded = match json.is_some() || trace_file.is_some() {
        true => 0..options.record,
        false => 0..0,
    };
    let predict = |pass: Pass, name: &'static str| -> Result<SimulatedRun> {
        let progress = spinner(name);
        let plan = attention.plan(shape, dtype, pass)?;
        let run = simulate(&plan, &machine, recorded.clone())?;
        progress.finish_and_clear();
        Ok(run)
    };
    let forward = predict(Pass::Forward, "forward")?;
    let backward = match options.grad {
        true => Some(predict(Pass::Backward { dlse: false }, "backward")?),
        false => None,
    };
    let plan = attention.plan(shape, dtype, Pass::Forward)?;
    let schedules = match options.ring.gives_schedule() {
        true => Vec::new(),
        false => schedules::compare(plan.request(), &machine, options.grad)?,
    };
    let record = SimulationRecord {
        request: plan.request(),
        machine: &machine,
        forward: &forward,
        backward: backward.as_ref(),
        schedules: &schedules,
    };
    OutputFile::write_json(json, &record)?;
    if let Some(mut file) = trace_file {
        let trace = trace(&forward, backward.as_ref());
        file.write(|to| trace.write(to))?;
        file.keep()?;
    }
    let text = text::runs(plan.request(), &machine, &forward, backward.as_ref());
    say(&(text + &schedules::to_text(&schedules)))?;
    Ok(Verdict::Fine)
}

/// Creates the files of the record and of the trace.
fn outputs(options: &Options) -> Result<(Option<OutputFile>, Option<OutputFile>)> {
    let file = options.machine.file.as_deref();
    let mut others: Vec<(&str, &std::path::Path)> = Vec::new();
    others.extend(file.map(|file| ("the machine", file)));
    let json = OutputFile::create_optional(options.json.as_deref(), &others)?;
    others.extend(options.json.as_deref().map(|path| ("the JSON", path)));
    let trace = OutputFile::create_optional(options.trace.as_deref(), &others)?;
    Ok((json, trace))
}

/// The trace of both passes, one after the other: ranks, and the hops they receive.
fn trace(forward: &SimulatedRun, backward: Option<&SimulatedRun>) -> ChromeTrace {
    let mut trace = ChromeTrace::default();
    let passes = [("forward", Some(forward)), ("backward", backward)];
    let mut origin = Duration::ZERO;
    for (name, run) in passes {
        let Some(run) = run else { continue };
        trace.add(name, &run.trace, origin);
        trace.add_hops(name, &run.transfers, origin);
        origin += Duration::try_from_secs_f64(run.seconds).unwrap_or_default();
    }
    trace
}
