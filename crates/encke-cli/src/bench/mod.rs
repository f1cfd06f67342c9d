//! `encke bench`: how long rings of several sizes take, one beside the other.
//!
//! The decision here: nothing is timed that was not checked. Every ring's output is held against the
//! f64 reference row by row, and its gradients against those of the smallest ring, before the first
//! clock is read; then the rings take turns, so that whatever else the machine does falls on all.

mod case;
#[cfg(feature = "mpi")]
pub mod processes;
mod report;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use encke::{Attention, Backward, Builder, Forward, Kernel, Mode, Pass, Report, Request};
use encke_core::sharding::Run;

use crate::Verdict;
use crate::check::Checked;
use crate::device_option::{Device, DeviceOption, cuda};
use crate::number::count;
use crate::output::OutputFile;
use crate::pattern_options::PatternOptions;
use crate::rings_options::RingsOptions;
use crate::shape_options::{ShapeOptions, usual};
use crate::terminal::bar;
use case::Case;
use report::{PassTimes, Record, RingTimes};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke bench
      Dense attention, 4096 tokens, on rings of 1, 2, 4 and 8 threads.
  encke bench --tokens 16k --heads 8 --causal --sharding zigzag --grad --repeats 9
      Both passes under a causal mask, even work for every rank.
  encke bench --tokens 64k --mode mix --segment-lengths 2k,16k,64k --dilation-rates 1,8,32
      A LongNet pattern.
  encke bench --tokens 64k --heads 16 --dim 128 --dtype bf16 --grad --device cuda
      The ranks of a ring on the first NVIDIA GPU. A call begins and ends with tensors of the host, so
      the way there and back is in its time; bench/gpu.py times the GPU alone.
  mpirun -n 4 encke bench --tokens 32k --grad --json four.json
      Every rank a process: the ring that they are, by its slowest rank.

Ranks of one process share its cores: a ring of any size has the same work to do with the same
means, and what it takes longer than the smallest ring is what being a ring costs (against). Each
ring is run as often as --repeats says, in turn with the others; medians are shown, and against is
the median of the turns' ratios. Speed counts the pairs of the pattern alone: 4 d operations for a
pair forward, 10 d backward.

Before anything is timed, rows of every ring's output are held against the f64 reference, and its
gradients against those of the smallest ring (of processes: the output alone; encke verify compares
all bits).

Exit codes: 0 what was timed is right, 1 it is not, 2 any other error.
Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.";

/// Rings of several sizes, timed.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", usual("4k")),
    mut_arg("heads", usual("4")),
    mut_arg("dim", usual("64")),
    mut_arg("ranks", usual("1,2,4,8"))
)]
pub struct Options {
    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    rings: RingsOptions,

    #[command(flatten)]
    device: DeviceOption,

    #[command(flatten)]
    work: WorkOptions,
}

/// What is timed and written.
#[derive(Debug, Args)]
#[command(next_help_heading = "What is timed and written")]
struct WorkOptions {
    /// Also time the backward pass.
    #[arg(long)]
    grad: bool,

    /// How often each ring is timed.
    #[arg(long, value_name = "N", value_parser = count, default_value = "5")]
    repeats: usize,

    /// Seed of the tensors.
    #[arg(long, value_name = "S", default_value = "1")]
    seed: u64,

    /// Write every single time, and what was checked, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Both passes, as far as they were asked for, with what they took.
struct Ran {
    forward: Forward,
    backward: Option<Backward>,
    seconds: Vec<f64>,
}

impl Ran {
    /// What each pass says of itself, in their order.
    fn reports(&self) -> impl Iterator<Item = &Report> {
        let backward = self.backward.iter().map(|backward| &backward.report);
        std::iter::once(&self.forward.report).chain(backward)
    }
}

impl Options {
    fn check(&self) -> Result<()> {
        if self.work.repeats == 0 {
            bail!("--repeats 0 times nothing; give 1 or more");
        }
        if self.pattern.pattern()?.mode() == Mode::Fkodom {
            bail!(
                "fkodom mode divides by sums over the whole sequence, so that no row of it can be \
                 checked alone; use --mode group, which has the same pairs"
            );
        }
        Ok(())
    }

    fn json(&self) -> Result<Option<OutputFile>> {
        let json = self.work.json.as_deref();
        json.map(|path| OutputFile::create(path, &[])).transpose()
    }

    fn record(&self, request: &Request) -> Record {
        Record::new(
            request.clone(),
            self.work.seed,
            self.device.device.to_string(),
        )
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    match options.device.device {
        Device::Cpu => rings(options, |of| Ok(of.build()?)),
        Device::Cuda(number) => rings(options, |of| Ok(of.build_on(cuda(number)?)?)),
    }
}

/// All rings in this process; `build` gives each its device.
fn rings<K: Kernel>(
    options: &Options,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<Verdict> {
    options.check()?;
    let (shape, dtype) = (options.sizes.shape()?, options.sizes.dtype());
    let mut rings = Vec::new();
    for ranks in options.rings.sizes()? {
        let attention = build(options.rings.builder(&options.pattern, ranks)?)?;
        let plan = attention.plan(shape, dtype, Pass::Forward)?;
        rings.push((attention, plan.request().clone()));
    }
    let Some((_, request)) = rings.first() else {
        bail!("--ranks names no ring; give one or more sizes");
    };
    let json = options.json()?;
    let whole = Run {
        first: 0,
        stride: 1,
        count: shape.tokens,
    };
    let case = Case::new(request, options.work.seed, &[whole])?;
    let mut record = options.record(request);
    let progress = bar(rings.len() * (1 + options.work.repeats));
    let mut first: Option<Backward> = None;
    for (attention, request) in &rings {
        let ranks = request.sharding.ranks();
        progress.set_message(format!("ring of {ranks}, checked"));
        let ran = turn(attention, &case, options.work.grad)?;
        let mut checked = Checked::default();
        case.check(&ran.forward, &mut checked)?;
        let apart = match (&first, &ran.backward) {
            (Some(first), Some(own)) => Some(case::apart(first, own)),
            _ => None,
        };
        record.rings.push(RingTimes {
            ranks,
            checked,
            gradients_apart: apart,
            passes: passes(&ran)?,
        });
        first = first.or(ran.backward);
        progress.inc(1);
    }
    drop(first);
    let right = record.right();
    if right {
        for _ in 0..options.work.repeats {
            for ((attention, _), times) in rings.iter().zip(&mut record.rings) {
                progress.set_message(format!("ring of {}", times.ranks));
                let ran = turn(attention, &case, options.work.grad)?;
                times.add(&ran);
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();
    record.conclude(json)
}

/// One forward pass, and one backward pass from it.
fn turn<K: Kernel>(attention: &Attention<K>, case: &Case, grad: bool) -> Result<Ran> {
    let (q, k, v) = case.tensors.views();
    let dout = case.tensors.dout.view();
    let begin = Instant::now();
    let forward = attention.forward(&q, &k, &v)?;
    let mut seconds = vec![begin.elapsed().as_secs_f64()];
    let mut backward = None;
    if grad {
        let begin = Instant::now();
        backward = Some(attention.backward(&q, &k, &v, &forward.checkpoint, &dout, None)?);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    Ok(Ran {
        forward,
        backward,
        seconds,
    })
}

/// What the passes of a ring are, before any was timed.
fn passes(ran: &Ran) -> Result<Vec<PassTimes>> {
    let named = ["forward", "backward"].into_iter().zip(ran.reports());
    named.map(|(name, of)| PassTimes::new(name, of)).collect()
}
