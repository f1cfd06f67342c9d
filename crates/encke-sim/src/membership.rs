//! What simulated ranks know of each other beside messages: who has come to agree, who is away in
//! this epoch, and who is dead.
//!
//! It stands for the failure detector and the consensus of a real transport, which are not
//! simulated: [`recovery`](crate::recovery) decides when a fact becomes known.

use std::sync::Arc;

use encke_core::plan::Plan;
use encke_core::plan::membership::{Epoch, RankProgress};

/// The membership of a simulated ring.
pub(crate) struct SimulatedMembership {
    pub epoch: Epoch,
    /// The rounds of the longest program of each epoch.
    pub rounds: Vec<usize>,
    /// Whether all living ranks have finished and agreed on it.
    pub is_finished: bool,
    /// The progress of the ranks that have come to agree.
    pub progress: Vec<Option<RankProgress>>,
    /// Ranks known to send nothing more in this epoch.
    pub away: Vec<bool>,
    /// Ranks known to be dead.
    pub dead: Vec<bool>,
    /// Whether a rank's error has ended the call for all.
    pub is_aborted: bool,
}

impl SimulatedMembership {
    pub fn new(plan: &Arc<Plan>) -> SimulatedMembership {
        let ranks = plan.ranks();
        SimulatedMembership {
            epoch: Epoch::first(plan),
            rounds: Vec::new(),
            is_finished: false,
            progress: vec![None; ranks],
            away: vec![false; ranks],
            dead: vec![false; ranks],
            is_aborted: false,
        }
    }

    /// Whether the call survives deaths.
    pub fn survives(&self) -> bool {
        self.epoch.plan().request().redundancy > 0
    }

    /// Whether every member of the epoch has come to agree or is known to be dead, and at least one
    /// has come.
    pub fn is_complete(&self) -> bool {
        let came = |rank: usize| self.progress[rank].is_some();
        let mut members = self.epoch.living();
        members.all(|rank| came(rank) || self.dead[rank]) && self.epoch.living().any(came)
    }

    /// Whether a member of this epoch is known to be dead.
    pub fn has_deaths(&self) -> bool {
        let mut members = self.epoch.living();
        members.any(|rank| self.dead[rank])
    }
}
