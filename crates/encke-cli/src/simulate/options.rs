//! The options of `encke simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use encke::DType;
use encke_lab::number::{count, repeats};

use super::machine::MachineOptions;
use crate::pattern_options::PatternOptions;
use crate::ring_options::RingOptions;
use crate::shape_options::{ShapeOptions, default};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke simulate --tokens 1e9 --ranks 1024 --node 8 --gpu h200 --link nvlink,ib400 --causal \\
      --mode mix --segment-lengths 2k,64k,1M --dilation-rates 1,32,512 --grad
      A billion tokens on 128 nodes of 8 GPUs, forward and backward: time, and where it is spent.
  encke simulate --tokens 1M --ranks 64 --causal --sharding zigzag --nics 1 --straggler 17:1.5
      One network card for each node, and one GPU that is slower by a factor of 1.5.
  encke simulate --tokens 1M --ranks 16 --causal --json run.json --trace run.trace.json
      The whole timeline as JSON, and for https://ui.perfetto.dev.
  encke simulate --gpu h100 --node 4 --describe > mine.json
  encke simulate --tokens 1M --ranks 16 --machine mine.json
      A machine of your own: print a description, edit it, use it.
  encke simulate --against threads
      Rings of threads on this machine: predicted from measurements of the kernel alone, and
      measured.
  encke simulate --scale scale.html
      What a cluster of H200s would take: times, bytes and memory, and which schedule wins where.
  encke simulate --list
      Devices and links by name, with the source of every figure.

The cost model executes the plan round by round: hops overlap with jobs, and a round ends when both
are done. Hops at a port share its bandwidth equally. Reading inputs from storage, and combining
branches after a detached mix or an fkodom division, are not included.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G are powers of 1024.";

const TOKENS_HELP: &str =
    "Tokens of the sequence, over all ranks [with --against: 4096 unless given]";
const DTYPE_HELP: &str = "Type of the tensors: f64, f32, bf16 or f16 [default: bf16; f32 if the \
                          CPU of this machine computes]";

/// Predicts the time of a plan on a described machine.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", |tokens| tokens.required(false).help(TOKENS_HELP)),
    mut_arg("heads", default("8")),
    mut_arg("dim", default("128")),
    mut_arg("dtype", |dtype| dtype.help(DTYPE_HELP))
)]
pub struct Options {
    /// Sizes of the tensors.
    #[command(flatten)]
    pub sizes: ShapeOptions,

    /// The attention pattern.
    #[command(flatten)]
    pub pattern: PatternOptions,

    /// Ranks, sharding and schedule.
    #[command(flatten)]
    pub ring: RingOptions,

    /// The machine.
    #[command(flatten)]
    pub machine: MachineOptions,

    /// Also predict the backward pass.
    #[arg(long, help_heading = HEADING)]
    pub grad: bool,

    /// Write everything as JSON: request, machine, times, timeline.
    #[arg(long, value_name = "R.json", help_heading = HEADING)]
    pub json: Option<PathBuf>,

    /// Write a timeline as trace-event JSON, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "T.json", help_heading = HEADING)]
    pub trace: Option<PathBuf>,

    /// Number of ranks in the timelines of --json and --trace, from the first on.
    #[arg(
        long,
        value_name = "P",
        value_parser = count,
        default_value = "64",
        help_heading = HEADING
    )]
    pub record: usize,

    /// Print the machine as JSON, to be edited and used with --machine.
    #[arg(long, help_heading = HEADING)]
    pub describe: bool,

    /// List the devices and links that have names.
    #[arg(long, help_heading = HEADING)]
    pub list: bool,

    /// Compare predictions with measurements instead: run rings here and predict each of them.
    #[arg(long, value_enum, value_name = "WHAT", help_heading = HEADING)]
    pub against: Option<Against>,

    /// Write predictions for 8 to 1024 devices and 128k to 1G tokens, dense and LongNet, on the
    /// described machine: a page (OUT.html) or a Markdown table (OUT.md).
    #[arg(long, value_name = "OUT", conflicts_with_all = ["tokens", "against"],
          help_heading = HEADING)]
    pub scale: Option<PathBuf>,

    /// With --scale, the largest number of devices.
    #[arg(long, value_name = "P", value_parser = count, default_value = "1024",
          help_heading = HEADING)]
    pub scale_ranks: usize,

    /// How often each ring of --against runs; medians are compared.
    #[arg(
        long,
        value_name = "TIMES",
        value_parser = repeats,
        default_value = "11",
        help_heading = HEADING
    )]
    pub repeats: usize,
}

const HEADING: &str = "Output";

impl Options {
    /// The given type, or the default of the device.
    pub fn dtype(&self, default: DType) -> DType {
        let here = self.machine.gpu.as_deref() == Some("here");
        let default = if here { DType::F32 } else { default };
        self.sizes.dtype.unwrap_or(default)
    }
}

/// What predictions are compared with.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Against {
    /// Rings of 1 to 8 threads on this machine
    Threads,
}
