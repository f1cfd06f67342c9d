//! A tensor in host memory, one shard for each rank.
//!
//! Calls take and return such tensors ([`ThreadRing::run_shards`](crate::ThreadRing::run_shards)),
//! and a ring that changes its size moves their rows
//! ([`ThreadRing::resize`](crate::ThreadRing::resize)).
//!
//! The decision here: a shard has the layout of a rank's buffer, rows in the order of its runs, so
//! that a rank reads it in place.

use encke_core::plan::resize::ResizeTensor;
use encke_core::sharding::{Run, Sharding};
use encke_core::tensor::{Tensor, View};
use encke_core::{DType, Error, Result};

use crate::sequence::{RowPositions, gather_rows, split_rows};

/// A `[b, n, h, d]` tensor in one shard for each rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Sharded {
    sharding: Sharding,
    positions: RowPositions,
    dims: [usize; 4],
    shards: Vec<Tensor>,
}

impl Sharded {
    /// Splits a tensor into shards.
    pub fn split(sequence: &View<'_>, sharding: &Sharding) -> Result<Sharded> {
        Sharded::split_at(sequence, sharding, RowPositions::all(sequence.dims()[1]))
    }

    /// Splits a tensor of queries, which has a row for each token from `first` on, of a sequence of
    /// `tokens` tokens. A rank gets the queries at the positions of its tokens.
    pub fn split_queries(
        queries: &View<'_>,
        sharding: &Sharding,
        tokens: usize,
        first: usize,
    ) -> Result<Sharded> {
        let positions = RowPositions::queries(tokens, first, queries.dims()[1])?;
        Sharded::split_at(queries, sharding, positions)
    }

    fn split_at(tensor: &View<'_>, sharding: &Sharding, at: RowPositions) -> Result<Sharded> {
        let shards = split_rows(tensor, sharding, &at)?;
        Sharded::from_shards_at(shards, sharding, at)
    }

    /// Takes existing shards, in rank order, each `[b, rows, h, d]`.
    pub fn from_shards(shards: Vec<Tensor>, sharding: &Sharding) -> Result<Sharded> {
        let tokens = shards.iter().map(|shard| shard.dims()[1]).sum();
        Sharded::from_shards_at(shards, sharding, RowPositions::all(tokens))
    }

    /// The same where the rows are at these positions.
    pub fn from_shards_at(
        shards: Vec<Tensor>,
        sharding: &Sharding,
        positions: RowPositions,
    ) -> Result<Sharded> {
        if shards.len() != sharding.ranks() {
            return Err(Error::PartitionRanks {
                firsts: shards.len(),
                ranks: sharding.ranks(),
            });
        }
        let ([b, _, h, d], dtype) = (shards[0].dims(), shards[0].dtype());
        let rows = shards.iter().map(|shard| shard.dims()[1]).sum();
        sharding.check(positions.tokens())?;
        for (rank, shard) in shards.iter().enumerate() {
            let expected = [b, positions.rows(sharding, rank), h, d];
            if shard.dims() != expected {
                return Err(Error::ShapeMismatch {
                    tensor: "a shard",
                    got: shard.dims().to_vec(),
                    expected: expected.to_vec(),
                });
            }
            if shard.dtype() != dtype {
                return Err(Error::DTypeMismatch {
                    tensor: "a shard",
                    got: shard.dtype(),
                    expected: dtype,
                });
            }
        }
        Ok(Sharded {
            sharding: sharding.clone(),
            positions,
            dims: [b, rows, h, d],
            shards,
        })
    }

    /// The whole tensor. No ring calls this: it allocates all n rows at once.
    pub fn gather(&self) -> Result<Tensor> {
        gather_rows(&self.shards, &self.sharding, &self.positions)
    }

    /// The dimensions of the whole tensor.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.shards[0].dtype()
    }

    /// Which rank holds which tokens.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Which tokens its rows are.
    pub fn positions(&self) -> &RowPositions {
        &self.positions
    }

    /// The rows of a rank.
    pub fn shard(&self, rank: usize) -> &Tensor {
        &self.shards[rank]
    }

    /// All shards, in rank order.
    pub fn into_shards(self) -> Vec<Tensor> {
        self.shards
    }

    /// Its row sizes, to plan a resize.
    pub fn moving(&self) -> ResizeTensor {
        let [batch, _, heads, dim] = self.dims;
        ResizeTensor {
            batch,
            width: heads * dim,
            dtype: self.dtype(),
        }
    }
}

/// All rows of a shard that is a tensor of its own.
pub(crate) fn all_rows(rows: usize) -> Vec<Run> {
    let run = Run::leading(rows);
    (rows > 0).then_some(run).into_iter().collect()
}
