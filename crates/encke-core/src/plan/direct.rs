//! The straight ways: a parcel from its home to one member, a sum from one member to its home.
//!
//! In the ring a parcel goes from member to member, and a sum is added to on its way; whoever dies
//! takes with him what was on its way through his hands. Here a message has one sender, one
//! receiver and one reason, so it can be left out where what it is for is done already, and a sum
//! that has arrived is never lost with another rank. The bytes are never more than the ring's.
//! Programs that continue after a death get their keys this way; sums of a backward pass that is to
//! survive one go home this way from the start.

use super::builder::Builder;
use super::flow::{Channel, HOME, RingPosition, VISIT, origin};
use super::gather::Gather;
use super::layout::{Resident, Width, reversed};
use super::membership::Progress;
use super::program::{BufferId, Component, Message, Role, Task};
use super::rings::Parcel;
use super::rotation::Visit;
use crate::transport::Address;

/// One rank's queries and another one's parcel: they meet once, in the round of their distance.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingPair {
    /// The ring.
    pub ring: usize,
    /// How many hops the parcel would have come.
    pub distance: usize,
    /// Whose queries.
    pub reader: usize,
    /// Whose keys.
    pub home: usize,
}

impl RingPair {
    /// Whether the queries have not seen the keys.
    pub fn is_new_to_queries(self, so_far: &[Progress]) -> bool {
        !so_far[self.reader]
            .seen
            .contains(&(self.ring, self.distance))
    }

    /// Whether what the queries have for the gradients of the keys is not at their home.
    pub fn is_new_to_keys(self, so_far: &[Progress]) -> bool {
        !so_far[self.home]
            .gathered
            .contains(&(self.ring, self.distance))
    }
}

impl<'a> RingPosition<'a> {
    /// This rank's queries with a parcel that visits.
    pub fn meeting(self, distance: usize, home: usize) -> RingPair {
        RingPair {
            ring: self.index,
            distance,
            reader: self.ring.members[self.place],
            home,
        }
    }

    /// This rank's parcel, and whom it meets: (place of the member, meeting).
    pub fn hosts(self) -> Option<(&'a Parcel, impl Iterator<Item = (usize, RingPair)>)> {
        let RingPosition {
            index, ring, place, ..
        } = self;
        let parcel = ring.parcels[place].as_ref()?;
        let meetings = (parcel.first..=parcel.last).map(move |distance| {
            let member = ring.away(place, distance);
            let meeting = RingPair {
                ring: index,
                distance,
                reader: ring.members[member],
                home: ring.members[place],
            };
            (member, meeting)
        });
        Some((parcel, meetings))
    }
}

/// A visit of one parcel a round.
fn visit(travel: [[BufferId; 2]; 2]) -> Visit {
    Visit {
        travel: travel.map(|kv| vec![kv.to_vec()]),
    }
}

/// Sums for one parcel a round.
fn gather(local: [Vec<BufferId>; 2]) -> Gather {
    Gather {
        local: local.map(|sums| vec![sums]),
    }
}

impl<'a> Builder<'a> {
    /// Gets the parcels of the meetings that are wanted from their homes, and sends the own one to
    /// those that want it. It is packed once, and stays.
    pub fn fetch(
        &mut self,
        seat: RingPosition<'a>,
        own: [BufferId; 2],
        wanted: impl Fn(RingPair) -> bool,
    ) -> Visit {
        let (plan, dtype) = (self.plan, self.plan.request.dtype);
        let kv = |b: &mut Self, elements: usize| {
            ["travelling k", "travelling v"]
                .map(|name| b.buffer(name, Component::TravellingKv, dtype, elements))
        };
        let visits = || {
            let rotating = seat.rotating();
            rotating.filter(|(distance, home, _)| wanted(seat.meeting(*distance, *home)))
        };
        let travel = [0, 1].map(|turn| {
            let held = visits().filter(|(distance, ..)| distance % 2 == turn);
            let elements = self.largest(held.map(|(_, _, parcel)| parcel), Width::Kv);
            kv(self, elements)
        });
        let message = |address: Address, buffer, role, parcel: &Parcel| Message {
            address,
            buffer,
            origin: origin(Some(role), &plan.token_rows(parcel, Width::Kv)),
        };
        for (distance, _, parcel) in visits() {
            let elements = plan.parcel_elements(parcel, Width::Kv);
            let home = seat.ring.home_index(seat.place, distance);
            for (side, role) in [Role::K, Role::V].into_iter().enumerate() {
                let from = seat.address(home, VISIT + side, elements);
                let buffer = travel[distance % 2][side];
                self.receive(distance - 1, message(from, buffer, role, parcel));
            }
        }
        let Some((parcel, meetings)) = seat.hosts() else {
            return visit(travel);
        };
        let meetings: Vec<(usize, RingPair)> = meetings.filter(|of| wanted(of.1)).collect();
        if meetings.is_empty() {
            return visit(travel);
        }
        let elements = plan.parcel_elements(parcel, Width::Kv);
        let packed = kv(self, elements);
        let blocks = plan.packing(parcel, self.own(), Width::Kv);
        for (from, to) in own.into_iter().zip(packed) {
            self.copy(0, blocks.clone(), false, from, to);
        }
        for (member, meeting) in meetings {
            for (side, role) in [Role::K, Role::V].into_iter().enumerate() {
                let to = seat.address(member, VISIT + side, elements);
                let sent = message(to, packed[side], role, parcel);
                self.send(meeting.distance - 1, sent);
            }
        }
        visit(travel)
    }

    /// Sends what the wanted meetings have for the gradients of keys home, each by itself: computed
    /// in the round of its distance, sent in the next, and there in the one after that, where it is
    /// added to `own`, rows `at`.
    pub fn deliver(
        &mut self,
        seat: RingPosition<'a>,
        channels: &[Channel],
        own: &[BufferId],
        at: Resident,
        wanted: impl Fn(RingPair) -> bool,
    ) -> Gather {
        let (plan, component) = (self.plan, Component::TravellingGradients);
        let visits = || {
            let rotating = seat.rotating();
            rotating.filter(|(distance, home, _)| wanted(seat.meeting(*distance, *home)))
        };
        let local = [0, 1].map(|turn| {
            let mine = visits().filter(|(distance, ..)| distance % 2 == turn);
            self.channels(channels, component, mine.map(|(_, _, parcel)| parcel))
        });
        let message = |address: Address, buffer, channel: &Channel, parcel: &Parcel| Message {
            address,
            buffer,
            origin: origin(channel.role, &plan.token_rows(parcel, channel.width)),
        };
        for (distance, _, parcel) in visits() {
            let home = seat.ring.home_index(seat.place, distance);
            for (i, channel) in channels.iter().enumerate() {
                let (buffer, value) = (local[distance % 2][i], channel.empty);
                let empty = Task::Fill { buffer, value };
                self.round(distance).before.push(empty);
                let elements = plan.parcel_elements(parcel, channel.width);
                let to = seat.address(home, HOME + i, elements);
                self.send(distance + 1, message(to, buffer, channel, parcel));
            }
        }
        let Some((parcel, meetings)) = seat.hosts() else {
            return gather(local);
        };
        let meetings: Vec<(usize, RingPair)> = meetings.filter(|of| wanted(of.1)).collect();
        if meetings.is_empty() {
            return gather(local);
        }
        let home = self.channels(channels, component, std::iter::once(parcel));
        for (member, meeting) in meetings {
            for (i, channel) in channels.iter().enumerate() {
                let elements = plan.parcel_elements(parcel, channel.width);
                let from = seat.address(member, HOME + i, elements);
                let sum = message(from, home[i], channel, parcel);
                self.receive(meeting.distance + 1, sum);
                let unpacked = reversed(plan.packing(parcel, at, channel.width));
                self.copy(meeting.distance + 2, unpacked, true, home[i], own[i]);
            }
        }
        gather(local)
    }
}
