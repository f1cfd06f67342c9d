//! The plan: who computes what, who sends what to whom, in which order, and how many bytes it takes.
//!
//! A pure function of the request, and the same on every rank. [`Plan::new`] finds the rings,
//! [`Plan::rank`] resolves one rank into a program. Nothing in here grows with the number of
//! tokens; a plan for a billion of them is made in the time of one for a thousand.

mod adoption;
mod assignment;
mod backward;
pub mod balance;
mod batches;
mod builder;
mod component;
mod direct;
pub mod explain;
mod flow;
mod forward;
mod fuse_softmax;
mod gather;
mod jobs;
mod layout;
pub mod membership;
pub mod program;
pub mod resize;
pub mod rings;
mod rotation;
mod schedule;
mod sparse;

use serde::Serialize;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::pattern::{Lane, Pattern};
use crate::rows::{Group, Shards};
use crate::shape::Shape;
use crate::sharding::Sharding;
use layout::{HeadAddresses, Width};
use program::{RankPlan, Role};
use rings::{Ring, Rotating};
pub use schedule::Schedule;

/// Who holds the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Queries {
    /// Each rank holds those of its own tokens; keys and values travel.
    Sharded,
    /// Every rank holds all and ends with all of the output; keys and values stay where they are.
    Replicated,
}

/// Which way the call goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pass {
    /// q, k, v to out, lse.
    Forward,
    /// q, k, v, out, lse, dout (and dlse) to dq, dk, dv.
    Backward {
        /// Whether the lse has a gradient too.
        dlse: bool,
    },
}

/// Everything a plan depends on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Request {
    /// Sizes.
    pub shape: Shape,
    /// Who sees whom.
    pub pattern: Pattern,
    /// Who owns which tokens.
    pub sharding: Sharding,
    /// Who holds the queries.
    pub queries: Queries,
    /// The storage type.
    pub dtype: DType,
    /// The softmax scale; 1/sqrt(dim) where none is given.
    pub scale: Option<f64>,
    /// The direction.
    pub pass: Pass,
    /// How many other ranks keep each rank's inputs, so that so many neighbours may die.
    pub redundancy: usize,
    /// How parcels go round.
    pub schedule: Schedule,
}

impl Request {
    /// A request for a forward pass with every choice at its default.
    pub fn new(shape: Shape, pattern: Pattern, sharding: Sharding, dtype: DType) -> Request {
        Request {
            shape,
            pattern,
            sharding,
            queries: Queries::Sharded,
            dtype,
            scale: None,
            pass: Pass::Forward,
            redundancy: 0,
            schedule: Schedule::RING,
        }
    }

    /// The softmax scale in force.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| self.shape.default_scale())
    }

    /// The type of out: sums that are still to be combined are not rounded yet.
    pub fn out_dtype(&self) -> DType {
        if self.pattern.splits_slots() {
            self.dtype.sum()
        } else {
            self.dtype
        }
    }

    /// Whether a job may write out itself: kernels write the type they read.
    pub(crate) fn ends_in_jobs(&self) -> bool {
        self.out_dtype() == self.dtype
    }

    /// What travels.
    pub fn freight(&self) -> Rotating {
        match (self.queries, self.pass) {
            (Queries::Sharded, Pass::Forward) => Rotating::Keys,
            (Queries::Sharded, Pass::Backward { .. }) => self.schedule.backward,
            (Queries::Replicated, _) => Rotating::Queries,
        }
    }

    fn check(&self) -> Result<()> {
        self.pattern.check(&self.shape)?;
        self.sharding.check(self.shape.tokens)?;
        if !self.scale().is_finite() {
            return Err(Error::Scale { got: self.scale() });
        }
        let (redundancy, ranks) = (self.redundancy, self.sharding.ranks());
        if redundancy >= ranks && redundancy > 0 {
            return Err(Error::Redundancy { redundancy, ranks });
        }
        if redundancy > 0 && self.queries == Queries::Replicated {
            return Err(Error::RedundantQueries { redundancy });
        }
        if self.schedule.width == 0 {
            return Err(Error::NoWidth);
        }
        if redundancy > 0 && self.schedule.backward == Rotating::Queries {
            return Err(Error::RedundantRotation { redundancy });
        }
        Ok(())
    }
}

/// What all ranks will do.
#[derive(Debug, Clone)]
pub struct Plan {
    request: Request,
    shards: Shards,
    lanes: Vec<Lane>,
    heads: Vec<HeadAddresses>,
    slots: usize,
    groups: Vec<Vec<Group>>,
    rings: Vec<Ring>,
    /// (lane, group) of each rank.
    groups_of: Vec<Vec<(usize, usize)>>,
    /// (ring, member index) of each rank.
    rings_of: Vec<Vec<(usize, usize)>>,
}

impl Plan {
    /// Makes the plan, or says which number of the request was wrong.
    pub fn new(request: Request) -> Result<Plan> {
        request.check()?;
        let ranks = request.sharding.ranks();
        let shards = Shards::new(&request.sharding, request.shape.tokens);
        let lanes = request.pattern.lanes(&request.shape);
        let groups: Vec<Vec<Group>> = lanes.iter().map(|lane| shards.groups(lane)).collect();
        let freight = request.freight();
        let causal = request.pattern.is_causal();
        let rings = rings::rings(&shards, &lanes, &groups, causal, freight);

        let mut groups_of = vec![Vec::new(); ranks];
        for (lane, groups) in groups.iter().enumerate() {
            for (index, group) in groups.iter().enumerate() {
                for &rank in &group.members {
                    groups_of[rank].push((lane, index));
                }
            }
        }
        let mut rings_of = vec![Vec::new(); ranks];
        for (ring, of) in rings.iter().enumerate() {
            for (index, &rank) in of.members.iter().enumerate() {
                rings_of[rank].push((ring, index));
            }
        }
        Ok(Plan {
            heads: lanes
                .iter()
                .map(|lane| HeadAddresses::new(lane, request.shape.dim))
                .collect(),
            slots: request.pattern.slots(request.shape.heads).len(),
            request,
            shards,
            lanes,
            groups,
            rings,
            groups_of,
            rings_of,
        })
    }

    /// What was asked for.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// How many ranks take part.
    pub fn ranks(&self) -> usize {
        self.request.sharding.ranks()
    }

    /// The pattern's lanes.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Head slots of out and lse; see [`Pattern::slots`].
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The rings in which parcels travel.
    pub fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// Who owns which tokens.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The program of one rank.
    pub fn rank(&self, rank: usize) -> Result<RankPlan> {
        if rank >= self.ranks() {
            return Err(Error::NoSuchRank {
                rank,
                ranks: self.ranks(),
            });
        }
        Ok(match self.request.pass {
            Pass::Forward if self.request.ends_in_jobs() => {
                fuse_softmax::straight(forward::program(self, rank), self.can_go_on())
            }
            Pass::Forward => forward::program(self, rank),
            Pass::Backward { dlse } => backward::program(self, rank, dlse),
        })
    }

    /// Whether survivors may have to go on with what they have got: somebody keeps inputs, or has
    /// none that could be lost.
    fn can_go_on(&self) -> bool {
        let empty = |rank| self.shards.rows(rank) == 0;
        self.request.redundancy > 0 || (0..self.ranks()).any(empty)
    }

    /// The ranks that keep the inputs of `shard`, in the order in which they would adopt it.
    pub fn keepers(&self, shard: usize) -> impl Iterator<Item = usize> + use<> {
        let ranks = self.ranks();
        (1..=self.request.redundancy).map(move |away| (shard + away) % ranks)
    }

    /// The shards whose inputs `rank` keeps beside its own, the nearest first.
    pub fn kept(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let ranks = self.ranks();
        (1..=self.request.redundancy).map(move |away| (rank + ranks - away) % ranks)
    }

    /// What a rank is given of its own rows, queries being sharded.
    fn inputs(&self) -> Vec<(Role, &'static str, DType, Width)> {
        let (dtype, sum) = (self.request.dtype, self.request.dtype.sum());
        let out_dtype = self.request.out_dtype();
        let mut inputs = vec![
            (Role::Q, "q", dtype, Width::Query),
            (Role::K, "k", dtype, Width::Kv),
            (Role::V, "v", dtype, Width::Kv),
        ];
        if let Pass::Backward { dlse } = self.request.pass {
            inputs.push((Role::Out, "out", out_dtype, Width::WideCell));
            inputs.push((Role::Lse, "lse", sum, Width::Cell));
            inputs.push((Role::Dout, "dout", dtype, Width::WideCell));
            inputs.extend(dlse.then_some((Role::Dlse, "dlse", sum, Width::Cell)));
        }
        inputs
    }

    /// What visits other ranks where queries do: what a backward job reads of them.
    fn query_cargo(&self) -> [(&'static str, DType, Width, Option<Role>); 4] {
        let (dtype, sum) = (self.request.dtype, self.request.dtype.sum());
        let wide = Width::WideCell;
        [
            ("travelling q", dtype, Width::Query, Some(Role::Q)),
            ("travelling dout", dtype, wide, Some(Role::Dout)),
            ("travelling lse", sum, Width::Cell, Some(Role::Lse)),
            ("travelling delta", sum, Width::Cell, None),
        ]
    }

    /// The round in which every parcel has come home: the same on all ranks.
    fn settled_round(&self) -> usize {
        let width = self.request.schedule.width;
        let rounds = |ring: &Ring| ring.rounds(ring.width(width));
        self.rings.iter().map(rounds).max().unwrap_or(0) + 2
    }
}
