//! Receiving: a simulated rank matches arrived packets with its posted receives and checks them as
//! a network transport does, or as a mutant with weaker checks.
//!
//! The epoch of a call is the `call` field of an [`Envelope`]: rounds begin at 0 in every epoch,
//! and packets of an earlier epoch are stale.

use encke_core::Data;
use encke_core::kernel::Kernel;
use encke_core::transport::{TransportError, WireBuffer};
use encke_ring::Envelope;
use encke_ring::envelope::{EnvelopeMatch, PostedReceive};

use crate::fault_config::ReceiverChecks;
use crate::network::Packet;
use crate::simulated_ring::SimulatedRank;

/// Receives every missing message that has arrived: its envelope is checked before, its contents
/// after the copy.
pub(crate) fn receive_arrived<K: Kernel<Buffer = Data>>(
    receiver: &mut SimulatedRank<K>,
    epoch: usize,
    checks: ReceiverChecks,
) -> Result<(), TransportError> {
    let SimulatedRank {
        rank,
        round,
        missing,
        inbox,
        moved,
        ..
    } = receiver;
    let mut still = Vec::new();
    for message in missing.drain(..) {
        let posted = PostedReceive {
            rank: rank.plan().rank,
            call: epoch as u64,
            round: *round,
            from: message.address,
        };
        match find(&posted, inbox, checks)? {
            None => still.push(message),
            Some((envelope, contents)) => {
                let buffer = rank.accept(&message);
                buffer.copy_from(&contents, message.address.elements);
                if checks != ReceiverChecks::NoChecksum {
                    posted.verify(&envelope, buffer)?;
                }
                moved.received_bytes += message.address.elements * buffer.element_bytes();
            }
        }
    }
    *missing = still;
    Ok(())
}

/// Searches the inbox for the message of a posted receive, and drops stale packets on the way.
fn find(
    posted: &PostedReceive,
    inbox: &mut Vec<Packet>,
    checks: ReceiverChecks,
) -> Result<Option<(Envelope, Data)>, TransportError> {
    let mut at = 0;
    while let Some(packet) = inbox.get(at) {
        if packet.from != posted.from.peer {
            at += 1;
            continue;
        }
        let envelope = Envelope::from_bytes(packet.envelope);
        match admit(posted, &envelope, checks)? {
            EnvelopeMatch::Take => return Ok(Some((envelope, inbox.remove(at).contents))),
            EnvelopeMatch::Stale => drop(inbox.remove(at)),
            EnvelopeMatch::Early => at += 1,
        }
    }
    Ok(None)
}

/// The receiver's check of an envelope, weakened for mutants.
fn admit(
    posted: &PostedReceive,
    envelope: &Envelope,
    checks: ReceiverChecks,
) -> Result<EnvelopeMatch, TransportError> {
    match checks {
        ReceiverChecks::All => posted.admit(envelope),
        ReceiverChecks::NoChecksum => {
            let seal = envelope.sealed(posted.from.peer, posted.rank);
            posted.admit(&Envelope { seal, ..*envelope })
        }
        ReceiverChecks::NoRound => {
            let round = usize::try_from(envelope.round).unwrap_or(usize::MAX);
            PostedReceive { round, ..*posted }.admit(envelope)
        }
    }
}
