//! The options that say where the work is done, shared by all commands that have a ring.
//!
//! What they cannot do is change a result by more than rounding.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use encke::{Builder, Cut, Queries};

use crate::number::count;

/// Who owns which tokens.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ring (results differ by rounding only)")]
pub struct RingOptions {
    /// How many ranks share the tokens: threads for `attend`, any devices for `plan` [default: 1].
    #[arg(long, value_name = "P", value_parser = count)]
    ranks: Option<usize>,

    /// How tokens are cut: contiguous, zigzag (even work under a causal mask), striped (rank a
    /// owns every p-th token from a on), or each rank's first token, as in 0,100,250
    /// [default: contiguous].
    #[arg(long, value_name = "CUT", value_parser = cut)]
    sharding: Option<Cut>,

    /// Who holds the queries [default: sharded].
    #[arg(long, value_enum, value_name = "WHO")]
    queries: Option<QueriesName>,

    /// How many other ranks keep each rank's inputs, so that the call survives when a rank dies
    /// [default: 0].
    #[arg(long, value_name = "R", value_parser = count)]
    redundancy: Option<usize>,
}

/// Who holds the queries, by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum QueriesName {
    /// Each rank holds those of its own tokens; keys and values travel
    Sharded,
    /// Every rank holds all queries and ends with all of the output; keys and values stay
    Replicated,
}

impl QueriesName {
    /// What the name means.
    pub fn queries(self) -> Queries {
        match self {
            QueriesName::Sharded => Queries::Sharded,
            QueriesName::Replicated => Queries::Replicated,
        }
    }
}

/// The words for a cut, or the first tokens of the ranks.
pub fn cut(text: &str) -> Result<Cut, String> {
    Ok(match text {
        "contiguous" => Cut::Contiguous,
        "zigzag" => Cut::Zigzag,
        "striped" => Cut::Striped,
        firsts => {
            let firsts: Result<Vec<usize>, String> = firsts.split(',').map(count).collect();
            Cut::Firsts(firsts.map_err(
                |_| "write contiguous, zigzag, striped, or each rank's first token: 0,100,250",
            )?)
        }
    })
}

impl RingOptions {
    /// How many ranks were asked for, if any number was.
    pub fn ranks(&self) -> Option<usize> {
        self.ranks
    }

    /// Whether the cut names first tokens, which fixes the number of ranks.
    pub fn gives_first_tokens(&self) -> bool {
        matches!(self.sharding, Some(Cut::Firsts(_)))
    }

    /// Whether the options say how many ranks there are.
    pub fn gives_ranks(&self) -> bool {
        self.ranks.is_some() || matches!(self.sharding, Some(Cut::Firsts(_)))
    }

    /// Whether every rank is to hold all queries.
    pub fn replicates(&self) -> bool {
        matches!(self.queries, Some(QueriesName::Replicated))
    }

    /// Whether deaths are to be survived.
    pub fn survives(&self) -> bool {
        self.redundancy.is_some_and(|redundancy| redundancy > 0)
    }

    /// Puts the options into a builder. `most` is the largest ring the command can do, and
    /// `reason` says why.
    pub fn apply(&self, builder: Builder, most: usize, reason: &str) -> Result<Builder> {
        let cut = self.sharding.clone().unwrap_or(Cut::Contiguous);
        let ranks = match (&cut, self.ranks) {
            (_, Some(ranks)) => ranks,
            (Cut::Firsts(firsts), None) => firsts.len(),
            (_, None) => 1,
        };
        if ranks > most {
            bail!("{ranks} ranks are too many: {reason}; use at most {most}");
        }
        self.put(builder, ranks, cut)
    }

    /// The same where processes are the ranks, so that it is known how many there are.
    #[cfg(feature = "mpi")]
    pub fn apply_to(&self, builder: Builder, processes: usize) -> Result<Builder> {
        if let Some(ranks) = self.ranks.filter(|ranks| *ranks != processes) {
            bail!(
                "--ranks {ranks}, but {processes} processes were started, and each is one rank; \
                 leave --ranks out or start as many processes"
            );
        }
        let cut = self.sharding.clone().unwrap_or(Cut::Contiguous);
        if let Cut::Firsts(firsts) = &cut
            && firsts.len() != processes
        {
            bail!(
                "--sharding names the first tokens of {} ranks, but {processes} processes were \
                 started; name as many",
                firsts.len()
            );
        }
        self.put(builder, processes, cut)
    }

    fn put(&self, builder: Builder, ranks: usize, cut: Cut) -> Result<Builder> {
        let queries = self.queries.unwrap_or(QueriesName::Sharded).queries();
        let redundancy = self.redundancy.unwrap_or(0);
        let builder = builder.ranks(ranks).sharding(cut).queries(queries);
        Ok(builder.redundancy(redundancy))
    }
}

/// A cut in one word.
pub fn words(cut: &Cut) -> &'static str {
    match cut {
        Cut::Contiguous => "contiguous",
        Cut::Firsts(_) => "contiguous, cut as given",
        Cut::Zigzag => "zigzag",
        Cut::Striped => "striped",
    }
}
