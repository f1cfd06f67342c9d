//! Rotation: the parcels of some tensors move from member to member, in two buffer sets that
//! alternate between being read and being received into.
//!
//! A rank packs its own parcel into a buffer that is still unused. In the first round a batch of
//! several parcels arrives in several messages, one from each owner. A message fills a buffer from
//! its start, so these parcels arrive in buffers of their own and are copied into the batch. That
//! is the only extra copy of a wide schedule: later rounds receive a batch as one message, and a
//! batch of one parcel is received in place. Where parcels arrive one by one, the own parcel has a
//! buffer of its own too, so that transports can hand whole buffers over instead of copying them.

use super::batches::{BatchSlot, ParcelBatch};
use super::builder::ProgramBuilder;
use super::position::{ROTATE_TAG, RingPosition};
use super::program::{BufferId, Component, Role};
use super::topology::Plan;
use super::width::Width;
use crate::dtype::DType;

/// A tensor whose rows rotate.
#[derive(Clone, Copy)]
pub(super) struct RotatingTensor {
    /// The name of its rotation buffers.
    pub name: &'static str,
    /// The buffer with this rank's rows.
    pub own: BufferId,
    pub dtype: DType,
    pub width: Width,
    /// The tensor of the call, if it is one.
    pub role: Option<Role>,
}

/// The buffers of a rotation.
pub(super) struct Rotation {
    /// By parity of the round, by batch of the round, by tensor.
    buffers: [Vec<Vec<BufferId>>; 2],
}

impl Rotation {
    /// A rotation of one parcel per round.
    pub fn single(buffers: [Vec<BufferId>; 2]) -> Rotation {
        Rotation {
            buffers: buffers.map(|set| vec![set]),
        }
    }

    /// The buffers of a batch, one per tensor.
    pub fn at(&self, slot: BatchSlot) -> &[BufferId] {
        &self.buffers[slot.round % 2][slot.index]
    }
}

impl Plan {
    /// The tensors that rotate with the queries of a backward pass: (name, type, row width,
    /// tensor).
    pub(super) fn query_tensors(&self) -> [(&'static str, DType, Width, Option<Role>); 4] {
        let (dtype, sum) = (self.request.dtype, self.request.dtype.sum());
        let wide = Width::WideCell;
        [
            ("travelling q", dtype, Width::Query, Some(Role::Q)),
            ("travelling dout", dtype, wide, Some(Role::Dout)),
            ("travelling lse", sum, Width::Cell, Some(Role::Lse)),
            ("travelling delta", sum, Width::Cell, None),
        ]
    }
}

impl<'a> ProgramBuilder<'a> {
    /// Keys and values as rotating tensors.
    pub fn keys(&self, [k, v]: [BufferId; 2]) -> [RotatingTensor; 2] {
        let dtype = self.plan.request.dtype;
        let of = |name, own, width, role| RotatingTensor {
            name,
            own,
            dtype,
            width,
            role: Some(role),
        };
        [
            of("travelling k", k, Width::Key, Role::K),
            of("travelling v", v, Width::Value, Role::V),
        ]
    }

    /// Rotates the parcels of a ring, starting in round 0.
    pub fn rotate(
        &mut self,
        position: RingPosition<'a>,
        component: Component,
        tensors: &[RotatingTensor],
    ) -> Rotation {
        if let Some(nodes) = position.nodes {
            return self.rotate_in_nodes(position, nodes, component, tensors);
        }
        let batches = position.batches();
        let specs = tensors.iter().map(|t| (t.name, t.dtype, t.width));
        let first_round: Vec<_> = batches.iter().filter(|of| of.slot.round == 1).collect();
        let separate = first_round.iter().any(|batch| batch.parcels.len() > 1);
        let own = position.own_parcel();
        let buffers = [0, 1].map(|parity| {
            let of_round = batches.iter().filter(|of| of.slot.round % 2 == parity);
            let of_round: Vec<_> = of_round.collect();
            let own = own.filter(|_| parity == 0 && !separate);
            self.batch_buffers(component, specs.clone(), &of_round, own)
        });
        let rotation = Rotation { buffers };
        let mut arrivals = Vec::new();
        for batch in first_round.iter().filter(|of| of.parcels.len() > 1) {
            for of in &batch.parcels {
                let buffers = self.batch_buffers(component, specs.clone(), &[], Some(of.parcel));
                arrivals.push((of.distance, buffers[0].clone()));
            }
        }
        let packed = match separate {
            false => rotation.buffers[0][0].clone(),
            true => self.batch_buffers(component, specs, &[], own)[0].clone(),
        };
        self.send_own(position, tensors, &packed);
        for batch in &batches {
            match batch.slot.round {
                1 => self.receive_from_owners(position, tensors, batch, (&rotation, &arrivals)),
                _ => self.receive_batch(position, tensors, batch, &rotation),
            }
            self.forward_batch(position, tensors, batch, &rotation);
        }
        rotation
    }

    /// Packs this rank's parcel and sends it to the members of the first round.
    fn send_own(
        &mut self,
        position: RingPosition<'a>,
        tensors: &[RotatingTensor],
        packed: &[BufferId],
    ) {
        let RingPosition {
            ring,
            member,
            width,
            ..
        } = position;
        let Some(parcel) = position.own_parcel() else {
            return;
        };
        let plan = self.plan;
        for (tensor, &to) in tensors.iter().zip(packed) {
            let blocks = plan.packing(parcel, self.own(tensor.width), tensor.width);
            self.pack(0, blocks, tensor.own, to);
        }
        for distance in 1..=width.min(parcel.last) {
            if parcel.needed_from(distance, width).is_none() {
                continue;
            }
            for (i, tensor) in tensors.iter().enumerate() {
                let to = position.address(ring.member_at(member, distance), ROTATE_TAG + i);
                let rows = (tensor.role, tensor.width);
                self.send(0, plan.parcel_message(to, packed[i], rows, parcel));
            }
        }
    }

    /// Receives a batch of the first round, each parcel from its owner.
    fn receive_from_owners(
        &mut self,
        position: RingPosition<'a>,
        tensors: &[RotatingTensor],
        batch: &ParcelBatch<'a>,
        (rotation, arrivals): (&Rotation, &[(usize, Vec<BufferId>)]),
    ) {
        let plan = self.plan;
        for (index, of) in batch.parcels.iter().enumerate() {
            let arrival = arrivals.iter().find(|arrival| arrival.0 == of.distance);
            for (i, tensor) in tensors.iter().enumerate() {
                let to = rotation.at(batch.slot)[i];
                let buffer = arrival.map_or(to, |(_, buffers)| buffers[i]);
                let from = position.address(of.owner, ROTATE_TAG + i);
                let rows = (tensor.role, tensor.width);
                self.receive(0, plan.parcel_message(from, buffer, rows, of.parcel));
                if arrival.is_some() {
                    let blocks = plan.batching(&batch.parcels, index, tensor.width);
                    self.copy(1, blocks, false, buffer, to);
                }
            }
        }
    }

    /// Receives a batch of a later round, from the member that had it before.
    fn receive_batch(
        &mut self,
        position: RingPosition<'a>,
        tensors: &[RotatingTensor],
        batch: &ParcelBatch<'a>,
        rotation: &Rotation,
    ) {
        let RingPosition { ring, member, .. } = position;
        let from = ring.owner_index(member, position.width);
        for (i, tensor) in tensors.iter().enumerate() {
            let from = position.batch_address(from, ROTATE_TAG + i, batch.since);
            let rows = (tensor.role, tensor.width);
            let buffer = rotation.at(batch.slot)[i];
            let message = self.plan.batch_message(from, buffer, rows, &batch.parcels);
            self.receive(batch.slot.round - 1, message);
        }
    }

    /// Sends on the parcels of a batch that have hops left.
    fn forward_batch(
        &mut self,
        position: RingPosition<'a>,
        tensors: &[RotatingTensor],
        batch: &ParcelBatch<'a>,
        rotation: &Rotation,
    ) {
        if batch.forwarded().is_empty() {
            return;
        }
        let RingPosition { ring, member, .. } = position;
        let to = ring.member_at(member, position.width);
        for (i, tensor) in tensors.iter().enumerate() {
            let to = position.batch_address(to, ROTATE_TAG + i, batch.since);
            let rows = (tensor.role, tensor.width);
            let buffer = rotation.at(batch.slot)[i];
            let message = self.plan.batch_message(to, buffer, rows, batch.forwarded());
            self.send(batch.slot.round, message);
        }
    }
}
