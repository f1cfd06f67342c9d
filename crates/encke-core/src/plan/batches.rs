//! Batches: the parcels that are with one member in the same round and move on together.
//!
//! A round of width w covers w distances. The parcels of a round arrive together (in the first
//! round: directly from their owners) and are forwarded together, w members further, as one
//! message.
//!
//! The decision here: the parcels that are forwarded are a prefix of the batch. Parcels are ordered
//! by how many hops they have left, so a shrinking batch needs no repacking. Parcels with equally
//! many hops left are interleaved row by row in token order, so that the jobs on them can be
//! joined.
//!
//! Parcels that are first needed in different rounds are in different batches, because their
//! reductions start in different rounds.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::builder::ProgramBuilder;
use super::layout::PackedLocation;
use super::position::RingPosition;
use super::program::{BufferId, Component, Message, Origin, Role};
use super::rings::{Parcel, Section};
use super::topology::Plan;
use super::width::Width;
use crate::dtype::DType;
use crate::job::Block;
use crate::transport::Address;

/// A parcel at some distance from its owner.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchedParcel<'a> {
    /// Ring steps from the owner.
    pub distance: usize,
    /// The member that owns it.
    pub owner: usize,
    /// Its rows.
    pub parcel: &'a Parcel,
    /// How many more times it is forwarded.
    pub hops_left: usize,
    /// Parcels with equal values are interleaved row by row.
    pub interleave: usize,
}

/// Identifies a batch of one member: the round, and the index within that round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchSlot {
    pub round: usize,
    pub index: usize,
}

/// The parcels that move together.
#[derive(Debug, Clone)]
pub(super) struct ParcelBatch<'a> {
    pub slot: BatchSlot,
    /// The first round in which a member computes with them; before that they only pass through.
    pub since: usize,
    /// In storage order.
    pub parcels: Vec<BatchedParcel<'a>>,
}

impl<'a> ParcelBatch<'a> {
    /// Whether this member computes with it.
    pub fn is_needed(&self) -> bool {
        self.since <= self.slot.round
    }

    /// Whether the previous member computed with it as well.
    pub fn was_needed(&self) -> bool {
        self.since < self.slot.round
    }

    /// The parcels that are forwarded: a prefix.
    pub fn forwarded(&self) -> &[BatchedParcel<'a>] {
        let parcels = self.parcels.iter();
        let count = parcels.take_while(|parcel| parcel.hops_left > 0).count();
        &self.parcels[..count]
    }

    /// The parcels that go no further.
    pub fn finished(&self) -> &[BatchedParcel<'a>] {
        &self.parcels[self.forwarded().len()..]
    }

    /// Ends the route of every parcel here, without changing the storage order.
    pub fn end_here(&mut self) {
        for parcel in &mut self.parcels {
            parcel.hops_left = 0;
        }
    }
}

impl<'a> RingPosition<'a> {
    /// The batches of this member, round by round.
    pub fn batches(self) -> Vec<ParcelBatch<'a>> {
        let RingPosition {
            ring,
            member,
            width,
            ..
        } = self;
        let mut batches = Vec::new();
        for round in 1..=ring.rounds(width) {
            let first = (round - 1) * width + 1;
            let mut by_start: BTreeMap<usize, Vec<BatchedParcel<'a>>> = BTreeMap::new();
            for distance in first..(first + width).min(ring.members.len()) {
                let Some(parcel) = ring.parcel_at(member, distance) else {
                    continue;
                };
                let Some(since) = parcel.needed_from(distance, width) else {
                    continue;
                };
                let hops_left = (parcel.last - distance) / width;
                let start = (since - 1) / width + 1;
                by_start.entry(start).or_default().push(BatchedParcel {
                    distance,
                    owner: ring.owner_index(member, distance),
                    parcel,
                    hops_left,
                    interleave: hops_left,
                });
            }
            for (index, (since, mut parcels)) in by_start.into_iter().enumerate() {
                let token = |of: &BatchedParcel<'_>| {
                    let section = of.parcel.sections.first();
                    section.map(|section| section.rows.position)
                };
                parcels.sort_by_key(|of| (Reverse(of.hops_left), token(of), of.owner));
                batches.push(ParcelBatch {
                    slot: BatchSlot { round, index },
                    since,
                    parcels,
                });
            }
        }
        batches
    }

    /// The batches this member computes with.
    pub fn needed_batches(self) -> Vec<ParcelBatch<'a>> {
        if let Some(nodes) = self.nodes {
            return self.node_batches(nodes);
        }
        let mut batches = self.batches();
        batches.retain(ParcelBatch::is_needed);
        batches
    }
}

/// A section within a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchedSection<'a> {
    /// Index of its parcel in the batch.
    pub parcel: usize,
    pub section: &'a Section,
    pub location: PackedLocation,
}

/// The sections of a batch in groups that are interleaved row by row: equal `interleave` value,
/// same lane and same segments, and at most one of each parcel, so that a batch of one parcel is
/// stored like the parcel alone.
fn interleaved<'a>(parcels: &[BatchedParcel<'a>]) -> Vec<Vec<(usize, &'a Section)>> {
    let mut groups: Vec<(usize, Vec<(usize, &Section)>)> = Vec::new();
    for (index, of) in parcels.iter().enumerate() {
        for section in &of.parcel.sections {
            let group = groups.iter_mut().find(|(interleave, group)| {
                let other = group[0].1;
                let same = (other.lane, other.segments) == (section.lane, section.segments);
                let apart = group.iter().all(|(parcel, _)| *parcel != index);
                *interleave == of.interleave && same && apart
            });
            match group {
                Some((_, group)) => group.push((index, section)),
                None => groups.push((of.interleave, vec![(index, section)])),
            }
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

impl Plan {
    /// Elements of some parcels.
    pub(super) fn batch_elements(&self, parcels: &[BatchedParcel<'_>], width: Width) -> usize {
        let each = parcels.iter();
        each.map(|of| self.parcel_elements(of.parcel, width)).sum()
    }

    /// The sections of a batch in storage order.
    pub(super) fn batch_sections<'a>(
        &self,
        parcels: &[BatchedParcel<'a>],
        width: Width,
    ) -> Vec<BatchedSection<'a>> {
        let (mut sections, mut offset) = (Vec::new(), 0);
        for group in interleaved(parcels) {
            let rows = group.iter().map(|(_, section)| section.rows.count).sum();
            let row = self.section_row(group[0].1, width);
            let segments = group[0].1.segments.count;
            let mut before = 0;
            for (parcel, section) in group {
                let location = PackedLocation {
                    offset: offset + before * row,
                    rows,
                };
                sections.push(BatchedSection {
                    parcel,
                    section,
                    location,
                });
                before += section.rows.count;
            }
            offset += self.request.shape.batch * segments * rows * row;
        }
        sections
    }

    /// The copies that move a parcel from a buffer of its own to its location in a batch.
    pub(super) fn batching(
        &self,
        parcels: &[BatchedParcel<'_>],
        parcel: usize,
        width: Width,
    ) -> Vec<Block> {
        let alone: Vec<_> = self.sections(parcels[parcel].parcel, width).collect();
        let sections = self.batch_sections(parcels, width).into_iter();
        // Both list the sections of the parcel, but not in the same order.
        let copy = |of: BatchedSection<'_>| {
            let from = alone.iter().find(|(_, section)| *section == of.section);
            let &(from, _) = from.expect("a batch has the sections of its parcels");
            self.between(of.section, from, of.location, width)
        };
        sections
            .filter(|of| of.parcel == parcel)
            .map(copy)
            .collect()
    }

    /// A message of some parcels of a batch; `address.elements` is set here.
    pub(super) fn batch_message(
        &self,
        address: Address,
        buffer: BufferId,
        (role, width): (Option<Role>, Width),
        parcels: &[BatchedParcel<'_>],
    ) -> Message {
        let of = |group: Vec<(usize, &Section)>| {
            let sections: Vec<&Section> = group.into_iter().map(|(_, section)| section).collect();
            self.section_rows(&sections, width)
        };
        Message {
            address: Address {
                elements: self.batch_elements(parcels, width),
                ..address
            },
            buffer,
            origin: role.map(|role| Origin {
                role,
                rows: interleaved(parcels).into_iter().map(of).collect(),
            }),
        }
    }
}

impl<'a> ProgramBuilder<'a> {
    /// Buffers for batches of some tensors (name, type, row width): one set for each batch index of
    /// a round, each buffer large enough for every batch with that index. The first set is also
    /// large enough for the parcel `own`.
    pub fn batch_buffers(
        &mut self,
        component: Component,
        tensors: impl Iterator<Item = (&'static str, DType, Width)> + Clone,
        batches: &[&ParcelBatch<'a>],
        own: Option<&Parcel>,
    ) -> Vec<Vec<BufferId>> {
        let plan = self.plan;
        let count = batches.iter().map(|batch| batch.slot.index + 1).max();
        let mut sets = Vec::new();
        for index in 0..count.unwrap_or(1) {
            let buffers = tensors.clone().map(|(name, dtype, width)| {
                let held = batches.iter().filter(|batch| batch.slot.index == index);
                let held = held.map(|batch| plan.batch_elements(&batch.parcels, width));
                let own = own.filter(|_| index == 0);
                let own = own.map(|parcel| plan.parcel_elements(parcel, width));
                let elements = held.chain(own).max().unwrap_or(0);
                self.buffer(name, component, dtype, elements)
            });
            sets.push(buffers.collect());
        }
        sets
    }
}
