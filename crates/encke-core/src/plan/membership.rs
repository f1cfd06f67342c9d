//! What becomes of a call when a rank dies: who goes on with its tokens, and what is left to do.
//!
//! A call is a sequence of epochs. In the first, everyone carries out the plan. When somebody has
//! died, the survivors agree on who is gone and how far each of them has come ([`Agreement`]), and
//! [`Epoch::next`] makes of it, on every survivor alike, who hosts which shard from now on and what
//! each shard has got so far ([`Progress`]); [`Epoch::continuation`] is a survivor's program for the
//! rest. A pure function of plan and agreements: the same fault, the same bits.
//!
//! The decision here: a shard outlives its rank. Programs are made shard by shard, as if each still
//! had a rank of its own; one whose rank died is begun anew on the inputs that its keeper has, by
//! the keeper, in the same rounds as the keeper's own. So a continuation is no new kind of program,
//! and all that is known of plans is true of it.
//!
//! What a shard has got is known from the number of rounds its rank has come through, because what
//! is done in a round is in the plan: its queries have seen the parcels of every round below that
//! number, and gradients of its keys computed in a round are at home two rounds later. Nothing else
//! needs to be remembered or told. Only the first epoch is as wide as the schedule says: what is left
//! to do after a death is taken one distance at a time.

use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::program::{BufferId, RankPlan};
use super::{Pass, Plan, adoption, backward, forward};
use crate::error::{Error, Result};

/// How far a rank has come in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RankProgress {
    /// Rounds of its program whose tasks it has done, whatever became of the messages of the last.
    pub done: usize,
    /// Whether that was all, and all messages have come.
    pub finished: bool,
}

/// What the survivors of an epoch agree on when it ends: the same on each of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Agreement {
    /// How far each rank has come; None for those that are gone, in this epoch or before.
    pub standings: Vec<Option<RankProgress>>,
}

/// What one shard has got so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// Whether it has begun, and so met its own rows.
    pub begun: bool,
    /// (ring, distance) of the parcels that its queries have seen.
    pub seen: BTreeSet<(usize, usize)>,
    /// (ring, distance) of those that its parcel met and whose gradients for it are at home.
    pub gathered: BTreeSet<(usize, usize)>,
}

/// A rank's program after a death, and where it finds what it has got so far.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Continuation {
    /// What it does.
    pub program: RankPlan,
    /// For each buffer of the program, the one of the program before that it goes on with.
    pub keeps: Vec<Option<BufferId>>,
}

/// A call between two deaths.
#[derive(Debug, Clone)]
pub struct Epoch {
    plan: Arc<Plan>,
    number: usize,
    alive: Vec<bool>,
    /// Who hosts each shard; nobody needs to where it is empty.
    hosts: Vec<Option<usize>>,
    so_far: Vec<Progress>,
}

impl Epoch {
    /// The first epoch of a call: everyone is there, and hosts its own tokens.
    pub fn first(plan: &Arc<Plan>) -> Epoch {
        let ranks = plan.ranks();
        Epoch {
            plan: Arc::clone(plan),
            number: 0,
            alive: vec![true; ranks],
            hosts: (0..ranks).map(Some).collect(),
            so_far: vec![Progress::default(); ranks],
        }
    }

    /// Which one it is, from 0.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The plan of the call.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Whether `rank` takes part.
    pub fn is_alive(&self, rank: usize) -> bool {
        self.alive[rank]
    }

    /// The ranks that take part, rising.
    pub fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.alive.len()).filter(|rank| self.alive[*rank])
    }

    /// Who hosts a shard.
    pub fn host(&self, shard: usize) -> Option<usize> {
        self.hosts[shard]
    }

    /// What a shard had got when the epoch began.
    pub fn progress(&self, shard: usize) -> &Progress {
        &self.so_far[shard]
    }

    /// Whether an epoch that ends like this ends the call: nobody died, and everyone has finished.
    pub fn is_last(&self, agreement: &Agreement) -> bool {
        self.living().all(|rank| {
            let standing = agreement.standings[rank];
            standing.is_some_and(|standing| standing.finished)
        })
    }

    /// The epoch after this one, or which shard is lost.
    pub fn next(&self, agreement: &Agreement) -> Result<Epoch> {
        let mut next = self.clone();
        next.number += 1;
        for rank in 0..self.alive.len() {
            next.alive[rank] &= agreement.standings[rank].is_some();
        }
        for shard in 0..self.hosts.len() {
            let standing = self.hosts[shard].and_then(|host| agreement.standings[host]);
            if let Some(RankProgress { done, .. }) = standing {
                self.note(shard, done, &mut next.so_far[shard]);
                continue;
            }
            next.so_far[shard] = Progress::default();
            next.hosts[shard] = self.plan.keepers(shard).find(|rank| next.alive[*rank]);
            if next.hosts[shard].is_none() && self.plan.shards().rows(shard) > 0 {
                let keepers = self.plan.keepers(shard).collect();
                return Err(Error::LostShard { shard, keepers });
            }
        }
        Ok(next)
    }

    /// Adds what a shard has got in so many rounds. What these rounds left out it had before.
    fn note(&self, shard: usize, done: usize, progress: &mut Progress) {
        progress.begun |= done > 0;
        for &(index, place) in &self.plan.rings_of[shard] {
            let ring = &self.plan.rings[index];
            let width = match self.number {
                0 => ring.width(self.plan.request.schedule.width),
                _ => 1,
            };
            let round = |distance: usize| (distance - 1) / width + 1;
            let seen = (1..=ring.last()).filter(|&distance| round(distance) < done);
            let met = seen.filter(|&distance| {
                let parcel = ring.parcel_at(place, distance);
                parcel.is_some_and(|parcel| parcel.first <= distance)
            });
            progress.seen.extend(met.map(|distance| (index, distance)));
            if let (Pass::Backward { .. }, Some(parcel)) =
                (self.plan.request.pass, &ring.parcels[place])
            {
                // Sent in the round after their own, added in the one after that.
                let home = parcel.first..=parcel.last;
                let home = home.filter(|distance| round(*distance) + 3 <= done);
                progress
                    .gathered
                    .extend(home.map(|distance| (index, distance)));
            }
        }
    }

    /// The program of a rank that takes part.
    pub fn program(&self, rank: usize) -> Result<RankPlan> {
        let ranks = self.alive.len();
        if self.number == 0 || !self.alive.get(rank).is_some_and(|alive| *alive) {
            return match self.number {
                0 => self.plan.rank(rank),
                _ => Err(Error::NoSuchRank { rank, ranks }),
            };
        }
        // The own shard first; then what was adopted, the nearest first.
        let mine = (0..ranks)
            .map(|away| (rank + ranks - away) % ranks)
            .filter(|shard| self.hosts[*shard] == Some(rank));
        let programs = mine.map(|shard| match self.plan.request.pass {
            Pass::Forward => forward::sharded(&self.plan, shard, Some(&self.so_far)),
            Pass::Backward { dlse } => {
                backward::sharded(&self.plan, shard, dlse, Some(&self.so_far))
            }
        });
        let kept = self.plan.kept(rank);
        let kept = kept.filter(|shard| self.hosts[*shard] != Some(rank));
        Ok(adoption::together(
            &self.plan,
            rank,
            &self.hosts,
            programs,
            kept,
        ))
    }

    /// The program of a rank that takes part, as the continuation of the one it had before.
    pub fn continuation(&self, rank: usize, before: &RankPlan) -> Result<Continuation> {
        let program = self.program(rank)?;
        let keeps = program.buffers.iter().map(|wanted| {
            let same = before.buffers.iter().position(|had| {
                let same = (had.shard, had.name) == (wanted.shard, wanted.name);
                same && had.is_resident() && wanted.is_resident()
            });
            same.map(BufferId)
        });
        Ok(Continuation {
            keeps: keeps.collect(),
            program,
        })
    }

    /// (query, key) pairs that the ranks of this epoch compute, if nobody dies.
    pub fn pairs(&self) -> Result<u128> {
        let each = self.living().map(|rank| Ok(self.program(rank)?.pairs()));
        each.sum()
    }
}
