//! The command line as a whole: its commands and its help.

use clap::{Parser, Subcommand};

use crate::{
    attend, bench, billion, generate, launch, plan, profile, report, simulate, tune, verify,
};

const ABOUT: &str = "Exact ring and dilated attention, forward and backward.

Keys and values rotate over a ring of ranks, each of which holds 1/p of the tokens; a pattern of
segments and dilation rates determines which pairs are computed and which rows are sent. Results
depend on the number of ranks only by rounding.

Without a command, encke runs a demonstration: a ring against plain attention, memory and bytes.";

const EXAMPLES: &str = "\
Examples:
  encke
      The demonstration; it takes less than a minute.
  encke attend qkv.safetensors -o out.safetensors --causal --ranks 8 --grad
      Attention and gradients of the tensors in a file.
  encke plan --tokens 1e9 --heads 32 --kv-heads 8 --dim 128 --ranks 1000 --causal
      What that would compute, hold and send, without running it.
  encke report out.html
      Memory, timeline, bytes and pattern of rings of 1 to 32 ranks, as one page.
  encke simulate --tokens 1e9 --ranks 1024 --node 8 --gpu h200 --link nvlink,ib400 --causal
      The predicted time of that, and where it is spent.
  encke profile --causal --sharding striped --grad
      What each rank holds, measured and planned, by ring size.
  encke bench --causal --sharding zigzag --grad
      The times of rings of several sizes on this machine.
  encke tune
      Measure this machine in less than a minute, for --ranks auto and plan --explain.
  encke verify
      Random configurations against the f64 reference.
  encke billion --tokens 16M
      Attention over a generated sequence of any length, checked row by row; a billion by default.
  encke launch -n 4 attend qkv.safetensors -o out.safetensors --causal
      Four processes instead of threads; the same as mpirun -n 4 encke attend …

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G are powers of 1024.
Exit codes: 0 success, 1 a check failed, 2 bad input or any other error.";

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "encke", version, about = ABOUT, after_help = EXAMPLES)]
pub struct EnckeCli {
    /// The command, or none for the demonstration.
    #[command(subcommand)]
    pub command: Option<EnckeCommand>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum EnckeCommand {
    /// Compute attention and its gradients of tensors in a file
    #[command(after_help = attend::EXAMPLES, allow_negative_numbers = true)]
    Attend(attend::Options),
    /// Time rings of several sizes in turn, after checking their results
    #[command(after_help = bench::EXAMPLES, allow_negative_numbers = true)]
    Bench(bench::Options),
    /// Compute attention over a billion generated tokens on this machine
    #[command(after_help = billion::EXAMPLES)]
    Billion(billion::Options),
    /// Write a file of generated tensors of any size
    #[command(after_help = generate::EXAMPLES)]
    Generate(generate::Options),
    /// Start a command as several processes with mpirun
    #[command(after_help = launch::EXAMPLES)]
    Launch(launch::Options),
    /// Show what each rank would compute, hold and send
    #[command(after_help = plan::EXAMPLES, allow_negative_numbers = true)]
    Plan(plan::Options),
    /// Run rings of several sizes and write memory, traffic and times as an HTML page
    #[command(after_help = report::EXAMPLES, allow_negative_numbers = true)]
    Report(report::Options),
    /// Predict the time of a plan on a described machine
    #[command(after_help = simulate::EXAMPLES, allow_negative_numbers = true)]
    Simulate(simulate::Options),
    /// Measure the memory of ranks by ring size, and compare it with the plan
    #[command(after_help = profile::EXAMPLES, allow_negative_numbers = true)]
    Profile(profile::Options),
    /// Measure this machine for the decisions of auto options
    #[command(after_help = tune::EXAMPLES)]
    Tune(tune::Options),
    /// Compare random configurations with the reference, or run calls with injected faults
    #[command(after_help = verify::EXAMPLES, allow_negative_numbers = true)]
    Verify(verify::Options),
}
