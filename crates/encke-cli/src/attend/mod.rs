//! `encke attend`: attention, and its gradients, of tensors in a file.
//!
//! Everything that can be refused is refused before any work starts, and in this order: options,
//! the input file, its tensors, its numbers, the places of the outputs.

mod inputs;
mod options;
#[cfg(feature = "mpi")]
pub mod processes;
mod report;
mod streamed;

use std::time::{Duration, Instant};

use anyhow::Result;
use encke::{Attention, Backward, Forward, Kernel, Shape, Tensor};

use crate::Verdict;
use crate::device_option::{Device, cuda};
use crate::input::{InputFile, Tensors};
use crate::output::{OutputFile, write_tensors};
use crate::terminal::spinner;
use inputs::Inputs;
pub use options::{EXAMPLES, Options};

/// Results, with the moments at which the passes returned.
struct Done {
    forward: Forward,
    backward: Option<Backward>,
    forward_took: Duration,
    took: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let builder = options.builder()?;
    match options.device.device {
        Device::Cpu => run_on(options, builder.build()?),
        Device::Cuda(number) => run_on(options, builder.build_on(cuda(number)?)?),
    }
}

/// The same on a device.
fn run_on<K: Kernel>(options: &Options, attention: Attention<K>) -> Result<Verdict> {
    if let Some(limit) = options.work.memory_limit {
        return streamed::run(options, &attention, limit);
    }
    let file = InputFile::open(&options.input)?;
    let tensors = file.tensors()?;
    let inputs = Inputs::read(&tensors, options.work.grad, &attention)?;
    let compute = attention.compute_dtype(inputs.q.dtype());
    if !options.work.allow_non_finite {
        inputs.check_finite(&tensors, compute)?;
    }
    let (mut output, trace) = outputs(options)?;
    let done = compute_all(&attention, &tensors, &inputs)?;
    output.write(|to| write_tensors(to, &results(&done, &inputs.shape)))?;
    if let Some(mut trace) = trace {
        trace.write(|to| report::timeline(&done).write(to))?;
        trace.keep()?;
    }
    output.keep()?;
    if options.work.memory {
        report::print_memory(&done)?;
    }
    report::summarise(options, &attention, &inputs, &done);
    Ok(Verdict::Fine)
}

/// Claims the places of the output and of the trace.
fn outputs(options: &Options) -> Result<(OutputFile, Option<OutputFile>)> {
    let input = ("the input", options.input.as_path());
    let output = OutputFile::create(&options.output, &[input])?;
    let trace = match &options.work.trace {
        Some(path) => {
            let others = [input, ("the output", options.output.as_path())];
            Some(OutputFile::create(path, &others)?)
        }
        None => None,
    };
    Ok((output, trace))
}

fn compute_all<K: Kernel>(
    attention: &Attention<K>,
    file: &Tensors<'_>,
    inputs: &Inputs,
) -> Result<Done> {
    let numbers = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| file.numbers(tensor));
    let (q, k, v) = (
        numbers[0].view(inputs.q.dims()?)?,
        numbers[1].view(inputs.k.dims()?)?,
        numbers[2].view(inputs.v.dims()?)?,
    );
    let progress = spinner("forward");
    let begin = Instant::now();
    let forward = attention.forward(&q, &k, &v)?;
    let forward_took = begin.elapsed();
    let backward = match &inputs.dout {
        None => None,
        Some(dout) => {
            progress.set_message("backward");
            let numbers = (
                file.numbers(dout),
                inputs.dlse.as_ref().map(|of| file.numbers(of)),
            );
            let dout = numbers.0.view(dout.dims()?)?;
            let dlse = match (&inputs.dlse, &numbers.1) {
                (Some(dlse), Some(numbers)) => Some(numbers.view(dlse.row_dims()?)?),
                _ => None,
            };
            let kept = &forward.checkpoint;
            Some(attention.backward(&q, &k, &v, kept, &dout, dlse.as_ref())?)
        }
    };
    progress.finish_and_clear();
    Ok(Done {
        forward,
        backward,
        forward_took,
        took: begin.elapsed(),
    })
}

/// What is written, under which names and with which shapes.
fn results<'a>(done: &'a Done, shape: &Shape) -> Vec<(&'static str, Vec<usize>, &'a Tensor)> {
    let out = &done.forward.out;
    let rows = vec![shape.batch, shape.tokens, shape.heads];
    let mut results = vec![
        ("out", out.dims().to_vec(), &**out),
        ("lse", rows, &*done.forward.lse),
    ];
    if let Some(Backward { dq, dk, dv, .. }) = &done.backward {
        for (name, tensor) in [("dq", dq), ("dk", dk), ("dv", dv)] {
            results.push((name, tensor.dims().to_vec(), tensor));
        }
    }
    results
}
