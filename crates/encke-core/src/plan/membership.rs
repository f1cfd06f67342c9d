//! What happens to a call when a rank dies: who takes over its tokens, and what remains to be done.
//!
//! A call is a sequence of epochs. In the first one every rank executes the plan. After a death,
//! the survivors agree on which ranks are gone and how far each survivor got ([`Agreement`]).
//! [`Epoch::next`] derives from that, identically on every survivor, which rank hosts which shard
//! and what each shard has completed ([`ShardProgress`]); [`Epoch::continuation`] is a survivor's
//! program for the rest. All of this is a pure function of plan and agreements: the same fault
//! gives the same bits.
//!
//! The decision here: a shard outlives its rank. Programs are built per shard, as if each shard
//! still had a rank of its own. The shard of a dead rank restarts on one of its keepers, from the
//! replica of its inputs, in the same rounds as the keeper's own shard. So a continuation is an
//! ordinary program, and every property of programs holds for it.
//!
//! Progress follows from the number of rounds a rank has completed, because the plan says what
//! happens in each round: after `done` rounds a shard's queries have seen the parcels of every
//! round below `done`, and gradients for its keys that were computed in a round have been added two
//! rounds later. Nothing else is recorded or exchanged. Only the first epoch uses the schedule's
//! width; continuations take one distance per round.
//!
//! Where the bits must not depend on the ring, sums cannot be continued in another order: every
//! shard starts again, and only the inputs are kept.

use serde::Serialize;
use std::sync::Arc;

use super::adoption::combine;
use super::backward;
use super::forward;
use super::program::{BufferId, RankPlan};
use super::progress::ShardProgress;
use super::request::Pass;
use super::tile_order;
use super::topology::Plan;
pub use crate::agreement::{Agreement, RankProgress};
use crate::error::{Error, Result};

/// A rank's program after a death, and the buffers it inherits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Continuation {
    /// The program.
    pub program: RankPlan,
    /// For each buffer of the program, the buffer of the previous program whose contents it
    /// inherits.
    pub keeps: Vec<Option<BufferId>>,
}

/// A call between two deaths.
#[derive(Debug, Clone)]
pub struct Epoch {
    plan: Arc<Plan>,
    number: usize,
    alive: Vec<bool>,
    /// The rank that hosts each shard; None for an empty shard whose rank is gone.
    hosts: Vec<Option<usize>>,
    progress: Vec<ShardProgress>,
}

impl Epoch {
    /// The first epoch of a call: every rank is alive and hosts its own shard.
    pub fn first(plan: &Arc<Plan>) -> Epoch {
        let ranks = plan.ranks();
        Epoch {
            plan: Arc::clone(plan),
            number: 0,
            alive: vec![true; ranks],
            hosts: (0..ranks).map(Some).collect(),
            progress: vec![ShardProgress::default(); ranks],
        }
    }

    /// The epoch's number, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The plan of the call.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Whether `rank` is alive.
    pub fn is_alive(&self, rank: usize) -> bool {
        self.alive[rank]
    }

    /// The living ranks, in ascending order.
    pub fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.alive.len()).filter(|rank| self.alive[*rank])
    }

    /// The rank that hosts a shard.
    pub fn host(&self, shard: usize) -> Option<usize> {
        self.hosts[shard]
    }

    /// What a shard had completed when the epoch began.
    pub fn progress(&self, shard: usize) -> &ShardProgress {
        &self.progress[shard]
    }

    /// Whether this agreement ends the call: no rank died, and every rank has finished.
    pub fn is_last(&self, agreement: &Agreement) -> bool {
        self.living().all(|rank| {
            let progress = agreement.progress[rank];
            progress.is_some_and(|progress| progress.finished)
        })
    }

    /// The epoch after this one, or the shard that is lost.
    pub fn next(&self, agreement: &Agreement) -> Result<Epoch> {
        let mut next = self.clone();
        next.number += 1;
        for rank in 0..self.alive.len() {
            next.alive[rank] &= agreement.progress[rank].is_some();
        }
        for shard in 0..self.hosts.len() {
            let host = self.hosts[shard].and_then(|host| agreement.progress[host]);
            if let Some(RankProgress { done, .. }) = host {
                if self.plan.request.bits.is_planned() {
                    self.add_rounds(shard, done, &mut next.progress[shard]);
                }
                continue;
            }
            next.progress[shard] = ShardProgress::default();
            next.hosts[shard] = self.plan.keepers(shard).find(|rank| next.alive[*rank]);
            if next.hosts[shard].is_none() && self.plan.shards().rows(shard) > 0 {
                let keepers = self.plan.keepers(shard).collect();
                return Err(Error::LostShard { shard, keepers });
            }
        }
        Ok(next)
    }

    /// Adds what a shard completed in the first `done` rounds of this epoch. Pairs that the epoch's
    /// program skipped were completed before.
    fn add_rounds(&self, shard: usize, done: usize, progress: &mut ShardProgress) {
        progress.begun |= done > 0;
        for &(index, member) in &self.plan.rings_of[shard] {
            let ring = &self.plan.rings[index];
            let width = match self.number {
                0 => ring.width(self.plan.request.schedule.width),
                _ => 1,
            };
            let round = |distance: usize| (distance - 1) / width + 1;
            let passed = (1..=ring.max_distance()).filter(|&distance| round(distance) < done);
            let seen = passed.filter(|&distance| {
                let parcel = ring.parcel_at(member, distance);
                parcel.is_some_and(|parcel| parcel.first <= distance)
            });
            progress.seen.extend(seen.map(|distance| (index, distance)));
            if self.plan.request.pass != Pass::Forward
                && let Some(parcel) = &ring.parcels[member]
            {
                // Sent in the round after their own, added in the one after that.
                let gathered = parcel.first..=parcel.last;
                let gathered = gathered.filter(|distance| round(*distance) + 3 <= done);
                let gathered = gathered.map(|distance| (index, distance));
                progress.gathered.extend(gathered);
            }
        }
    }

    /// The program of a living rank.
    pub fn program(&self, rank: usize) -> Result<RankPlan> {
        let ranks = self.alive.len();
        if self.number == 0 || !self.alive.get(rank).is_some_and(|alive| *alive) {
            return match self.number {
                0 => self.plan.rank(rank),
                _ => Err(Error::NoSuchRank { rank, ranks }),
            };
        }
        // The own shard first, then adopted ones, the nearest first.
        let hosted = (0..ranks)
            .map(|away| (rank + ranks - away) % ranks)
            .filter(|shard| self.hosts[*shard] == Some(rank));
        let progress = Some(&self.progress[..]);
        let planned = self.plan.request.bits.is_planned();
        let programs = hosted.map(|shard| match self.plan.request.pass {
            _ if !planned => tile_order::program(&self.plan, shard, false),
            Pass::Forward => forward::sharded(&self.plan, shard, progress),
            Pass::Backward { dlse } => backward::rotating_keys(&self.plan, shard, dlse, progress),
            Pass::BackwardByBranch => backward::rotating_keys(&self.plan, shard, false, progress),
        });
        let kept = self.plan.kept(rank);
        let kept = kept.filter(|shard| self.hosts[*shard] != Some(rank));
        Ok(combine(&self.plan, rank, &self.hosts, programs, kept))
    }

    /// The program of a living rank, as the continuation of its previous program.
    pub fn continuation(&self, rank: usize, before: &RankPlan) -> Result<Continuation> {
        let program = self.program(rank)?;
        let keeps = program.buffers.iter().map(|new| {
            let inherited = before.buffers.iter().position(|old| {
                let same = (old.shard, old.name) == (new.shard, new.name);
                same && old.is_resident() && new.is_resident()
            });
            inherited.map(BufferId)
        });
        Ok(Continuation {
            keeps: keeps.collect(),
            program,
        })
    }

    /// (query, key) pairs that the ranks compute in this epoch if none of them dies.
    pub fn pairs(&self) -> Result<u128> {
        let each = self.living().map(|rank| Ok(self.program(rank)?.pairs()));
        each.sum()
    }
}
