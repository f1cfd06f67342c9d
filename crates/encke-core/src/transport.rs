//! The transport port: an exchange sends and receives messages while a closure computes.
//!
//! The decision here: overlap is enforced by borrowing. During an exchange the closure may read
//! what is being sent (shared borrow) and cannot access what is being received (mutable borrow held
//! by the exchange), so a race between messages and compute does not compile. There are no request
//! handles: when `exchange` returns, all messages are complete, or there is a typed error.
//!
//! One exchange takes several messages, because a rank can be in several rings at once and because
//! k and v are in separate buffers.

use serde::Serialize;
use std::time::Duration;

use crate::agreement::{Agreement, RankProgress};

/// A buffer that a transport can send and receive.
pub trait WireBuffer: Send + Sized {
    /// Its capacity in elements.
    fn elements(&self) -> usize;
    /// Bytes of one element.
    fn element_bytes(&self) -> usize;
    /// Overwrites the first `elements` with those of `source`.
    fn copy_from(&mut self, source: &Self, elements: usize);
    /// Bytes it has allocated, used or not.
    fn allocated_bytes(&self) -> usize;
    /// Takes the storage and leaves an empty buffer.
    fn take(&mut self) -> Self;
    /// Whether operations on it are enqueued on a device stream instead of executed by the calling
    /// thread. Posting its messages before the compute tasks then gains nothing, and the tasks are
    /// enqueued first.
    fn is_enqueued(&self) -> bool {
        false
    }
    /// Called before the buffer is posted to receive a message of this round.
    fn vacate(&mut self, _round: usize) {}
    /// A checksum of the first `elements` elements.
    fn checksum(&self, elements: usize) -> u64;
}

/// A wire buffer in host memory, which a transport can access as bytes. Device memory is staged
/// through one of these.
pub trait HostWireBuffer: WireBuffer {
    /// The bytes of the first `elements`.
    fn host_bytes(&self, elements: usize) -> &[u8];
    /// The same, mutable.
    fn host_bytes_mut(&mut self, elements: usize) -> &mut [u8];
}

/// One end of a message. Both ends have the same tag and the same number of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Address {
    /// The rank at the other end.
    pub peer: usize,
    /// Distinguishes messages between the same two ranks. Messages with the same tag stay in order.
    pub tag: u64,
    /// Elements of the message.
    pub elements: usize,
}

/// A message to send. The buffer stays readable during the exchange.
#[derive(Debug)]
pub struct Outgoing<'a, B> {
    /// The destination.
    pub to: Address,
    /// The buffer to read.
    pub parcel: &'a B,
}

/// A message to receive. The buffer is inaccessible until the exchange is complete.
#[derive(Debug)]
pub struct Incoming<'a, B> {
    /// The source.
    pub from: Address,
    /// The buffer to overwrite.
    pub parcel: &'a mut B,
}

/// Why an exchange failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The other rank did not answer in time.
    #[error(
        "rank {rank} waited {waited:?} for rank {peer} in round {round}, \
         longer than the deadline of {limit:?}"
    )]
    Deadline {
        /// The rank that waited.
        rank: usize,
        /// The rank it waited for. If the transport knows that this rank was itself waiting for
        /// another one, the end of that chain.
        peer: usize,
        /// The round.
        round: usize,
        /// How long it waited.
        waited: Duration,
        /// The deadline.
        limit: Duration,
    },
    /// Another rank failed, so this one cannot continue.
    #[error("rank {rank} stopped in round {round} because rank {peer} failed: {reason}")]
    PeerFailed {
        /// The rank that stopped.
        rank: usize,
        /// The rank that failed first.
        peer: usize,
        /// The round in which this was detected.
        round: usize,
        /// The error of the failed rank.
        reason: String,
    },
    /// The other rank is gone, or has stopped because another rank is. This exchange will not
    /// complete, but the survivors can continue ([`Survivors`]).
    #[error("rank {rank} stopped in round {round}: rank {peer} is gone, or waits for one that is")]
    Gone {
        /// The rank that stopped.
        rank: usize,
        /// The rank it waited for.
        peer: usize,
        /// The round.
        round: usize,
    },
    /// A message of a size other than planned.
    #[error("rank {rank} got {got} elements from rank {peer} in round {round}, planned {expected}")]
    Size {
        /// The receiver.
        rank: usize,
        /// The sender.
        peer: usize,
        /// The round.
        round: usize,
        /// Elements received.
        got: usize,
        /// Elements planned.
        expected: usize,
    },
    /// A message that was changed in transit.
    #[error(
        "rank {rank} got a message from rank {peer} in round {round} whose {part} was changed on \
         the way: checksum {got:016x}, sent with {expected:016x}; look at the link between them"
    )]
    Corrupt {
        /// The receiver.
        rank: usize,
        /// The sender.
        peer: usize,
        /// The round.
        round: usize,
        /// The changed part: the envelope or the contents.
        part: &'static str,
        /// Checksum of the received data.
        got: u64,
        /// Checksum sent with the message.
        expected: u64,
    },
    /// The transport failed on this rank: a device, a library, a copy.
    #[error("rank {rank} could not send or receive in round {round}: {reason}")]
    Local {
        /// The rank.
        rank: usize,
        /// The round.
        round: usize,
        /// The error.
        reason: String,
    },
}

/// Bytes of the messages of an exchange, whether they were copied, handed over or dropped because
/// the receiver is dead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Sent by this rank.
    pub sent_bytes: usize,
    /// Received by this rank.
    pub received_bytes: usize,
}

/// Exchanges messages between ranks.
pub trait Transport<B: WireBuffer> {
    /// Sends and receives all messages and runs `meanwhile` once, in the order that overlaps best;
    /// returns when all messages are complete.
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError>;
}

/// A transport whose ranks survive the death of others, as calls with redundancy need it.
///
/// Ranks keep their numbers: a transport that renumbers survivors (a shrunk communicator) must
/// translate. A call is a sequence of epochs ([`Epoch`]); an epoch ends for a rank when it calls
/// [`Survivors::agree`], because its program is finished or because an exchange returned
/// [`TransportError::Gone`].
///
/// Additional requirements on [`Transport::exchange`]:
/// - Messages to a rank that is gone or has called `agree` are dropped and counted as sent.
/// - A receive fails the exchange with `Gone` if its sender is gone or has called `agree` and the
///   message has neither arrived nor is in flight. Before that, all sends are completed or dropped.
/// - `meanwhile` may or may not have run by then; the rank runs it afterwards if needed. The rank
///   ignores what was received in such an exchange, but gets all buffers back.
/// - The deadline applies as always and is an error on all ranks, because a slow rank is not a dead
///   one: see [`Survivors::give_up`].
///
/// With these rules the progress of each survivor, and so every bit of the result, follows from the
/// plan and from what the dead rank had sent, not from timing. A transport that cannot tell whether
/// a message is still in flight (ULFM: after a revocation every exchange ends with `Gone`) is also
/// correct, but the same fault may then lead to different agreements. The same agreement always
/// leads to the same bits.
///
/// With ULFM: on `MPIX_ERR_PROC_FAILED` or `MPIX_ERR_REVOKED` complete or cancel every request and
/// return `Gone`. In `agree`, a rank that has stopped revokes the communicator, which makes all
/// others call `agree`; a rank that has finished waits in a collective that ends when all ranks
/// have finished or with the revocation. After a revocation: shrink, all-gather rank and progress
/// of the survivors over the new communicator, and `MPIX_Comm_agree` on whether that succeeded
/// everywhere; if not, shrink again. The new communicator is used in the next epoch.
///
/// [`Epoch`]: crate::plan::membership::Epoch
pub trait Survivors<B: WireBuffer>: Transport<B> {
    /// Ends the epoch for this rank, with its progress. Waits until every rank has called this or
    /// is gone, and returns the same agreement on all living ranks, or an error on all of them: a
    /// rank that dies meanwhile is gone for all or for none. No message of an epoch is received in
    /// a later one. Fails with [`TransportError::Deadline`] if no rank makes progress for that
    /// long; a rank that finished early waits as long as others are working.
    fn agree(&mut self, progress: RankProgress) -> Result<Agreement, TransportError>;

    /// Reports that this rank ends with an error that the others must not survive (of its kernel, a
    /// deadline, a corrupt message): `exchange` and `agree` of all other ranks end with
    /// [`TransportError::PeerFailed`] and this reason, instead of continuing without it.
    fn give_up(&mut self, reason: &str);
}

impl<B: WireBuffer, T: Transport<B> + ?Sized> Transport<B> for &mut T {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        (**self).exchange(round, outgoing, incoming, meanwhile)
    }
}

impl<B: WireBuffer, T: Survivors<B> + ?Sized> Survivors<B> for &mut T {
    fn agree(&mut self, progress: RankProgress) -> Result<Agreement, TransportError> {
        (**self).agree(progress)
    }

    fn give_up(&mut self, reason: &str) {
        (**self).give_up(reason);
    }
}
