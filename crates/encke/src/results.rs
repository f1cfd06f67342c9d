//! What the passes return: outputs, gradients, and a report of the call.

use std::sync::Arc;

use encke_core::Tensor;
use encke_core::plan::Plan;
use encke_ring::{RankError, RankMemory, Trace};

use crate::checkpoint::Checkpoint;

/// Results of a forward pass.
#[derive(Debug)]
pub struct Forward {
    /// The output, `[b, n, heads, d]`, in the compute type.
    pub out: Arc<Tensor>,
    /// The log-sum-exp of each row, `[b, n, heads, 1]`, in f32 (f64 for f64).
    pub lse: Arc<Tensor>,
    /// Input of the backward pass.
    pub checkpoint: Checkpoint,
    /// Plan, times, bytes and memory of the call.
    pub report: Report,
}

/// Results of a backward pass.
#[derive(Debug)]
pub struct Backward {
    /// Gradient of q.
    pub dq: Tensor,
    /// Gradient of k.
    pub dk: Tensor,
    /// Gradient of v.
    pub dv: Tensor,
    /// Gradient of the sinks, one for each head, if the forward pass had any; of a shard, its own
    /// rows' share.
    pub dsinks: Option<Vec<f64>>,
    /// Plan, times, bytes and memory of the call. With
    /// [`CheckpointPolicy::Recompute`](crate::CheckpointPolicy::Recompute) the recomputed forward
    /// pass is not included.
    pub report: Report,
}

/// Plan, times, bytes and memory of one call.
#[derive(Debug)]
pub struct Report {
    /// The plan that the ranks executed.
    pub plan: Arc<Plan>,
    /// Times and bytes.
    pub trace: Trace,
    /// Memory of each rank, planned and allocated; after a death, of the surviving ranks.
    pub memory: Vec<RankMemory>,
    /// The ranks that died while the call survived, each with its error.
    pub deaths: Vec<(usize, RankError)>,
}
