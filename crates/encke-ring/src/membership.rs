//! Where the ranks of a process agree on who is gone and how far the others have come.
//!
//! The decision here: a rank is *away* when it is gone or has come here, and nobody waits for what
//! such a rank has not sent. So everyone comes as far as the messages of the living allow and no
//! less, whoever is woken first; then all are here, and the last to come, or to die, closes the
//! epoch for all.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use encke_core::plan::membership::{Agreement, RankProgress};

/// What the ranks know of each other beside messages.
#[derive(Debug)]
pub(crate) struct Membership {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    gone: Vec<bool>,
    /// Of those that have come here in this epoch.
    standings: Vec<Option<RankProgress>>,
    /// How many epochs were closed, and what was agreed on in the last.
    closed: usize,
    agreed: Option<Agreement>,
    /// When anybody last showed that it lives.
    sign: Instant,
}

/// Why there is no agreement.
pub(crate) enum AgreementError {
    /// Nothing was heard of a rank for so long.
    Silence { peer: usize, waited: Duration },
    /// The call has failed meanwhile.
    Failed { peer: usize, reason: String },
}

impl State {
    fn is_away(&self, rank: usize) -> bool {
        self.gone[rank] || self.standings[rank].is_some()
    }

    /// Closes the epoch if nobody is missing.
    fn close(&mut self) {
        if !(0..self.gone.len()).all(|rank| self.is_away(rank)) {
            return;
        }
        let ranks = self.gone.len();
        let standings = std::mem::replace(&mut self.standings, vec![None; ranks]);
        self.agreed = Some(Agreement {
            progress: standings,
        });
        self.closed += 1;
    }
}

impl Membership {
    pub(crate) fn new(ranks: usize) -> Membership {
        Membership {
            state: Mutex::new(State {
                gone: vec![false; ranks],
                standings: vec![None; ranks],
                closed: 0,
                agreed: None,
                sign: Instant::now(),
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No panic can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing more comes from a rank in this epoch.
    pub(crate) fn is_away(&self, rank: usize) -> bool {
        self.state().is_away(rank)
    }

    /// Notes that somebody lives.
    pub(crate) fn sign(&self) {
        self.state().sign = Instant::now();
    }

    /// Wakes those that wait, to look whether the call has failed.
    pub(crate) fn wake(&self) {
        drop(self.state());
        self.changed.notify_all();
    }

    /// A rank is gone, for good.
    pub(crate) fn bury(&self, rank: usize) {
        let mut state = self.state();
        state.gone[rank] = true;
        state.standings[rank] = None;
        state.close();
        drop(state);
        self.changed.notify_all();
    }

    /// A rank has come; returns the number of the epoch that it waits for the end of.
    pub(crate) fn come(&self, rank: usize, standing: RankProgress) -> usize {
        let mut state = self.state();
        let epoch = state.closed;
        state.standings[rank] = Some(standing);
        state.sign = Instant::now();
        state.close();
        drop(state);
        self.changed.notify_all();
        epoch
    }

    /// Waits for the end of an epoch, no longer than `limit` after the last sign of life.
    pub(crate) fn agreement(
        &self,
        epoch: usize,
        limit: Duration,
        failure: impl Fn() -> Option<(usize, String)>,
    ) -> Result<Agreement, AgreementError> {
        let mut state = self.state();
        loop {
            if state.closed > epoch
                && let Some(agreed) = &state.agreed
            {
                return Ok(agreed.clone());
            }
            if let Some((peer, reason)) = failure() {
                return Err(AgreementError::Failed { peer, reason });
            }
            let waited = state.sign.elapsed();
            let Some(left) = limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let missing = (0..state.gone.len()).find(|rank| !state.is_away(*rank));
                let peer = missing.expect("an epoch in which nobody is missing is closed");
                return Err(AgreementError::Silence { peer, waited });
            };
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
