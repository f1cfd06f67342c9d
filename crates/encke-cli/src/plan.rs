//! `encke plan`: what would be computed, held and sent, without running it.
//!
//! The time to make a plan does not depend on the number of tokens: 1e9 take as long as 1000.

use anyhow::Result;
use clap::Args;
use encke::tune::MachineSource;
use encke::{Attention, Pass};
use encke_lab::Verdict;
use encke_lab::number::count;
use encke_lab::terminal::say;

use crate::draw::draw;
use crate::pattern_options::PatternOptions;
use crate::ring_options::RingOptions;
use crate::shape_options::ShapeOptions;
use crate::simulate::machine::MachineOptions;
use crate::{explain, rank_program};

/// Larger rings can be planned, but take minutes.
const MOST_RANKS: usize = 100_000;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke plan --tokens 64k --heads 12 --dim 64 --ranks 8 --causal \\
      --segment-lengths 2048,4096,8192 --dilation-rates 1,2,4
      Every segment lies inside one rank's tokens: nothing is sent.
  encke plan --tokens 1e9 --heads 32 --kv-heads 8 --dim 128 --dtype bf16 --ranks 1000 --causal
      A billion tokens: a thousand ranks, and what each of them holds.
  encke plan --tokens 4k --heads 8 --dim 64 --ranks 4 --backward --rank 2
      The program of rank 2 in the backward pass, round by round.
  encke plan --tokens 32 --heads 4 --dim 8 --mode mix --causal \\
      --segment-lengths 8,32 --dilation-rates 1,4 --draw 1
      The attention mask of head 1, drawn with characters.
  encke plan --tokens 1M --heads 8 --dim 64 --ranks 32 --json | jq .sent_bytes
  encke plan --tokens 64k --heads 8 --dim 64 --ranks 8 --schedule 4
      Four parcels at a time instead of one: fewer rounds and longer jobs, for more memory.
  encke plan --tokens 64k --heads 8 --dim 64 --ranks 8 --backward --rotate queries
      The backward pass with rotating queries: fewer bytes, because each key has one head.
  encke plan --tokens 1M --heads 8 --dim 64 --ranks 32 --redundancy 1
      The memory to survive the death of a rank: each keeps the inputs of its neighbour.
  encke plan --tokens 64k --heads 8 --dim 64 --causal --explain
      One device or a ring, and which: the alternatives on this machine (encke tune).
  encke plan --tokens 1M --heads 32 --dim 128 --dtype bf16 --causal --explain --gpu h200 \\
      --node 8 --most-ranks 64 --memory-per-rank 40GiB --backward
      The same for a described machine, with a memory limit of a rank.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G are powers of 1024.";

/// Shows what each rank would compute, hold and send.
#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    ring: RingOptions,

    #[command(flatten)]
    machine: MachineOptions,

    /// Plan the backward pass instead of the forward pass.
    #[arg(long, help_heading = HEADING)]
    backward: bool,

    /// Show the program of this rank, round by round, instead of the whole ring.
    #[arg(long, value_name = "A", value_parser = count, help_heading = HEADING)]
    rank: Option<usize>,

    /// Show the alternatives of auto instead of the plan: predicted time and memory of each, which
    /// one is chosen, and why. Options that were not given are auto.
    #[arg(long, conflicts_with = "rank", help_heading = HEADING)]
    explain: bool,

    /// Print JSON: the summary, or with --rank every buffer, task and message of that rank.
    #[arg(long, help_heading = HEADING)]
    json: bool,

    /// Draw the attention mask of this head for the first 64 tokens instead.
    #[arg(
        long,
        value_name = "H",
        value_parser = count,
        conflicts_with_all = ["rank", "json", "explain"],
        help_heading = HEADING
    )]
    draw: Option<usize>,
}

const HEADING: &str = "Output";

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let mut ring = options.ring.clone();
    if options.explain {
        ring.default_to_auto();
    }
    let shape = options.sizes.shape()?;
    let builder = options.pattern.apply(Attention::builder(), None)?;
    let reason = "the plan would take too long to make";
    let dtype = options.sizes.dtype();
    let builder = match options.machine.any_given() {
        false => ring.apply(builder, MOST_RANKS, reason)?,
        true => {
            let machine = options.machine.machine(&options.sizes, dtype)?;
            let source = MachineSource::Described(machine.device.name.clone());
            ring.apply_on(builder, MOST_RANKS, reason, (machine, source))?
        }
    };
    let pass = match options.backward {
        true => Pass::Backward { dlse: false },
        false => Pass::Forward,
    };
    let attention = builder.build()?;
    if let Some(head) = options.draw {
        // A ring that is refused has no mask, and every other one has the same.
        attention.plan(shape, dtype, pass)?;
        say(&draw(attention.pattern(), &shape, head)?)?;
        return Ok(Verdict::Fine);
    }
    if options.explain {
        return explain::run(&attention, shape, dtype, pass, options.json);
    }
    let plan = attention.plan(shape, dtype, pass)?;
    let text = match (options.rank, options.json) {
        (None, false) => plan.explain()?.to_string(),
        (None, true) => serde_json::to_string_pretty(&plan.explain()?)? + "\n",
        (Some(rank), false) => rank_program::to_text(&plan.rank(rank)?, plan.ranks()),
        (Some(rank), true) => serde_json::to_string_pretty(&plan.rank(rank)?)? + "\n",
    };
    say(&text)?;
    Ok(Verdict::Fine)
}
