//! `encke attend --memory-limit`: a file of any size, one rank at a time.
//!
//! The input is unmapped once its header is read, because pages of a map count as resident; rows
//! are read with `pread`. The output file has its full length from the start, rows are written at
//! their offsets, and with `--grad` the backward pass reads out and lse back from it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use encke::explain::bytes;
use encke::plan::program::Role;
use encke::{Attention, DType, Data, Kernel, Pass, Plan, RankMemory, Request};
use encke_lab::output::{OutputFile, TensorEntry};
use encke_lab::process::peak_resident_bytes;
use encke_lab::terminal::{long_bar, say};
use encke_lab::{Verdict, memory_table};
use encke_ring::out_of_core::{
    ExtraTermRows, Files, FittingRanks, GradientFile, PROGRAM_BYTES, RowRange, Stream, StreamError,
    TensorFile, TensorSink, TensorSource, fit_ranks, row_width,
};

use super::inputs::AttendInputs;
use super::options::Options;
use super::results::StreamedPass;
use super::summary;
use crate::finite;
use crate::input::{InputFile, TensorHeader};

/// The input file as a source of rows that refuses elements that are not finite.
pub(super) struct CheckedInput<'a> {
    pub files: Files,
    names: Vec<(Role, &'static str)>,
    compute: Option<DType>,
    inputs: &'a AttendInputs,
}

impl<'a> CheckedInput<'a> {
    /// Opens the input file.
    pub fn new(
        options: &Options,
        inputs: &'a AttendInputs,
        compute: DType,
    ) -> Result<CheckedInput<'a>> {
        Ok(CheckedInput {
            files: input_files(&options.input, inputs)?,
            names: vec![
                (Role::Q, "q"),
                (Role::K, "k"),
                (Role::V, "v"),
                (Role::Dout, "do"),
                (Role::Dlse, "dlse"),
            ],
            compute: (!options.allow_non_finite).then_some(compute),
            inputs,
        })
    }
}

impl TensorSource for CheckedInput<'_> {
    fn dtype(&self, role: Role) -> DType {
        self.files.dtype(role)
    }

    fn read(&self, rows: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        TensorSource::read(&self.files, rows, to)?;
        let named = self.names.iter().find(|(role, _)| *role == rows.role);
        let (Some(compute), Some((role, name))) = (self.compute, named) else {
            return Ok(());
        };
        let width = row_width(*role, &self.inputs.shape);
        let compute = match role {
            Role::Dlse => compute.sum(),
            _ => compute,
        };
        let heads = rows.heads.len();
        let index = |at: usize| {
            let token = rows.tokens.first + at / width / heads * rows.tokens.stride;
            let head = rows.heads[at / width % heads];
            let full = [rows.batch, token, head, at % width];
            full[..if *role == Role::Dlse { 3 } else { 4 }].to_vec()
        };
        let checked = finite::check_some(name, to.as_slice(), compute, index);
        checked.map_err(|error| StreamError::Refused {
            reason: error.to_string(),
        })
    }
}

/// Runs the command.
pub fn run<K: Kernel>(
    options: &Options,
    attention: &Attention<K>,
    limit: usize,
) -> Result<Verdict> {
    options.check_with_memory_limit()?;
    options.check_slots_with_memory_limit(attention.pattern())?;
    encke_cpu::return_freed_memory();
    let inputs = {
        let file = InputFile::open(&options.input)?;
        AttendInputs::read(
            &file.tensors()?,
            (options.grad, options.sinks),
            None,
            attention,
        )?
    };
    let compute = attention.compute_dtype(inputs.q.dtype());
    let requests = requests(attention, &inputs)?;
    let fit = fit_ranks(attention.kernel(), &requests, limit)?;
    let output = OutputFile::create(&options.output, &[("the input", options.input.as_path())])?;
    let mut source = CheckedInput::new(options, &inputs, compute)?;
    let entries = output_entries(&inputs, compute);
    let tensors = output.prepare(&entries_alone(&inputs, &entries))?;
    let dsinks = dsinks_file(&inputs, &tensors);
    let mut sink = output_files(&entries, tensors);
    for role in [Role::Out, Role::Lse] {
        source.files.add(role, file_of(&sink, role)?);
    }
    let mut passes = Vec::new();
    let mut plans = Vec::new();
    for request in requests {
        let plan = Plan::new(request.on_ranks(fit.ranks)?)?;
        passes.push(pass(attention, &plan, &source, &mut sink, &output)?);
        add_extra_terms(&inputs, &plan, &source, &mut sink, dsinks.as_ref())?;
        plans.push(plan);
    }
    output.keep()?;
    if options.memory {
        for done in &passes {
            let name = format!("rank {}, the largest", done.largest.rank);
            let table = memory_table::by_rank(2, done.name, &[(name, &done.largest)]);
            say(&table.to_string())?;
        }
    }
    summary::print_streamed(
        options,
        attention,
        &inputs,
        &plans[0],
        &passes,
        &memory_text(fit, limit),
    );
    Ok(Verdict::Fine)
}

/// The passes; their number of ranks may be replaced later.
pub(super) fn requests<K: Kernel>(
    attention: &Attention<K>,
    inputs: &AttendInputs,
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

/// The inputs as ranges of the file.
fn input_files(path: &Path, inputs: &AttendInputs) -> Result<Files> {
    let file =
        encke_files::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = Arc::new(file);
    let mut files = Files::new();
    let mut add = |role: Role, header: &TensorHeader, dims: [usize; 4]| {
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

/// The outputs: role, name, shape and type of each.
pub(super) fn output_entries(inputs: &AttendInputs, compute: DType) -> Vec<(Role, TensorEntry)> {
    let shape = &inputs.shape;
    let queries = |width: usize| vec![shape.batch, shape.queries, shape.heads, width];
    let keys = |width: usize| vec![shape.batch, shape.tokens, shape.kv_heads, width];
    let rows = vec![shape.batch, shape.queries, shape.heads];
    let mut outputs = vec![
        (Role::Out, "out", queries(shape.value_dim), compute),
        (Role::Lse, "lse", rows, compute.sum()),
    ];
    if inputs.dout.is_some() {
        outputs.extend([
            (Role::Dq, "dq", queries(shape.dim), compute),
            (Role::Dk, "dk", keys(shape.dim), compute),
            (Role::Dv, "dv", keys(shape.value_dim), compute),
        ]);
    }
    let entry = |(role, name, shape, dtype)| (role, TensorEntry { name, shape, dtype });
    outputs.into_iter().map(entry).collect()
}

/// The entries without their roles, and last dsinks, if there are sinks with a gradient.
pub(super) fn entries_alone(
    inputs: &AttendInputs,
    entries: &[(Role, TensorEntry)],
) -> Vec<TensorEntry> {
    let mut alone: Vec<TensorEntry> = entries.iter().map(|(_, entry)| entry.clone()).collect();
    let lse = entries.iter().find(|(role, _)| *role == Role::Lse);
    if let (Some(sinks), Some((_, lse)), true) = (&inputs.sinks, lse, inputs.dout.is_some()) {
        alone.push(TensorEntry {
            name: "dsinks",
            shape: vec![sinks.len()],
            dtype: lse.dtype,
        });
    }
    alone
}

/// The file of dsinks, which is the last of `tensors`, if there are sinks with a gradient.
pub(super) fn dsinks_file(inputs: &AttendInputs, tensors: &[TensorFile]) -> Option<TensorFile> {
    let wanted = inputs.sinks.is_some() && inputs.dout.is_some();
    tensors.last().filter(|_| wanted).cloned()
}

/// Writes the gradient of the sinks.
pub(super) fn write_dsinks(file: &TensorFile, gradient: &[f64]) -> Result<(), StreamError> {
    file.write_row(&Data::from_f64(file.dtype, gradient))
}

/// After a forward pass, adds sinks and phantom keys to out and lse of all ranks; after a backward
/// pass, writes the gradient of the sinks.
fn add_extra_terms(
    inputs: &AttendInputs,
    plan: &Plan,
    source: &CheckedInput<'_>,
    sink: &mut Files,
    dsinks: Option<&TensorFile>,
) -> Result<(), StreamError> {
    let (request, sinks) = (plan.request(), inputs.sinks.as_deref());
    let rows = ExtraTermRows { sinks, request };
    match (request.pass, dsinks) {
        (Pass::Backward { .. }, None) | (Pass::BackwardByBranch, _) => Ok(()),
        (Pass::Backward { dlse }, Some(file)) => {
            let mut sums = vec![0.0; request.shape.heads];
            for rank in 0..plan.ranks() {
                let part = rows.gradient(&request.query_runs(rank), dlse, source)?;
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
            write_dsinks(file, &sums)
        }
        (Pass::Forward, _) => (0..plan.ranks())
            .try_for_each(|rank| rows.apply(&request.query_runs(rank), source, sink)),
    }
}

/// The outputs as ranges of the file.
pub(super) fn output_files(entries: &[(Role, TensorEntry)], tensors: Vec<TensorFile>) -> Files {
    let mut files = Files::new();
    for ((role, _), tensor) in entries.iter().zip(tensors) {
        files.add(*role, tensor);
    }
    files
}

/// The range of the file that holds an output.
pub(super) fn file_of(files: &Files, role: Role) -> Result<TensorFile, StreamError> {
    let verb = "read";
    let found = files.get(role).cloned();
    found.ok_or(StreamError::Missing { verb, role })
}

/// One pass, one rank after another.
fn pass<K: Kernel>(
    attention: &Attention<K>,
    plan: &Plan,
    source: &dyn TensorSource,
    sink: &mut dyn TensorSink,
    output: &OutputFile,
) -> Result<StreamedPass> {
    let begin = Instant::now();
    let (name, mut gradient_sums) = match plan.request().pass {
        Pass::Forward => ("forward", None),
        Pass::Backward { .. } | Pass::BackwardByBranch => {
            let sums = GradientFile::new(output.scratch_file()?, plan.request())?;
            ("backward", Some(sums))
        }
    };
    let mut stream = Stream::new(attention.kernel(), plan)?;
    let progress = long_bar(plan.ranks());
    progress.set_message(format!("ranks {name}"));
    let mut largest: Option<RankMemory> = None;
    let mut moved_bytes = 0;
    for rank in 0..plan.ranks() {
        let done = stream.rank(rank, source, sink, gradient_sums.as_mut())?;
        moved_bytes += done.events.iter().map(|e| e.received_bytes).sum::<usize>();
        let before = largest.as_ref().map_or(0, RankMemory::planned_bytes);
        if done.memory.planned_bytes() > before {
            largest = Some(done.memory);
        }
        progress.inc(1);
    }
    if let Some(sums) = gradient_sums {
        sums.finish(sink)?;
    }
    progress.finish_and_clear();
    Ok(StreamedPass {
        name,
        seconds: begin.elapsed().as_secs_f64(),
        moved_bytes,
        largest: largest.context("a plan has at least one rank")?,
    })
}

/// Limit, planned and peak resident memory.
fn memory_text(fit: FittingRanks, limit: usize) -> String {
    let peak = peak_resident_bytes().map_or("unknown".to_string(), bytes);
    format!(
        "limit {}, planned {} ({} of it for the program itself), resident at most {peak}",
        bytes(limit),
        bytes(fit.bytes),
        bytes(PROGRAM_BYTES),
    )
}
