//! What a forward pass saves for the backward pass: its output in memory, its output in a file, or
//! nothing.
//!
//! The decision here: the backward pass sees the same tensors under every policy, so policies
//! differ in memory and time and not in a bit.

use std::sync::Arc;

use encke_core::{Tensor, View};
use encke_ring::RingError as Error;

use crate::offload::Offloaded;

/// What the forward pass saves for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointPolicy {
    /// out and lse, in memory: the backward pass recomputes nothing and sends nothing twice.
    #[default]
    KeepOutput,
    /// Nothing: the backward pass first runs the forward pass again, communication included.
    Recompute,
    /// out and lse, in a file; the backward pass reads them back.
    Offload,
}

/// What a forward pass saved. `out` is shared with the caller, so it costs no further memory.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    saved: Option<SlotResults>,
    offloaded: Option<Offloaded>,
    pub(crate) sinks: Option<Arc<[f64]>>,
}

/// The output as the ring computed it: by slot. Slots are heads, except where branches keep slots
/// of their own (see [`Pattern::splits_slots`](crate::Pattern::splits_slots)).
#[derive(Debug, Clone)]
pub(crate) struct SlotResults {
    pub slot_out: Arc<Tensor>,
    pub slot_lse: Arc<Tensor>,
    pub lse: Arc<Tensor>,
}

/// A forward pass's output in the caller's memory: a checkpoint for callers that save the tensors
/// themselves, as autograd engines do.
#[derive(Debug, Clone, Copy)]
pub struct SavedOutput<'a> {
    /// The output by slot.
    pub slot_out: View<'a>,
    /// The lse by slot.
    pub slot_lse: View<'a>,
    /// The lse by head.
    pub lse: View<'a>,
}

impl SlotResults {
    pub fn view(&self) -> SavedOutput<'_> {
        SavedOutput {
            slot_out: self.slot_out.view(),
            slot_lse: self.slot_lse.view(),
            lse: self.lse.view(),
        }
    }
}

impl Checkpoint {
    /// An empty checkpoint: the backward pass will run the forward pass again.
    pub fn nothing() -> Checkpoint {
        Checkpoint {
            saved: None,
            offloaded: None,
            sinks: None,
        }
    }

    /// The tensors it holds in memory, if any.
    pub fn saved(&self) -> Option<SavedOutput<'_>> {
        self.saved.as_ref().map(SlotResults::view)
    }

    /// out and lse by slot, if they are in memory.
    pub fn into_slots(self) -> Option<(Arc<Tensor>, Arc<Tensor>)> {
        self.saved.map(|saved| (saved.slot_out, saved.slot_lse))
    }

    pub(crate) fn new(saved: SlotResults, policy: CheckpointPolicy) -> Result<Checkpoint, Error> {
        let nothing = Checkpoint::nothing();
        Ok(match policy {
            CheckpointPolicy::KeepOutput => Checkpoint {
                saved: Some(saved),
                ..nothing
            },
            CheckpointPolicy::Recompute => nothing,
            CheckpointPolicy::Offload => {
                let SlotResults {
                    slot_out,
                    slot_lse,
                    lse,
                } = &saved;
                let offloaded = match Arc::ptr_eq(slot_lse, lse) {
                    true => Offloaded::store(&[slot_out, slot_lse])?,
                    false => Offloaded::store(&[slot_out, slot_lse, lse])?,
                };
                Checkpoint {
                    offloaded: Some(offloaded),
                    ..nothing
                }
            }
        })
    }

    /// Bytes in memory (tensors shared with the caller included) and bytes in the file.
    pub fn kept_bytes(&self) -> (usize, usize) {
        let of = |tensor: &Arc<Tensor>| tensor.data().bytes().len();
        let in_memory = self.saved.as_ref().map_or(0, |saved| {
            let head_lse = match Arc::ptr_eq(&saved.slot_lse, &saved.lse) {
                true => 0,
                false => of(&saved.lse),
            };
            of(&saved.slot_out) + of(&saved.slot_lse) + head_lse
        });
        (
            in_memory,
            self.offloaded.as_ref().map_or(0, Offloaded::bytes),
        )
    }

    /// The saved tensors, read from the file if they were offloaded; `None` if nothing was saved.
    pub(crate) fn fetch(&self) -> Result<Option<SlotResults>, Error> {
        let Some(offloaded) = &self.offloaded else {
            return Ok(self.saved.clone());
        };
        let mut tensors = offloaded.load()?.into_iter().map(Arc::new);
        let mut next = || tensors.next().expect("two or three tensors were stored");
        let (slot_out, slot_lse) = (next(), next());
        let lse = tensors.next().unwrap_or_else(|| Arc::clone(&slot_lse));
        Ok(Some(SlotResults {
            slot_out,
            slot_lse,
            lse,
        }))
    }
}
