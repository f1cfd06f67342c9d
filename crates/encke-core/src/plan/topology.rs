//! The part of a plan that all ranks share: shards, lanes, groups of ranks, and rings.
//!
//! Nothing here belongs to one rank; the programs of single ranks are built from it (`forward.rs`,
//! `backward.rs`). Its size does not depend on the number of tokens.
//!
//! The seed of dropout decides nothing here: plans that differ in it alone share all else, and a
//! cached plan serves a call with another seed ([`Plan::with_seed`]).

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use super::head_shares::{self, HeadShare};
use super::nodes::{NodeLayout, NodeRing};
use super::program::{RankPlan, Role};
use super::request::{Pass, Request};
use super::rings::{self, Ring};
use super::width::{HeadAddresses, Width};
use crate::dtype::DType;
use crate::error::Result;
use crate::pattern::Lane;
use crate::rows::{Group, Shards};

/// A request resolved into shards, lanes and rings: what the ranks compute and exchange.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(super) request: Request,
    topology: Arc<Topology>,
}

/// What plans share that differ in the seed of dropout alone.
#[derive(Debug)]
pub struct Topology {
    pub(super) shards: Shards,
    pub(super) lanes: Vec<Lane>,
    /// Head offsets of each lane.
    pub(super) heads: Vec<HeadAddresses>,
    pub(super) slots: usize,
    /// The groups of ranks of each lane.
    pub(super) groups: Vec<Vec<Group>>,
    pub(super) rings: Vec<Ring>,
    /// How each ring lies in nodes.
    pub(super) layouts: Vec<NodeLayout>,
    /// The shares of the heads, where ranks of a group divide them.
    pub(super) shares: Vec<HeadShare>,
    /// (lane, group) of each rank.
    pub(super) groups_of: Vec<Vec<(usize, usize)>>,
    /// (ring, member index) of each rank.
    pub(super) rings_of: Vec<Vec<(usize, usize)>>,
    /// The programs that [`Plan::program`] has made, with the seed of the plan that made them.
    pub(super) programs: Vec<OnceLock<Arc<RankPlan>>>,
}

impl Deref for Plan {
    type Target = Topology;

    fn deref(&self) -> &Topology {
        &self.topology
    }
}

impl Plan {
    /// Checks the request and finds its rings.
    pub fn new(request: Request) -> Result<Plan> {
        request.check()?;
        let lanes = request.pattern.lanes(&request.shape);
        let slots = request.pattern.slots(request.shape.heads).len();
        let shares = head_shares::shares(&request, &lanes)?;
        Ok(Plan::with_lanes(request, lanes, slots, shares))
    }

    /// The plan of a request that was checked, with these of its lanes.
    pub(super) fn with_lanes(
        request: Request,
        lanes: Vec<Lane>,
        slots: usize,
        shares: Vec<HeadShare>,
    ) -> Plan {
        let ranks = request.sharding.ranks();
        let shards = Shards::new(&request.sharding, request.shape.tokens, &request.pattern)
            .with_queries(request.positions());
        let groups: Vec<Vec<Group>> = lanes.iter().map(|lane| shards.groups(lane)).collect();
        let pattern = &request.pattern;
        let rings = rings::rings(&shards, &lanes, &groups, pattern, request.rotating());

        let mut groups_of = vec![Vec::new(); ranks];
        for (lane, groups) in groups.iter().enumerate() {
            for (index, group) in groups.iter().enumerate() {
                for &rank in &group.members {
                    groups_of[rank].push((lane, index));
                }
            }
        }
        let mut rings_of = vec![Vec::new(); ranks];
        for (index, ring) in rings.iter().enumerate() {
            for (member, &rank) in ring.members.iter().enumerate() {
                rings_of[rank].push((index, member));
            }
        }
        let layout = |ring: &Ring| NodeLayout::new(ring, request.schedule.node);
        let topology = Topology {
            layouts: rings.iter().map(layout).collect(),
            heads: lanes
                .iter()
                .map(|lane| HeadAddresses::new(lane, &request.shape))
                .collect(),
            slots,
            shares,
            shards,
            lanes,
            groups,
            rings,
            groups_of,
            rings_of,
            programs: vec![OnceLock::new(); ranks],
        };
        Plan {
            request,
            topology: Arc::new(topology),
        }
    }

    /// This plan for a call with another seed of its dropout. Decides nothing again.
    pub fn with_seed(&self, seed: u64) -> Plan {
        Plan {
            request: self.request.clone().with_seed(seed),
            topology: Arc::clone(&self.topology),
        }
    }

    /// Whether one plan is the other with another seed, or the same one.
    pub fn differs_in_seed_alone(&self, other: &Plan) -> bool {
        Arc::ptr_eq(&self.topology, &other.topology)
    }

    /// The request.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.request.sharding.ranks()
    }

    /// The pattern's lanes.
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Head slots of out and lse; see [`Pattern::slots`](crate::Pattern::slots).
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Slots of the deltas of branches; see
    /// [`Pattern::delta_slots`](crate::Pattern::delta_slots).
    pub fn delta_slots(&self) -> usize {
        let heads = self.lanes.iter().flat_map(|lane| &lane.heads);
        heads.map(|head| head.delta_slot + 1).max().unwrap_or(0)
    }

    /// The rings in which parcels rotate.
    pub fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// How the members of each ring lie in nodes, in the order of [`Plan::rings`].
    pub fn layouts(&self) -> &[NodeLayout] {
        &self.layouts
    }

    /// The nodes of a ring, where its parcels move in two levels.
    pub(super) fn node_ring(&self, ring: usize) -> Option<NodeRing> {
        self.layouts[ring].node_ring()
    }

    /// Which rank owns which tokens.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Whether a continuation may follow the first epoch: some rank's inputs are replicated, or
    /// some rank owns no rows that could be lost.
    pub(super) fn is_resumable(&self) -> bool {
        let empty = |rank| self.shards.rows(rank) == 0;
        self.request.redundancy > 0 || (0..self.ranks()).any(empty)
    }

    /// The ranks that hold a replica of the inputs of `shard`, in the order in which they would
    /// adopt it.
    pub fn keepers(&self, shard: usize) -> impl Iterator<Item = usize> + use<> {
        let ranks = self.ranks();
        (1..=self.request.redundancy).map(move |away| (shard + away) % ranks)
    }

    /// The shards whose inputs `rank` replicates, the nearest first.
    pub fn kept(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let ranks = self.ranks();
        (1..=self.request.redundancy).map(move |away| (rank + ranks - away) % ranks)
    }

    /// The inputs of one rank with sharded queries: (tensor, buffer name, type, row width).
    pub(super) fn inputs(&self) -> Vec<(Role, &'static str, DType, Width)> {
        let (dtype, sum) = (self.request.dtype, self.request.dtype.sum());
        let out_dtype = self.request.out_dtype();
        let mut inputs = vec![
            (Role::Q, "q", dtype, Width::Query),
            (Role::K, "k", dtype, Width::Key),
            (Role::V, "v", dtype, Width::Value),
        ];
        if let Pass::Backward { dlse } = self.request.pass {
            inputs.push((Role::Out, "out", out_dtype, Width::WideCell));
            inputs.push((Role::Lse, "lse", sum, Width::Cell));
            inputs.push((Role::Dout, "dout", dtype, Width::WideCell));
            inputs.extend(dlse.then_some((Role::Dlse, "dlse", sum, Width::Cell)));
        }
        if self.request.pass == Pass::BackwardByBranch {
            inputs.push((Role::Lse, "lse", sum, Width::Cell));
            inputs.push((Role::Dout, "dout", dtype, Width::WideCell));
            inputs.push((Role::Delta, "delta", sum, Width::Delta));
        }
        inputs
    }

    /// The first round in which all parcels and sums have reached their owners: the same on all
    /// ranks.
    pub(super) fn settled_round(&self) -> usize {
        let width = self.request.schedule.width;
        let rounds = |ring: &Ring| ring.rounds(ring.width(width));
        self.rings.iter().map(rounds).max().unwrap_or(0) + 2
    }
}
