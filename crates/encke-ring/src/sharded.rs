//! A tensor as a ring holds it between calls: every rank's rows apart, and never in one piece.
//!
//! The rows are the host's. What is not here is who computes with them: a call takes such tensors
//! and returns such tensors ([`ThreadRing::run_shards`](crate::ThreadRing::run_shards)), and a ring
//! that changes its size moves them ([`ThreadRing::resize`](crate::ThreadRing::resize)).
//!
//! The decision here: a shard lies exactly as a rank's buffer does, rows in the order of its runs, so
//! that a rank reads it where it is.

use encke_core::plan::resize::ResizeTensor;
use encke_core::sharding::{Run, Sharding};
use encke_core::tensor::{Tensor, View};
use encke_core::{DType, Error, Result};

use crate::sequence::{gather_sequence, split_sequence};

/// A `[b, n, h, d]` tensor in shards.
#[derive(Debug, Clone, PartialEq)]
pub struct Sharded {
    sharding: Sharding,
    dims: [usize; 4],
    shards: Vec<Tensor>,
}

impl Sharded {
    /// Cuts a tensor into shards.
    pub fn split(sequence: &View<'_>, sharding: &Sharding) -> Result<Sharded> {
        let shards = split_sequence(sequence, sharding)?;
        Sharded::from_shards(shards, sharding)
    }

    /// Shards that are there already, in rank order, each `[b, rows, h, d]`.
    pub fn from_shards(shards: Vec<Tensor>, sharding: &Sharding) -> Result<Sharded> {
        if shards.len() != sharding.ranks() {
            return Err(Error::PartitionRanks {
                firsts: shards.len(),
                ranks: sharding.ranks(),
            });
        }
        let ([b, _, h, d], dtype) = (shards[0].dims(), shards[0].dtype());
        let tokens = shards.iter().map(|shard| shard.dims()[1]).sum();
        sharding.check(tokens)?;
        for (rank, shard) in shards.iter().enumerate() {
            let expected = [b, sharding.rows(tokens, rank), h, d];
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
            dims: [b, tokens, h, d],
            shards,
        })
    }

    /// The whole tensor: n rows in one place, which nothing here ever asks for.
    pub fn gather(&self) -> Result<Tensor> {
        gather_sequence(&self.shards, &self.sharding)
    }

    /// The dimensions of the whole tensor.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> DType {
        self.shards[0].dtype()
    }

    /// Who has which tokens.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// The rows of a rank.
    pub fn shard(&self, rank: usize) -> &Tensor {
        &self.shards[rank]
    }

    /// All shards, in rank order.
    pub fn into_shards(self) -> Vec<Tensor> {
        self.shards
    }

    /// What a planner wants to know of it.
    pub fn moving(&self) -> ResizeTensor {
        let [batch, _, heads, dim] = self.dims;
        ResizeTensor {
            batch,
            width: heads * dim,
            dtype: self.dtype(),
        }
    }
}

/// All rows of a shard, as the rows of a tensor of its own.
pub(crate) fn all_rows(rows: usize) -> Vec<Run> {
    let run = Run {
        first: 0,
        stride: 1,
        count: rows,
    };
    (rows > 0).then_some(run).into_iter().collect()
}
