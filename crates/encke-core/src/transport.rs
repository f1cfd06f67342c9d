//! The port for hops: bytes fly while a closure computes.
//!
//! Overlap by structure. The closure may read what is being sent (it is only borrowed) and cannot
//! touch what is being received (it is borrowed mutably by the exchange), so the aliasing bug that
//! makes rings silently wrong cannot be written. There are no request handles to forget: when
//! `exchange` returns, everything has been sent and received, or there is a typed error.
//!
//! One call takes several parcels because a rank can sit in several rings at once, and because k
//! and v travel in buffers of their own.

use serde::Serialize;
use std::time::Duration;

/// What a transport can carry.
pub trait Parcel: Send + Sized {
    /// How many elements it can hold.
    fn elements(&self) -> usize;
    /// Bytes of one element.
    fn element_bytes(&self) -> usize;
    /// Overwrites the first `elements` with those of `source`.
    fn copy_from(&mut self, source: &Self, elements: usize);
    /// Bytes it really holds on to, used or not.
    fn allocated_bytes(&self) -> usize;
    /// Takes the storage, leaving an empty parcel behind.
    fn take(&mut self) -> Self;
    /// A number that changes when any of the first `elements` does.
    fn checksum(&self, elements: usize) -> u64;
}

/// A parcel that lies in the host's memory, where a wire can read and write it. Memory of a device
/// is staged through one of these.
pub trait HostParcel: Parcel {
    /// The bytes of the first `elements`.
    fn host_bytes(&self, elements: usize) -> &[u8];
    /// The same, to be overwritten.
    fn host_bytes_mut(&mut self, elements: usize) -> &mut [u8];
}

/// One end of a message. Both ends of it name the same tag and the same number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Address {
    /// The rank at the other end.
    pub peer: usize,
    /// Tells messages between the same two ranks apart; those of one tag keep their order.
    pub tag: u64,
    /// How many elements travel.
    pub elements: usize,
}

/// A parcel to be sent. Readable by everyone meanwhile.
#[derive(Debug)]
pub struct Outgoing<'a, B> {
    /// Where it goes.
    pub to: Address,
    /// What is sent.
    pub parcel: &'a B,
}

/// A parcel to be received. Out of reach for everyone until it is complete.
#[derive(Debug)]
pub struct Incoming<'a, B> {
    /// Where it comes from.
    pub from: Address,
    /// What is overwritten.
    pub parcel: &'a mut B,
}

/// Why an exchange failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The other side did not answer in time.
    #[error(
        "rank {rank} waited {waited:?} for rank {peer} in round {round}, \
         longer than the deadline of {limit:?}"
    )]
    Deadline {
        /// Who waited.
        rank: usize,
        /// For whom.
        peer: usize,
        /// In which round.
        round: usize,
        /// How long.
        waited: Duration,
        /// How long was allowed.
        limit: Duration,
    },
    /// Another rank failed, so this one cannot go on.
    #[error("rank {rank} stopped in round {round} because rank {peer} failed: {reason}")]
    PeerFailed {
        /// Who stopped.
        rank: usize,
        /// Who failed first.
        peer: usize,
        /// The round in which this was noticed.
        round: usize,
        /// What the failed rank said.
        reason: String,
    },
    /// A message of another size than the plan says.
    #[error("rank {rank} got {got} elements from rank {peer} in round {round}, planned {expected}")]
    Size {
        /// Who received.
        rank: usize,
        /// From whom.
        peer: usize,
        /// In which round.
        round: usize,
        /// Elements received.
        got: usize,
        /// Elements planned.
        expected: usize,
    },
    /// A message that is not what was sent.
    #[error(
        "rank {rank} got a message from rank {peer} in round {round} whose {part} was changed on \
         the way: checksum {got:016x}, sent with {expected:016x}; look at the link between them"
    )]
    Corrupt {
        /// Who received.
        rank: usize,
        /// From whom.
        peer: usize,
        /// In which round.
        round: usize,
        /// What was changed: the envelope or the contents.
        part: &'static str,
        /// Checksum of what arrived.
        got: u64,
        /// Checksum it was sent with.
        expected: u64,
    },
    /// Its own end of the wire failed: a device, a library, a copy.
    #[error("rank {rank} could not move its parcels in round {round}: {reason}")]
    Local {
        /// Whose end it is.
        rank: usize,
        /// In which round.
        round: usize,
        /// What was said.
        reason: String,
    },
}

/// Bytes that an exchange moved, counted where they were copied or handed to the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Sent by this rank.
    pub sent_bytes: usize,
    /// Received by this rank.
    pub received_bytes: usize,
}

/// Moves parcels between ranks.
pub trait Transport<B: Parcel> {
    /// Posts all sends and receives, runs `meanwhile`, and waits until all of them are complete.
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError>;
}
