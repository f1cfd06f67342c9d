//! A rank's position in a ring: its neighbours, the parcels it gets, and the tags of its messages.

use super::nodes::NodeRing;
use super::progress::ShardProgress;
use super::rings::{Parcel, Ring};
use crate::transport::Address;

/// Tags per ring. Rotating tensors, partial sums that are passed on and sums that return to their
/// owner have separate tags: all three can be in flight between the same two ranks in one round.
pub(super) const TAGS: usize = 16;
/// Tag of the first rotating tensor.
pub(super) const ROTATE_TAG: usize = 0;
/// Tag of the first sum that is passed on.
pub(super) const PASS_TAG: usize = 4;
/// Tag of the first sum that returns to its owner.
pub(super) const RETURN_TAG: usize = 8;

/// This rank's position in one ring.
#[derive(Clone, Copy)]
pub(super) struct RingPosition<'a> {
    /// The ring's index, the same on all ranks.
    pub index: usize,
    /// The ring.
    pub ring: &'a Ring,
    /// This rank's index among the members.
    pub member: usize,
    /// How many distances a round takes.
    pub width: usize,
    /// The nodes of the ring, where parcels move in two levels.
    pub nodes: Option<NodeRing>,
    /// The number of tags of all rings together.
    pub tags: usize,
}

/// One rank's queries and another rank's parcel: they are computed once, in the round of their
/// distance.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingPair {
    /// The ring's index.
    pub ring: usize,
    /// How many ring steps the reader is from the owner.
    pub distance: usize,
    /// The rank of the queries.
    pub reader: usize,
    /// The rank of the keys.
    pub owner: usize,
}

impl RingPair {
    /// Whether the queries have not yet attended to the keys.
    pub fn is_new_to_queries(self, progress: &[ShardProgress]) -> bool {
        let seen = &progress[self.reader].seen;
        !seen.contains(&(self.ring, self.distance))
    }

    /// Whether the pair's share of dk and dv has not yet been added at the owner.
    pub fn is_new_to_keys(self, progress: &[ShardProgress]) -> bool {
        let gathered = &progress[self.owner].gathered;
        !gathered.contains(&(self.ring, self.distance))
    }
}

impl<'a> RingPosition<'a> {
    /// This rank's parcel, if it has one in the ring.
    pub fn own_parcel(self) -> Option<&'a Parcel> {
        self.ring.parcels[self.member].as_ref()
    }

    /// The parcels this rank computes with, as pairs with its own queries.
    pub fn incoming(self) -> impl Iterator<Item = (RingPair, &'a Parcel)> {
        (1..=self.ring.max_distance()).filter_map(move |distance| {
            let parcel = self.ring.parcel_at(self.member, distance)?;
            let owner = self.ring.owner_index(self.member, distance);
            (parcel.first <= distance).then(|| (self.pair(distance, owner), parcel))
        })
    }

    /// This rank's queries with the parcel of another member, `distance` steps away.
    pub fn pair(self, distance: usize, owner: usize) -> RingPair {
        RingPair {
            ring: self.index,
            distance,
            reader: self.ring.members[self.member],
            owner: self.ring.members[owner],
        }
    }

    /// This rank's parcel and its readers: (member index, pair).
    pub fn readers(self) -> Option<(&'a Parcel, impl Iterator<Item = (usize, RingPair)>)> {
        let RingPosition {
            index,
            ring,
            member,
            ..
        } = self;
        let parcel = self.own_parcel()?;
        let readers = (parcel.first..=parcel.last).map(move |distance| {
            let reader = ring.member_at(member, distance);
            let pair = RingPair {
                ring: index,
                distance,
                reader: ring.members[reader],
                owner: ring.members[member],
            };
            (reader, pair)
        });
        Some((parcel, readers))
    }

    /// One end of a message with another member. The message constructors set `elements`.
    pub fn address(self, member: usize, tag: usize) -> Address {
        Address {
            peer: self.ring.members[member],
            tag: (self.index * TAGS + tag) as u64,
            elements: 0,
        }
    }

    /// The same for a batch of parcels that are needed from round `since` on. Batches on the same
    /// link in the same round differ in `since`, and so in their tags.
    pub fn batch_address(self, member: usize, tag: usize, since: usize) -> Address {
        let mut address = self.address(member, tag);
        if self.width > 1 {
            address.tag += (since * self.tags) as u64;
        }
        address
    }
}
