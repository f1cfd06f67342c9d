//! `encke attend`: attention and its gradients of tensors in a file.
//!
//! The decision here: all errors of the caller are found before any computation, in this order:
//! options, the input file, its tensors, their elements, the paths of the outputs.

mod inputs;
mod options;
#[cfg(feature = "mpi")]
pub mod processes;
mod results;
mod streamed;
mod summary;

use std::time::Instant;

use anyhow::Result;
use encke::{Attention, Kernel, Pass, Tensor, View};
use encke_lab::Verdict;
use encke_lab::device::{ComputeDevice, open_gpu};
use encke_lab::output::{OutputFile, write_tensors};
use encke_lab::ring_memory::check_ring_memory;
use encke_lab::terminal::spinner;

use crate::input::{InputFile, InputTensors};
use inputs::AttendInputs;
pub use options::{EXAMPLES, Options};
use results::AttendResult;

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    options.device.check_wire(1)?;
    let builder = options.builder()?;
    match options.device.device {
        ComputeDevice::Cpu => run_on(options, builder.build()?),
        ComputeDevice::Cuda(index) => run_on(options, builder.build_on(open_gpu(index)?)?),
    }
}

fn run_on<K: Kernel>(options: &Options, attention: Attention<K>) -> Result<Verdict> {
    if let Some(limit) = options.memory_limit {
        return streamed::run(options, &attention, limit);
    }
    let file = InputFile::open(&options.input)?;
    let tensors = file.tensors()?;
    let lengths = options.key_lengths()?;
    let given = (options.grad, options.sinks);
    let inputs = AttendInputs::read(&tensors, given, lengths, &attention)?;
    let compute = attention.compute_dtype(inputs.q.dtype());
    if !options.allow_non_finite {
        inputs.check_finite(&tensors, compute)?;
    }
    // What is wrong with a plan is said by the call.
    let plan = attention.plan(inputs.shape, inputs.q.dtype(), Pass::Forward);
    if let (ComputeDevice::Cpu, Ok(plan)) = (options.device.device, plan) {
        check_ring_memory(&plan)?;
    }
    let (mut output, trace_file) = outputs(options)?;
    let result = run_passes(&attention, &tensors, &inputs)?;
    output.write(|to| write_tensors(to, &result.outputs(&inputs.shape)))?;
    if let Some(mut file) = trace_file {
        file.write(|to| result.trace().write(to))?;
        file.keep()?;
    }
    output.keep()?;
    if options.memory {
        summary::print_memory(&result)?;
    }
    summary::print(options, &attention, &inputs, &result);
    Ok(Verdict::Fine)
}

/// Creates the output file and the trace file.
fn outputs(options: &Options) -> Result<(OutputFile, Option<OutputFile>)> {
    let input = ("the input", options.input.as_path());
    let output = OutputFile::create(&options.output, &[input])?;
    let others = [input, ("the output", options.output.as_path())];
    let trace = OutputFile::create_optional(options.trace.as_deref(), &others)?;
    Ok((output, trace))
}

fn run_passes<K: Kernel>(
    attention: &Attention<K>,
    file: &InputTensors<'_>,
    inputs: &AttendInputs,
) -> Result<AttendResult> {
    let elements = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| file.elements(tensor));
    let (q, k, v) = (
        elements[0].view(inputs.q.dims()?)?,
        elements[1].view(inputs.k.dims()?)?,
        elements[2].view(inputs.v.dims()?)?,
    );
    let packed = [inputs.pack(&q)?, inputs.pack(&k)?, inputs.pack(&v)?];
    let (q, k, v) = (or(&packed[0], q), or(&packed[1], k), or(&packed[2], v));
    let progress = spinner("forward");
    let begin = Instant::now();
    let forward = match &inputs.sinks {
        None => attention.forward(&q, &k, &v)?,
        Some(sinks) => attention.forward_with_sinks(&q, &k, &v, sinks)?,
    };
    let forward_took = begin.elapsed();
    let backward = match &inputs.dout {
        None => None,
        Some(dout) => {
            progress.set_message("backward");
            let elements = (
                file.elements(dout),
                inputs.dlse.as_ref().map(|of| file.elements(of)),
            );
            let dout = elements.0.view(dout.dims()?)?;
            let dlse = match (&inputs.dlse, &elements.1) {
                (Some(dlse), Some(elements)) => Some(elements.view(dlse.row_dims()?)?),
                _ => None,
            };
            let packed_dlse = match &dlse {
                Some(dlse) => inputs.pack(dlse)?,
                None => None,
            };
            let dlse = dlse.map(|dlse| or(&packed_dlse, dlse));
            let packed = inputs.pack(&dout)?;
            let dout = or(&packed, dout);
            let kept = &forward.checkpoint;
            Some(attention.backward(&q, &k, &v, kept, &dout, dlse.as_ref())?)
        }
    };
    progress.finish_and_clear();
    let dsinks = backward.as_ref().and_then(|done| done.dsinks.as_ref());
    let vector = |of: &Vec<f64>| {
        let dims = [1, 1, of.len(), 1];
        Tensor::from_f64(forward.lse.dtype(), dims, of)
    };
    let dsinks = dsinks.map(vector).transpose()?;
    let took = begin.elapsed();
    let result = AttendResult {
        forward,
        backward,
        dsinks,
        forward_took,
        took,
    };
    match &inputs.lengths {
        None => Ok(result),
        Some(lengths) => result.unpack(lengths),
    }
}

/// A view of the packed rows, if there are any.
fn or<'a>(packed: &'a Option<Tensor>, view: View<'a>) -> View<'a> {
    packed.as_ref().map_or(view, Tensor::view)
}
