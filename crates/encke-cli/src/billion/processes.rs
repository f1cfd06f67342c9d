//! `encke billion` as several processes: ranks are dealt out to them like cards.
//!
//! Ranks of a streamed forward pass need nothing from one another, so nothing travels until the end,
//! when what each process found is added up. Each has a state of its own, beside the others'.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use encke::explain::bytes;
use encke::plan::Plan;
use encke::{CpuKernel, RankMemory};
use encke_ring::out_of_core::{Generator, Stream};
use serde::{Deserialize, Serialize};

use super::options::Settings;
use super::report::Report;
use super::state::State;
use super::{Host, Options, Progress, Works, add};
use crate::Verdict;
use crate::check;
use crate::cluster::Cluster;
use crate::output::OutputFile;
use crate::process::peak_resident_bytes;
use crate::terminal::say;

/// What one process found.
#[derive(Serialize, Deserialize)]
struct Found {
    state: State,
    largest: Option<RankMemory>,
    resident_bytes: Option<usize>,
}

/// Everything a process needs to begin.
struct Work {
    settings: Settings,
    state: State,
    path: PathBuf,
    kernel: CpuKernel,
    plan: Plan,
    record: Option<OutputFile>,
}

/// Runs the command.
pub fn run(cluster: &mut Cluster, options: &Options) -> Result<Verdict> {
    let ready = prepare(cluster, options);
    let mut work = cluster.agree(ready)?;
    let largest = attend(cluster, &mut work)?;
    let found = Found {
        state: work.state.clone(),
        largest,
        resident_bytes: peak_resident_bytes(),
    };
    let all = cluster.gather(&found)?;
    let told = match all {
        Some(all) => conclude(&mut work, all),
        None => Ok(0),
    };
    let wrong = cluster.agree(told)?;
    std::fs::remove_file(&work.path)?;
    let wrong = cluster.broadcast(cluster.speaks().then_some(wrong))?;
    Ok(match wrong {
        0 => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

fn prepare(cluster: &Cluster, options: &Options) -> Result<Work> {
    options.device.refuse_in_processes()?;
    let settings = options.settings(|settings| Ok(settings.cpu_ranks()))?;
    let plan = Plan::new(settings.request()?)?;
    let record = match (&options.record, cluster.speaks()) {
        (Some(path), true) => Some(OutputFile::create(path, &[])?),
        _ => None,
    };
    // A state is of one process among so many: with another number, other ranks are its own.
    let mut path = options.state.clone().into_os_string();
    path.push(format!(".{}-of-{}", cluster.rank(), cluster.ranks()));
    let path = PathBuf::from(path);
    let state = match options.fresh {
        true => None,
        false => State::load(&path, &settings)?,
    };
    let state = state.map(|mut state| {
        state.interruptions += 1;
        state
    });
    let state = state.unwrap_or_else(|| State::new(settings.clone()));
    state.save(&path)?;
    Ok(Work {
        settings,
        state,
        path,
        kernel: CpuKernel::new()?,
        plan,
        record,
    })
}

/// This process's ranks, one after another; the memory of the largest.
fn attend(cluster: &Cluster, work: &mut Work) -> Result<Option<RankMemory>> {
    let Work {
        settings,
        state,
        path,
        kernel,
        plan,
        ..
    } = work;
    let generator = Generator::new(settings.seed, settings.dim);
    let mut samples = check::samples(plan.request(), &generator, settings.samples);
    let mut stream = Stream::new(kernel, plan)?;
    let mut works = Host::new(kernel);
    let (own, each) = (cluster.rank(), cluster.ranks());
    let mut largest: Option<RankMemory> = None;
    let tokens = settings.tokens;
    let mut progress = cluster
        .speaks()
        .then(|| Progress::new(settings.ranks.div_ceil(each), state.finished, tokens));
    for rank in (own + state.finished * each..settings.ranks).step_by(each) {
        let begin = Instant::now();
        let done = works.rank(&mut stream, rank, &generator, &mut samples)?;
        let harvest = works.collect(&done, &mut samples)?;
        let checked = &mut state.checked;
        checked.check(plan.request(), &generator, harvest.samples)?;
        state.checksum = state.checksum + harvest.checksum;
        state.load_seconds += harvest.load.as_secs_f64();
        state.compute_seconds += harvest.compute.as_secs_f64();
        add(state, &done, begin.elapsed());
        state.save(path)?;
        progress
            .iter_mut()
            .for_each(|progress| progress.step(state));
        let before = largest.as_ref().map_or(0, RankMemory::planned_bytes);
        if done.memory.planned_bytes() > before {
            largest = Some(done.memory);
        }
    }
    progress
        .iter()
        .for_each(|progress| progress.bar.finish_and_clear());
    Ok(largest)
}

/// Adds up what all processes found and reports it; how many rows were wrong.
fn conclude(work: &mut Work, all: Vec<Found>) -> Result<usize> {
    let mut sum = State::new(work.settings.clone());
    let mut largest: Option<RankMemory> = None;
    let mut resident = Vec::new();
    for found in all {
        let State {
            finished,
            checksum,
            checked,
            pairs,
            received_bytes,
            seconds,
            load_seconds,
            compute_seconds,
            interruptions,
            ..
        } = found.state;
        sum.finished += finished;
        sum.checksum = sum.checksum + checksum;
        sum.checked = sum.checked.with(checked);
        sum.pairs += pairs;
        sum.received_bytes += received_bytes;
        // They worked side by side.
        sum.seconds = sum.seconds.max(seconds);
        sum.load_seconds = sum.load_seconds.max(load_seconds);
        sum.compute_seconds = sum.compute_seconds.max(compute_seconds);
        sum.interruptions = sum.interruptions.max(interruptions);
        let before = largest.as_ref().map_or(0, RankMemory::planned_bytes);
        largest = found
            .largest
            .filter(|m| m.planned_bytes() > before)
            .or(largest);
        resident.push(found.resident_bytes.map_or("unknown".to_string(), bytes));
    }
    let kernel = work.kernel.instruction_set().to_string();
    let report = Report::new(&work.plan, &sum, largest.as_ref(), kernel, None);
    say(&report.words())?;
    say(&format!(
        "\n{} processes side by side, resident at most: {}\n",
        resident.len(),
        resident.join(", ")
    ))?;
    if let Some(mut record) = work.record.take() {
        record.write(|to| report.write(to))?;
        record.keep()?;
    }
    Ok(sum.checked.wrong)
}
