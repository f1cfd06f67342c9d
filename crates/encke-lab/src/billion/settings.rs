//! The settings of a run over a generated sequence.

use anyhow::{Result, bail};
use encke::plan::Request;
use encke::{DType, Documents, Shape, Sharding, Window};
use serde::{Deserialize, Serialize};

use crate::device::ComputeDevice;
use crate::longnet;

/// Tokens of a rank on the CPU unless the number of ranks is given.
const CPU_RANK_TOKENS: usize = 1 << 20;

/// Documents of a packed sequence: a state file holds their lengths.
const MOST_DOCUMENTS: usize = 1 << 15;

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
    /// How far a query sees in each branch; everything is causal.
    #[serde(default = "all", skip_serializing_if = "is_all")]
    pub window: Window,
    /// Tokens at the start of each document that are visible outside the window.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prefix: usize,
    /// The documents that the sequence is packed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<Documents>,
    /// Uniformly sampled rows that are compared with the reference.
    pub samples: usize,
    /// Seed of the sequence.
    pub seed: u64,
}

fn all() -> Window {
    Window::ALL
}

fn is_all(window: &Window) -> bool {
    *window == Window::ALL
}

fn is_zero(prefix: &usize) -> bool {
    *prefix == 0
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
        let documents = self.documents.as_ref().map_or(1, Documents::count);
        if documents > MOST_DOCUMENTS {
            bail!(
                "{documents} documents are too many for the state file; use at most \
                 {MOST_DOCUMENTS}"
            );
        }
        let pattern = longnet::pattern(&self.segment_lengths, &self.dilation_rates)?;
        let pattern = pattern.window(self.window).prefix(self.prefix);
        let pattern = pattern.documents(self.documents.clone());
        let shape = Shape::new(1, self.tokens, self.heads, self.heads, self.dim)?;
        let sharding = Sharding::contiguous(self.ranks)?;
        Ok(Request::new(shape, pattern, sharding, self.dtype))
    }
}
