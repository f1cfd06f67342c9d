//! A rank's inputs and outputs as rows of a [`RowIo`]: which tokens and heads lie where in which
//! buffer.

use encke_core::Shape;
use encke_core::kernel::Kernel;
use encke_core::plan::program::{Port, Role};
use encke_core::plan::{Pass, Queries, Request};
use encke_core::sharding::Run;

use crate::error::{RankError, RingError};
use crate::rank::{BorrowedInputs, Rank};
use crate::shard_call::{ShardInput, ShardOutput};

use super::error::StreamError;
use super::row_io::{BufferSlot, RowIo};
use super::source::RowRange;

/// Elements in a row of one head of a tensor.
pub fn row_width(role: Role, shape: &Shape) -> usize {
    match role {
        Role::Lse | Role::Dlse | Role::Delta => 1,
        Role::V | Role::Dv | Role::Out | Role::Dout => shape.value_dim,
        Role::Q | Role::K | Role::Dq | Role::Dk | Role::Rows => shape.dim,
    }
}

/// Heads of a tensor, where slots are heads.
fn heads(role: Role, shape: &Shape) -> Vec<usize> {
    let count = match role {
        Role::K | Role::V | Role::Dk | Role::Dv => shape.kv_heads,
        _ => shape.heads,
    };
    (0..count).collect()
}

/// Refuses patterns whose branches are combined from all rows of the sequence: a row of their
/// outputs is not a row of the result.
pub(super) fn check_slots(request: &Request) -> Result<(), StreamError> {
    if request.pattern.splits_slots() {
        return Err(StreamError::Unsupported {
            what: "a pattern whose branches are combined after the last rank (fkodom, detached \
                   mixing gradients)",
            hint: "use group mode, or mix mode with exact gradients",
        });
    }
    if request.pass == Pass::BackwardByBranch {
        return Err(StreamError::Unsupported {
            what: "a delta for each branch, whose rows are not heads",
            hint: "differentiate branch by branch",
        });
    }
    Ok(())
}

/// A rank's inputs and outputs, moved by a [`RowIo`].
pub(super) struct RankRows<'s, K: Kernel>(pub &'s mut dyn RowIo<K>);

impl<'a, K: Kernel> ShardInput<'a, K> for RankRows<'_, K> {
    type Error = StreamError;

    fn load(
        &mut self,
        kernel: &K,
        request: &Request,
        rank: &mut Rank<K>,
    ) -> Result<BorrowedInputs<'a>, StreamError> {
        check_slots(request)?;
        let (number, shape) = (rank.plan().rank, &request.shape);
        let begun = rank.begin(kernel, true);
        begun.map_err(|source| RingError::of_rank(number, RankError::before_start(source)))?;
        for port in rank.plan().inputs.clone() {
            let (heads, width) = (heads(port.role, shape), row_width(port.role, shape));
            let dtype = rank.plan().buffers[port.buffer.0].dtype;
            let buffer = rank.buffer_mut(port.buffer);
            for (at, batch, tokens) in offsets(&port, shape, heads.len() * width) {
                let range = RowRange {
                    role: port.role,
                    batch,
                    tokens,
                    heads: &heads,
                };
                let buffer = &mut *buffer;
                self.0
                    .fetch(&range, width, BufferSlot { buffer, dtype, at })?;
            }
        }
        Ok(BorrowedInputs::default())
    }
}

impl<K: Kernel> ShardOutput<K> for RankRows<'_, K> {
    type Error = StreamError;

    /// A [`RowIo`] that sums gradients does so before they are rounded.
    fn store(&mut self, _: &K, request: &Request, rank: &Rank<K>) -> Result<(), StreamError> {
        let shape = &request.shape;
        for port in &rank.plan().outputs {
            let (heads, width) = (heads(port.role, shape), row_width(port.role, shape));
            let dtype = rank.plan().buffers[port.buffer.0].dtype;
            let rounded = match port.role {
                Role::Lse => request.dtype.sum(),
                _ => request.dtype,
            };
            let row = heads.len() * width;
            for (at, batch, tokens) in own_offsets(port, request, rank.plan().rank, row) {
                let range = RowRange {
                    role: port.role,
                    batch,
                    tokens,
                    heads: &heads,
                };
                let buffer = rank.buffer(port.buffer);
                let from = BufferSlot { buffer, dtype, at };
                self.0.deliver(from, &range, width, rounded)?;
            }
        }
        Ok(())
    }
}

/// Where each run of a port begins in its buffer `[batch, rows, …]`: (element, batch entry, run).
fn offsets(port: &Port, shape: &Shape, row: usize) -> Vec<(usize, usize, Run)> {
    let mut at = 0;
    let mut offsets = Vec::new();
    for batch in 0..shape.batch {
        for &run in &port.runs {
            offsets.push((at, batch, run));
            at += run.count * row;
        }
    }
    offsets
}

/// The same for the rows that this rank writes.
fn own_offsets(
    port: &Port,
    request: &Request,
    rank: usize,
    row: usize,
) -> Vec<(usize, usize, Run)> {
    let own = own_runs(port, request, rank);
    let mut offsets = offsets(port, &request.shape, row);
    offsets.retain(|(_, _, run)| own.contains(run));
    offsets
}

/// The rows of a port that this rank writes. Where every rank holds all queries, shard by shard,
/// each rank writes those of its own tokens; it holds the gradients of its own keys alone.
fn own_runs(port: &Port, request: &Request, rank: usize) -> Vec<Run> {
    let of_keys = matches!(port.role, Role::Dk | Role::Dv);
    if request.queries == Queries::Replicated && port.runs.len() > 1 && !of_keys {
        return request.query_runs(rank);
    }
    port.runs.clone()
}

/// The rows of an output that a rank writes, including those of shards that it has adopted.
pub(super) fn stored_runs<K: Kernel>(request: &Request, rank: &Rank<K>, role: Role) -> Vec<Run> {
    let plan = rank.plan();
    let ports = plan.outputs.iter().filter(|port| port.role == role);
    ports
        .flat_map(|port| own_runs(port, request, plan.rank))
        .collect()
}
