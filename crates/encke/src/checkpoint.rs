//! What a forward pass leaves for the backward pass: its output, nothing, or its output in a file.
//!
//! The decision here: whatever was kept, the backward pass sees the same thing, so policies differ in
//! memory and time and not in a bit.

use std::sync::Arc;

use encke_core::{Tensor, View};
use encke_ring::RingError as Error;

use crate::offload::Offloaded;

/// What is kept from the forward pass for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointPolicy {
    /// out and lse: the backward pass recomputes nothing and communicates nothing twice.
    #[default]
    KeepOutput,
    /// Nothing: the backward pass runs the forward pass again first, with all it communicates.
    Recompute,
    /// out and lse, but in a file instead of in memory; the backward pass reads them back.
    Offload,
}

/// What a forward pass kept. Sharing `out` with the caller costs no memory.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    kept: Option<Slots>,
    offloaded: Option<Offloaded>,
}

/// The output as the ring made it: by slot, which is by head except where branches stay apart
/// (see [`Pattern::splits_slots`](crate::Pattern::splits_slots)).
#[derive(Debug, Clone)]
pub(crate) struct Slots {
    pub slot_out: Arc<Tensor>,
    pub slot_lse: Arc<Tensor>,
    pub lse: Arc<Tensor>,
}

/// What a forward pass left, in memory of the caller: a checkpoint for those who keep tensors
/// themselves.
#[derive(Debug, Clone, Copy)]
pub struct Kept<'a> {
    /// The output by slot.
    pub slot_out: View<'a>,
    /// Its lse by slot.
    pub slot_lse: View<'a>,
    /// The lse by head.
    pub lse: View<'a>,
}

impl Slots {
    pub fn view(&self) -> Kept<'_> {
        Kept {
            slot_out: self.slot_out.view(),
            slot_lse: self.slot_lse.view(),
            lse: self.lse.view(),
        }
    }
}

impl Checkpoint {
    /// Keeps nothing: the backward pass will run the forward pass again.
    pub fn nothing() -> Checkpoint {
        Checkpoint {
            kept: None,
            offloaded: None,
        }
    }

    /// What it holds in memory, to be read.
    pub fn kept(&self) -> Option<Kept<'_>> {
        self.kept.as_ref().map(Slots::view)
    }

    /// Out and lse by slot, for a caller who keeps them in ways of its own; none where they are not
    /// in memory.
    pub fn into_slots(self) -> Option<(Arc<Tensor>, Arc<Tensor>)> {
        self.kept.map(|kept| (kept.slot_out, kept.slot_lse))
    }

    pub(crate) fn new(kept: Slots, policy: CheckpointPolicy) -> Result<Checkpoint, Error> {
        let nothing = Checkpoint::nothing();
        Ok(match policy {
            CheckpointPolicy::KeepOutput => Checkpoint {
                kept: Some(kept),
                ..nothing
            },
            CheckpointPolicy::Recompute => nothing,
            CheckpointPolicy::Offload => {
                let Slots {
                    slot_out,
                    slot_lse,
                    lse,
                } = &kept;
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

    /// Bytes that it keeps in memory, what it shares with the caller included, and in a file.
    pub fn kept_bytes(&self) -> (usize, usize) {
        let of = |tensor: &Arc<Tensor>| tensor.data().bytes().len();
        let in_memory = self.kept.as_ref().map_or(0, |kept| {
            let apart = match Arc::ptr_eq(&kept.slot_lse, &kept.lse) {
                true => 0,
                false => of(&kept.lse),
            };
            of(&kept.slot_out) + of(&kept.slot_lse) + apart
        });
        (
            in_memory,
            self.offloaded.as_ref().map_or(0, Offloaded::bytes),
        )
    }

    /// What was kept, fetched back if it has to be; none where nothing was.
    pub(crate) fn fetch(&self) -> Result<Option<Slots>, Error> {
        let Some(offloaded) = &self.offloaded else {
            return Ok(self.kept.clone());
        };
        let mut tensors = offloaded.load()?.into_iter().map(Arc::new);
        let mut next = || tensors.next().expect("as many as were stored");
        let (slot_out, slot_lse) = (next(), next());
        let lse = tensors.next().unwrap_or_else(|| Arc::clone(&slot_lse));
        Ok(Some(Slots {
            slot_out,
            slot_lse,
            lse,
        }))
    }
}
