//! `encke attend --memory-limit`: a file of any size, one rank at a time.
//!
//! The map of the input is closed once its header is read; rows are read at their place. The output
//! file has its full length from the start and is written at its places; with `--grad` the
//! backward pass reads out and lse back from it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use encke::explain::bytes;
use encke::plan::program::Role;
use encke::{Attention, DType, Data, Kernel, Pass, Plan, RankMemory, Request, Sharding};
use encke_ring::out_of_core::{
    Files, Fit, GradientFile, PROGRAM_BYTES, RowRange, Sink, Source, Stream, StreamError,
    TensorFile, fit,
};

use super::inputs::Inputs;
use super::{Options, report};
use crate::finite;
use crate::input::{Header, InputFile};
use crate::output::{Entry, OutputFile};
use crate::process::peak_resident_bytes;
use crate::terminal::{long_bar, say};
use crate::{Verdict, memory};

/// The input file as a source that refuses what is not finite, when it is first read.
pub(super) struct Inspected<'a> {
    pub files: Files,
    names: Vec<(Role, &'static str)>,
    compute: Option<DType>,
    inputs: &'a Inputs,
}

impl<'a> Inspected<'a> {
    /// The inputs, where they lie.
    pub fn new(options: &Options, inputs: &'a Inputs, compute: DType) -> Result<Inspected<'a>> {
        Ok(Inspected {
            files: input_files(&options.input, inputs)?,
            names: vec![
                (Role::Q, "q"),
                (Role::K, "k"),
                (Role::V, "v"),
                (Role::Dout, "do"),
                (Role::Dlse, "dlse"),
            ],
            compute: (!options.work.allow_non_finite).then_some(compute),
            inputs,
        })
    }
}

impl Source for Inspected<'_> {
    fn dtype(&self, role: Role) -> DType {
        self.files.dtype(role)
    }

    fn read(&self, stretch: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        Source::read(&self.files, stretch, to)?;
        let named = self.names.iter().find(|(role, _)| *role == stretch.role);
        let (Some(compute), Some((role, name))) = (self.compute, named) else {
            return Ok(());
        };
        let (width, compute) = match role {
            Role::Dlse => (1, compute.sum()),
            _ => (self.inputs.shape.dim, compute),
        };
        let heads = stretch.heads.len();
        let place = |at: usize| {
            let token = stretch.tokens.first + at / width / heads * stretch.tokens.stride;
            let head = stretch.heads[at / width % heads];
            let index = [stretch.batch, token, head, at % width];
            index[..if width == 1 { 3 } else { 4 }].to_vec()
        };
        let checked = finite::check_some(name, to.as_slice(), compute, place);
        checked.map_err(|error| StreamError::Refused {
            reason: error.to_string(),
        })
    }
}

/// What a pass did.
pub(super) struct PassDone {
    pub name: &'static str,
    pub seconds: f64,
    pub moved_bytes: usize,
    pub largest: RankMemory,
}

/// Runs the command.
pub fn run<K: Kernel>(
    options: &Options,
    attention: &Attention<K>,
    limit: usize,
) -> Result<Verdict> {
    options.refuse_beside_limit()?;
    let inputs = {
        let file = InputFile::open(&options.input)?;
        Inputs::read(&file.tensors()?, options.work.grad, attention)?
    };
    let compute = attention.compute_dtype(inputs.q.dtype());
    let requests = requests(attention, &inputs)?;
    let fit = fit(attention.kernel(), &requests, limit)?;
    let output = OutputFile::create(&options.output, &[("the input", options.input.as_path())])?;
    let mut source = Inspected::new(options, &inputs, compute)?;
    let entries = entries(&inputs, compute);
    let mut sink = output_files(&entries, output.prepare(&named(&entries))?);
    for role in [Role::Out, Role::Lse] {
        source.files.add(role, of(&sink, role)?);
    }
    let mut passes = Vec::new();
    let mut plans = Vec::new();
    for request in requests {
        let request = Request {
            sharding: Sharding::new(fit.ranks, request.sharding.cut().clone())?,
            ..request
        };
        let plan = Plan::new(request)?;
        passes.push(pass(attention, &plan, &source, &mut sink, &output)?);
        plans.push(plan);
    }
    output.keep()?;
    if options.work.memory {
        for done in &passes {
            let name = format!("rank {}, the largest", done.largest.rank);
            let table = memory::by_rank(2, done.name, &[(name, &done.largest)]);
            say(&table.to_string())?;
        }
    }
    report::summarise_streamed(
        options,
        attention,
        &inputs,
        &plans[0],
        &passes,
        &resident(fit, limit),
    );
    Ok(Verdict::Fine)
}

/// The passes to be made. How many ranks they have may be decided later.
pub(super) fn requests<K: Kernel>(
    attention: &Attention<K>,
    inputs: &Inputs,
) -> Result<Vec<Request>> {
    let dlse = inputs.dlse.is_some();
    let passes = [Pass::Forward, Pass::Backward { dlse }];
    let count = 1 + usize::from(inputs.dout.is_some());
    let request = |pass: &Pass| {
        let plan = attention.plan(inputs.shape, inputs.q.dtype(), *pass)?;
        Ok(plan.request().clone())
    };
    passes[..count].iter().map(request).collect()
}

/// Where the inputs lie.
fn input_files(path: &Path, inputs: &Inputs) -> Result<Files> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = Arc::new(file);
    let mut files = Files::new();
    let mut add = |role: Role, header: &Header, dims: [usize; 4]| {
        files.add(
            role,
            TensorFile {
                file: Arc::clone(&file),
                offset: header.offset(),
                dtype: header.dtype(),
                dims,
            },
        );
    };
    add(Role::Q, &inputs.q, inputs.q.dims()?);
    add(Role::K, &inputs.k, inputs.k.dims()?);
    add(Role::V, &inputs.v, inputs.v.dims()?);
    if let Some(dout) = &inputs.dout {
        add(Role::Dout, dout, dout.dims()?);
    }
    if let Some(dlse) = &inputs.dlse {
        add(Role::Dlse, dlse, dlse.row_dims()?);
    }
    Ok(files)
}

/// The outputs: what they are, and how they are stored.
pub(super) fn entries(inputs: &Inputs, compute: DType) -> Vec<(Role, Entry)> {
    let shape = &inputs.shape;
    let of = |heads: usize, dim: usize| vec![shape.batch, shape.tokens, heads, dim];
    let (q, kv) = (of(shape.heads, shape.dim), of(shape.kv_heads, shape.dim));
    let rows = vec![shape.batch, shape.tokens, shape.heads];
    let mut outputs = vec![
        (Role::Out, "out", q.clone(), compute),
        (Role::Lse, "lse", rows, compute.sum()),
    ];
    if inputs.dout.is_some() {
        outputs.extend([
            (Role::Dq, "dq", q, compute),
            (Role::Dk, "dk", kv.clone(), compute),
            (Role::Dv, "dv", kv, compute),
        ]);
    }
    let entry = |(role, name, shape, dtype)| (role, Entry { name, shape, dtype });
    outputs.into_iter().map(entry).collect()
}

/// The outputs alone, as a file lists them.
pub(super) fn named(entries: &[(Role, Entry)]) -> Vec<Entry> {
    entries.iter().map(|(_, entry)| entry.clone()).collect()
}

/// Where the outputs lie.
pub(super) fn output_files(entries: &[(Role, Entry)], tensors: Vec<TensorFile>) -> Files {
    let mut files = Files::new();
    for ((role, _), tensor) in entries.iter().zip(tensors) {
        files.add(*role, tensor);
    }
    files
}

pub(super) fn of(files: &Files, role: Role) -> Result<TensorFile, StreamError> {
    let verb = "read";
    let found = files.get(role).cloned();
    found.ok_or(StreamError::Missing { verb, role })
}

/// One pass, rank after rank.
fn pass<K: Kernel>(
    attention: &Attention<K>,
    plan: &Plan,
    source: &dyn Source,
    sink: &mut dyn Sink,
    output: &OutputFile,
) -> Result<PassDone> {
    let begin = Instant::now();
    let (name, mut spool) = match plan.request().pass {
        Pass::Forward => ("forward", None),
        Pass::Backward { .. } => {
            let spool = GradientFile::new(output.beside()?, plan.request())?;
            ("backward", Some(spool))
        }
    };
    let mut stream = Stream::new(attention.kernel(), plan)?;
    let progress = long_bar(plan.ranks());
    progress.set_message(format!("ranks {name}"));
    let mut largest: Option<RankMemory> = None;
    let mut moved_bytes = 0;
    for rank in 0..plan.ranks() {
        let done = stream.rank(rank, source, sink, spool.as_mut())?;
        moved_bytes += done.events.iter().map(|e| e.received_bytes).sum::<usize>();
        let before = largest.as_ref().map_or(0, RankMemory::planned_bytes);
        if done.memory.planned_bytes() > before {
            largest = Some(done.memory);
        }
        progress.inc(1);
    }
    if let Some(spool) = spool {
        spool.finish(sink)?;
    }
    progress.finish_and_clear();
    Ok(PassDone {
        name,
        seconds: begin.elapsed().as_secs_f64(),
        moved_bytes,
        largest: largest.context("a plan has at least one rank")?,
    })
}

/// What was planned to be resident, and what was.
fn resident(fit: Fit, limit: usize) -> String {
    let peak = peak_resident_bytes().map_or("unknown".to_string(), bytes);
    format!(
        "limit {}, planned {} ({} of it for the program itself), resident at most {peak}",
        bytes(limit),
        bytes(fit.bytes),
        bytes(PROGRAM_BYTES),
    )
}
