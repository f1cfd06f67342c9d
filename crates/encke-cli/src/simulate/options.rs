//! The options of `encke simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use encke::DType;

use crate::number::count;
use crate::pattern_options::PatternOptions;
use crate::ring_options::RingOptions;
use crate::shape_options::{ShapeOptions, usual};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke simulate --tokens 1e9 --ranks 1024 --node 8 --gpu h200 --link nvlink,ib400 --causal \\
      --mode mix --segment-lengths 2k,64k,1M --dilation-rates 1,32,512 --grad
      A billion tokens on 128 nodes of 8 GPUs, forward and backward: time, and where it goes.
  encke simulate --tokens 1M --ranks 64 --causal --sharding zigzag --nics 1 --straggler 17:1.5
      One network card for each node, and one GPU that takes half as long again.
  encke simulate --tokens 1M --ranks 16 --causal --json run.json --trace run.trace.json
      The whole timeline as numbers, and for https://ui.perfetto.dev.
  encke simulate --gpu h100 --node 4 --describe > mine.json
  encke simulate --tokens 1M --ranks 16 --machine mine.json
      A machine of your own: print a description, change its numbers, use it.
  encke simulate --against threads
      Rings of threads on this machine: predicted from the kernel alone, and measured.
  encke simulate --list
      Devices and links by name, with the source of every figure.

What is timed is the plan itself, round by round: hops fly while jobs run, and a round ends when
both are done. Hops at a port share its bandwidth equally. Reading inputs from storage and combining
branches after a detached mix or an fkodom division are not in it.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.";

const TOKENS_HELP: &str =
    "Tokens of the sequence, over all ranks [with --against: 4096 unless given]";
const DTYPE_HELP: &str = "Type of the tensors: f64, f32, bf16 or f16 [default: bf16; f32 where the \
                          CPU here computes]";

/// How long the plan would take on a described machine.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", |tokens| tokens.required(false).help(TOKENS_HELP)),
    mut_arg("heads", usual("8")),
    mut_arg("dim", usual("128")),
    mut_arg("dtype", |dtype| dtype.help(DTYPE_HELP))
)]
pub struct Options {
    /// Sizes of the tensors.
    #[command(flatten)]
    pub sizes: ShapeOptions,

    /// Which query sees which key.
    #[command(flatten)]
    pub pattern: PatternOptions,

    /// Who owns which tokens.
    #[command(flatten)]
    pub ring: RingOptions,

    /// What it runs on.
    #[command(flatten)]
    pub machine: MachineOptions,

    /// What is done and shown.
    #[command(flatten)]
    pub view: ViewOptions,
}

impl Options {
    /// The type asked for, or the usual one of the device.
    pub fn dtype(&self, usual: DType) -> DType {
        let here = self.machine.gpu.as_deref() == Some("here");
        let usual = if here { DType::F32 } else { usual };
        self.sizes.dtype.unwrap_or(usual)
    }
}

/// What it runs on.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineOptions {
    /// What each rank computes on: a name of --list; `here`, the CPU kernel as measured now; or
    /// `tuned`, the GPU of this machine as encke tune measured it [default: h200].
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,

    /// Ranks in a node [default: 8].
    #[arg(long, value_name = "G", value_parser = count)]
    pub node: Option<usize>,

    /// The link inside a node and the one between nodes, names of --list
    /// [default: nvlink,ib400].
    #[arg(long, value_name = "INSIDE,BETWEEN", value_delimiter = ',')]
    pub link: Vec<String>,

    /// Network cards in a node; its ranks are dealt out to them in order [default: one for each
    /// rank of a node].
    #[arg(long, value_name = "C", value_parser = count)]
    pub nics: Option<usize>,

    /// Operations per second of a device, forward and backward, instead of those known of it:
    /// 5e14 or 6e14,5e14.
    #[arg(long, value_name = "F[,B]", value_delimiter = ',')]
    pub flops: Vec<f64>,

    /// A rank that takes so many times as long for everything, as in 17:1.5; may be repeated.
    #[arg(long, value_name = "RANK:FACTOR", value_parser = straggler)]
    pub straggler: Vec<(usize, f64)>,

    /// A machine as --describe prints it, instead of names.
    #[arg(long = "machine", value_name = "M.json", conflicts_with_all = ["gpu", "node", "link", "nics"])]
    pub file: Option<PathBuf>,
}

/// What is done and shown.
#[derive(Debug, Args)]
#[command(next_help_heading = "What is done and shown")]
pub struct ViewOptions {
    /// Also time the backward pass.
    #[arg(long)]
    pub grad: bool,

    /// Write everything as JSON: request, machine, times, timeline.
    #[arg(long, value_name = "R.json")]
    pub json: Option<PathBuf>,

    /// Write a timeline as trace-event JSON, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "T.json")]
    pub trace: Option<PathBuf>,

    /// How many ranks the timelines of --json and --trace show, from the first on.
    #[arg(long, value_name = "P", value_parser = count, default_value = "64")]
    pub record: usize,

    /// Print the machine as JSON, to be changed and used with --machine.
    #[arg(long)]
    pub describe: bool,

    /// List the devices and links that are known by name.
    #[arg(long)]
    pub list: bool,

    /// Hold the clock against reality instead: run rings here and predict each of them.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub against: Option<Against>,

    /// How often each ring of --against runs; medians are compared.
    #[arg(long, value_name = "TIMES", value_parser = count, default_value = "11")]
    pub repeats: usize,
}

/// What a prediction can be held against.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Against {
    /// Rings of 1 to 8 threads on this machine
    Threads,
}

fn straggler(text: &str) -> Result<(usize, f64), String> {
    let refused = || "write a rank and a factor, as in 17:1.5".to_string();
    let (rank, factor) = text.split_once(':').ok_or_else(refused)?;
    let factor = factor.parse::<f64>().map_err(|_| refused())?;
    match factor.is_finite() && factor > 0.0 {
        true => Ok((count(rank)?, factor)),
        false => Err(refused()),
    }
}
