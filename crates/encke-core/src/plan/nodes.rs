//! Rings in nodes: the order in which parcels of a two-level ring visit its members.
//!
//! In a ring of N nodes with g members each, step t has two digits, a turn o = t / g and an inner
//! step s = t % g. At that step a member attends the parcel of the member o nodes and s positions
//! before it. A parcel enters every node at its owner's position, once, and rotates from there.
//!
//! The decision here: two levels are a different order of the same visits, never other visits. A
//! ring that cannot have that order (its members lie unevenly in nodes), gains nothing from it (one
//! node, or one member in each) or would send more bytes (a window that ends inside a node) keeps
//! one level, and an explanation says why.

use serde::Serialize;

use super::rings::{Parcel, Ring};

/// The nodes of a ring with equally many members in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct NodeRing {
    /// The number of nodes.
    pub nodes: usize,
    /// Members in each node.
    pub members: usize,
    /// Whether parcels move from lower to higher members.
    rising: bool,
}

/// How the members of a ring lie in nodes, and so how its parcels move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeLayout {
    /// The schedule has one level.
    OneLevel,
    /// All members are in one node: one level, over fast links.
    OneNode,
    /// Every member is in a node of its own: one level, over slow links.
    OneEach,
    /// Nodes have different numbers of members: one level.
    Uneven,
    /// Two levels would send more bytes: one level.
    MoreBytes,
    /// Two levels.
    TwoLevels(NodeRing),
}

impl NodeLayout {
    /// The layout of a ring with `node` ranks in a node.
    pub(super) fn new(ring: &Ring, node: usize) -> NodeLayout {
        if node <= 1 {
            return NodeLayout::OneLevel;
        }
        let mut counts: Vec<usize> = Vec::new();
        let mut before = None;
        for of in ring.members.iter().map(|rank| rank / node) {
            match counts.last_mut() {
                Some(count) if before == Some(of) => *count += 1,
                _ => counts.push(1),
            }
            before = Some(of);
        }
        let members = counts[0];
        let nodes = NodeRing {
            nodes: counts.len(),
            members,
            rising: ring.rising,
        };
        match counts.len() {
            1 => NodeLayout::OneNode,
            _ if counts.iter().any(|count| *count != members) => NodeLayout::Uneven,
            _ if members == 1 => NodeLayout::OneEach,
            _ if nodes.sends_more(ring) => NodeLayout::MoreBytes,
            _ => NodeLayout::TwoLevels(nodes),
        }
    }

    /// The nodes, where there are two levels.
    pub fn node_ring(self) -> Option<NodeRing> {
        match self {
            NodeLayout::TwoLevels(nodes) => Some(nodes),
            _ => None,
        }
    }

    /// Why a ring of a two-level schedule has one level.
    pub fn reason(self) -> Option<&'static str> {
        match self {
            NodeLayout::OneLevel | NodeLayout::TwoLevels(_) => None,
            NodeLayout::OneNode => Some("one level: all in one node"),
            NodeLayout::OneEach => Some("one level: each in a node of its own"),
            NodeLayout::Uneven => Some("one level: its ranks lie unevenly in nodes"),
            NodeLayout::MoreBytes => Some("one level: two would send more"),
        }
    }
}

impl NodeRing {
    fn all(self) -> usize {
        self.nodes * self.members
    }

    /// Node and position of a member, both counted in the direction in which parcels move.
    fn place(self, member: usize) -> (usize, usize) {
        let index = self.turned(member);
        (index / self.members, index % self.members)
    }

    fn turned(self, member: usize) -> usize {
        match self.rising {
            true => member,
            false => self.all() - 1 - member,
        }
    }

    /// The member `nodes` nodes and `positions` positions after another.
    fn after(self, member: usize, nodes: usize, positions: usize) -> usize {
        let (node, position) = self.place(member);
        let node = (node + nodes) % self.nodes;
        let position = (position + positions) % self.members;
        self.turned(node * self.members + position)
    }

    /// The member that attends the parcel of `owner` at `step`.
    pub fn reader(self, owner: usize, step: usize) -> usize {
        self.after(owner, step / self.members, step % self.members)
    }

    /// The member whose parcel `reader` attends at `step`.
    pub fn owner(self, reader: usize, step: usize) -> usize {
        let (turn, inner) = (step / self.members, step % self.members);
        self.after(reader, self.nodes - turn, self.members - inner)
    }

    /// The member after this one in its node, and the one before it.
    pub fn beside(self, member: usize) -> (usize, usize) {
        let before = self.after(member, 0, self.members - 1);
        (self.after(member, 0, 1), before)
    }

    /// The member in the same position of the next node, and of the one before.
    pub fn across(self, member: usize) -> (usize, usize) {
        let before = self.after(member, self.nodes - 1, 0);
        (self.after(member, 1, 0), before)
    }

    /// Steps around the whole ring from an owner to the reader of a step.
    pub fn distance(self, owner: usize, step: usize) -> usize {
        let reader = self.turned(self.reader(owner, step));
        (reader + self.all() - self.turned(owner)) % self.all()
    }

    /// Whether the reader of a step needs the parcel.
    pub fn is_needed(self, owner: usize, parcel: &Parcel, step: usize) -> bool {
        let distance = self.distance(owner, step);
        (parcel.first.max(1)..=parcel.last).contains(&distance)
    }

    /// The step in which a reader attends the parcel that is `distance` members from its owner.
    pub fn step(self, reader: usize, owner: usize) -> usize {
        let ((node, position), (of, at)) = (self.place(reader), self.place(owner));
        let turn = (node + self.nodes - of) % self.nodes;
        turn * self.members + (position + self.members - at) % self.members
    }

    /// The first and the last inner step of a turn in which the parcel is needed; None if its node
    /// does not need it.
    pub fn span(self, owner: usize, parcel: &Parcel, turn: usize) -> Option<(usize, usize)> {
        let needs = |inner: &usize| {
            let step = turn * self.members + inner;
            self.is_needed(owner, parcel, step)
        };
        let first = (0..self.members).find(needs)?;
        let last = (first..self.members).rev().find(needs)?;
        Some((first, last))
    }

    /// The last turn in which a node needs the parcel.
    pub fn last_turn(self, owner: usize, parcel: &Parcel) -> usize {
        let needs = |turn: &usize| self.span(owner, parcel, *turn).is_some();
        (0..self.nodes).rev().find(needs).unwrap_or(0)
    }

    /// The number of turns until every parcel has reached all its readers.
    pub fn turns(self, ring: &Ring) -> usize {
        let parcels = ring.parcels.iter().enumerate();
        let turns = parcels.filter_map(|(owner, parcel)| {
            let parcel = parcel.as_ref()?;
            Some(self.last_turn(owner, parcel) + 1)
        });
        turns.max().unwrap_or(0)
    }

    /// How often a parcel is sent: inside nodes, and between nodes.
    pub fn hops(self, owner: usize, parcel: &Parcel) -> (usize, usize) {
        let last = self.last_turn(owner, parcel);
        let spans = (0..=last).filter_map(|turn| self.span(owner, parcel, turn));
        (spans.map(|(_, last)| last).sum(), last)
    }

    /// How often sums for a parcel are sent: inside nodes, and to the owner.
    pub fn sums(self, owner: usize, parcel: &Parcel) -> (usize, usize) {
        let last = self.last_turn(owner, parcel);
        let spans = (0..=last).filter_map(|turn| self.span(owner, parcel, turn));
        spans.fold((0, 0), |(inside, home), (first, last)| {
            (inside + last - first, home + 1)
        })
    }

    /// Whether any parcel, or the sums for it, would be sent more often than in one level.
    fn sends_more(self, ring: &Ring) -> bool {
        let parcels = ring.parcels.iter().enumerate();
        let mut parcels = parcels.filter_map(|(owner, parcel)| Some((owner, parcel.as_ref()?)));
        parcels.any(|(owner, parcel)| {
            let (inside, between) = self.hops(owner, parcel);
            let (passed, home) = self.sums(owner, parcel);
            let reduced = parcel.last - parcel.first + 1;
            inside + between > parcel.hops(1) || passed + home > reduced
        })
    }
}
