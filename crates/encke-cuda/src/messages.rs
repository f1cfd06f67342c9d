//! The messages of a round as wires that stay on the GPU see them: bytes of memory, in order.
//!
//! NCCL knows no tags: messages between two ranks are put in the order of their tags on both sides,
//! which the plan makes the same set.

use std::sync::Arc;

use encke_core::transport::{Address, Incoming, Moved, Outgoing, WireBuffer};

use crate::buffer::Buffer;
use crate::error::Result;
use crate::memory::Memory;

/// Bytes on a GPU that go to a rank or come from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The rank at the other end.
    pub peer: usize,
    /// Tells messages between the same two ranks apart.
    pub tag: u64,
    /// Where they are.
    pub pointer: u64,
    /// How many.
    pub bytes: usize,
}

/// A message and its memory, which is held on to.
pub(crate) struct Message {
    pub address: Address,
    memory: Arc<Memory>,
    bytes: usize,
}

/// What a round sends and receives, each in the order in which both ends post.
pub(crate) struct Messages {
    pub sends: Vec<Message>,
    pub receives: Vec<Message>,
}

impl Messages {
    /// Those of an exchange; what is received into has memory of its own from now on.
    pub fn of(
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
    ) -> Result<Messages> {
        let sends = outgoing.iter().map(|Outgoing { to, parcel }| {
            Ok(Message::new(*to, parcel.memory()?, parcel.element_bytes()))
        });
        let sends: Result<Vec<Message>> = sends.collect();
        let receives = incoming.iter_mut().map(|Incoming { from, parcel }| {
            let width = parcel.element_bytes();
            Ok(Message::new(*from, parcel.target(from.elements)?, width))
        });
        let receives: Result<Vec<Message>> = receives.collect();
        Ok(Messages {
            sends: sorted(sends?),
            receives: sorted(receives?),
        })
    }

    /// Whether nothing moves.
    pub fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    /// The memory that is read, and that is written.
    pub fn memory(&self) -> [Vec<&Memory>; 2] {
        [&self.sends, &self.receives].map(|of| of.iter().map(|x| &*x.memory).collect())
    }

    /// What is sent, and what is received.
    pub fn pieces(&self) -> [Vec<Piece>; 2] {
        [&self.sends, &self.receives].map(|of| of.iter().map(Message::piece).collect())
    }

    /// What moves when all of it has.
    pub fn moved(&self) -> Moved {
        let sum = |messages: &[Message]| messages.iter().map(|x| x.bytes).sum();
        Moved {
            sent_bytes: sum(&self.sends),
            received_bytes: sum(&self.receives),
        }
    }
}

impl Message {
    fn new(address: Address, memory: &Arc<Memory>, width: usize) -> Message {
        let bytes = address.elements * width;
        assert!(bytes <= memory.bytes(), "a message larger than its buffer");
        Message {
            address,
            memory: Arc::clone(memory),
            bytes,
        }
    }

    fn piece(&self) -> Piece {
        Piece {
            peer: self.address.peer,
            tag: self.address.tag,
            pointer: self.memory.pointer(),
            bytes: self.bytes,
        }
    }
}

/// Nothing is nothing to NCCL.
fn sorted(mut messages: Vec<Message>) -> Vec<Message> {
    messages.retain(|message| message.bytes > 0);
    messages.sort_by_key(|message| (message.address.peer, message.address.tag));
    messages
}
