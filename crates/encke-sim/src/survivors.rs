//! Survival in a simulated call: deaths become known, ranks come together, and go on.
//!
//! The steps are those of every ring ([`encke_ring::survival`]); only the knowledge that a transport
//! has of who is away is simulated here: a death is known to all after a while, and that a rank has
//! come to agree, after the time of a message. Agreeing itself takes no time and cannot fail: what
//! it stands for, consensus among processes of which some die, is not what is tried here.
//!
//! Where messages get lost, somebody may be away without having sent what others think. So ranks
//! stop for those who are away only when somebody is gone, and wait for their deadline otherwise; and
//! there are no more epochs than deaths, plus one.

use std::sync::Arc;
use std::time::Duration;

use encke_core::Data;
use encke_core::kernel::Kernel;
use encke_core::plan::Plan;
use encke_core::plan::membership::{Agreement, Epoch, RankProgress};
use encke_core::transport::TransportError;
use encke_ring::RankError;
use encke_ring::rank::BorrowedInputs;
use encke_ring::survival::resume;

use crate::fault_run::{Event, World};

/// What the ranks know of each other beside messages.
pub(crate) struct SimMembership {
    pub epoch: Epoch,
    /// The longest program of each epoch.
    pub rounds: Vec<usize>,
    /// Whether everyone who lives has finished, and all know it.
    pub is_over: bool,
    /// Of those that have come to agree.
    standings: Vec<Option<RankProgress>>,
    /// Who is known to be away in this epoch, or gone for good.
    away: Vec<bool>,
    gone: Vec<bool>,
    /// Whether somebody's error has ended the call for all.
    is_dissolved: bool,
}

impl SimMembership {
    pub fn new(plan: &Arc<Plan>) -> SimMembership {
        let ranks = plan.ranks();
        SimMembership {
            epoch: Epoch::first(plan),
            rounds: Vec::new(),
            is_over: false,
            standings: vec![None; ranks],
            away: vec![false; ranks],
            gone: vec![false; ranks],
            is_dissolved: false,
        }
    }

    /// Whether the call is one that survives deaths.
    pub fn survives(&self) -> bool {
        self.epoch.plan().request().redundancy > 0
    }

    /// Whether somebody has come, and nobody is still to come.
    fn is_complete(&self) -> bool {
        let came = |rank: usize| self.standings[rank].is_some();
        let mut living = self.epoch.living();
        living.all(|rank| came(rank) || self.gone[rank]) && self.epoch.living().any(came)
    }

    /// Whether a death of this epoch is known.
    fn is_bereaved(&self) -> bool {
        let mut living = self.epoch.living();
        living.any(|rank| self.gone[rank])
    }
}

impl<K: Kernel<Buffer = Data>> World<'_, K> {
    /// Nothing more comes from a rank in this epoch, which the others will learn.
    pub(crate) fn leave(&mut self, rank: usize, now: Duration) {
        if !self.council.survives() {
            return;
        }
        let died = self.players[rank].end.is_some();
        let until = match died {
            true => self.hardship.detection.max(self.hardship.latency),
            false => self.hardship.latency,
        };
        let epoch = self.council.epoch.number();
        self.at(now + until, Event::Away(rank, epoch));
    }

    /// Everyone learns that nothing more comes from a rank.
    pub(crate) fn learn(&mut self, rank: usize, epoch: usize, now: Duration) {
        if epoch == self.council.epoch.number() {
            self.council.away[rank] = true;
        }
        let error = self.players[rank].end.as_ref();
        let error = error.and_then(|end| end.error.as_ref());
        self.council.gone[rank] |= error.is_some_and(RankError::is_death);
        for waiting in 0..self.players.len() {
            self.stop_if_stuck(waiting, now);
        }
        self.agree(now);
    }

    /// Ends the epoch for a rank that waits for one that is away, where somebody is gone.
    pub(crate) fn stop_if_stuck(&mut self, rank: usize, now: Duration) {
        let player = &self.players[rank];
        let mut missing = player.missing.iter();
        let stuck = missing.any(|message| self.council.away[message.address.peer]);
        if player.waiting.is_some() && stuck && self.council.is_bereaved() {
            self.players[rank].waiting = None;
            self.come(rank, false, now);
        }
    }

    /// A rank comes to agree, unless it dies on the way.
    pub(crate) fn come(&mut self, rank: usize, finished: bool, now: Duration) {
        let epoch = self.council.epoch.number();
        let mut deaths = self.hardship.deaths.iter();
        if deaths.any(|death| (death.rank, death.epoch) == (rank, epoch)) {
            let round = self.players[rank].round;
            return self.die(rank, round, now);
        }
        let done = self.players[rank].rank.rounds_done();
        self.council.standings[rank] = Some(RankProgress { done, finished });
        if self.council.is_dissolved {
            return self.dissolve(now);
        }
        self.leave(rank, now);
        self.agree(now);
    }

    /// Goes on, or ends the call, if everyone has come or is known to be gone.
    fn agree(&mut self, now: Duration) {
        if !self.council.is_complete() {
            return;
        }
        let ranks = self.players.len();
        let standings = std::mem::replace(&mut self.council.standings, vec![None; ranks]);
        let came: Vec<usize> = (0..ranks)
            .filter(|rank| standings[*rank].is_some())
            .collect();
        let agreement = Agreement {
            progress: standings,
        };
        if self.council.epoch.is_last(&agreement) {
            self.council.is_over = true;
            for rank in came {
                self.end(rank, now, None);
            }
            return;
        }
        let before = self.council.epoch.clone();
        for &rank in &came {
            let mut epoch = before.clone();
            let player = &mut self.players[rank];
            let resumed = resume(
                self.kernel,
                &mut player.rank,
                &mut epoch,
                &agreement,
                BorrowedInputs::default(),
            );
            player.missing.clear();
            match resumed {
                Err(error) => self.end(rank, now, Some(error)),
                Ok(_) => {
                    player.round = 0;
                    self.council.epoch = epoch;
                }
            }
        }
        self.council.away.clone_from(&self.council.gone);
        self.allow();
        for rank in came {
            if self.players[rank].end.is_none() {
                self.begin(rank, now);
            }
        }
    }

    /// Somebody's error ends the call: those who have come to agree learn it, the others when they
    /// come.
    pub(crate) fn dissolve(&mut self, now: Duration) {
        if !self.council.survives() {
            return;
        }
        self.council.is_dissolved = true;
        let mut standings = self.council.standings.iter_mut().enumerate();
        let came: Vec<usize> = standings
            .by_ref()
            .filter_map(|(rank, standing)| standing.take().map(|_| rank))
            .collect();
        let errors = self.players.iter().filter_map(|player| {
            let end = player.end.as_ref()?;
            let error = end.error.as_ref().filter(|error| error.ends_call())?;
            Some((end.rank, error.to_string()))
        });
        let Some((peer, reason)) = errors.min() else {
            return;
        };
        for rank in came {
            let failed = TransportError::PeerFailed {
                rank,
                peer,
                round: self.players[rank].round,
                reason: reason.clone(),
            };
            self.end(rank, now, Some(RankError::Transport(failed)));
        }
    }
}
