//! What a simulated rank does with what has arrived: the checks that a network transport makes, or
//! what a mutant has in their place.
//!
//! The epoch of a call is the call of an [`Envelope`]: rounds begin again with each, and what is left
//! over from the one before is stale.

use encke_core::Data;
use encke_core::kernel::Kernel;
use encke_core::transport::{TransportError, WireBuffer};
use encke_ring::Envelope;
use encke_ring::envelope::{EnvelopeMatch, PostedReceive};

use crate::fault_config::Checks;
use crate::fault_run::Player;
use crate::wire::Packet;

/// Takes every missing message that has arrived, each checked before and after.
pub(crate) fn take<K: Kernel<Buffer = Data>>(
    player: &mut Player<K>,
    epoch: usize,
    checks: Checks,
) -> Result<(), TransportError> {
    let Player {
        rank,
        round,
        missing,
        mail,
        moved,
        ..
    } = player;
    let mut still = Vec::new();
    for message in missing.drain(..) {
        let posted = PostedReceive {
            rank: rank.plan().rank,
            call: epoch as u64,
            round: *round,
            from: message.address,
        };
        match find(&posted, mail, checks)? {
            None => still.push(message),
            Some((envelope, contents)) => {
                let buffer = rank.accept(&message);
                buffer.copy_from(&contents, message.address.elements);
                if checks != Checks::NoChecksum {
                    posted.verify(&envelope, buffer)?;
                }
                moved.received_bytes += message.address.elements * buffer.element_bytes();
            }
        }
    }
    *missing = still;
    Ok(())
}

/// Looks through the mail for the message of a posted receive, and throws away what is stale.
fn find(
    posted: &PostedReceive,
    mail: &mut Vec<Packet>,
    checks: Checks,
) -> Result<Option<(Envelope, Data)>, TransportError> {
    let mut at = 0;
    while let Some(letter) = mail.get(at) {
        if letter.from != posted.from.peer {
            at += 1;
            continue;
        }
        let envelope = Envelope::from_bytes(letter.envelope);
        match admit(posted, &envelope, checks)? {
            EnvelopeMatch::Take => return Ok(Some((envelope, mail.remove(at).contents))),
            EnvelopeMatch::Stale => drop(mail.remove(at)),
            EnvelopeMatch::Early => at += 1,
        }
    }
    Ok(None)
}

/// The receiver's check, or what a mutant has in its place.
fn admit(
    posted: &PostedReceive,
    envelope: &Envelope,
    checks: Checks,
) -> Result<EnvelopeMatch, TransportError> {
    match checks {
        Checks::All => posted.admit(envelope),
        Checks::NoChecksum => {
            let seal = envelope.sealed(posted.from.peer, posted.rank);
            posted.admit(&Envelope { seal, ..*envelope })
        }
        Checks::NoRound => {
            let round = usize::try_from(envelope.round).unwrap_or(usize::MAX);
            PostedReceive { round, ..*posted }.admit(envelope)
        }
    }
}
