//! Rotation and reduction of a two-level ring (`nodes.rs`).
//!
//! Inside a node parcels rotate as in a ring of one level. Between nodes a parcel moves in as many
//! pieces as a turn has rounds, one in each, to the member in the same position of the next node:
//! every rank sends over its own link, and no round waits for more than a piece. At the start of a
//! turn the pieces that have arrived are copied into a rotation buffer; they are sent on from where
//! they arrived. That takes one more parcel and one more piece than a ring of one level.
//!
//! Sums are reduced inside each node, and each node's sum returns to the owner: from another node
//! in pieces during the next turn, which takes one more parcel of sums. After the last turn nothing
//! is left to hide a return behind, and it is one message.

use super::batches::{BatchSlot, BatchedParcel, ParcelBatch};
use super::builder::ProgramBuilder;
use super::layout::{Resident, flat, reversed};
use super::nodes::NodeRing;
use super::pieces::ParcelPiece;
use super::position::{PASS_TAG, RETURN_TAG, ROTATE_TAG, RingPosition};
use super::program::{BufferId, Component};
use super::reduce::{ReducedTensor, Reduction};
use super::rings::Parcel;
use super::rotation::{RotatingTensor, Rotation};
use super::width::Width;
use crate::dtype::DType;

/// The parcel that is with this member at a step, and where it goes.
struct Visit<'a> {
    /// The step, which is also the round.
    step: usize,
    owner: usize,
    parcel: &'a Parcel,
    /// The inner step of this turn.
    inner: usize,
    /// The inner steps of this turn in which the parcel is needed.
    span: (usize, usize),
}

impl Visit<'_> {
    /// Whether the next member of the node gets the parcel after this one.
    fn moves_on(&self) -> bool {
        self.inner < self.span.1
    }

    /// Whether sums for the parcel exist here.
    fn sums(&self) -> bool {
        (self.span.0..=self.span.1).contains(&self.inner)
    }
}

/// The sum of a node for a parcel of another node, on its way to the owner: pieces in the rounds
/// from `round` on.
struct ReturningSum<'a> {
    round: usize,
    parcel: &'a Parcel,
    pieces: usize,
}

impl<'a> RingPosition<'a> {
    /// What is with this member in each step of a two-level ring, its own parcel first.
    fn visits(self, nodes: NodeRing) -> Vec<Visit<'a>> {
        let RingPosition { ring, member, .. } = self;
        let visit = |step: usize| {
            let owner = nodes.owner(member, step);
            let parcel = ring.parcels[owner].as_ref()?;
            let (turn, inner) = (step / nodes.members, step % nodes.members);
            let span = nodes.span(owner, parcel, turn)?;
            let here = inner <= span.1;
            here.then_some(Visit {
                step,
                owner,
                parcel,
                inner,
                span,
            })
        };
        let steps = nodes.turns(ring) * nodes.members;
        (0..steps).filter_map(visit).collect()
    }

    /// The batches of a two-level ring that this member computes with: one parcel each.
    pub fn node_batches(self, nodes: NodeRing) -> Vec<ParcelBatch<'a>> {
        let needed = self.visits(nodes).into_iter().filter(|of| {
            let needed = nodes.is_needed(of.owner, of.parcel, of.step);
            of.step > 0 && needed
        });
        let batch = |of: Visit<'a>| ParcelBatch {
            slot: BatchSlot {
                round: of.step,
                index: 0,
            },
            since: of.step,
            parcels: vec![BatchedParcel {
                distance: nodes.distance(of.owner, of.step),
                owner: of.owner,
                parcel: of.parcel,
                hops_left: 0,
                interleave: 0,
            }],
        };
        needed.map(batch).collect()
    }

    /// The sums of other nodes for one parcel, from the node `turn` nodes after its owner's.
    fn returning(
        self,
        nodes: NodeRing,
        (owner, parcel): (usize, &'a Parcel),
        turn: usize,
    ) -> Option<ReturningSum<'a>> {
        let (_, last) = nodes.span(owner, parcel, turn)?;
        let hidden = turn > 0 && turn + 1 < nodes.turns(self.ring);
        Some(ReturningSum {
            round: turn * nodes.members + last + 1,
            parcel,
            pieces: if hidden { nodes.members } else { 1 },
        })
    }
}

impl<'a> ProgramBuilder<'a> {
    /// Rotates the parcels of a two-level ring, starting in round 0.
    pub(super) fn rotate_in_nodes(
        &mut self,
        position: RingPosition<'a>,
        nodes: NodeRing,
        component: Component,
        tensors: &[RotatingTensor],
    ) -> Rotation {
        let plan = self.plan;
        let visits = position.visits(nodes);
        let mut buffers = [Vec::new(), Vec::new()];
        for (parity, set) in buffers.iter_mut().enumerate() {
            for tensor in tensors {
                let held = visits.iter().filter(|of| of.step % 2 == parity);
                let elements = self.largest(held.map(|of| of.parcel), tensor.width);
                set.push(self.buffer(tensor.name, component, tensor.dtype, elements));
            }
        }
        let (next, before) = nodes.beside(position.member);
        for visit in &visits {
            let set = &buffers[visit.step % 2];
            for (i, tensor) in tensors.iter().enumerate() {
                let rows = (tensor.role, tensor.width);
                let message = |member: usize| {
                    let address = position.address(member, ROTATE_TAG + i);
                    plan.parcel_message(address, set[i], rows, visit.parcel)
                };
                if visit.step == 0 {
                    let blocks = plan.packing(visit.parcel, self.own(tensor.width), tensor.width);
                    self.pack(0, blocks, tensor.own, set[i]);
                } else if visit.inner > 0 {
                    self.receive(visit.step - 1, message(before));
                }
                if visit.moves_on() {
                    self.send(visit.step, message(next));
                }
            }
        }
        self.cross_nodes(position, nodes, component, tensors, &buffers);
        Rotation::single(buffers)
    }

    /// Moves parcels from node to node in pieces, and copies them into the rotation buffers of the
    /// first step of each turn.
    fn cross_nodes(
        &mut self,
        position: RingPosition<'a>,
        nodes: NodeRing,
        component: Component,
        tensors: &[RotatingTensor],
        rotating: &[Vec<BufferId>; 2],
    ) {
        let plan = self.plan;
        let (ring, member, count) = (position.ring, position.member, nodes.members);
        // By turn, of parcels that this member gets from another node or sends to one.
        let entering: Vec<(usize, &Parcel, usize, Vec<ParcelPiece>)> = (0..nodes.nodes)
            .filter_map(|turn| {
                let owner = nodes.owner(member, turn * count);
                let parcel = ring.parcels[owner].as_ref()?;
                let last = nodes.last_turn(owner, parcel);
                let here = last >= turn && last > 0;
                here.then(|| (turn, parcel, last, parcel.pieces(count)))
            })
            .collect();
        // Piece x of turn o is in buffer (o * count + x) modulo count + 1: it is received in the
        // round after that buffer was sent for the last time.
        let specs = tensors.iter().map(|t| (t.name, t.dtype, t.width));
        let all = entering.iter().flat_map(|(turn, _, _, pieces)| {
            let numbered = pieces.iter().enumerate();
            numbered.map(move |(x, piece)| (turn * count + x, &piece.parcel))
        });
        let sizes: Vec<(usize, &Parcel)> = all.collect();
        let buffers = self.piece_buffers(component, specs, count + 1, &sizes);
        let (next, before) = nodes.across(member);
        for (turn, parcel, last, pieces) in &entering {
            let round = turn * count;
            let owner = nodes.owner(member, round);
            let attended = *turn > 0 && nodes.span(owner, parcel, *turn).is_some();
            for (x, piece) in pieces.iter().enumerate().filter(|of| !of.1.is_empty()) {
                let set = &buffers[(round + x) % (count + 1)];
                for (i, tensor) in tensors.iter().enumerate() {
                    let rows = (tensor.role, tensor.width);
                    let message = |member: usize| {
                        let address = position.address(member, ROTATE_TAG + i);
                        plan.parcel_message(address, set[i], rows, &piece.parcel)
                    };
                    if *turn == 0 {
                        let own = self.own(tensor.width);
                        let blocks = plan.packing(&piece.parcel, own, tensor.width);
                        self.pack(x, blocks, tensor.own, set[i]);
                    } else {
                        self.receive(round - count + x, message(before));
                    }
                    if attended {
                        let to = rotating[round % 2][i];
                        let blocks = plan.assembling(parcel, piece, tensor.width);
                        self.copy(round, blocks, false, set[i], to);
                    }
                    if turn < last {
                        self.send(round + x, message(next));
                    }
                }
            }
        }
    }

    /// Reduces what the members of a two-level ring compute for each other's parcels; see
    /// [`ProgramBuilder::reduce`].
    pub(super) fn reduce_in_nodes(
        &mut self,
        position: RingPosition<'a>,
        nodes: NodeRing,
        component: Component,
        tensors: &[ReducedTensor],
        (own, at): (&[BufferId], Resident),
    ) -> Reduction {
        let plan = self.plan;
        let visits: Vec<Visit<'a>> = position.visits(nodes);
        let visits: Vec<&Visit<'a>> = visits.iter().filter(|of| of.sums()).collect();
        let local = [0, 1].map(|parity| {
            let held = visits.iter().filter(|of| of.step % 2 == parity);
            self.sum_buffers(tensors, component, held.map(|of| of.parcel))
        });
        let continued = visits.iter().filter(|of| of.inner > of.span.0);
        let incoming = self.sum_buffers(tensors, component, continued.map(|of| of.parcel));
        let (next, before) = nodes.beside(position.member);
        let mut returned: Vec<(usize, ReturningSum<'a>, [usize; 2])> = Vec::new();
        for visit in &visits {
            let (round, sums) = (visit.step, &local[visit.step % 2]);
            for (i, tensor) in tensors.iter().enumerate() {
                self.fill(round, sums[i], tensor.empty);
                let message = |member: usize, buffer: BufferId| {
                    let address = position.address(member, PASS_TAG + i);
                    let rows = (tensor.role, tensor.width);
                    plan.parcel_message(address, buffer, rows, visit.parcel)
                };
                if visit.inner > visit.span.0 {
                    self.receive(round, message(before, incoming[i]));
                    let elements = plan.parcel_elements(visit.parcel, tensor.width);
                    let all = vec![flat(1, elements)];
                    self.copy(round + 1, all, true, incoming[i], sums[i]);
                }
                if visit.moves_on() {
                    self.send(round + 1, message(next, sums[i]));
                }
            }
            if !visit.moves_on() {
                let turn = visit.step / nodes.members;
                let sum = position.returning(nodes, (visit.owner, visit.parcel), turn);
                let sum = sum.expect("the node needs the parcel");
                returned.push((visit.owner, sum, [visit.step % 2, 0]));
            }
        }
        self.send_home(position, component, tensors, returned, &local);
        self.receive_home(position, nodes, component, tensors, (own, at));
        Reduction::single(local)
    }

    /// Sends the sums of this node to their owners.
    fn send_home(
        &mut self,
        position: RingPosition<'a>,
        component: Component,
        tensors: &[ReducedTensor],
        mut returned: Vec<(usize, ReturningSum<'a>, [usize; 2])>,
        local: &[Vec<BufferId>; 2],
    ) {
        let plan = self.plan;
        // Sums that travel at the same time have sets of buffers of their own.
        let mut free_from: Vec<usize> = Vec::new();
        for (_, sum, [_, set]) in returned.iter_mut().filter(|of| of.1.pieces > 1) {
            let free = free_from.iter().position(|free| *free <= sum.round);
            *set = free.unwrap_or_else(|| {
                free_from.push(0);
                free_from.len() - 1
            });
            free_from[*set] = sum.round + sum.pieces;
        }
        let most = returned.iter().map(|of| of.1.pieces).max().unwrap_or(1);
        let pieces: Vec<(usize, Vec<ParcelPiece>)> = returned
            .iter()
            .map(|(_, sum, [_, set])| (*set, sum.parcel.pieces(sum.pieces)))
            .collect();
        let parts = pieces.iter().filter(|of| of.1.len() > 1);
        let parts = parts.flat_map(|(set, pieces)| {
            let numbered = pieces.iter().enumerate();
            numbered.map(move |(x, piece)| (set * most + x, &piece.parcel))
        });
        let sizes: Vec<(usize, &Parcel)> = parts.collect();
        let sum = plan.request.dtype.sum();
        let specs = tensors.iter().map(|t| (t.name, sum, t.width));
        let buffers = self.piece_buffers(component, specs, free_from.len() * most, &sizes);
        for ((owner, sum, [parity, set]), (_, pieces)) in returned.iter().zip(&pieces) {
            let whole = pieces.len() == 1;
            for (x, piece) in pieces.iter().enumerate().filter(|of| !of.1.is_empty()) {
                for (i, tensor) in tensors.iter().enumerate() {
                    let from = match whole {
                        true => local[*parity][i],
                        false => buffers[set * most + x][i],
                    };
                    if !whole {
                        let blocks = plan.assembling(sum.parcel, piece, tensor.width);
                        let sums = local[*parity][i];
                        self.copy(sum.round, reversed(blocks), false, sums, from);
                    }
                    let to = position.address(*owner, RETURN_TAG + i);
                    let rows = (tensor.role, tensor.width);
                    let message = plan.parcel_message(to, from, rows, &piece.parcel);
                    self.send(sum.round + x, message);
                }
            }
        }
    }

    /// Receives the sums for this rank's parcel from every node and adds them to `own`, rows `at`.
    fn receive_home(
        &mut self,
        position: RingPosition<'a>,
        nodes: NodeRing,
        component: Component,
        tensors: &[ReducedTensor],
        (own, at): (&[BufferId], Resident),
    ) {
        let (plan, member) = (self.plan, position.member);
        // (round, its index among the messages of that round, sender, piece)
        let mut arrivals: Vec<(usize, usize, usize, ParcelPiece)> = Vec::new();
        if let Some(parcel) = position.own_parcel() {
            for turn in 0..nodes.nodes {
                let Some(sum) = position.returning(nodes, (member, parcel), turn) else {
                    continue;
                };
                let from = nodes.reader(member, sum.round - 1);
                for (x, piece) in parcel.pieces(sum.pieces).into_iter().enumerate() {
                    let round = sum.round + x;
                    let others = arrivals.iter().filter(|of| of.0 == round).count();
                    if !piece.is_empty() {
                        arrivals.push((round, others, from, piece));
                    }
                }
            }
        }
        let most = arrivals.iter().map(|of| of.1 + 1).max().unwrap_or(0);
        let sizes: Vec<(usize, &Parcel)> = (arrivals.iter())
            .map(|(_, index, _, piece)| (*index, &piece.parcel))
            .collect();
        let sum = plan.request.dtype.sum();
        let specs = tensors.iter().map(|t| (t.name, sum, t.width));
        let buffers = self.piece_buffers(component, specs, most, &sizes);
        for (round, index, from, piece) in &arrivals {
            for (i, tensor) in tensors.iter().enumerate() {
                let from = position.address(*from, RETURN_TAG + i);
                let rows = (tensor.role, tensor.width);
                let buffer = buffers[*index][i];
                let message = plan.parcel_message(from, buffer, rows, &piece.parcel);
                self.receive(*round, message);
                let blocks = reversed(plan.packing(&piece.parcel, at, tensor.width));
                self.copy(round + 1, blocks, true, buffer, own[i]);
            }
        }
    }

    /// `count` sets of buffers, one buffer for each tensor (name, type, row width), each as large
    /// as the largest of the parcels that are listed with the number of its set.
    fn piece_buffers(
        &mut self,
        component: Component,
        tensors: impl Iterator<Item = (&'static str, DType, Width)> + Clone,
        count: usize,
        parcels: &[(usize, &Parcel)],
    ) -> Vec<Vec<BufferId>> {
        let mut sets = Vec::new();
        for set in 0..count {
            let mut buffers = Vec::new();
            for (name, dtype, width) in tensors.clone() {
                let of_set = parcels.iter().filter(|(of, _)| of % count == set);
                let elements = self.largest(of_set.map(|of| of.1), width);
                buffers.push(self.buffer(name, component, dtype, elements));
            }
            sets.push(buffers);
        }
        sets
    }
}
