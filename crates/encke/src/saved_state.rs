//! What the autograd engine of another library saves between the passes.
//!
//! The decision here: such an engine keeps the output itself, so Encke saves only what lies beside
//! it (the log-sum-exp, or the outputs by branch), and the output is nowhere twice.

use std::sync::Arc;

use encke_core::kernel::Kernel;
use encke_core::{Tensor, View};
use encke_ring::RingError as Error;

use crate::attention::Attention;
use crate::checkpoint::{Checkpoint, SavedOutput};
use crate::results::{Backward, Forward, Report};

/// What a forward pass saves for its backward pass beside its output.
#[derive(Debug, Clone)]
pub enum SavedState {
    /// The log-sum-exp.
    Lse(Arc<Tensor>),
    /// Output and log-sum-exp by branch, where branches keep slots of their own.
    Slots {
        /// The output by slot.
        out: Arc<Tensor>,
        /// The log-sum-exp by slot.
        slot_lse: Arc<Tensor>,
        /// The log-sum-exp by head.
        lse: Arc<Tensor>,
    },
    /// A checkpoint that is not in memory: a file, or nothing.
    Checkpoint(Checkpoint),
}

/// A [`SavedState`] together with the output: the input of a backward pass.
#[derive(Debug, Clone, Copy)]
#[expect(
    clippy::large_enum_variant,
    reason = "views on their way into one call; nothing stores them"
)]
pub enum SavedForward<'a> {
    /// The output and its log-sum-exp.
    Output(SavedOutput<'a>),
    /// A checkpoint that is not in memory: a file, or nothing.
    Checkpoint(&'a Checkpoint),
}

impl Forward {
    /// The output, for a caller that keeps it until the backward pass, and what to save beside it.
    /// The output's reference is the last one, unless branches keep slots of their own.
    pub fn into_saved(self) -> (Arc<Tensor>, SavedState, Report) {
        let Forward {
            out,
            lse,
            checkpoint,
            report,
        } = self;
        let saved = match checkpoint.saved().is_some() {
            false => SavedState::Checkpoint(checkpoint),
            true => match checkpoint.into_slots() {
                Some((slot_out, slot_lse)) if !Arc::ptr_eq(&slot_lse, &lse) => SavedState::Slots {
                    out: slot_out,
                    slot_lse,
                    lse,
                },
                _ => SavedState::Lse(lse),
            },
        };
        (out, saved, report)
    }
}

impl SavedState {
    /// The input of the backward pass; `out` is the output that the caller kept.
    pub fn with_output<'a>(&'a self, out: View<'a>) -> SavedForward<'a> {
        let output = |slot_out, slot_lse, lse| {
            SavedForward::Output(SavedOutput {
                slot_out,
                slot_lse,
                lse,
            })
        };
        match self {
            SavedState::Lse(lse) => output(out, lse.view(), lse.view()),
            SavedState::Slots { out, slot_lse, lse } => {
                output(out.view(), slot_lse.view(), lse.view())
            }
            SavedState::Checkpoint(checkpoint) => SavedForward::Checkpoint(checkpoint),
        }
    }
}

impl<K: Kernel> Attention<K> {
    /// Gradients from what a forward pass saved ([`Forward::into_saved`]).
    pub fn backward_saved(
        &self,
        [q, k, v]: [&View<'_>; 3],
        saved: SavedForward<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error> {
        match saved {
            SavedForward::Output(saved) => self.backward_from(q, k, v, &saved, dout, None),
            SavedForward::Checkpoint(checkpoint) => self.backward(q, k, v, checkpoint, dout, None),
        }
    }
}
