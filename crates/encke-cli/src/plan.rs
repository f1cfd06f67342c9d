//! `encke plan`: what would be computed, held and sent, without doing it.
//!
//! Nothing here grows with the tokens: a plan for 1e9 of them is made as fast as one for 1000.

use anyhow::Result;
use clap::Args;
use encke::tune::MachineSource;
use encke::{Attention, Pass};

use crate::draw::draw;
use crate::number::count;
use crate::pattern_options::PatternOptions;
use crate::ring_options::RingOptions;
use crate::shape_options::ShapeOptions;
use crate::simulate::machine;
use crate::simulate::options::MachineOptions;
use crate::terminal::say;
use crate::{Verdict, explain, program};

/// Beyond this a plan still exists but takes longer than anyone waits.
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
      What rank 2 does in the backward pass, round by round.
  encke plan --tokens 32 --heads 4 --dim 8 --mode mix --causal \\
      --segment-lengths 8,32 --dilation-rates 1,4 --draw 1
      Which query of head 1 sees which key, as a picture.
  encke plan --tokens 1M --heads 8 --dim 64 --ranks 32 --json | jq .sent_bytes
  encke plan --tokens 64k --heads 8 --dim 64 --ranks 8 --schedule 4
      Four parcels at a time instead of one: fewer rounds and longer jobs, for more memory.
  encke plan --tokens 64k --heads 8 --dim 64 --ranks 8 --backward --rotate queries
      The backward pass with queries that travel: fewer bytes, since each key has one head.
  encke plan --tokens 1M --heads 8 --dim 64 --ranks 32 --redundancy 1
      What it takes to survive the death of a rank: the inputs each keeps of its neighbour.
  encke plan --tokens 64k --heads 8 --dim 64 --causal --explain
      One device or a ring, and which: what was considered, as this machine is (encke tune).
  encke plan --tokens 1M --heads 32 --dim 128 --dtype bf16 --causal --explain --gpu h200 \\
      --node 8 --most-ranks 64 --memory-per-rank 40GiB --backward
      The same for a described machine, with a limit on what a rank may hold.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.";

/// Who would compute what, send what to whom, and hold how much.
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

    #[command(flatten)]
    view: ViewOptions,
}

/// What is shown of the plan.
#[derive(Debug, Args)]
#[command(next_help_heading = "What is shown")]
struct ViewOptions {
    /// Plan the backward pass instead of the forward pass.
    #[arg(long)]
    backward: bool,

    /// Show the program of this rank, round by round, instead of the whole ring.
    #[arg(long, value_name = "A", value_parser = count)]
    rank: Option<usize>,

    /// Show what was considered instead of the plan: alternatives with their predicted time and
    /// memory, which of them is chosen and why. What was not given is left open.
    #[arg(long, conflicts_with = "rank")]
    explain: bool,

    /// Print JSON: the summary, or with --rank every buffer, task and message of that rank.
    #[arg(long)]
    json: bool,

    /// Draw which query of this head sees which key, for the first 64 tokens, instead.
    #[arg(long, value_name = "H", value_parser = count, conflicts_with_all = ["rank", "json"])]
    draw: Option<usize>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let mut ring = options.ring.clone();
    if options.view.explain {
        ring.open_all();
    }
    let shape = options.sizes.shape()?;
    if let Some(head) = options.view.draw {
        let pattern = options.pattern.pattern()?;
        pattern.check(&shape)?;
        say(&draw(&pattern, &shape, head)?)?;
        return Ok(Verdict::Fine);
    }
    let builder = Attention::builder().pattern(options.pattern.pattern()?);
    let reason = "the plan would take too long to make";
    let dtype = options.sizes.dtype();
    let builder = match machine::names_one(&options.machine) {
        false => ring.apply(builder, MOST_RANKS, reason)?,
        true => {
            let machine = machine::machine(&options.machine, &options.sizes, dtype)?;
            let source = MachineSource::Described(machine.device.name.clone());
            ring.apply_on(builder, MOST_RANKS, reason, (machine, source))?
        }
    };
    let pass = match options.view.backward {
        true => Pass::Backward { dlse: false },
        false => Pass::Forward,
    };
    let attention = builder.build()?;
    if options.view.explain {
        return explain::run(&attention, shape, dtype, pass, options.view.json);
    }
    let plan = attention.plan(shape, dtype, pass)?;
    let text = match (options.view.rank, options.view.json) {
        (None, false) => plan.explain()?.to_string(),
        (None, true) => serde_json::to_string_pretty(&plan.explain()?)? + "\n",
        (Some(rank), false) => program::words(&plan.rank(rank)?, plan.ranks()),
        (Some(rank), true) => serde_json::to_string_pretty(&plan.rank(rank)?)? + "\n",
    };
    say(&text)?;
    Ok(Verdict::Fine)
}
