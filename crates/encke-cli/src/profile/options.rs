//! The options of `encke profile`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use encke::{Pass, Request};

use crate::device_option::DeviceOption;
use crate::number::count;
use crate::pattern_options::PatternOptions;
use crate::rings_options::{self, RingsOptions};
use crate::shape_options::{ShapeOptions, usual};

/// Rings that are only planned; the programs of all ranks are made, one after the other.
const MOST_PLANNED: usize = 4096;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke profile
      Dense attention, 4096 tokens, on rings of 1 to 32 ranks, and a ring of 1000 by plan.
  encke profile --tokens 64k --heads 8 --kv-heads 2 --dtype bf16 --causal --grad --mode mix \\
      --segment-lengths 2k,16k,64k --dilation-rates 1,8,32
      A LongNet pattern, forward and backward.
  encke profile --tokens 64k --dtype bf16 --ranks 1,2,4,8 --device cuda
      The same on the first NVIDIA GPU: what each rank's buffers take there.
  encke profile --queries replicated
      Every rank holds all queries: those and the output are flat, keys and values fall.
  encke profile --tokens 16k --ranks 2,4,8,16 --csv memory.csv --json memory.json
      Every rank, every round, every component, as numbers.
  mpirun -n 4 encke profile --tokens 32k --json four.json
      Every rank a process: what each holds and has resident, and how much of the time that messages
      take alone is hidden behind the computation.
  encke profile --tokens 2k --ranks 1,4 --plan-ranks 0 --caches
      What is kept between calls, when no two of them have the same length.

Every ring is run, all of its ranks in this process, on random tensors. Measured is what buffers
really took, booked as they were allocated and freed; planned is what the plan says without any
run. Of each component the rank that holds most is shown, and over all ring sizes the exponent of
its bytes against the number of ranks: -1 is O(n/p), 0 is flat. The own rows are packed for their
journey in a travelling buffer, so packing takes no memory of its own; the workspace is scratch of
the kernel, which does not depend on the ring.

Exit codes: 0 no rank held more than was planned, 1 one did, 2 any other error.
Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.";

/// What ranks really hold, beside what was planned, by the size of the ring.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", usual("4k")),
    mut_arg("heads", usual("4")),
    mut_arg("dim", usual("64")),
    mut_arg("ranks", usual("1,2,4,8,16,32"))
)]
pub struct Options {
    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    rings: RingsOptions,

    /// Ring sizes that are only planned; 0 for none.
    #[arg(
        long,
        value_name = "P1,P2,...",
        value_delimiter = ',',
        value_parser = count,
        default_value = "1000",
        help_heading = rings_options::HEADING
    )]
    plan_ranks: Vec<usize>,

    /// Where it is run.
    #[command(flatten)]
    pub device: DeviceOption,

    /// What is run and written.
    #[command(flatten)]
    pub work: WorkOptions,
}

/// What is run and written.
#[derive(Debug, Args)]
#[command(next_help_heading = "What is run and written")]
pub struct WorkOptions {
    /// Also run the backward pass.
    #[arg(long)]
    pub grad: bool,

    /// Also run both passes on the largest ring with everything that can be kept between them: the
    /// output, the output in a file, nothing; memory, bytes and time of each.
    #[arg(long)]
    pub policies: bool,

    /// Also make calls of changing lengths on the largest ring, and show what plans and buffers are
    /// kept between them, with hit rates and limits.
    #[arg(long)]
    pub caches: bool,

    /// Seed of the random tensors.
    #[arg(long, value_name = "S", default_value = "1")]
    pub seed: u64,

    /// Write every rank, round and component as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Write the same, with the exponents, as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What is asked for: an attention for each ring size.
pub struct Rings {
    /// Rings that are run, by rising size.
    pub run: Vec<Ring>,
    /// Rings that are only planned.
    pub planned: Vec<Ring>,
}

/// A ring size, with its forward request.
pub struct Ring {
    /// How many ranks.
    pub ranks: usize,
    /// What it carries out.
    pub request: Request,
}

impl Options {
    /// The rings that the options ask for, or which of them cannot be.
    pub fn rings(&self) -> Result<Rings> {
        let rings = |sizes: Vec<usize>| -> Result<Vec<Ring>> {
            sizes.into_iter().map(|ranks| self.ring(ranks)).collect()
        };
        let planned: Vec<usize> = self.plan_ranks.clone();
        let planned: Vec<usize> = planned.into_iter().filter(|ranks| *ranks > 0).collect();
        Ok(Rings {
            run: rings(self.rings.sizes()?)?,
            planned: rings(rings_options::sizes(
                &planned,
                "--plan-ranks",
                MOST_PLANNED,
            )?)?,
        })
    }

    /// A ring of one size.
    pub fn ring(&self, ranks: usize) -> Result<Ring> {
        let (shape, dtype) = (self.sizes.shape()?, self.sizes.dtype());
        let attention = self.rings.builder(&self.pattern, ranks)?.build()?;
        let plan = attention.plan(shape, dtype, Pass::Forward)?;
        Ok(Ring {
            ranks,
            request: plan.request().clone(),
        })
    }
}
