//! Survival of rank deaths: a rank runs its program, agrees with the other survivors on how far
//! each has come, and resumes with a program for the rest, until all of them have finished.
//!
//! Nothing is decided here. [`Epoch`] derives the remaining work after a death; the transport's
//! [`Agreement`] lists who is dead and how far the others have come. Threads, the simulator and a
//! network run the same three steps.

use encke_core::kernel::Kernel;
use encke_core::plan::membership::{Agreement, Epoch, RankProgress};
use encke_core::transport::{Survivors, TransportError};

use crate::error::RankError;
use crate::rank::{BorrowedInputs, Rank};
use crate::trace::Recorder;

/// The progress of a rank whose program finished, or stopped because another rank died. Any other
/// error is returned.
fn progress<K: Kernel>(
    rank: &Rank<K>,
    ran: Result<(), RankError>,
) -> Result<RankProgress, RankError> {
    let done = rank.rounds_done();
    let finished = match ran {
        Ok(()) => true,
        Err(RankError::Transport(TransportError::Gone { .. })) => false,
        Err(error) => return Err(error),
    };
    Ok(RankProgress { done, finished })
}

/// Gives a rank its program for the next epoch, after an agreement that did not end the call.
pub fn resume<'a, K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    epoch: &mut Epoch,
    agreement: &Agreement,
    inputs: BorrowedInputs<'a>,
) -> Result<BorrowedInputs<'a>, RankError> {
    *epoch = epoch.next(agreement).map_err(RankError::Lost)?;
    let continuation = epoch.continuation(rank.plan().rank, rank.plan());
    let continuation = continuation.map_err(RankError::Lost)?;
    let resumed = rank.resume(kernel, continuation, inputs);
    resumed.map_err(RankError::before_start)
}

/// Runs a rank's part of a call until all survivors agree that it has ended. `store` is called when
/// the rank's program has finished and before the rank reports so, and again after a later death:
/// outputs that go to a file are written there, so that a rank that dies before it has stored them
/// counts as unfinished.
pub fn run_surviving<K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    epoch: &mut Epoch,
    inputs: BorrowedInputs<'_>,
    transport: &mut dyn Survivors<K::Buffer>,
    recorder: &mut Recorder,
    store: &mut dyn FnMut(&Rank<K>) -> Result<(), RankError>,
) -> Result<(), RankError> {
    let run_epochs = || -> Result<(), RankError> {
        let mut inputs = inputs;
        loop {
            let ran = rank.run_on(kernel, &inputs, transport, recorder);
            let ran = ran.and_then(|()| store(rank));
            let progress = progress(rank, ran)?;
            let agreement = transport.agree(progress)?;
            if epoch.is_last(&agreement) {
                return Ok(());
            }
            inputs = resume(kernel, rank, epoch, &agreement, inputs)?;
        }
    };
    let result = run_epochs();
    if let Err(error) = &result
        && error.ends_call()
    {
        transport.give_up(&error.to_string());
    }
    result
}
