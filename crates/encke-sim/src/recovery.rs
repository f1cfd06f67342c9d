//! Recovery from deaths in a simulated call: deaths become known, ranks agree, and the call
//! continues.
//!
//! The steps are those of every ring ([`encke_ring::survival`]); only a transport's knowledge of
//! absent ranks is simulated: a death is known to all after the detection time, and that a rank has
//! come to agree, after the latency of a message. The agreement itself takes no time and cannot
//! fail: consensus among processes of which some die is not under test here.
//!
//! Where messages get lost, a rank may have left a round without the sends that others wait for. So
//! ranks stop waiting for an absent rank only if a death is known, and otherwise wait until their
//! deadline; and there are no more epochs than deaths, plus one.

use std::time::Duration;

use encke_core::Data;
use encke_core::kernel::Kernel;
use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::TransportError;
use encke_ring::RankError;
use encke_ring::rank::BorrowedInputs;
use encke_ring::survival::resume;

use crate::simulated_ring::{RingEvent, SimulatedRing};

impl<K: Kernel<Buffer = Data>> SimulatedRing<'_, K> {
    /// Schedules the time at which the others learn that a rank sends nothing more in this epoch.
    pub(crate) fn leave(&mut self, rank: usize, now: Duration) {
        if !self.membership.survives() {
            return;
        }
        let died = self.ranks[rank].end.is_some();
        let known_after = match died {
            true => self.config.detection.max(self.config.latency),
            false => self.config.latency,
        };
        let epoch = self.membership.epoch.number();
        self.queue
            .push(now + known_after, RingEvent::Away { rank, epoch });
    }

    /// All ranks learn that a rank sends nothing more in an epoch.
    pub(crate) fn announce_away(&mut self, rank: usize, epoch: usize, now: Duration) {
        if epoch == self.membership.epoch.number() {
            self.membership.away[rank] = true;
        }
        let error = self.ranks[rank].end.as_ref();
        let error = error.and_then(|end| end.error.as_ref());
        self.membership.dead[rank] |= error.is_some_and(RankError::is_death);
        for waiting in 0..self.ranks.len() {
            self.stop_if_stuck(waiting, now);
        }
        self.agree(now);
    }

    /// Ends the epoch for a rank that waits for one that is away, if a death is known.
    pub(crate) fn stop_if_stuck(&mut self, rank: usize, now: Duration) {
        let state = &self.ranks[rank];
        let mut missing = state.missing.iter();
        let stuck = missing.any(|message| self.membership.away[message.address.peer]);
        if state.waiting.is_some() && stuck && self.membership.has_deaths() {
            self.ranks[rank].waiting = None;
            self.come_to_agree(rank, false, now);
        }
    }

    /// A rank comes to agree, unless it dies in this epoch.
    pub(crate) fn come_to_agree(&mut self, rank: usize, finished: bool, now: Duration) {
        let epoch = self.membership.epoch.number();
        let mut deaths = self.config.deaths.iter();
        if deaths.any(|death| (death.rank, death.epoch) == (rank, epoch)) {
            let round = self.ranks[rank].round;
            return self.die(rank, round, now);
        }
        let done = self.ranks[rank].rank.rounds_done();
        self.membership.progress[rank] = Some(RankProgress { done, finished });
        if self.membership.is_aborted {
            return self.abort(now);
        }
        self.leave(rank, now);
        self.agree(now);
    }

    /// Continues or ends the call, if every rank has come to agree or is known to be dead.
    fn agree(&mut self, now: Duration) {
        if !self.membership.is_complete() {
            return;
        }
        let ranks = self.ranks.len();
        let progress = std::mem::replace(&mut self.membership.progress, vec![None; ranks]);
        let present: Vec<usize> = (0..ranks)
            .filter(|rank| progress[*rank].is_some())
            .collect();
        let agreement = Agreement { progress };
        if self.membership.epoch.is_last(&agreement) {
            self.membership.is_finished = true;
            for rank in present {
                self.end(rank, now, None);
            }
            return;
        }
        let before = self.membership.epoch.clone();
        for &rank in &present {
            let mut epoch = before.clone();
            let state = &mut self.ranks[rank];
            let resumed = resume(
                self.kernel,
                &mut state.rank,
                &mut epoch,
                &agreement,
                BorrowedInputs::default(),
            );
            state.missing.clear();
            match resumed {
                Err(error) => self.end(rank, now, Some(error)),
                Ok(_) => {
                    state.round = 0;
                    self.membership.epoch = epoch;
                }
            }
        }
        self.membership.away.clone_from(&self.membership.dead);
        self.begin_epoch();
        for rank in present {
            if self.ranks[rank].end.is_none() {
                self.begin_round(rank, now);
            }
        }
    }

    /// A rank's error ends the call: ranks that have come to agree fail now, the others when they
    /// come.
    pub(crate) fn abort(&mut self, now: Duration) {
        if !self.membership.survives() {
            return;
        }
        self.membership.is_aborted = true;
        let progress = self.membership.progress.iter_mut().enumerate();
        let present: Vec<usize> = progress
            .filter_map(|(rank, progress)| progress.take().map(|_| rank))
            .collect();
        let errors = self.ranks.iter().filter_map(|state| {
            let end = state.end.as_ref()?;
            let error = end.error.as_ref().filter(|error| error.ends_call())?;
            Some((end.rank, error.to_string()))
        });
        let Some((peer, reason)) = errors.min() else {
            return;
        };
        for rank in present {
            let failed = TransportError::PeerFailed {
                rank,
                peer,
                round: self.ranks[rank].round,
                reason: reason.clone(),
            };
            self.end(rank, now, Some(RankError::Transport(failed)));
        }
    }
}
