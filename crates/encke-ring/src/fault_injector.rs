//! Ranks that die on purpose, for tests and drills.
//!
//! The decision here: a fault is a transport that gives way under a rank that knows nothing of it,
//! so nothing in a rank or in the ring asks whether this is a drill.

use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::{
    Incoming, Moved, Outgoing, Survivors, Transport, TransportError, WireBuffer,
};
use serde::Serialize;

/// A rank's death in a call: in the first exchange from this round of this epoch on, or at the
/// latest when it has come to the end of its program there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The rank.
    pub rank: usize,
    /// The epoch: how many deaths were survived before.
    pub epoch: usize,
    /// The round.
    pub round: usize,
    /// When in the round.
    pub phase: Phase,
}

/// A moment of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Before it has sent or offered to receive anything.
    Begin,
    /// After its jobs, when some of its messages may have been sent and some not.
    Midst,
}

/// The transport of a rank that may be about to die.
#[derive(Debug)]
pub(crate) struct FaultInjector<T> {
    transport: T,
    faults: Vec<Fault>,
    epoch: usize,
}

impl<T> FaultInjector<T> {
    /// Faults of other ranks are not this one's.
    pub(crate) fn new(rank: usize, transport: T, faults: &[Fault]) -> FaultInjector<T> {
        let own = faults.iter().filter(|fault| fault.rank == rank);
        FaultInjector {
            transport,
            faults: own.copied().collect(),
            epoch: 0,
        }
    }

    fn fault(&self, round: usize) -> Option<Phase> {
        let now = |fault: &&Fault| fault.epoch == self.epoch && fault.round <= round;
        self.faults.iter().find(now).map(|fault| fault.phase)
    }
}

/// Ends the rank's thread as a panic would, without its noise.
fn die(round: usize) -> ! {
    std::panic::resume_unwind(Box::new(format!(
        "died in round {round}, as it was told to"
    )))
}

impl<B: WireBuffer, T: Transport<B>> Transport<B> for FaultInjector<T> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        match self.fault(round) {
            None => self
                .transport
                .exchange(round, outgoing, incoming, meanwhile),
            Some(Phase::Begin) => die(round),
            Some(Phase::Midst) => self.transport.exchange(round, outgoing, incoming, &mut || {
                meanwhile();
                die(round)
            }),
        }
    }
}

impl<B: WireBuffer, T: Survivors<B>> Survivors<B> for FaultInjector<T> {
    fn agree(&mut self, standing: RankProgress) -> Result<Agreement, TransportError> {
        if self.fault(usize::MAX).is_some() {
            die(standing.done);
        }
        self.epoch += 1;
        self.transport.agree(standing)
    }

    fn give_up(&mut self, reason: &str) {
        self.transport.give_up(reason);
    }
}
