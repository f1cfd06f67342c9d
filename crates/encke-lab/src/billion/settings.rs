//! The settings of a run over a generated sequence.

use anyhow::{Result, bail};
use encke::plan::Request;
use encke::{DType, Shape, Sharding};
use serde::{Deserialize, Serialize};

use crate::device::ComputeDevice;
use crate::longnet;

/// Tokens of a rank on the CPU unless the number of ranks is given.
const CPU_RANK_TOKENS: usize = 1 << 20;

/// Rows that are compared with the reference at most, in addition to those of each branch.
const MOST_SAMPLES: usize = 1 << 20;

/// Everything that the results depend on: a saved state continues only with equal settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BillionSettings {
    /// The device that computes.
    pub device: ComputeDevice,
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Ranks, which run one after another.
    pub ranks: usize,
    /// Type of the tensors.
    pub dtype: DType,
    /// Heads.
    pub heads: usize,
    /// Head dimension.
    pub dim: usize,
    /// Segment length of each branch.
    pub segment_lengths: Vec<usize>,
    /// Dilation rate of each branch.
    pub dilation_rates: Vec<usize>,
    /// Uniformly sampled rows that are compared with the reference.
    pub samples: usize,
    /// Seed of the sequence.
    pub seed: u64,
}

impl BillionSettings {
    /// The number of ranks on the CPU if none is given.
    pub(super) fn cpu_ranks(&self) -> usize {
        self.tokens.div_ceil(CPU_RANK_TOKENS)
    }

    /// The forward pass.
    pub fn request(&self) -> Result<Request> {
        if self.samples > MOST_SAMPLES {
            bail!(
                "{} sampled rows are too many, because they are kept in memory; use at most \
                 {MOST_SAMPLES}",
                self.samples
            );
        }
        let pattern = longnet::pattern(&self.segment_lengths, &self.dilation_rates)?;
        let shape = Shape::new(1, self.tokens, self.heads, self.heads, self.dim)?;
        let sharding = Sharding::contiguous(self.ranks)?;
        Ok(Request::new(shape, pattern, sharding, self.dtype))
    }
}
