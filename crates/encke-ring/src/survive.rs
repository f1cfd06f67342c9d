//! The life of a rank in a call that survives deaths: it carries out its program, agrees with the
//! other survivors on where everyone stands, and goes on with what that makes of the plan, until
//! everyone has finished.
//!
//! Nothing is decided here. What is left to do after a death is in [`Epoch`], who is gone and how
//! far the others came in the transport's [`Agreement`];
//! threads, the simulator and a network drive the same three steps.

use encke_core::kernel::Kernel;
use encke_core::plan::membership::{Agreement, Epoch, RankProgress};
use encke_core::transport::{Survivors, TransportError};

use crate::error::RankError;
use crate::rank::{BorrowedInputs, Rank};
use crate::trace::Recorder;

/// Where a rank stands whose program came to an end, or to a stop because somebody is gone. Any
/// other end is an error.
pub fn standing<K: Kernel>(
    rank: &Rank<K>,
    ran: Result<(), RankError>,
) -> Result<RankProgress, RankError> {
    let done = rank.done();
    let finished = match ran {
        Ok(()) => true,
        Err(RankError::Transport(TransportError::Gone { .. })) => false,
        Err(error) => return Err(error),
    };
    Ok(RankProgress { done, finished })
}

/// Goes on after an agreement that did not end the call: the rank has its program for the rest.
pub fn go_on<'a, K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    epoch: &mut Epoch,
    agreement: &Agreement,
    loans: BorrowedInputs<'a>,
) -> Result<BorrowedInputs<'a>, RankError> {
    *epoch = epoch.next(agreement).map_err(RankError::Lost)?;
    let continuation = epoch.continuation(rank.plan().rank, rank.plan());
    let continuation = continuation.map_err(RankError::Lost)?;
    let resumed = rank.resume(kernel, continuation, loans);
    resumed.map_err(|source| RankError::Kernel { round: 0, source })
}

/// Carries out a rank's part of a call to the end that all survivors agree on. `deliver` is told of
/// a finished program before the others are asked: outputs that leave the rank (to a file) leave it
/// there, so that a rank that dies before it has delivered is one that has not finished. After a
/// death it is told again.
pub fn survive<K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    epoch: &mut Epoch,
    loans: BorrowedInputs<'_>,
    transport: &mut dyn Survivors<K::Buffer>,
    recorder: &mut Recorder,
    deliver: &mut dyn FnMut(&Rank<K>) -> Result<(), RankError>,
) -> Result<(), RankError> {
    let live = || -> Result<(), RankError> {
        let mut loans = loans;
        loop {
            let ran = rank.run_on(kernel, &loans, transport, recorder);
            let ran = ran.and_then(|()| deliver(rank));
            let standing = standing(rank, ran)?;
            let agreement = transport.agree(standing)?;
            if epoch.is_last(&agreement) {
                return Ok(());
            }
            loans = go_on(kernel, rank, epoch, &agreement, loans)?;
        }
    };
    let ended = live();
    if let Err(error) = &ended
        && error.is_to_blame()
    {
        transport.give_up(&error.to_string());
    }
    ended
}
