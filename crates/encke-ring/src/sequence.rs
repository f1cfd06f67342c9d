//! Splits a sequence into shards, and gathers shards into a sequence.
//!
//! The decision here: a tensor of queries may have fewer rows than the sequence has tokens. Its
//! rows then lie with the tokens at their positions ([`RowPositions`]); some ranks may have none.

use std::fmt;
use std::ops::Range;

use encke_core::host;
use encke_core::sharding::{Run, Sharding};
use encke_core::tensor::{Tensor, View};
use encke_core::{Error, Result};

/// Which tokens of a sequence the rows of a tensor are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPositions {
    tokens: usize,
    positions: Range<usize>,
}

impl RowPositions {
    /// A row for each of `tokens` tokens.
    pub fn all(tokens: usize) -> RowPositions {
        RowPositions {
            tokens,
            positions: 0..tokens,
        }
    }

    /// `queries` rows of a sequence of `tokens` tokens, for those from position `first` on.
    pub fn queries(tokens: usize, first: usize, queries: usize) -> Result<RowPositions> {
        if queries > tokens {
            return Err(Error::MoreQueries { queries, tokens });
        }
        if first > tokens - queries {
            return Err(Error::QueryOffset {
                offset: first,
                queries,
                tokens,
            });
        }
        Ok(RowPositions {
            tokens,
            positions: first..first + queries,
        })
    }

    /// Tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether every token has a row.
    pub fn is_all(&self) -> bool {
        self.positions == (0..self.tokens)
    }

    /// The rows of a rank, by index in the tensor.
    pub fn runs(&self, sharding: &Sharding, rank: usize) -> Vec<Run> {
        sharding.query_runs(self.tokens, rank, &self.positions)
    }

    /// How many rows a rank has.
    pub fn rows(&self, sharding: &Sharding, rank: usize) -> usize {
        let runs = self.runs(sharding, rank);
        runs.iter().map(|run| run.count).sum()
    }
}

impl fmt::Display for RowPositions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.positions;
        write!(f, "at positions {start} to {end} of {} tokens", self.tokens)
    }
}

/// The shard of every rank, `[b, rows, h, d]`, in rank order. Rows of a shard are in the order of
/// [`Sharding::runs`].
pub fn split_sequence(sequence: &View<'_>, sharding: &Sharding) -> Result<Vec<Tensor>> {
    split_rows(sequence, sharding, &RowPositions::all(sequence.dims()[1]))
}

/// The same for a tensor whose rows are at these positions.
pub(crate) fn split_rows(
    tensor: &View<'_>,
    sharding: &Sharding,
    at: &RowPositions,
) -> Result<Vec<Tensor>> {
    let [b, _, h, d] = tensor.dims();
    sharding.check(at.tokens)?;
    let shard = |rank: usize| {
        let rows = at.rows(sharding, rank);
        let mut shard = Tensor::try_zeros(tensor.dtype(), [b, rows, h, d])?;
        host::upload(tensor, &at.runs(sharding, rank), shard.data_mut());
        Ok(shard)
    };
    (0..sharding.ranks()).map(shard).collect()
}

/// The sequence with these shards.
pub fn gather_sequence(shards: &[Tensor], sharding: &Sharding) -> Result<Tensor> {
    let tokens = shards.iter().map(|shard| shard.dims()[1]).sum();
    gather_rows(shards, sharding, &RowPositions::all(tokens))
}

/// The tensor whose rows, at these positions, are in these shards.
pub(crate) fn gather_rows(
    shards: &[Tensor],
    sharding: &Sharding,
    at: &RowPositions,
) -> Result<Tensor> {
    if shards.len() != sharding.ranks() {
        return Err(Error::PartitionRanks {
            firsts: shards.len(),
            ranks: sharding.ranks(),
        });
    }
    let [b, _, h, d] = shards[0].dims();
    sharding.check(at.tokens)?;
    let mut whole = Tensor::try_zeros(shards[0].dtype(), [b, at.positions.len(), h, d])?;
    for (rank, shard) in shards.iter().enumerate() {
        let expected = [b, at.rows(sharding, rank), h, d];
        if shard.dims() != expected {
            return Err(Error::ShapeMismatch {
                tensor: "a shard",
                got: shard.dims().to_vec(),
                expected: expected.to_vec(),
            });
        }
        host::download(shard.data(), &at.runs(sharding, rank), &mut whole);
    }
    Ok(whole)
}
