//! `encke attend` as an MPI job: each process is a rank, reads its own rows of the input and writes
//! its own rows of the output.
//!
//! The decision here: there is one output file, of its full length from the start; all ranks write
//! it, and the root renames it when all have written. The backward pass reads out and lse from that
//! file.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use encke::plan::program::Role;
use encke::{Attention, Builder, CpuKernel, DType, Kernel, Pass, Plan, Request, Trace};
use encke_files::ExpectedFile;
use encke_lab::Verdict;
use encke_lab::chrome_trace::ChromeTrace;
use encke_lab::cluster::Cluster;
use encke_lab::device::ComputeDevice;
use encke_lab::output::OutputFile;
use encke_lab::process::{peak_resident_bytes, resident_bytes};
use encke_lab::rank_kernel::RankKernel;
use encke_lab::terminal::spinner;
use encke_lab::wire_choice::WireChoice;
use encke_ring::ShardCall;
use encke_ring::out_of_core::{ExtraTermRows, Files, FromSource, TensorFile, WithExtraTerms};

use super::inputs::AttendInputs;
use super::options::Options;
use super::results::{AttendProcess, RankPass};
use super::streamed::{
    CheckedInput, dsinks_file, entries_alone, file_of, output_entries, output_files, requests,
    write_dsinks,
};
use super::summary;
use crate::device_option::DeviceOption;
use crate::input::InputFile;

/// What all ranks agree on before anything is written.
struct PreparedCall<K: Kernel> {
    attention: Attention<K>,
    inputs: AttendInputs,
    /// Of the input file.
    sample: u64,
    compute: DType,
    requests: Vec<Request>,
}

/// Runs the command.
pub fn run(cluster: &mut Cluster, options: &Options) -> Result<Verdict> {
    let DeviceOption { device, wire } = options.device;
    // Before a GPU is opened: whatever the options alone decide.
    let builder = builder(cluster.ranks(), options);
    let builder = cluster.agree(builder)?;
    match device {
        ComputeDevice::Cpu => {
            let kernel = CpuKernel::new().map_err(anyhow::Error::from);
            let kernel = cluster.agree(kernel)?;
            run_on(cluster, options, builder, kernel)
        }
        ComputeDevice::Cuda(index) => {
            let kernel = cluster.open_gpu(index, wire, options.survives())?;
            run_on(cluster, options, builder, kernel)
        }
    }
}

fn run_on<K: RankKernel>(
    cluster: &mut Cluster,
    options: &Options,
    builder: Builder,
    kernel: K,
) -> Result<Verdict> {
    let call = prepare(builder, kernel, options);
    let call = cluster.agree(call)?;
    cluster.check_equal(&options.input.display().to_string(), call.sample)?;
    if call.requests[0].redundancy > 0 {
        let ready = cluster.survive();
        cluster.agree(ready)?;
    }
    let (output, mut trace_file, mut sink, dsinks_file) = create(cluster, options, &call)?;
    let mut output = Some(output);
    let before = resident_bytes();
    let progress = cluster.is_root().then(|| spinner("forward"));
    let mut passes = Vec::new();
    for request in &call.requests {
        if let (Some(progress), true) = (&progress, !passes.is_empty()) {
            progress.set_message("backward");
        }
        let pass = (request, dsinks_file.as_ref());
        passes.push(run_pass(cluster, options, &call, pass, &mut sink)?);
    }
    drop(progress);
    let most = peak_resident_bytes();
    let done = AttendProcess {
        passes,
        resident_bytes: before.zip(most),
    };
    let mut all = cluster.gather(&done)?;
    loop {
        let root = cluster.root();
        let finished = match (all.take(), output.take_if(|_| cluster.is_root())) {
            (Some(all), Some(output)) => {
                let files = (output, trace_file.take());
                finish(cluster, options, &call, &all, files)
            }
            // The former root has died: it may have renamed the file, or not yet.
            (None, Some(output)) => output.keep(),
            _ => Ok(()),
        };
        cluster.agree(finished)?;
        if cluster.root() == root {
            return Ok(Verdict::Fine);
        }
    }
}

/// The attention, if the options go together in processes.
fn builder(processes: usize, options: &Options) -> Result<Builder> {
    if options.memory_limit.is_some() {
        bail!(
            "--memory-limit runs the ranks of one process one after another; here every process is \
             a rank: leave it out, or start one process"
        );
    }
    if options.injects_faults() {
        bail!("--drill is for threads; a process dies with kill -KILL");
    }
    options.device.check_wire(processes)?;
    let builder = options.builder_of(processes)?;
    if options.device.wire == WireChoice::Nccl && options.survives() {
        bail!(
            "--wire nccl and --redundancy do not go together: NCCL ends with the first lost rank"
        );
    }
    Ok(builder)
}

/// Everything that can be refused from the options and the input's header alone.
fn prepare<K: Kernel>(builder: Builder, kernel: K, options: &Options) -> Result<PreparedCall<K>> {
    let attention = builder.build_on(kernel)?;
    let file = InputFile::open(&options.input)?;
    let given = (options.grad, options.sinks);
    let inputs = AttendInputs::read(&file.tensors()?, given, None, &attention)?;
    if attention.pattern().splits_slots() {
        bail!(
            "fkodom mode and detached mixing gradients need all rows in one process; use group \
             mode, or mix mode with exact gradients, or threads"
        );
    }
    let requests = requests(&attention, &inputs)?;
    Ok(PreparedCall {
        compute: attention.compute_dtype(inputs.q.dtype()),
        requests,
        attention,
        inputs,
        sample: file.sample(),
    })
}

/// Creates the output and the trace on the root, and opens the output on the others. Every process
/// holds the output, so that any of them can rename it, and removes it if it fails.
fn create<K: Kernel>(
    cluster: &mut Cluster,
    options: &Options,
    call: &PreparedCall<K>,
) -> Result<(OutputFile, Option<OutputFile>, Files, Option<TensorFile>)> {
    let entries = output_entries(&call.inputs, call.compute);
    let alone = entries_alone(&call.inputs, &entries);
    let (output, trace) = loop {
        let root = cluster.root();
        let mut created = match cluster.is_root() {
            true => super::outputs(options).map(Some),
            false => Ok(None),
        };
        let path = match &created {
            Ok(Some((output, _))) => Some(output.announce()),
            _ => None,
        };
        // The file gets its path once all know it: they remove it if the root is killed.
        let path: Option<PathBuf> = cluster.broadcast(Some(path))?;
        let expected = match &path {
            Some(path) if !cluster.is_root() => ExpectedFile::new(path.clone()).map(Some),
            _ => Ok(None),
        };
        let expected = cluster.agree(expected.context("cannot write the output"))?;
        if let (Ok(Some((output, _))), Some(path)) = (&mut created, path)
            && let Err(error) = output.give_path(path)
        {
            created = Err(error);
        }
        let created = cluster.agree(created)?;
        // If the root has died meanwhile, the next one creates another file.
        if cluster.root() != root {
            continue;
        }
        let held = match (created, expected) {
            (Some(created), _) => created.0.prepare(&alone).map(|_| Some(created)),
            (None, Some(expected)) => {
                OutputFile::join(&options.output, expected).map(|output| Some((output, None)))
            }
            (None, None) => Ok(None),
        };
        let held = cluster.agree(held)?;
        if let Some(held) = held.filter(|_| cluster.root() == root) {
            break held;
        }
    };
    let tensors = cluster.agree(output.prepared(&alone))?;
    let dsinks = dsinks_file(&call.inputs, &tensors);
    Ok((output, trace, output_files(&entries, tensors), dsinks))
}

/// One pass of this process's rank. A backward pass writes the gradient of the sinks, if they have
/// a file.
fn run_pass<K: RankKernel>(
    cluster: &mut Cluster,
    options: &Options,
    call: &PreparedCall<K>,
    (request, dsinks_file): (&Request, Option<&TensorFile>),
    sink: &mut Files,
) -> Result<RankPass> {
    let kernel = call.attention.kernel();
    let ready = (|| {
        let plan = Plan::new(request.clone())?;
        let mut source = CheckedInput::new(options, &call.inputs, call.compute)?;
        for role in [Role::Out, Role::Lse] {
            source.files.add(role, file_of(sink, role)?);
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
    let sinks = call.inputs.sinks.as_deref();
    let terms = ExtraTermRows { sinks, request };
    let mut output = WithExtraTerms {
        terms,
        source: &source,
        sink,
    };
    cluster.wire.begin();
    let begin = Instant::now();
    shard.restart_clock();
    let mut stored = Ok(());
    let mut wire = K::wire(cluster);
    match request.redundancy {
        0 => shard.run(&mut *wire)?,
        _ => shard.run_surviving(&mut *wire, &mut output)?,
    }
    drop(wire);
    kernel.synchronize()?;
    let seconds = begin.elapsed().as_secs_f64();
    if request.redundancy == 0 {
        stored = shard.store(&mut output).map_err(anyhow::Error::from);
    }
    // Other ranks may read these rows, and the root renames the file.
    let stored = stored.and_then(|()| {
        let file = file_of(sink, an_output(request))?.file;
        file.sync_data().context("cannot write the output")
    });
    cluster.agree(stored)?;
    if let (Pass::Backward { dlse }, Some(file)) = (request.pass, dsinks_file) {
        dsinks(cluster, (terms, dlse), &source, file)?;
    }
    let done = shard.finish();
    Ok(RankPass {
        events: done.events,
        memory: done.memory,
        seconds,
    })
}

/// Writes the gradient of the sinks: a rank sums over the rows of its own shard, and the root over
/// those of ranks that have died, too.
fn dsinks(
    cluster: &mut Cluster,
    (terms, dlse): (ExtraTermRows<'_>, bool),
    source: &CheckedInput<'_>,
    file: &TensorFile,
) -> Result<()> {
    let of = |rank: usize| -> Result<Vec<f64>> {
        Ok(terms.gradient(&terms.request.query_runs(rank), dlse, source)?)
    };
    let own = cluster.agree(of(cluster.rank()))?;
    // As bits: JSON has no NaN.
    let bits: Vec<u64> = own.iter().map(|x| x.to_bits()).collect();
    loop {
        let root = cluster.root();
        let parts: Option<Vec<(usize, Vec<u64>)>> =
            cluster.gather(&(cluster.rank(), bits.clone()))?;
        let written: Result<()> = parts.map_or(Ok(()), |parts| {
            let mut sums = vec![0.0; own.len()];
            for rank in 0..cluster.ranks() {
                let part = match parts.iter().find(|(of, _)| *of == rank) {
                    Some((_, bits)) => bits.iter().map(|bits| f64::from_bits(*bits)).collect(),
                    None => of(rank)?,
                };
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
            Ok(write_dsinks(file, &sums)?)
        });
        cluster.agree(written)?;
        if cluster.root() == root {
            return Ok(());
        }
    }
}

/// One of the outputs of a pass; all of them are in one file.
fn an_output(request: &Request) -> Role {
    match request.pass {
        Pass::Forward => Role::Out,
        Pass::Backward { .. } | Pass::BackwardByBranch => Role::Dq,
    }
}

/// Writes the trace, renames the output and prints the summary.
fn finish<K: Kernel>(
    cluster: &Cluster,
    options: &Options,
    call: &PreparedCall<K>,
    all: &[AttendProcess],
    (output, trace_file): (OutputFile, Option<OutputFile>),
) -> Result<()> {
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
    if let Some(mut file) = trace_file {
        file.write(|to| {
            let seconds = |count: usize| {
                let sum = took[..count].iter().sum();
                std::time::Duration::from_secs_f64(sum)
            };
            let (forward, whole) = (seconds(1), seconds(took.len()));
            ChromeTrace::new(&traces[0], traces.get(1), forward, whole).write(to)
        })?;
        file.keep()?;
    }
    output.keep()?;
    summary::print_processes(
        options,
        (&call.attention, &call.inputs),
        &cluster.library,
        all,
        &traces.iter().zip(took).collect::<Vec<_>>(),
    )
}
