//! What moves, and the marks it travels under: channels, seats, tags; and rows that are shared.
//!
//! There are three ways for rows to move, each written once. *Visit* (`visit.rs`): rows go from member
//! to member, read by each. *Gather* (`gather.rs`): sums are added to on their way and end at home.
//! *Share*, here: finished rows go all the way round (queries replicated).

use super::batches::ParcelBatch;
use super::builder::Builder;
use super::layout::{Width, flat};
use super::program::{BufferId, CarryIds, Component, Fill, Message, Origin, Role, Task, TokenRows};
use super::rings::{Parcel, Ring, Rotating};
use super::{Pass, Plan, Queries};
use crate::dtype::DType;
use crate::job::Block;
use crate::transport::Address;
use std::sync::Arc;

/// Tags of one ring, a few each for k and v, for sums that pass, and for sums that go home: the
/// three can be under way between the same two ranks in the same round.
const TAGS: usize = 16;
pub(super) const VISIT: usize = 0;
pub(super) const PASS: usize = 4;
pub(super) const HOME: usize = 8;

/// A quantity that is gathered: its width, what an empty sum is, and the tensor of the call it
/// ends in, if it is a part of one.
#[derive(Clone, Copy)]
pub(super) struct Channel {
    pub name: &'static str,
    pub width: Width,
    pub empty: Fill,
    pub role: Option<Role>,
}

/// A part of a carry.
const fn carried(name: &'static str, width: Width, empty: Fill) -> Channel {
    Channel {
        name,
        width,
        empty,
        role: None,
    }
}

/// A part of a gradient.
const fn gradient(name: &'static str, width: Width, role: Role) -> Channel {
    Channel {
        name,
        width,
        empty: Fill::Zero,
        role: Some(role),
    }
}

/// A carry, to be merged.
pub(super) const CARRY: [Channel; 3] = [
    carried("travelling acc", Width::WideCell, Fill::Zero),
    carried("travelling m", Width::Cell, Fill::MinusInfinity),
    carried("travelling l", Width::Cell, Fill::Zero),
];
/// Gradients of keys and values, to be added.
pub(super) const DKV: [Channel; 2] = [
    gradient("travelling dk", Width::Kv, Role::Dk),
    gradient("travelling dv", Width::Kv, Role::Dv),
];
/// Gradients of queries, to be added.
pub(super) const DQ: [Channel; 1] = [gradient("travelling dq", Width::Query, Role::Dq)];

/// This rank's place in one ring.
#[derive(Clone, Copy)]
pub(super) struct RingPosition<'a> {
    /// The ring's number, the same on all ranks.
    pub index: usize,
    /// The ring.
    pub ring: &'a Ring,
    /// Which member this rank is.
    pub place: usize,
    /// How many distances a round takes.
    pub width: usize,
    /// How many tags all rings take.
    pub tags: usize,
}

impl<'a> RingPosition<'a> {
    /// The parcels this rank computes with: (distance, home rank, parcel).
    pub fn rotating(self) -> impl Iterator<Item = (usize, usize, &'a Parcel)> {
        (1..=self.ring.last()).filter_map(move |distance| {
            let parcel = self.ring.parcel_at(self.place, distance)?;
            let home = self.ring.members[self.ring.home_index(self.place, distance)];
            (parcel.first <= distance).then_some((distance, home, parcel))
        })
    }

    /// One end of a message of what a load holds, passed on from one member to another.
    pub fn passed(
        self,
        member: usize,
        tag: usize,
        load: &ParcelBatch<'_>,
        elements: usize,
    ) -> Address {
        let mut address = self.address(member, tag, elements);
        // Of loads that go the same way in the same round, each has tags of its own.
        if self.width > 1 {
            address.tag += (load.since * self.tags) as u64;
        }
        address
    }

    /// One end of a message with another member.
    pub fn address(self, member: usize, tag: usize, elements: usize) -> Address {
        Address {
            peer: self.ring.members[member],
            tag: (self.index * TAGS + tag) as u64,
            elements,
        }
    }
}

/// Three buffers as a carry.
pub(super) fn carry(buffers: &[BufferId]) -> CarryIds {
    CarryIds {
        acc: buffers[0],
        m: buffers[1],
        l: buffers[2],
    }
}

/// What a message of a parcel's rows holds, if it is of a tensor.
pub(super) fn origin(role: Option<Role>, rows: &Arc<[TokenRows]>) -> Option<Origin> {
    role.map(|role| Origin {
        role,
        rows: Arc::clone(rows),
    })
}

impl Plan {
    /// Bytes that all ranks send, summed over parcels instead of over programs.
    pub(super) fn sent_bytes(&self) -> usize {
        let request = &self.request;
        let (stored, sum) = (request.dtype.bytes(), request.dtype.sum().bytes());
        let parcels = || {
            self.rings.iter().flat_map(|ring| {
                let width = ring.width(request.schedule.width);
                let parcels = ring.parcels.iter().flatten();
                parcels.map(move |parcel| (parcel, width))
            })
        };
        let visits = |bytes: &dyn Fn(&Parcel) -> usize| -> usize {
            let each = parcels().map(|(parcel, width)| bytes(parcel) * parcel.hops(width));
            each.sum()
        };
        let keys = |parcel: &Parcel| 2 * self.parcel_elements(parcel, Width::Kv) * stored;
        let queries = |parcel: &Parcel| -> usize {
            let of = |dtype: DType, width| self.parcel_elements(parcel, width) * dtype.bytes();
            let cargo = self.query_cargo().into_iter();
            cargo.map(|(_, dtype, width, _)| of(dtype, width)).sum()
        };
        let gathers = |channels: &[Channel]| -> usize {
            let of = |(parcel, _): (&Parcel, usize)| {
                let elements = channels
                    .iter()
                    .map(|c| self.parcel_elements(parcel, c.width));
                elements.sum::<usize>() * (parcel.last - parcel.first + 1)
            };
            parcels().map(of).sum::<usize>() * sum
        };
        let rows = request.shape.batch * request.shape.tokens;
        let shared = |width: Width| (self.ranks() - 1) * rows * self.resident_width(width);
        match (request.queries, request.pass) {
            (Queries::Sharded, Pass::Forward) => visits(&keys),
            (Queries::Sharded, Pass::Backward { .. }) => match request.schedule.backward {
                Rotating::Keys => visits(&keys) + gathers(&DKV),
                Rotating::Queries => visits(&queries) + gathers(&DQ),
            },
            (Queries::Replicated, Pass::Forward) => {
                let out = shared(Width::WideCell) * request.out_dtype().bytes();
                gathers(&CARRY) + out + shared(Width::Cell) * sum
            }
            (Queries::Replicated, Pass::Backward { .. }) => {
                gathers(&DQ) + shared(Width::Query) * sum
            }
        }
    }
}

impl<'a> Builder<'a> {
    /// This rank's places in its rings, as the schedule has them.
    pub fn seats(&self) -> Vec<RingPosition<'a>> {
        self.seats_of(self.plan.request.schedule.width)
    }

    /// The same for rounds that take so many distances.
    pub fn seats_of(&self, width: usize) -> Vec<RingPosition<'a>> {
        let plan = self.plan;
        let seat = |&(index, place): &(usize, usize)| {
            let ring = &plan.rings[index];
            RingPosition {
                index,
                ring,
                place,
                width: ring.width(width),
                tags: (plan.rings.len() + 1) * TAGS,
            }
        };
        plan.rings_of[self.rank].iter().map(seat).collect()
    }

    /// Elements of the largest of some parcels.
    pub fn largest<'p>(&self, parcels: impl Iterator<Item = &'p Parcel>, width: Width) -> usize {
        let elements = parcels.map(|parcel| self.plan.parcel_elements(parcel, width));
        elements.max().unwrap_or(0)
    }

    /// One buffer per channel, large enough for the largest of `parcels`.
    pub fn channels<'p>(
        &mut self,
        channels: &[Channel],
        component: Component,
        parcels: impl Iterator<Item = &'p Parcel>,
    ) -> Vec<BufferId> {
        let sum = self.plan.request.dtype.sum();
        let parcels: Vec<&Parcel> = parcels.collect();
        let mut buffers = Vec::new();
        for channel in channels {
            let elements = self.largest(parcels.iter().copied(), channel.width);
            buffers.push(self.buffer(channel.name, component, sum, elements));
        }
        buffers
    }

    /// Adds (or, for the three buffers of a carry, merges) one set of sums into another.
    pub fn combine(
        &mut self,
        round: usize,
        blocks: Vec<Vec<Block>>,
        merge: Vec<Block>,
        from: &[BufferId],
        to: &[BufferId],
    ) {
        if from.len() == CARRY.len() {
            let (from, to) = (carry(from), carry(to));
            let task = Task::Merge {
                blocks: merge,
                from,
                to,
            };
            self.round(round).before.push(task);
            return;
        }
        for ((blocks, &from), &to) in blocks.into_iter().zip(from).zip(to) {
            self.copy(round, blocks, true, from, to);
        }
    }

    pub fn flat_cells(&self, cells: usize) -> Block {
        flat(cells, self.plan.request.shape.dim, 0, 0)
    }

    /// Copies of cells as merges take them: addressed by cell, `dim` numbers wide.
    pub fn cell_blocks(&self, blocks: Vec<Block>) -> Vec<Block> {
        let width = self.plan.request.shape.dim;
        let widen = |block: Block| Block { width, ..block };
        blocks.into_iter().map(widen).collect()
    }

    pub fn copy(
        &mut self,
        round: usize,
        blocks: Vec<Block>,
        add: bool,
        from: BufferId,
        to: BufferId,
    ) {
        self.round(round).before.push(Task::Copy {
            blocks,
            add,
            from,
            to,
        });
    }

    /// Packs a parcel. Blocks that lie one after the other on both sides are one.
    pub fn pack(&mut self, round: usize, blocks: Vec<Block>, from: BufferId, to: BufferId) {
        let mut joined: Vec<Block> = Vec::new();
        for block in blocks {
            match joined.last().and_then(|last| last.join_rows(&block)) {
                Some(both) => *joined.last_mut().expect("there is one") = both,
                None => joined.push(block),
            }
        }
        let blocks = joined;
        let task = Task::Pack { blocks, from, to };
        self.round(round).before.push(task);
    }

    pub fn send(&mut self, round: usize, message: Message) {
        self.round(round).sends.push(message);
    }

    pub fn receive(&mut self, round: usize, message: Message) {
        self.round(round).receives.push(message);
    }

    /// The two buffers in which finished rows go round, each large enough for any rank's.
    pub fn sharing(&mut self, dtype: DType, width: Width) -> [BufferId; 2] {
        let rows = (0..self.plan.ranks()).map(|rank| self.plan.shards.rows(rank));
        let rows = rows.max().unwrap_or(0);
        [0, 1].map(|_| self.resident("sharing", Component::Sharing, dtype, rows, width))
    }

    /// Sends this rank's finished rows round to everyone, from round `start` on. They lie in the
    /// first of the `travel` buffers by then, and go from there into their place in `all`, as does
    /// what comes by.
    pub fn share(
        &mut self,
        start: usize,
        tag: usize,
        travel: [BufferId; 2],
        all: BufferId,
        width: Width,
    ) {
        let (ranks, batch) = (self.plan.ranks(), self.plan.request.shape.batch);
        let rows = |rank: usize| self.plan.shards.rows(rank);
        let elements = |rank: usize| batch * rows(rank) * self.plan.resident_width(width);
        let home = |distance: usize| (self.rank + ranks - distance) % ranks;
        let place = |rank: usize| {
            let at = self.among_all(rank);
            let row = self.plan.resident_width(width);
            let mut block = flat(batch, rows(rank) * row, 0, at.base * row);
            (block.from.row, block.to.row) = (rows(rank) * row, at.rows * row);
            vec![block]
        };
        let places: Vec<Vec<Block>> = (0..ranks).map(|d| place(home(d))).collect();
        let sizes: Vec<usize> = (0..ranks).map(|d| elements(home(d))).collect();
        let tag = self.plan.rings.len() * TAGS + tag;
        let message = |peer: usize, elements: usize, buffer: BufferId| Message {
            address: Address {
                peer,
                tag: tag as u64,
                elements,
            },
            buffer,
            origin: None,
        };
        let (next, previous) = (home(ranks - 1), home(1));
        for (distance, blocks) in places.into_iter().enumerate() {
            let buffer = travel[distance % 2];
            self.copy(start + distance, blocks, false, buffer, all);
            if sizes[distance] == 0 {
                continue;
            }
            if distance > 0 {
                let from = message(previous, sizes[distance], buffer);
                self.receive(start + distance - 1, from);
            }
            if distance + 1 < ranks {
                let to = message(next, sizes[distance], buffer);
                self.send(start + distance, to);
            }
        }
    }
}
