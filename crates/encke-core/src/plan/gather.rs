//! Sums that are gathered: each member adds what it has for a home rank to what the members before
//! it had, and the last one sends the sum home.
//!
//! What a member computes in a round meets what it receives in that round, so the hop never waits
//! for the compute it overlaps. Sums of a load go the way of the load, one round behind, as one
//! message; only at the end of the way do they part, each for its home. Every member sends what it
//! has for a home once, along or home, so the bytes are the same for every width; along, it is one
//! message and one addition a round, and there is something to be taken apart only once.

use super::batches::{BatchedParcel, ParcelBatch, Stop};
use super::builder::Builder;
use super::flow::{Channel, HOME, PASS, RingPosition, carry, origin};
use super::layout::{Resident, Width, flat, reversed};
use super::program::{BufferId, CarryIds, Component, Message, Task};
use std::collections::BTreeMap;

/// Sums on their way: `local` takes turns between being computed and being sent.
pub(super) struct Gather {
    /// By turn, by load of a round, by channel.
    pub local: [Vec<Vec<BufferId>>; 2],
}

impl Gather {
    /// The buffers that what is computed for a load goes into.
    pub fn at(&self, stop: Stop) -> &[BufferId] {
        &self.local[stop.round % 2][stop.slot]
    }

    /// The same, as a carry.
    pub fn carry_at(&self, stop: Stop) -> CarryIds {
        carry(self.at(stop))
    }
}

/// Where sums of one seat lie.
struct Sums<'c> {
    channels: &'c [Channel],
    component: Component,
    gather: Gather,
    /// By load of a round: what the member before had.
    incoming: Vec<Vec<BufferId>>,
    /// Sums of single parcels, taken out of their load to be sent home.
    parted: Vec<Vec<BufferId>>,
}

impl<'a> Builder<'a> {
    /// Gathers what the members of a ring have for each other. What is computed for a load goes
    /// into the buffers of [`Gather::at`]; what comes home goes into `own`, rows `at`. A carry is
    /// merged, everything else is added.
    pub fn gather(
        &mut self,
        seat: RingPosition<'a>,
        component: Component,
        channels: &[Channel],
        own: &[BufferId],
        at: Resident,
    ) -> Gather {
        let mut loads = seat.loads();
        loads.retain(ParcelBatch::is_needed);
        let parcel = seat.ring.parcels[seat.place].as_ref();
        let ends = parcel.map(|parcel| parcel.ends(seat.width).collect());
        self.gather_from(seat, component, channels, (own, at), (loads, ends))
    }

    /// The same where nothing is added up on the way, so that a sum that has arrived is never lost
    /// with another rank: each member sends what it has home by itself.
    pub fn gather_straight(
        &mut self,
        seat: RingPosition<'a>,
        component: Component,
        channels: &[Channel],
        own: &[BufferId],
        at: Resident,
    ) -> Gather {
        let mut loads = seat.loads();
        loads.retain(ParcelBatch::is_needed);
        for load in &mut loads {
            // Every way begins and ends here, whatever becomes of the rows. That they lie by how
            // far those go has been settled with the load.
            load.since = load.stop.round;
            load.part();
        }
        let parcel = seat.ring.parcels[seat.place].as_ref();
        let ends = parcel.map(|parcel| (parcel.first..=parcel.last).collect());
        self.gather_from(seat, component, channels, (own, at), (loads, ends))
    }

    /// Gathers sums of some loads; those of the own parcel come home from its `ends`.
    fn gather_from(
        &mut self,
        seat: RingPosition<'a>,
        component: Component,
        channels: &[Channel],
        (own, at): (&[BufferId], Resident),
        (loads, ends): (Vec<ParcelBatch<'a>>, Option<Vec<usize>>),
    ) -> Gather {
        let local = [0, 1].map(|turn| {
            let mine = loads.iter().filter(|load| load.stop.round % 2 == turn);
            self.sums(channels, component, mine)
        });
        let followed = loads.iter().filter(|load| load.was_needed());
        let incoming = self.sums(channels, component, followed);
        let mut sums = Sums {
            channels,
            component,
            gather: Gather { local },
            incoming,
            parted: Vec::new(),
        };
        self.part(&loads, &mut sums);
        for load in &loads {
            self.pass_sums(seat, load, &sums);
        }
        let mut parted: BTreeMap<usize, usize> = BTreeMap::new();
        for load in &loads {
            let from = parted.entry(load.stop.round).or_default();
            *from = self.send_home(seat, load, &sums, *from);
        }
        self.bring_home(seat, &sums, (own, at), ends);
        sums.gather
    }

    /// Buffers for the sums of some loads: one set for each load of a round.
    fn sums<'l>(
        &mut self,
        channels: &[Channel],
        component: Component,
        loads: impl Iterator<Item = &'l ParcelBatch<'a>>,
    ) -> Vec<Vec<BufferId>>
    where
        'a: 'l,
    {
        let (plan, sum) = (self.plan, self.plan.request.dtype.sum());
        let loads: Vec<&ParcelBatch<'a>> = loads.collect();
        let slots = loads.iter().map(|load| load.stop.slot + 1).max();
        let mut sums = Vec::new();
        for slot in 0..slots.unwrap_or(1) {
            let buffers = channels.iter().map(|channel| {
                let held = loads.iter().filter(|load| load.stop.slot == slot);
                let held = held.map(|load| plan.items_elements(&load.items, channel.width));
                let elements = held.max().unwrap_or(0);
                self.buffer(channel.name, component, sum, elements)
            });
            sums.push(buffers.collect());
        }
        sums
    }

    /// Buffers for what is taken out of loads: as many as part in one round.
    fn part(&mut self, loads: &[ParcelBatch<'a>], sums: &mut Sums<'_>) {
        let mut by_round: BTreeMap<usize, Vec<&BatchedParcel<'a>>> = BTreeMap::new();
        for load in loads.iter().filter(|load| load.items.len() > 1) {
            let parting = by_round.entry(load.stop.round).or_default();
            parting.extend(load.ended());
        }
        let most = by_round.values().map(Vec::len).max().unwrap_or(0);
        for index in 0..most {
            let each = by_round.values().filter_map(|parting| parting.get(index));
            let parcels = each.map(|item| item.parcel);
            let buffers = self.channels(sums.channels, sums.component, parcels);
            sums.parted.push(buffers);
        }
    }

    /// The sums of a load: emptied, added to what the member before had, and passed on.
    fn pass_sums(&mut self, seat: RingPosition<'a>, load: &ParcelBatch<'a>, sums: &Sums<'_>) {
        let round = load.stop.round;
        let local = sums.gather.at(load.stop);
        for (channel, &buffer) in sums.channels.iter().zip(local) {
            let value = channel.empty;
            self.round(round).before.push(Task::Fill { buffer, value });
        }
        let width = seat.width;
        if load.was_needed() {
            let cells = |width| self.plan.items_elements(&load.items, width);
            let channels = sums.channels.iter();
            let blocks = channels.map(|c| vec![flat(1, cells(c.width), 0, 0)]);
            let blocks = blocks.collect();
            let merge = vec![self.flat_cells(cells(Width::Cell))];
            let incoming = &sums.incoming[load.stop.slot];
            self.combine(round + 1, blocks, merge, incoming, local);
            let from = seat.ring.home_index(seat.place, width);
            for (i, channel) in sums.channels.iter().enumerate() {
                let (elements, rows) = self.sized(&load.items, channel.width);
                self.receive(
                    round,
                    Message {
                        address: seat.passed(from, PASS + i, load, elements),
                        buffer: incoming[i],
                        origin: origin(channel.role, &rows),
                    },
                );
            }
        }
        if load.going().is_empty() {
            return;
        }
        let to = seat.ring.away(seat.place, width);
        for (i, channel) in sums.channels.iter().enumerate() {
            let (elements, rows) = self.sized(load.going(), channel.width);
            self.send(
                round + 1,
                Message {
                    address: seat.passed(to, PASS + i, load, elements),
                    buffer: local[i],
                    origin: origin(channel.role, &rows),
                },
            );
        }
    }

    /// Sends the sums of parcels whose way ends here home. Returns how many buffers of those for
    /// parted sums are taken in this round, the first `taken` being taken already.
    fn send_home(
        &mut self,
        seat: RingPosition<'a>,
        load: &ParcelBatch<'a>,
        sums: &Sums<'_>,
        mut taken: usize,
    ) -> usize {
        let round = load.stop.round;
        let local = sums.gather.at(load.stop);
        let going = load.going().len();
        for (index, item) in load.ended().iter().enumerate() {
            let alone = load.items.len() == 1;
            let from: &[BufferId] = if alone { local } else { &sums.parted[taken] };
            for (i, channel) in sums.channels.iter().enumerate() {
                if !alone {
                    let stowing = self.plan.stowing(&load.items, going + index, channel.width);
                    self.copy(round + 1, reversed(stowing), false, local[i], from[i]);
                }
                let elements = self.plan.parcel_elements(item.parcel, channel.width);
                let rows = self.plan.token_rows(item.parcel, channel.width);
                self.send(
                    round + 1,
                    Message {
                        address: seat.address(item.home, HOME + i, elements),
                        buffer: from[i],
                        origin: origin(channel.role, &rows),
                    },
                );
            }
            taken += usize::from(!alone);
        }
        taken
    }

    /// Takes the sums of the own parcel in, from the ends of its ways, and adds them to `own`.
    fn bring_home(
        &mut self,
        seat: RingPosition<'a>,
        sums: &Sums<'_>,
        (own, at): (&[BufferId], Resident),
        ends: Option<Vec<usize>>,
    ) {
        let RingPosition {
            ring, place, width, ..
        } = seat;
        let (Some(parcel), Some(ends)) = (&ring.parcels[place], ends) else {
            // A rank without a parcel has these buffers too, and nothing in them.
            self.channels(sums.channels, sums.component, std::iter::empty());
            return;
        };
        let mut by_round: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for end in ends {
            by_round.entry((end - 1) / width + 1).or_default().push(end);
        }
        let most = by_round.values().map(Vec::len).max().unwrap_or(0);
        let mut home = Vec::new();
        for _ in 0..most {
            home.push(self.channels(sums.channels, sums.component, std::iter::once(parcel)));
        }
        for (round, ends) in by_round {
            for (end, home) in ends.into_iter().zip(&home) {
                for (i, channel) in sums.channels.iter().enumerate() {
                    let elements = self.plan.parcel_elements(parcel, channel.width);
                    let rows = self.plan.token_rows(parcel, channel.width);
                    self.receive(
                        round + 1,
                        Message {
                            address: seat.address(ring.away(place, end), HOME + i, elements),
                            buffer: home[i],
                            origin: origin(channel.role, &rows),
                        },
                    );
                }
                let unpack = |width| reversed(self.plan.packing(parcel, at, width));
                let blocks = sums.channels.iter().map(|c| unpack(c.width)).collect();
                let merge = self.cell_blocks(unpack(Width::Cell));
                self.combine(round + 2, blocks, merge, home, own);
            }
        }
    }
}
