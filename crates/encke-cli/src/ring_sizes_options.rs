//! The options of commands that run rings of several sizes.

use anyhow::{Result, bail};
use clap::Args;
use encke::{Attention, Bits, Builder, Cut, Queries};
use encke_lab::number::count;

use crate::pattern_options::PatternOptions;
use crate::ring_options::{bits, cut, queries};

/// Their heading in help.
pub const HEADING: &str = "Rings";
/// All ranks of a ring are in memory at once, each with its plan.
const MOST_RANKS: usize = 1024;

/// Ring sizes and sharding.
#[derive(Debug, Args)]
#[command(next_help_heading = HEADING)]
pub struct RingSizesOptions {
    /// Ring sizes that run.
    #[arg(
        long,
        value_name = "P1,P2,...",
        value_delimiter = ',',
        value_parser = count,
        required = true
    )]
    ranks: Vec<usize>,

    /// How tokens are cut into shards: contiguous, zigzag or striped [default: contiguous].
    #[arg(long, value_name = "CUT", value_parser = cut)]
    sharding: Option<Cut>,

    /// Whether queries are sharded or replicated [default: sharded].
    #[arg(long, value_name = "HOW", value_parser = queries)]
    queries: Option<Queries>,

    /// What the bits of results may depend on: planned, invariant, or invariant:TILE [default:
    /// planned].
    #[arg(long, value_name = "WHAT", value_parser = bits)]
    bits: Option<Bits>,

    /// Number of other ranks that keep each rank's inputs; at most the ring size minus one.
    #[arg(long, value_name = "R", value_parser = count, default_value = "0")]
    redundancy: usize,
}

impl RingSizesOptions {
    /// The ring sizes, rising.
    pub fn sizes(&self) -> Result<Vec<usize>> {
        if let Some(Cut::Firsts(_)) = self.sharding {
            bail!(
                "first tokens define one ring size, and several are compared; use contiguous, \
                 zigzag or striped"
            );
        }
        sorted(&self.ranks, "--ranks", MOST_RANKS)
    }

    /// The attention of a ring of one size.
    pub fn builder(&self, pattern: &PatternOptions, ranks: usize) -> Result<Builder> {
        Ok(pattern
            .apply(Attention::builder(), None)?
            .ranks(ranks)
            .sharding(self.sharding.clone().unwrap_or(Cut::Contiguous))
            .queries(self.queries.unwrap_or(Queries::Sharded))
            .bits(self.bits.unwrap_or_default())
            .redundancy(self.redundancy.min(ranks.saturating_sub(1))))
    }
}

/// Sizes in rising order without duplicates, or which of them is too large.
pub fn sorted(given: &[usize], option: &str, most: usize) -> Result<Vec<usize>> {
    let mut sizes = given.to_vec();
    sizes.sort_unstable();
    sizes.dedup();
    if let Some(ranks) = sizes.iter().find(|ranks| **ranks > most) {
        bail!("{option} {ranks} is too many; use at most {most}");
    }
    Ok(sizes)
}
