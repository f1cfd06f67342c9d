//! Ring reduction: each member adds its contribution for an owner to those of the members before
//! it, and the last one sends the sum to the owner.
//!
//! A member computes its contribution in the same round in which it receives the sum so far, so the
//! message never waits for the computation it overlaps. The sums of a batch follow the batch, one
//! round behind, as one message; at the end of their route they are separated and sent to their
//! owners. Every member sends its contribution for an owner once, along the ring or to the owner,
//! so the bytes are the same for every width.

use std::collections::BTreeMap;

use super::batches::{BatchSlot, BatchedParcel, ParcelBatch};
use super::builder::ProgramBuilder;
use super::layout::{Resident, flat, reversed};
use super::position::{PASS_TAG, RETURN_TAG, RingPosition};
use super::program::{BufferId, CarryIds, Component, Fill, Role, Task};
use super::rings::Parcel;
use super::width::Width;
use crate::dtype::DType;
use crate::job::Block;

/// A tensor that is reduced.
#[derive(Clone, Copy)]
pub(super) struct ReducedTensor {
    pub name: &'static str,
    pub width: Width,
    /// The neutral element.
    pub empty: Fill,
    /// The tensor of the call, if the sum is a part of one.
    pub role: Option<Role>,
}

impl ReducedTensor {
    const fn carry(name: &'static str, width: Width, empty: Fill) -> ReducedTensor {
        ReducedTensor {
            name,
            width,
            empty,
            role: None,
        }
    }

    const fn gradient(name: &'static str, width: Width, role: Role) -> ReducedTensor {
        ReducedTensor {
            name,
            width,
            empty: Fill::Zero,
            role: Some(role),
        }
    }
}

/// A carry, which is merged.
pub(super) const CARRY: [ReducedTensor; 3] = [
    ReducedTensor::carry("travelling acc", Width::WideCell, Fill::Zero),
    ReducedTensor::carry("travelling m", Width::Cell, Fill::MinusInfinity),
    ReducedTensor::carry("travelling l", Width::Cell, Fill::Zero),
];
/// Gradients of keys and values, which are added.
pub(super) const DKV: [ReducedTensor; 2] = [
    ReducedTensor::gradient("travelling dk", Width::Key, Role::Dk),
    ReducedTensor::gradient("travelling dv", Width::Value, Role::Dv),
];
/// Gradients of queries, which are added.
pub(super) const DQ: [ReducedTensor; 1] = [ReducedTensor::gradient(
    "travelling dq",
    Width::Query,
    Role::Dq,
)];

/// Three buffers as a carry.
fn carry(buffers: &[BufferId]) -> CarryIds {
    CarryIds {
        acc: buffers[0],
        m: buffers[1],
        l: buffers[2],
    }
}

/// The buffers that jobs accumulate into.
pub(super) struct Reduction {
    /// By parity of the round, by batch of the round, by tensor: one set is computed while the
    /// other is sent.
    local: [Vec<Vec<BufferId>>; 2],
}

impl Reduction {
    /// A reduction of one parcel per round.
    pub fn single(local: [Vec<BufferId>; 2]) -> Reduction {
        Reduction {
            local: local.map(|set| vec![set]),
        }
    }

    /// The buffers for contributions to the parcels of a batch, one per tensor.
    pub fn at(&self, slot: BatchSlot) -> &[BufferId] {
        &self.local[slot.round % 2][slot.index]
    }

    /// The same, as a carry.
    pub fn carry_at(&self, slot: BatchSlot) -> CarryIds {
        carry(self.at(slot))
    }
}

/// How sums reach their owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReducePath {
    /// Added up along the ring.
    Ring,
    /// Each member sends its own contribution to the owner, so that no rank's death loses the
    /// contribution of another.
    Direct,
}

/// Everything a reduction in one ring works with.
struct ReduceBuffers<'c> {
    tensors: &'c [ReducedTensor],
    component: Component,
    reduction: Reduction,
    /// By batch of a round: the sum so far, received from the previous member.
    incoming: Vec<Vec<BufferId>>,
    /// Sums of single parcels, copied out of their batch to be sent to their owners.
    separated: Vec<Vec<BufferId>>,
}

impl<'a> ProgramBuilder<'a> {
    /// Reduces what the members of a ring compute for each other's parcels. Jobs accumulate into
    /// the buffers of [`Reduction::at`]; the sums for this rank's parcel are combined into `own`,
    /// rows `at`: a carry is merged, everything else is added.
    pub fn reduce(
        &mut self,
        position: RingPosition<'a>,
        component: Component,
        tensors: &[ReducedTensor],
        (own, at): (&[BufferId], Resident),
        path: ReducePath,
    ) -> Reduction {
        if let Some(nodes) = position.nodes {
            return self.reduce_in_nodes(position, nodes, component, tensors, (own, at));
        }
        let mut batches = position.needed_batches();
        let parcel = position.own_parcel();
        let ends: Option<Vec<usize>> = match path {
            ReducePath::Ring => parcel.map(|parcel| parcel.ends(position.width).collect()),
            ReducePath::Direct => {
                for batch in &mut batches {
                    // Every route starts and ends here; the storage order stays that of the batch.
                    batch.since = batch.slot.round;
                    batch.end_here();
                }
                parcel.map(|parcel| (parcel.first..=parcel.last).collect())
            }
        };
        let sum = self.plan.request.dtype.sum();
        let specs = tensors.iter().map(|t| (t.name, sum, t.width));
        let local = [0, 1].map(|parity| {
            let of_round = batches.iter().filter(|of| of.slot.round % 2 == parity);
            let of_round: Vec<_> = of_round.collect();
            self.batch_buffers(component, specs.clone(), &of_round, None)
        });
        let continued: Vec<_> = batches.iter().filter(|of| of.was_needed()).collect();
        let incoming = self.batch_buffers(component, specs, &continued, None);
        let mut buffers = ReduceBuffers {
            tensors,
            component,
            reduction: Reduction { local },
            incoming,
            separated: Vec::new(),
        };
        self.plan_separated(&batches, &mut buffers);
        for batch in &batches {
            self.pass_sums(position, batch, &buffers);
        }
        let mut used: BTreeMap<usize, usize> = BTreeMap::new();
        for batch in &batches {
            let used = used.entry(batch.slot.round).or_default();
            *used = self.return_sums(position, batch, &buffers, *used);
        }
        self.receive_sums(position, &buffers, (own, at), ends);
        buffers.reduction
    }

    /// One buffer per tensor, large enough for the largest of `parcels`.
    pub fn sum_buffers<'p>(
        &mut self,
        tensors: &[ReducedTensor],
        component: Component,
        parcels: impl Iterator<Item = &'p Parcel>,
    ) -> Vec<BufferId> {
        let sum: DType = self.plan.request.dtype.sum();
        let parcels: Vec<&Parcel> = parcels.collect();
        let mut buffers = Vec::new();
        for tensor in tensors {
            let elements = self.largest(parcels.iter().copied(), tensor.width);
            buffers.push(self.buffer(tensor.name, component, sum, elements));
        }
        buffers
    }

    /// Plans as many buffers for separated sums as one round needs at most.
    fn plan_separated(&mut self, batches: &[ParcelBatch<'a>], buffers: &mut ReduceBuffers<'_>) {
        let mut by_round: BTreeMap<usize, Vec<&BatchedParcel<'a>>> = BTreeMap::new();
        for batch in batches.iter().filter(|batch| batch.parcels.len() > 1) {
            let separated = by_round.entry(batch.slot.round).or_default();
            separated.extend(batch.finished());
        }
        let most = by_round.values().map(Vec::len).max().unwrap_or(0);
        for index in 0..most {
            let each = by_round.values().filter_map(|parcels| parcels.get(index));
            let parcels = each.map(|of| of.parcel);
            let set = self.sum_buffers(buffers.tensors, buffers.component, parcels);
            buffers.separated.push(set);
        }
    }

    /// The sums of a batch: cleared, computed, combined with the sum so far, and passed on.
    fn pass_sums(
        &mut self,
        position: RingPosition<'a>,
        batch: &ParcelBatch<'a>,
        buffers: &ReduceBuffers<'_>,
    ) {
        let plan = self.plan;
        let round = batch.slot.round;
        let local = buffers.reduction.at(batch.slot);
        for (tensor, &buffer) in buffers.tensors.iter().zip(local) {
            self.fill(round, buffer, tensor.empty);
        }
        let RingPosition {
            ring,
            member,
            width,
            ..
        } = position;
        if batch.was_needed() {
            let elements = |width| plan.batch_elements(&batch.parcels, width);
            let tensors = buffers.tensors.iter();
            let blocks = tensors.map(|t| vec![flat(1, elements(t.width))]).collect();
            let cells = vec![flat(elements(Width::Cell), plan.request.shape.value_dim)];
            let incoming = &buffers.incoming[batch.slot.index];
            self.combine(round + 1, blocks, cells, incoming, local);
            let from = ring.owner_index(member, width);
            for (i, tensor) in buffers.tensors.iter().enumerate() {
                let from = position.batch_address(from, PASS_TAG + i, batch.since);
                let rows = (tensor.role, tensor.width);
                let message = plan.batch_message(from, incoming[i], rows, &batch.parcels);
                self.receive(round, message);
            }
        }
        if batch.forwarded().is_empty() {
            return;
        }
        let to = ring.member_at(member, width);
        for (i, tensor) in buffers.tensors.iter().enumerate() {
            let to = position.batch_address(to, PASS_TAG + i, batch.since);
            let rows = (tensor.role, tensor.width);
            let message = plan.batch_message(to, local[i], rows, batch.forwarded());
            self.send(round + 1, message);
        }
    }

    /// Sends the sums of finished parcels to their owners. The first `used` buffers for separated
    /// sums are taken in this round; returns how many are taken afterwards.
    fn return_sums(
        &mut self,
        position: RingPosition<'a>,
        batch: &ParcelBatch<'a>,
        buffers: &ReduceBuffers<'_>,
        mut used: usize,
    ) -> usize {
        let plan = self.plan;
        let round = batch.slot.round + 1;
        let local = buffers.reduction.at(batch.slot);
        let forwarded = batch.forwarded().len();
        let alone = batch.parcels.len() == 1;
        for (index, of) in batch.finished().iter().enumerate() {
            let from = if alone {
                local
            } else {
                &buffers.separated[used][..]
            };
            for (i, tensor) in buffers.tensors.iter().enumerate() {
                if !alone {
                    let copies = plan.batching(&batch.parcels, forwarded + index, tensor.width);
                    self.copy(round, reversed(copies), false, local[i], from[i]);
                }
                let to = position.address(of.owner, RETURN_TAG + i);
                let rows = (tensor.role, tensor.width);
                self.send(round, plan.parcel_message(to, from[i], rows, of.parcel));
            }
            used += usize::from(!alone);
        }
        used
    }

    /// Receives the sums of this rank's parcel from the `ends` of its routes and combines them into
    /// `own`.
    fn receive_sums(
        &mut self,
        position: RingPosition<'a>,
        buffers: &ReduceBuffers<'_>,
        (own, at): (&[BufferId], Resident),
        ends: Option<Vec<usize>>,
    ) {
        let plan = self.plan;
        let ReduceBuffers {
            tensors, component, ..
        } = *buffers;
        let (Some(parcel), Some(ends)) = (position.own_parcel(), ends) else {
            // A rank without a parcel has these buffers too; they are empty.
            self.sum_buffers(tensors, component, std::iter::empty());
            return;
        };
        let mut by_round: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for end in ends {
            let round = (end - 1) / position.width + 1;
            by_round.entry(round).or_default().push(end);
        }
        let most = by_round.values().map(Vec::len).max().unwrap_or(0);
        let mut sets = Vec::new();
        for _ in 0..most {
            sets.push(self.sum_buffers(tensors, component, std::iter::once(parcel)));
        }
        for (round, ends) in by_round {
            for (end, set) in ends.into_iter().zip(&sets) {
                let from = position.ring.member_at(position.member, end);
                for (i, tensor) in tensors.iter().enumerate() {
                    let from = position.address(from, RETURN_TAG + i);
                    let rows = (tensor.role, tensor.width);
                    let message = plan.parcel_message(from, set[i], rows, parcel);
                    self.receive(round + 1, message);
                }
                let unpack = |width| reversed(plan.packing(parcel, at, width));
                let blocks = tensors.iter().map(|t| unpack(t.width)).collect();
                // Merges address cells, each `value_dim` elements wide.
                let width = plan.request.shape.value_dim;
                let cells = unpack(Width::Cell).into_iter();
                let cells = cells.map(|block| Block { width, ..block }).collect();
                self.combine(round + 2, blocks, cells, set, own);
            }
        }
    }

    /// Adds one set of sums to another, or merges them if they are carries. `blocks` are the copies
    /// of each tensor, `cells` those of a merge.
    fn combine(
        &mut self,
        round: usize,
        blocks: Vec<Vec<Block>>,
        cells: Vec<Block>,
        from: &[BufferId],
        to: &[BufferId],
    ) {
        if from.len() == CARRY.len() {
            let (from, to) = (carry(from), carry(to));
            let task = Task::Merge {
                blocks: cells,
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
}
