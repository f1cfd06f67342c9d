//! Rows that visit: parcels of some tensors go from member to member, read by each, in two sets of
//! buffers that take turns.
//!
//! The own parcel is packed where nothing else lies yet. In the first round a load comes in pieces,
//! each straight from its home; a message fills a buffer from its beginning, so the pieces arrive
//! beside the load and are stowed in it. That is the one copy a wide schedule costs: from then on
//! a load is one message, and a load of one parcel never needs it. Where there are pieces the own
//! parcel has a buffer to itself, as they have: whole buffers can be handed over instead of copied.

use super::batches::{BatchedParcel, ParcelBatch, Stop};
use super::builder::Builder;
use super::flow::{RingPosition, VISIT, origin};
use super::layout::Width;
use super::program::{BufferId, Component, Message, Role, TokenRows};
use crate::dtype::DType;
use std::sync::Arc;

/// A tensor whose rows visit.
#[derive(Clone, Copy)]
pub(super) struct RotatingTensor {
    /// What its travelling buffers are called.
    pub name: &'static str,
    /// Where the own rows are.
    pub own: BufferId,
    pub dtype: DType,
    pub width: Width,
    /// The tensor of the call that it is, if it is one.
    pub role: Option<Role>,
}

/// Rows on their way.
pub(super) struct Visit {
    /// By turn, by load of a round, by cargo.
    pub travel: [Vec<Vec<BufferId>>; 2],
}

impl Visit {
    /// The buffers of a load, cargo by cargo.
    pub fn at(&self, stop: Stop) -> &[BufferId] {
        &self.travel[stop.round % 2][stop.slot]
    }
}

impl<'a> Builder<'a> {
    /// Keys and values, to be visited by.
    pub fn keys(&self, [k, v]: [BufferId; 2]) -> [RotatingTensor; 2] {
        let dtype = self.plan.request.dtype;
        let of = |name, own, role| RotatingTensor {
            name,
            own,
            dtype,
            width: Width::Kv,
            role: Some(role),
        };
        [
            of("travelling k", k, Role::K),
            of("travelling v", v, Role::V),
        ]
    }

    /// Sends the parcels of a ring round, starting in round 0.
    pub fn visit(
        &mut self,
        seat: RingPosition<'a>,
        component: Component,
        cargo: &[RotatingTensor],
    ) -> Visit {
        let loads = seat.loads();
        let in_first = loads.iter().filter(|load| load.stop.round == 1);
        let in_pieces = in_first.clone().any(|load| load.items.len() > 1);
        let travel = [0, 1].map(|turn| {
            let mine = loads.iter().filter(|load| load.stop.round % 2 == turn);
            let own = (turn == 0 && !in_pieces).then_some(seat);
            self.travelling(component, cargo, mine, own)
        });
        let visit = Visit { travel };
        let pieces = self.pieces(component, cargo, in_first);
        let home = match in_pieces {
            false => visit.travel[0][0].clone(),
            true => self.travelling(component, cargo, std::iter::empty(), Some(seat))[0].clone(),
        };
        if let Some(parcel) = &seat.ring.parcels[seat.place] {
            for (cargo, &to) in cargo.iter().zip(&home) {
                let blocks = self.plan.packing(parcel, self.own(), cargo.width);
                self.pack(0, blocks, cargo.own, to);
            }
        }
        self.send_out(seat, cargo, &home);
        for load in &loads {
            match load.stop.round {
                1 => self.take_in(seat, cargo, load, (&visit, &pieces)),
                _ => self.take_over(seat, cargo, load, &visit),
            }
            self.pass_on(seat, cargo, load, &visit);
        }
        visit
    }

    /// Buffers that are large enough for some loads, one set for each load of a round; the first set
    /// also for the own parcel of a seat.
    fn travelling<'l>(
        &mut self,
        component: Component,
        cargo: &[RotatingTensor],
        loads: impl Iterator<Item = &'l ParcelBatch<'a>>,
        own: Option<RingPosition<'a>>,
    ) -> Vec<Vec<BufferId>>
    where
        'a: 'l,
    {
        let plan = self.plan;
        let own = own.and_then(|seat| seat.ring.parcels[seat.place].as_ref());
        let loads: Vec<&ParcelBatch<'a>> = loads.collect();
        let slots = loads.iter().map(|load| load.stop.slot + 1).max();
        let mut travel = Vec::new();
        for slot in 0..slots.unwrap_or(1) {
            let buffers = cargo.iter().map(|cargo| {
                let held = loads.iter().filter(|load| load.stop.slot == slot);
                let held = held.map(|load| plan.items_elements(&load.items, cargo.width));
                let own = own.filter(|_| slot == 0);
                let own = own.map(|parcel| plan.parcel_elements(parcel, cargo.width));
                let elements = held.chain(own).max().unwrap_or(0);
                self.buffer(cargo.name, component, cargo.dtype, elements)
            });
            travel.push(buffers.collect());
        }
        travel
    }

    /// A buffer for each parcel that arrives by itself to be stowed in a load.
    fn pieces<'l>(
        &mut self,
        component: Component,
        cargo: &[RotatingTensor],
        in_first: impl Iterator<Item = &'l ParcelBatch<'a>>,
    ) -> Vec<(usize, Vec<BufferId>)>
    where
        'a: 'l,
    {
        let mut pieces = Vec::new();
        let stowed = in_first.filter(|load| load.items.len() > 1);
        for item in stowed.flat_map(|load| &load.items) {
            let buffers = cargo.iter().map(|cargo| {
                let elements = self.plan.parcel_elements(item.parcel, cargo.width);
                self.buffer(cargo.name, component, cargo.dtype, elements)
            });
            pieces.push((item.distance, buffers.collect()));
        }
        pieces
    }

    /// The own parcel, to the members of the first round.
    fn send_out(&mut self, seat: RingPosition<'a>, cargo: &[RotatingTensor], home: &[BufferId]) {
        let RingPosition { ring, place, .. } = seat;
        let Some(parcel) = &ring.parcels[place] else {
            return;
        };
        let width = seat.width;
        for distance in 1..=width.min(parcel.last) {
            if parcel.needed_from(distance, width).is_none() {
                continue;
            }
            for (i, cargo) in cargo.iter().enumerate() {
                let elements = self.plan.parcel_elements(parcel, cargo.width);
                let rows = self.plan.token_rows(parcel, cargo.width);
                let to = seat.address(ring.away(place, distance), VISIT + i, elements);
                self.send(
                    0,
                    Message {
                        address: to,
                        buffer: home[i],
                        origin: origin(cargo.role, &rows),
                    },
                );
            }
        }
    }

    /// A load of the first round, from the homes of its parcels.
    fn take_in(
        &mut self,
        seat: RingPosition<'a>,
        cargo: &[RotatingTensor],
        load: &ParcelBatch<'a>,
        (visit, pieces): (&Visit, &[(usize, Vec<BufferId>)]),
    ) {
        for (index, item) in load.items.iter().enumerate() {
            let piece = pieces
                .iter()
                .find(|(distance, _)| *distance == item.distance);
            for (i, cargo) in cargo.iter().enumerate() {
                let to = visit.at(load.stop)[i];
                let buffer = piece.map_or(to, |(_, buffers)| buffers[i]);
                let elements = self.plan.parcel_elements(item.parcel, cargo.width);
                let rows = self.plan.token_rows(item.parcel, cargo.width);
                self.receive(
                    0,
                    Message {
                        address: seat.address(item.home, VISIT + i, elements),
                        buffer,
                        origin: origin(cargo.role, &rows),
                    },
                );
                if piece.is_some() {
                    let blocks = self.plan.stowing(&load.items, index, cargo.width);
                    self.copy(1, blocks, false, buffer, to);
                }
            }
        }
    }

    /// A later load, from the member that had it before.
    fn take_over(
        &mut self,
        seat: RingPosition<'a>,
        cargo: &[RotatingTensor],
        load: &ParcelBatch<'a>,
        visit: &Visit,
    ) {
        let from = seat.ring.home_index(seat.place, seat.width);
        for (i, cargo) in cargo.iter().enumerate() {
            let (elements, rows) = self.sized(&load.items, cargo.width);
            self.receive(
                load.stop.round - 1,
                Message {
                    address: seat.passed(from, VISIT + i, load, elements),
                    buffer: visit.at(load.stop)[i],
                    origin: origin(cargo.role, &rows),
                },
            );
        }
    }

    /// What of a load goes further.
    fn pass_on(
        &mut self,
        seat: RingPosition<'a>,
        cargo: &[RotatingTensor],
        load: &ParcelBatch<'a>,
        visit: &Visit,
    ) {
        if load.going().is_empty() {
            return;
        }
        let to = seat.ring.away(seat.place, seat.width);
        for (i, cargo) in cargo.iter().enumerate() {
            let (elements, rows) = self.sized(load.going(), cargo.width);
            self.send(
                load.stop.round,
                Message {
                    address: seat.passed(to, VISIT + i, load, elements),
                    buffer: visit.at(load.stop)[i],
                    origin: origin(cargo.role, &rows),
                },
            );
        }
    }

    /// Elements and rows of a message of some parcels.
    pub fn sized(&self, items: &[BatchedParcel<'_>], width: Width) -> (usize, Arc<[TokenRows]>) {
        let elements = self.plan.items_elements(items, width);
        (elements, self.plan.load_rows(items, width))
    }
}
