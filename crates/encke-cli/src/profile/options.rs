//! The options of `encke profile`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke::{Pass, Request};
use encke_lab::number::count;
use encke_lab::profile::ProfileSettings;

use crate::device_option::DeviceOption;
use crate::pattern_options::PatternOptions;
use crate::ring_sizes_options::{self, RingSizesOptions};
use crate::shape_options::{ShapeOptions, default};

/// Largest ring that is only planned: the programs of all its ranks are made one after another.
const MOST_PLANNED: usize = 4096;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke profile
      Dense attention, 4096 tokens, on rings of 1 to 32 ranks, and the plan of a ring of 1000.
  encke profile --tokens 64k --heads 8 --kv-heads 2 --dtype bf16 --causal --grad --mode mix \\
      --segment-lengths 2k,16k,64k --dilation-rates 1,8,32
      A LongNet pattern, forward and backward.
  encke profile --tokens 64k --dtype bf16 --ranks 1,2,4,8 --device cuda
      The same on the first NVIDIA GPU: the device memory of each rank's buffers.
  encke profile --queries replicated
      Every rank holds all queries: bytes of queries and output stay constant, those of keys and
      values decrease with the ring size.
  encke profile --tokens 16k --ranks 2,4,8,16 --csv memory.csv --json memory.json
      Every rank, round and component as files.
  mpirun -n 4 encke profile --tokens 32k --json four.json
      Every rank a process: what each allocates and has resident, and how much of the time of its
      messages is hidden behind computation.
  encke profile --tokens 2k --ranks 1,4 --plan-ranks 0 --caches
      What is kept between calls whose lengths change.

Every ring runs, with all of its ranks in this process, on random tensors. Measured bytes come from
a ledger of allocations; planned bytes come from the plan alone. For each component the rank that
holds most is shown, and over all ring sizes the exponent of its bytes against the number of ranks:
-1 is O(n/p), 0 is constant. A rank packs its own rows in a travelling buffer, so packing takes no
memory of its own; the workspace is scratch memory of the kernel and does not depend on the ring.

Exit codes: 0 no rank held more than planned, 1 one did, 2 any other error.
Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G are powers of 1024.";

/// Measures the memory of ranks by ring size.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", default("4k")),
    mut_arg("heads", default("4")),
    mut_arg("dim", default("64")),
    mut_arg("ranks", default("1,2,4,8,16,32"))
)]
pub struct Options {
    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    rings: RingSizesOptions,

    /// Ring sizes that are only planned; 0 for none.
    #[arg(
        long,
        value_name = "P1,P2,...",
        value_delimiter = ',',
        value_parser = count,
        default_value = "1000",
        help_heading = ring_sizes_options::HEADING
    )]
    plan_ranks: Vec<usize>,

    /// Where it runs.
    #[command(flatten)]
    pub device: DeviceOption,

    /// Also run the backward pass.
    #[arg(long, help_heading = HEADING)]
    pub grad: bool,

    /// Also run both passes on the largest ring with each checkpoint policy: output kept, output in
    /// a file, recomputed; memory, bytes and time of each.
    #[arg(long, help_heading = HEADING)]
    pub policies: bool,

    /// Also make calls of changing lengths on the largest ring, and show the cached plans and
    /// buffers, with hit rates and limits.
    #[arg(long, help_heading = HEADING)]
    pub caches: bool,

    /// Seed of the random tensors.
    #[arg(long, value_name = "S", default_value = "1", help_heading = HEADING)]
    pub seed: u64,

    /// Write every rank, round and component as comma-separated values.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub csv: Option<PathBuf>,

    /// Write the same, with the exponents, as JSON.
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub json: Option<PathBuf>,
}

const HEADING: &str = "Measurement and output";

impl Options {
    /// The settings, or which option is wrong.
    pub fn settings(&self) -> Result<ProfileSettings> {
        self.refuse_fixed_length()?;
        let requests = |sizes: Vec<usize>| -> Result<Vec<Request>> {
            sizes.into_iter().map(|ranks| self.request(ranks)).collect()
        };
        let planned = self.plan_ranks.iter().copied();
        let planned: Vec<usize> = planned.filter(|ranks| *ranks > 0).collect();
        let planned = ring_sizes_options::sorted(&planned, "--plan-ranks", MOST_PLANNED)?;
        Ok(ProfileSettings {
            run: requests(self.rings.sizes()?)?,
            planned: requests(planned)?,
            device: self.device.device,
            grad: self.grad,
            seed: self.seed,
        })
    }

    /// Refuses --caches with options for which the sequence cannot have other lengths.
    fn refuse_fixed_length(&self) -> Result<()> {
        let fixed = match self.pattern.fixes_length() {
            Some(name) if self.caches => name,
            _ => return Ok(()),
        };
        bail!(
            "--caches makes calls of changing lengths, which {fixed} does not allow: leave one out"
        )
    }

    /// The forward pass on a ring of this size.
    pub fn request(&self, ranks: usize) -> Result<Request> {
        let (shape, dtype) = (self.sizes.shape()?, self.sizes.dtype());
        let attention = self.rings.builder(&self.pattern, ranks)?.build()?;
        let plan = attention.plan(shape, dtype, Pass::Forward)?;
        Ok(plan.request().clone())
    }
}
