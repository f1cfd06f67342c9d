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

use crate::agreement::{Agreement, RankProgress};

/// What a transport can carry.
pub trait WireBuffer: Send + Sized {
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
    /// Whether what is done with it here is only enqueued, and done by somebody else in its turn. Then
    /// nothing is gained by posting it before computing, and computing is asked for first.
    fn is_enqueued(&self) -> bool {
        false
    }
    /// It is about to be posted, to be received into in this round.
    fn vacate(&mut self, _round: usize) {}
    /// A number that changes when any of the first `elements` does.
    fn checksum(&self, elements: usize) -> u64;
}

/// A parcel that lies in the host's memory, where a wire can read and write it. Memory of a device
/// is staged through one of these.
pub trait HostWireBuffer: WireBuffer {
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
        /// For whom; where the transport knows that this one waits itself, for whom that one does.
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
    /// The other side is gone, or has stopped because somebody is: this exchange will not complete,
    /// but the survivors can go on ([`Survivors`]).
    #[error("rank {rank} stopped in round {round}: rank {peer} is gone, or waits for one that is")]
    Gone {
        /// Who stopped.
        rank: usize,
        /// For whom it waited.
        peer: usize,
        /// In which round.
        round: usize,
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
pub trait Transport<B: WireBuffer> {
    /// Posts all sends and receives, runs `meanwhile`, and waits until all of them are complete.
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError>;
}

/// A transport whose ranks survive the death of others: what a call with `redundancy` needs.
///
/// Ranks keep their numbers for life: whoever renumbers survivors (a shrunk communicator) keeps a
/// table. A call is a sequence of epochs ([`Epoch`]); an epoch ends for a rank when it calls
/// [`Survivors::agree`], because its program is finished or because an exchange came back with
/// [`TransportError::Gone`].
///
/// What [`Transport::exchange`] must do beside what it always does:
/// - What is sent to a rank that is gone, or has called `agree`, is dropped and counted as sent.
/// - A receive whose sender is gone or has called `agree`, and which has not come and is not on its
///   way, ends the exchange with `Gone`. Everything that was to be sent is sent before that (or
///   dropped), to everyone who can still take it.
/// - `meanwhile` may have run by then or not: the rank makes up for it. What was received in such an
///   exchange is never looked at; parcels must be given back, with any contents.
/// - The deadline holds as always. It is an error for everyone, since who is slow is not dead: see
///   [`Survivors::give_up`].
///
/// With these rules how far each survivor comes follows from the plan and from what the dead rank
/// had sent, not from timing, and with it every bit of the result. A transport that cannot know
/// whether a message is still to come (ULFM: once anyone has revoked the communicator, everyone's
/// exchange ends with `Gone`) is as right, but the same fault may then lead to another agreement.
/// The same agreement always leads to the same bits.
///
/// With ULFM: on `MPIX_ERR_PROC_FAILED` or `MPIX_ERR_REVOKED` complete or cancel every request and
/// return `Gone`. In `agree`, a rank that has stopped revokes the communicator, which brings the
/// others there; one that has finished waits in a collective that ends when everyone has finished
/// or with the revocation. After a revocation: shrink, gather every survivor's number and standing
/// over the new communicator, and `MPIX_Comm_agree` on whether that worked for all; where it did
/// not, shrink again. The new communicator is the next epoch's.
///
/// [`Epoch`]: crate::plan::membership::Epoch
pub trait Survivors<B: WireBuffer>: Transport<B> {
    /// Ends the epoch for this rank, which has come this far. Waits until every rank has either
    /// called this or is gone, and returns the same on all that live, or an error on all of them:
    /// a rank that dies meanwhile is gone for all or for none. No message of an epoch is received
    /// in the next. Waiting ends with [`TransportError::Deadline`] when for that long no rank has
    /// shown a sign of life: one that has finished early waits as long as the others work.
    fn agree(&mut self, standing: RankProgress) -> Result<Agreement, TransportError>;

    /// Says that this rank ends with an error that is not to be survived (its kernel's, a deadline,
    /// a changed message): everyone else's exchange or `agree` ends with
    /// [`TransportError::PeerFailed`] and this reason, instead of going on without it.
    fn give_up(&mut self, reason: &str);
}
