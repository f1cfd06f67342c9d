//! Direct messages: a parcel from its owner to one reader, a sum from one reader to its owner.
//!
//! On the ring, parcels and sums pass through other members, and a member that dies takes them with
//! it. A direct message has one sender and one receiver, so it can be left out when its pair is
//! already done, and a sum that has arrived cannot be lost with another rank. The bytes are never
//! more than on the ring. Continuations after a death use direct messages throughout; a backward
//! pass that may have to survive one returns its sums directly from the start
//! ([`ReducePath::Direct`](super::reduce::ReducePath)).

use super::builder::ProgramBuilder;
use super::layout::{Resident, reversed};
use super::position::{RETURN_TAG, ROTATE_TAG, RingPair, RingPosition};
use super::program::{BufferId, Component, Role};
use super::reduce::{ReducedTensor, Reduction};
use super::rotation::Rotation;
use super::width::Width;

/// Keys and values, and the width of their rows.
const KV: [(Option<Role>, Width); 2] = [(Some(Role::K), Width::Key), (Some(Role::V), Width::Value)];

impl<'a> ProgramBuilder<'a> {
    /// Receives the parcels of the `wanted` pairs from their owners and sends this rank's parcel to
    /// the readers that want it. The own parcel is packed once and stays in its buffer.
    pub fn fetch(
        &mut self,
        position: RingPosition<'a>,
        own: [BufferId; 2],
        wanted: impl Fn(RingPair) -> bool,
    ) -> Rotation {
        let (plan, dtype) = (self.plan, self.plan.request.dtype);
        let kv = |b: &mut Self, elements: &dyn Fn(&Self, Width) -> usize| {
            [("travelling k", Width::Key), ("travelling v", Width::Value)].map(|(name, width)| {
                let elements = elements(b, width);
                b.buffer(name, Component::TravellingKv, dtype, elements)
            })
        };
        let incoming = || position.incoming().filter(|(pair, _)| wanted(*pair));
        let buffers = [0, 1].map(|parity| {
            let of_round = || incoming().filter(|(pair, _)| pair.distance % 2 == parity);
            let parcels = || of_round().map(|(_, parcel)| parcel);
            kv(self, &|b, width| b.largest(parcels(), width))
        });
        for (pair, parcel) in incoming() {
            let owner = position.ring.owner_index(position.member, pair.distance);
            for (i, rows) in KV.into_iter().enumerate() {
                let from = position.address(owner, ROTATE_TAG + i);
                let buffer = buffers[pair.distance % 2][i];
                let message = plan.parcel_message(from, buffer, rows, parcel);
                self.receive(pair.distance - 1, message);
            }
        }
        if let Some((parcel, readers)) = position.readers() {
            let readers: Vec<(usize, RingPair)> = readers.filter(|of| wanted(of.1)).collect();
            if !readers.is_empty() {
                let packed = kv(self, &|_, width| plan.parcel_elements(parcel, width));
                for ((from, to), (_, width)) in own.into_iter().zip(packed).zip(KV) {
                    let blocks = plan.packing(parcel, self.own(width), width);
                    self.copy(0, blocks, false, from, to);
                }
                for (reader, pair) in readers {
                    for (i, rows) in KV.into_iter().enumerate() {
                        let to = position.address(reader, ROTATE_TAG + i);
                        let message = plan.parcel_message(to, packed[i], rows, parcel);
                        self.send(pair.distance - 1, message);
                    }
                }
            }
        }
        Rotation::single(buffers.map(|kv| kv.to_vec()))
    }

    /// Sends the `wanted` pairs' shares of dk and dv to their owners. A share is computed in the
    /// round of its distance, sent in the next one, and added to `own`, rows `at`, in the one after
    /// that.
    pub fn return_gradients(
        &mut self,
        position: RingPosition<'a>,
        tensors: &[ReducedTensor],
        own: &[BufferId],
        at: Resident,
        wanted: impl Fn(RingPair) -> bool,
    ) -> Reduction {
        let (plan, component) = (self.plan, Component::TravellingGradients);
        let incoming = || position.incoming().filter(|(pair, _)| wanted(*pair));
        let local = [0, 1].map(|parity| {
            let of_round = incoming().filter(|(pair, _)| pair.distance % 2 == parity);
            self.sum_buffers(tensors, component, of_round.map(|(_, parcel)| parcel))
        });
        for (RingPair { distance, .. }, parcel) in incoming() {
            let owner = position.ring.owner_index(position.member, distance);
            for (i, tensor) in tensors.iter().enumerate() {
                let buffer = local[distance % 2][i];
                self.fill(distance, buffer, tensor.empty);
                let to = position.address(owner, RETURN_TAG + i);
                let rows = (tensor.role, tensor.width);
                let message = plan.parcel_message(to, buffer, rows, parcel);
                self.send(distance + 1, message);
            }
        }
        if let Some((parcel, readers)) = position.readers() {
            let readers: Vec<(usize, RingPair)> = readers.filter(|of| wanted(of.1)).collect();
            if !readers.is_empty() {
                let sums = self.sum_buffers(tensors, component, std::iter::once(parcel));
                for (reader, RingPair { distance, .. }) in readers {
                    for (i, tensor) in tensors.iter().enumerate() {
                        let from = position.address(reader, RETURN_TAG + i);
                        let rows = (tensor.role, tensor.width);
                        let message = plan.parcel_message(from, sums[i], rows, parcel);
                        self.receive(distance + 1, message);
                        let unpacked = reversed(plan.packing(parcel, at, tensor.width));
                        self.copy(distance + 2, unpacked, true, sums[i], own[i]);
                    }
                }
            }
        }
        Reduction::single(local)
    }
}
