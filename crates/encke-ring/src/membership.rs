//! Agreement between the ranks of one process on which of them are dead and how far the others have
//! come.
//!
//! The decision here: a rank is *inactive* when it is dead or has reported its progress, and no
//! rank waits for a message that an inactive rank has not sent. So every rank comes exactly as far
//! as the messages of the living allow, in whatever order threads wake up. When all ranks are
//! inactive, the last one to report or to die closes the epoch for all.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use encke_core::plan::membership::{Agreement, RankProgress};

/// Which ranks are alive, and how far they have come.
#[derive(Debug)]
pub(crate) struct Membership {
    epoch: Mutex<OpenEpoch>,
    changed: Condvar,
}

#[derive(Debug)]
struct OpenEpoch {
    dead: Vec<bool>,
    /// The progress of the ranks that have reported in this epoch.
    reported: Vec<Option<RankProgress>>,
    /// How many epochs were closed, and the agreement of the last one.
    closed: usize,
    agreed: Option<Agreement>,
    /// When a rank last exchanged or reported.
    last_activity: Instant,
}

/// Why there is no agreement.
pub(crate) enum AgreementError {
    /// No rank made progress for longer than the deadline, and `peer` has not reported.
    Silence { peer: usize, waited: Duration },
    /// The call has failed meanwhile.
    Failed { peer: usize, reason: String },
}

impl OpenEpoch {
    fn is_inactive(&self, rank: usize) -> bool {
        self.dead[rank] || self.reported[rank].is_some()
    }

    /// Closes the epoch if all ranks are inactive.
    fn close(&mut self) {
        if !(0..self.dead.len()).all(|rank| self.is_inactive(rank)) {
            return;
        }
        let ranks = self.dead.len();
        let progress = std::mem::replace(&mut self.reported, vec![None; ranks]);
        self.agreed = Some(Agreement { progress });
        self.closed += 1;
    }
}

impl Membership {
    pub(crate) fn new(ranks: usize) -> Membership {
        Membership {
            epoch: Mutex::new(OpenEpoch {
                dead: vec![false; ranks],
                reported: vec![None; ranks],
                closed: 0,
                agreed: None,
                last_activity: Instant::now(),
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, OpenEpoch> {
        // No panic can leave the epoch half changed.
        self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a rank sends nothing more in this epoch.
    pub(crate) fn is_inactive(&self, rank: usize) -> bool {
        self.lock().is_inactive(rank)
    }

    /// Restarts the deadline of waiting ranks, because a rank has made progress.
    pub(crate) fn record_activity(&self) {
        self.lock().last_activity = Instant::now();
    }

    /// Wakes the ranks that wait for an agreement, so that they check whether the call has failed.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Marks a rank as dead, for all further epochs.
    pub(crate) fn mark_dead(&self, rank: usize) {
        let mut epoch = self.lock();
        epoch.dead[rank] = true;
        epoch.reported[rank] = None;
        epoch.close();
        drop(epoch);
        self.changed.notify_all();
    }

    /// Reports a rank's progress; returns the number of the epoch whose end it waits for.
    pub(crate) fn report(&self, rank: usize, progress: RankProgress) -> usize {
        let mut epoch = self.lock();
        let number = epoch.closed;
        epoch.reported[rank] = Some(progress);
        epoch.last_activity = Instant::now();
        epoch.close();
        drop(epoch);
        self.changed.notify_all();
        number
    }

    /// Waits for the end of an epoch, at most `limit` after the last activity of any rank.
    pub(crate) fn agreement(
        &self,
        number: usize,
        limit: Duration,
        failure: impl Fn() -> Option<(usize, String)>,
    ) -> Result<Agreement, AgreementError> {
        let mut epoch = self.lock();
        loop {
            if epoch.closed > number
                && let Some(agreed) = &epoch.agreed
            {
                return Ok(agreed.clone());
            }
            if let Some((peer, reason)) = failure() {
                return Err(AgreementError::Failed { peer, reason });
            }
            let waited = epoch.last_activity.elapsed();
            let Some(left) = limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let active = (0..epoch.dead.len()).find(|rank| !epoch.is_inactive(*rank));
                let peer = active.expect("an epoch without active ranks is closed");
                return Err(AgreementError::Silence { peer, waited });
            };
            let woken = self.changed.wait_timeout(epoch, left);
            epoch = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
