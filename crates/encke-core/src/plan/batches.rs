//! Loads: the parcels that are with one member in the same round.
//!
//! A round of width w takes w distances. What a member has then came to it together (in the first
//! round: straight from the homes) and goes on together, to the member w places further, as one
//! message. The decision here: whatever goes on is the beginning of what is there. Parcels are laid
//! out by how far they still go, so a load that has become shorter needs no packing; those that go
//! equally far lie row by row in the order of their tokens, so that jobs on them are one.
//!
//! Parcels that are needed from different rounds on are different loads: what is added up for them
//! does not begin in the same round.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Plan;
use super::flow::RingPosition;
use super::layout::{Place, Width};
use super::program::TokenRows;
use super::rings::{Parcel, Section};
use crate::job::Block;

/// A parcel that has come some way.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchedParcel<'a> {
    /// How many places from home.
    pub distance: usize,
    /// The member that is its home.
    pub home: usize,
    /// What it holds.
    pub parcel: &'a Parcel,
    /// How many more times it is passed on.
    pub left: usize,
    /// Those that lie row by row have this in common.
    pub pile: usize,
}

/// Where a load is: the round, and which load of that round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stop {
    pub round: usize,
    pub slot: usize,
}

/// The parcels that are together.
#[derive(Debug, Clone)]
pub(super) struct ParcelBatch<'a> {
    pub stop: Stop,
    /// The round from which on they are needed; before, they only pass.
    pub since: usize,
    /// In the order in which they lie.
    pub items: Vec<BatchedParcel<'a>>,
}

impl<'a> ParcelBatch<'a> {
    /// Whether this member computes with it.
    pub fn is_needed(&self) -> bool {
        self.since <= self.stop.round
    }

    /// Whether the member it came from computed with it as well.
    pub fn was_needed(&self) -> bool {
        self.since < self.stop.round
    }

    /// Those that are passed on: the first ones.
    pub fn going(&self) -> &[BatchedParcel<'a>] {
        let going = self.items.iter().take_while(|item| item.left > 0).count();
        &self.items[..going]
    }

    /// Lets every way end here. Where things lie does not change.
    pub fn part(&mut self) {
        for item in &mut self.items {
            item.left = 0;
        }
    }

    /// Those whose way ends here.
    pub fn ended(&self) -> &[BatchedParcel<'a>] {
        &self.items[self.going().len()..]
    }
}

impl<'a> RingPosition<'a> {
    /// What is with this rank in each round, round after round.
    pub fn loads(self) -> Vec<ParcelBatch<'a>> {
        let RingPosition {
            ring, place, width, ..
        } = self;
        let mut loads = Vec::new();
        for round in 1..=ring.rounds(width) {
            let first = (round - 1) * width + 1;
            let mut together: BTreeMap<usize, Vec<BatchedParcel<'a>>> = BTreeMap::new();
            for distance in first..(first + width).min(ring.members.len()) {
                let Some(parcel) = ring.parcel_at(place, distance) else {
                    continue;
                };
                let Some(since) = parcel.needed_from(distance, width) else {
                    continue;
                };
                together
                    .entry((since - 1) / width + 1)
                    .or_default()
                    .push(BatchedParcel {
                        distance,
                        home: ring.home_index(place, distance),
                        parcel,
                        left: (parcel.last - distance) / width,
                        pile: (parcel.last - distance) / width,
                    });
            }
            for (slot, (since, mut items)) in together.into_iter().enumerate() {
                let position = |item: &BatchedParcel<'_>| {
                    let section = item.parcel.sections.first();
                    section.map(|section| section.rows.position)
                };
                items.sort_by_key(|item| (Reverse(item.left), position(item), item.home));
                let stop = Stop { round, slot };
                loads.push(ParcelBatch { stop, since, items });
            }
        }
        loads
    }
}

/// A section of a load: whose it is, and where it lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Laid<'a> {
    /// Which of the items.
    pub item: usize,
    pub section: &'a Section,
    pub place: Place,
}

/// The sections of a load that lie row by row, class after class: equally far to go, the same lane
/// and the same segments.
fn classes<'a>(items: &[BatchedParcel<'a>]) -> Vec<Vec<(usize, &'a Section)>> {
    let mut classes: Vec<(usize, Vec<(usize, &Section)>)> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        for section in &item.parcel.sections {
            let like = classes.iter_mut().find(|(pile, class)| {
                let other = class[0].1;
                let same = (other.lane, other.segments) == (section.lane, section.segments);
                *pile == item.pile && same
            });
            match like {
                Some((_, class)) => class.push((index, section)),
                None => classes.push((item.pile, vec![(index, section)])),
            }
        }
    }
    classes.into_iter().map(|(_, class)| class).collect()
}

impl Plan {
    /// Elements of some parcels.
    pub(super) fn items_elements(&self, items: &[BatchedParcel<'_>], width: Width) -> usize {
        let each = items.iter();
        each.map(|item| self.parcel_elements(item.parcel, width))
            .sum()
    }

    /// The sections of a load in the order in which they lie.
    pub(super) fn laid<'a>(&self, items: &[BatchedParcel<'a>], width: Width) -> Vec<Laid<'a>> {
        let (mut laid, mut offset) = (Vec::new(), 0);
        for class in classes(items) {
            let rows = class.iter().map(|(_, section)| section.rows.count).sum();
            let mut before = 0;
            for (item, section) in class {
                let row = self.section_row(section, width);
                let place = Place {
                    offset: offset + before * row,
                    rows,
                };
                laid.push(Laid {
                    item,
                    section,
                    place,
                });
                before += section.rows.count;
            }
            let last = laid.last().map_or(0, |laid| {
                let row = self.section_row(laid.section, width);
                self.request.shape.batch * laid.section.segments.count * rows * row
            });
            offset += last;
        }
        laid
    }

    /// The copies that bring a parcel from a buffer of its own to its place in a load.
    pub(super) fn stowing(
        &self,
        items: &[BatchedParcel<'_>],
        item: usize,
        width: Width,
    ) -> Vec<Block> {
        let alone = self.sections(items[item].parcel, width);
        let laid = self.laid(items, width);
        let of_item = laid.into_iter().filter(|laid| laid.item == item);
        // Both list the sections of a parcel, but not in the same order.
        let mut blocks = Vec::new();
        let alone: Vec<_> = alone.collect();
        for laid in of_item {
            let from = alone.iter().find(|(_, section)| *section == laid.section);
            let &(from, _) = from.expect("a load has the sections of its parcels");
            blocks.push(self.between(laid.section, from, laid.place, width));
        }
        blocks
    }

    /// The rows of a load by token, in the order in which they lie.
    pub(super) fn load_rows(&self, items: &[BatchedParcel<'_>], width: Width) -> Arc<[TokenRows]> {
        let of = |class: Vec<(usize, &Section)>| {
            let sections: Vec<&Section> = class.into_iter().map(|(_, section)| section).collect();
            self.section_rows(&sections, width)
        };
        classes(items).into_iter().map(of).collect()
    }
}
