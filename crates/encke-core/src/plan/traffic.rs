//! The bytes a plan sends, summed over parcels instead of over programs: independent of the number
//! of rounds, and checked against the programs by a test.

use super::reduce::{CARRY, DKV, DQ, ReducedTensor};
use super::request::{Pass, Queries};
use super::rings::{Parcel, Rotating};
use super::topology::Plan;
use super::width::Width;

impl Plan {
    /// Bytes that all ranks send.
    pub(super) fn sent_bytes(&self) -> usize {
        let request = &self.request;
        if !request.bits.is_planned() || !self.shares.is_empty() {
            let programs = (0..self.ranks()).filter_map(|rank| self.program(rank).ok());
            return programs
                .map(|of| of.sent_bytes().values().sum::<usize>())
                .sum();
        }
        let (stored, sum) = (request.dtype.bytes(), request.dtype.sum().bytes());
        // Each parcel, how often it is sent, and how often sums for it are.
        let parcels = || {
            self.rings.iter().enumerate().flat_map(|(index, ring)| {
                let width = ring.width(request.schedule.width);
                let parcels = ring.parcels.iter().enumerate();
                parcels.filter_map(move |(owner, parcel)| {
                    let parcel = parcel.as_ref()?;
                    let (hops, sums) = match self.node_ring(index) {
                        None => (parcel.hops(width), parcel.last - parcel.first + 1),
                        Some(nodes) => {
                            let (inside, between) = nodes.hops(owner, parcel);
                            let (passed, home) = nodes.sums(owner, parcel);
                            (inside + between, passed + home)
                        }
                    };
                    Some((parcel, hops, sums))
                })
            })
        };
        let rotated = |bytes: &dyn Fn(&Parcel) -> usize| -> usize {
            let each = parcels().map(|(parcel, hops, _)| bytes(parcel) * hops);
            each.sum()
        };
        let keys = |parcel: &Parcel| {
            let elements = |width| self.parcel_elements(parcel, width);
            (elements(Width::Key) + elements(Width::Value)) * stored
        };
        let queries = |parcel: &Parcel| -> usize {
            let tensors = self.query_tensors().into_iter();
            let bytes = tensors
                .map(|(_, dtype, width, _)| self.parcel_elements(parcel, width) * dtype.bytes());
            bytes.sum()
        };
        let reduced = |tensors: &[ReducedTensor]| -> usize {
            let of = |(parcel, _, sums): (&Parcel, usize, usize)| {
                let tensors = tensors.iter();
                let elements = tensors.map(|t| self.parcel_elements(parcel, t.width));
                elements.sum::<usize>() * sums
            };
            parcels().map(of).sum::<usize>() * sum
        };
        let rows = request.shape.batch * request.shape.queries;
        let all_gathered = |width: Width| (self.ranks() - 1) * rows * self.resident_width(width);
        match (request.queries, request.pass) {
            (Queries::Sharded, Pass::Forward) => rotated(&keys),
            (Queries::Sharded, Pass::BackwardByBranch) => rotated(&keys) + reduced(&DKV),
            (Queries::Sharded, Pass::Backward { .. }) => match request.schedule.backward {
                Rotating::Keys => rotated(&keys) + reduced(&DKV),
                Rotating::Queries => rotated(&queries) + reduced(&DQ),
            },
            (Queries::Replicated, Pass::Forward) => {
                let out = all_gathered(Width::WideCell) * request.out_dtype().bytes();
                reduced(&CARRY) + out + all_gathered(Width::Cell) * sum
            }
            (Queries::Replicated, Pass::Backward { .. } | Pass::BackwardByBranch) => {
                reduced(&DQ) + all_gathered(Width::Query) * sum
            }
        }
    }
}
