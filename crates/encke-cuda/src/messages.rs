//! The messages of a round as transports that stay on the GPU see them: bytes in memory, in order.
//!
//! NCCL has no tags. Messages between two ranks are sorted by tag at both ends; the plan gives both
//! ends the same set.

use std::sync::Arc;

use encke_core::transport::{Address, Incoming, Moved, Outgoing, TransportError, WireBuffer};

use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// Bytes on a GPU that are sent to a rank or received from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMessage {
    /// The rank at the other end.
    pub peer: usize,
    /// Distinguishes messages between the same two ranks.
    pub tag: u64,
    /// The device address.
    pub pointer: u64,
    /// The size.
    pub bytes: usize,
}

/// A message that keeps its memory alive.
pub(crate) struct PostedMessage {
    pub address: Address,
    memory: Arc<DeviceAllocation>,
    bytes: usize,
}

/// The sends and receives of a round, each in the order in which both ends post them.
pub(crate) struct RoundMessages {
    pub sends: Vec<PostedMessage>,
    pub receives: Vec<PostedMessage>,
}

impl RoundMessages {
    /// The messages of an exchange. Receive buffers get memory of their own.
    pub fn new(
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
    ) -> Result<RoundMessages> {
        let sends = outgoing.iter().map(|Outgoing { to, parcel }| {
            let width = parcel.element_bytes();
            Ok(PostedMessage::new(*to, parcel.memory()?, width))
        });
        let sends: Result<Vec<PostedMessage>> = sends.collect();
        let receives = incoming.iter_mut().map(|Incoming { from, parcel }| {
            let width = parcel.element_bytes();
            let target = parcel.receive_target(from.elements)?;
            Ok(PostedMessage::new(*from, target, width))
        });
        let receives: Result<Vec<PostedMessage>> = receives.collect();
        Ok(RoundMessages {
            sends: sorted(sends?),
            receives: sorted(receives?),
        })
    }

    /// Whether nothing moves.
    pub fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    /// The memory that is read, and the memory that is written.
    pub fn memory(&self) -> [Vec<&DeviceAllocation>; 2] {
        [&self.sends, &self.receives].map(|all| all.iter().map(|x| &*x.memory).collect())
    }

    /// The sends, and the receives.
    pub fn posted(&self) -> [Vec<DeviceMessage>; 2] {
        [&self.sends, &self.receives].map(|all| all.iter().map(PostedMessage::posted).collect())
    }

    /// The bytes sent and received when the exchange is complete.
    pub fn moved(&self) -> Moved {
        let sum = |messages: &[PostedMessage]| messages.iter().map(|x| x.bytes).sum();
        Moved {
            sent_bytes: sum(&self.sends),
            received_bytes: sum(&self.receives),
        }
    }
}

impl PostedMessage {
    fn new(address: Address, memory: &Arc<DeviceAllocation>, width: usize) -> PostedMessage {
        let bytes = address.elements * width;
        assert!(bytes <= memory.bytes(), "a message larger than its buffer");
        PostedMessage {
            address,
            memory: Arc::clone(memory),
            bytes,
        }
    }

    fn posted(&self) -> DeviceMessage {
        DeviceMessage {
            peer: self.address.peer,
            tag: self.address.tag,
            pointer: self.memory.pointer(),
            bytes: self.bytes,
        }
    }
}

/// Empty messages are not posted.
fn sorted(mut messages: Vec<PostedMessage>) -> Vec<PostedMessage> {
    messages.retain(|message| message.bytes > 0);
    messages.sort_by_key(|message| (message.address.peer, message.address.tag));
    messages
}

/// An error on this rank's own GPU.
pub(crate) fn local_error(rank: usize, round: usize) -> impl Fn(Error) -> TransportError {
    move |error| TransportError::Local {
        rank,
        round,
        reason: error.to_string(),
    }
}
