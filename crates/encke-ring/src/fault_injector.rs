//! Fault injection: ranks that die on purpose, for tests and drills.
//!
//! The decision here: a fault is injected by the transport. The rank and the ring run the same code
//! with and without it.

use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::{
    Incoming, Moved, Outgoing, Survivors, Transport, TransportError, WireBuffer,
};
use serde::Serialize;

/// The death of a rank in a call: in its first exchange in or after this round of this epoch, or,
/// if there is none, at the end of its program in that epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The rank.
    pub rank: usize,
    /// The epoch: how many agreements came before.
    pub epoch: usize,
    /// The round.
    pub round: usize,
    /// When in the round.
    pub phase: FaultPhase,
}

/// When in a round a rank dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultPhase {
    /// Before it has sent anything or posted a receive.
    Begin,
    /// After its jobs, when some of its messages may have been sent and some not.
    Midst,
}

/// The transport of a rank with injected faults.
#[derive(Debug)]
pub(crate) struct FaultInjector<T> {
    transport: T,
    faults: Vec<Fault>,
    epoch: usize,
}

impl<T> FaultInjector<T> {
    /// Injects those of `faults` that are of this rank.
    pub(crate) fn new(rank: usize, transport: T, faults: &[Fault]) -> FaultInjector<T> {
        let own = faults.iter().filter(|fault| fault.rank == rank);
        FaultInjector {
            transport,
            faults: own.copied().collect(),
            epoch: 0,
        }
    }

    fn fault(&self, round: usize) -> Option<FaultPhase> {
        let now = |fault: &&Fault| fault.epoch == self.epoch && fault.round <= round;
        self.faults.iter().find(now).map(|fault| fault.phase)
    }
}

/// Unwinds the rank's thread as a panic would, without printing a message.
fn die(round: usize) -> ! {
    std::panic::resume_unwind(Box::new(format!("died in round {round}: injected fault")))
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
            Some(FaultPhase::Begin) => die(round),
            Some(FaultPhase::Midst) => {
                self.transport.exchange(round, outgoing, incoming, &mut || {
                    meanwhile();
                    die(round)
                })
            }
        }
    }
}

impl<B: WireBuffer, T: Survivors<B>> Survivors<B> for FaultInjector<T> {
    fn agree(&mut self, progress: RankProgress) -> Result<Agreement, TransportError> {
        if self.fault(usize::MAX).is_some() {
            die(progress.done);
        }
        self.epoch += 1;
        self.transport.agree(progress)
    }

    fn give_up(&mut self, reason: &str) {
        self.transport.give_up(reason);
    }
}
