//! `encke attend` as several processes: each is a rank, reads its own rows of the input and writes its
//! own rows of the output.
//!
//! There is one output file, of its full length from the start, written by all and put in its place by
//! one, when everyone has written. Between the passes nothing is kept but that file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use encke::plan::program::Role;
use encke::trace::Event;
use encke::{Attention, DType, Plan, RankMemory, Request, Trace};
use encke_ring::ShardCall;
use encke_ring::out_of_core::{Files, FromSource, ToSink};
use serde::{Deserialize, Serialize};

use super::inputs::Inputs;
use super::streamed::{Inspected, entries, named, of, output_files, requests};
use super::{Options, report};
use crate::Verdict;
use crate::chrome::Timeline;
use crate::cluster::Cluster;
use crate::input::InputFile;
use crate::output::{OutputFile, prepared};
use crate::process::{peak_resident_bytes, resident_bytes};
use crate::terminal::spinner;

/// What all processes agree on before anything is written.
struct Call {
    attention: Attention,
    inputs: Inputs,
    compute: DType,
    requests: Vec<Request>,
}

/// What one rank did in one pass.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankPass {
    pub events: Vec<Event>,
    pub memory: RankMemory,
    pub seconds: f64,
}

/// What one process did.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessDone {
    pub passes: Vec<RankPass>,
    /// Resident before the first buffer of a rank, and at most.
    pub resident_bytes: Option<(usize, usize)>,
}

/// Runs the command.
pub fn run(cluster: &mut Cluster, options: &Options) -> Result<Verdict> {
    let call = prepare(cluster.ranks(), options);
    let call = cluster.agree(call)?;
    if let Some(deadline) = options.deadline()? {
        cluster.wire.set_deadline(deadline);
    }
    if call.requests[0].redundancy > 0 {
        let ready = cluster.survive();
        cluster.agree(ready)?;
    }
    let claimed = match cluster.speaks() {
        true => super::outputs(options).map(Some),
        false => Ok(None),
    };
    let claimed = cluster.agree(claimed)?;
    let (temporary, opened) = open(cluster, claimed.as_ref().map(|(output, _)| output), &call)?;
    let mut sink = cluster.agree(opened)?;
    let before = resident_bytes();
    let progress = cluster.speaks().then(|| spinner("forward"));
    let mut passes = Vec::new();
    for request in &call.requests {
        if let (Some(progress), true) = (&progress, !passes.is_empty()) {
            progress.set_message("backward");
        }
        passes.push(pass(cluster, options, &call, request, &mut sink)?);
    }
    drop(progress);
    let most = peak_resident_bytes();
    let done = ProcessDone {
        passes,
        resident_bytes: before.zip(most),
    };
    let mut all = cluster.gather(&done)?;
    let mut claimed = claimed;
    loop {
        let speaker = cluster.speaker();
        let told = match (all.take(), cluster.speaks()) {
            (Some(all), true) => {
                conclude(cluster, options, &call, &all, (&temporary, claimed.take()))
            }
            // Who spoke has died: the file may be in its place, or not yet.
            (None, true) => put(options, &temporary, None),
            _ => Ok(()),
        };
        cluster.agree(told)?;
        if cluster.speaker() == speaker {
            return Ok(Verdict::Fine);
        }
    }
}

/// Puts the output in its place: by whoever claimed it, or by whoever is left.
fn put(options: &Options, temporary: &Path, claimed: Option<OutputFile>) -> Result<()> {
    match claimed {
        Some(output) => output.keep(),
        None if temporary.exists() => std::fs::rename(temporary, &options.output)
            .with_context(|| format!("cannot write {}", options.output.display())),
        None => Ok(()),
    }
}

/// Everything that can be refused by looking at the options and at the input's header.
fn prepare(processes: usize, options: &Options) -> Result<Call> {
    if options.work.memory_limit.is_some() {
        bail!(
            "--memory-limit lets ranks of one process follow one another; here every process is a \
             rank: leave it out, or start one process"
        );
    }
    if options.drills() {
        bail!("--drill is for threads; a process dies with kill -KILL");
    }
    let attention = options.attention_of(processes)?;
    let inputs = {
        let file = InputFile::open(&options.input)?;
        Inputs::read(&file.tensors()?, options.work.grad, &attention)?
    };
    if attention.pattern().splits_slots() {
        bail!(
            "fkodom mode and detached mixing gradients combine branches where all rows are, which \
             is in no one process; use group mode, or mix mode with exact gradients, or threads"
        );
    }
    Ok(Call {
        compute: attention.compute_dtype(inputs.q.dtype()),
        requests: requests(&attention, &inputs)?,
        attention,
        inputs,
    })
}

/// Where the outputs lie, in the file that the speaking process has claimed.
fn open(
    cluster: &mut Cluster,
    claimed: Option<&OutputFile>,
    call: &Call,
) -> Result<(PathBuf, Result<Files>)> {
    let entries = entries(&call.inputs, call.compute);
    let made = claimed.map(|output| output.prepare(&named(&entries)));
    let path = claimed.map(|output| output.temporary().to_path_buf());
    let path: PathBuf = cluster.broadcast(path)?;
    let tensors = made.unwrap_or_else(|| prepared(&path, &named(&entries)));
    Ok((path, tensors.map(|tensors| output_files(&entries, tensors))))
}

/// One pass of this process's rank.
fn pass(
    cluster: &mut Cluster,
    options: &Options,
    call: &Call,
    request: &Request,
    sink: &mut Files,
) -> Result<RankPass> {
    let kernel = call.attention.kernel();
    let ready = (|| {
        let plan = Plan::new(request.clone())?;
        let mut source = Inspected::new(options, &call.inputs, call.compute)?;
        for role in [Role::Out, Role::Lse] {
            source.files.add(role, of(sink, role)?);
        }
        Ok((plan, source))
    })();
    let (plan, source) = cluster.agree(ready)?;
    let loaded = (|| {
        let mut shard = ShardCall::new(kernel, &plan, cluster.rank())?;
        shard.load(&mut FromSource(&source))?;
        Ok(shard)
    })();
    let mut shard = cluster.agree(loaded)?;
    cluster.wire.begin();
    let begin = Instant::now();
    shard.restart_clock();
    let mut stored = Ok(());
    match request.redundancy {
        0 => shard.run(&mut cluster.wire)?,
        _ => shard.run_surviving(&mut cluster.wire, &mut ToSink(sink))?,
    }
    let seconds = begin.elapsed().as_secs_f64();
    if request.redundancy == 0 {
        stored = shard.store(&mut ToSink(sink)).map_err(anyhow::Error::from);
    }
    // Others may read these rows, and one of them puts the file in its place.
    let stored = stored.and_then(|()| {
        let file = of(sink, request_output(request))?.file;
        file.sync_data().context("cannot write the output")
    });
    cluster.agree(stored)?;
    let done = shard.finish();
    Ok(RankPass {
        events: done.events,
        memory: done.memory,
        seconds,
    })
}

/// An output of a pass; all of them are in one file.
fn request_output(request: &Request) -> Role {
    match request.pass {
        encke::Pass::Forward => Role::Out,
        encke::Pass::Backward { .. } => Role::Dq,
    }
}

/// Puts the files in their places and says what was done.
fn conclude(
    cluster: &Cluster,
    options: &Options,
    call: &Call,
    all: &[ProcessDone],
    (temporary, claimed): (&Path, Option<(OutputFile, Option<OutputFile>)>),
) -> Result<()> {
    let (output, trace) = match claimed {
        Some((output, trace)) => (Some(output), trace),
        None => (None, None),
    };
    let traces: Vec<Trace> = (0..call.requests.len())
        .map(|pass| {
            let events = all.iter().flat_map(|done| done.passes[pass].events.clone());
            Trace {
                events: events.collect(),
            }
        })
        .collect();
    let took: Vec<f64> = (0..traces.len())
        .map(|pass| {
            let of = all.iter().map(|done| done.passes[pass].seconds);
            of.fold(0.0, f64::max)
        })
        .collect();
    if let Some(mut trace) = trace {
        trace.write(|to| {
            let seconds = |count: usize| {
                let sum = took[..count].iter().sum();
                std::time::Duration::from_secs_f64(sum)
            };
            let (forward, whole) = (seconds(1), seconds(took.len()));
            Timeline::of(&traces[0], traces.get(1), forward, whole).write(to)
        })?;
        trace.keep()?;
    }
    put(options, temporary, output)?;
    report::summarise_processes(
        options,
        (&call.attention, &call.inputs),
        &cluster.library,
        all,
        &traces.iter().zip(took).collect::<Vec<_>>(),
    )
}
