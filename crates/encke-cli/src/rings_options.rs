//! The options of commands that run rings of several sizes, one beside the other.

use anyhow::{Result, bail};
use clap::Args;
use encke::{Attention, Builder, Cut};

use crate::number::count;
use crate::pattern_options::PatternOptions;
use crate::ring_options::{QueriesName, cut};

/// Under which help shows them.
pub const HEADING: &str = "Rings";
/// All ranks of a ring are held in memory at once, and each makes its plan.
const MOST_RANKS: usize = 1024;

/// Which rings.
#[derive(Debug, Args)]
#[command(next_help_heading = HEADING)]
pub struct RingsOptions {
    /// Ring sizes that are run.
    #[arg(
        long,
        value_name = "P1,P2,...",
        value_delimiter = ',',
        value_parser = count,
        required = true
    )]
    ranks: Vec<usize>,

    /// How tokens are cut: contiguous, zigzag or striped [default: contiguous].
    #[arg(long, value_name = "CUT", value_parser = cut)]
    sharding: Option<Cut>,

    /// Who holds the queries [default: sharded].
    #[arg(long, value_enum, value_name = "WHO")]
    queries: Option<QueriesName>,

    /// How many other ranks keep each rank's inputs; rings without so many others keep none.
    #[arg(long, value_name = "R", value_parser = count, default_value = "0")]
    redundancy: usize,
}

impl RingsOptions {
    /// The sizes that are run, by rising size.
    pub fn sizes(&self) -> Result<Vec<usize>> {
        if let Some(Cut::Firsts(_)) = self.sharding {
            bail!(
                "first tokens fit one ring size only, and several are compared; use contiguous, \
                 zigzag or striped"
            );
        }
        sizes(&self.ranks, "--ranks", MOST_RANKS)
    }

    /// The settings of a ring of one size.
    pub fn builder(&self, pattern: &PatternOptions, ranks: usize) -> Result<Builder> {
        let queries = self.queries.unwrap_or(QueriesName::Sharded).queries();
        Ok(Attention::builder()
            .pattern(pattern.pattern()?)
            .ranks(ranks)
            .sharding(self.sharding.clone().unwrap_or(Cut::Contiguous))
            .queries(queries)
            .redundancy(self.redundancy.min(ranks.saturating_sub(1))))
    }
}

/// Sizes in order, each once, or which of them is too large.
pub fn sizes(given: &[usize], option: &str, most: usize) -> Result<Vec<usize>> {
    let mut sizes = given.to_vec();
    sizes.sort_unstable();
    sizes.dedup();
    if let Some(ranks) = sizes.iter().find(|ranks| **ranks > most) {
        bail!("{option} {ranks} is too many; use at most {most}");
    }
    Ok(sizes)
}
