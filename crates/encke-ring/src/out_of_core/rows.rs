//! Rows of a rank's inputs and outputs, between a dock and its buffers.

use crate::Rank;
use encke_core::Shape;
use encke_core::kernel::Kernel;
use encke_core::plan::program::{Port, Role};
use encke_core::plan::{Queries, Request};
use encke_core::sharding::Run;

use super::row_io::{BufferSlot, RowIo};
use super::{RowRange, StreamError};

/// Numbers in a row of one head of a tensor.
pub fn width(role: Role, shape: &Shape) -> usize {
    match role {
        Role::Lse | Role::Dlse => 1,
        _ => shape.dim,
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

/// Brings a rank its rows of an input.
pub(super) fn load<K: Kernel>(
    rank: &mut Rank<K>,
    port: &Port,
    shape: &Shape,
    dock: &mut dyn RowIo<K>,
) -> Result<(), StreamError> {
    let (heads, width) = (heads(port.role, shape), width(port.role, shape));
    let dtype = rank.plan().buffers[port.buffer.0].dtype;
    let buffer = rank.buffer_mut(port.buffer);
    for (at, batch, tokens) in places(port, shape, heads.len() * width) {
        let stretch = RowRange {
            role: port.role,
            batch,
            tokens,
            heads: &heads,
        };
        let to = BufferSlot {
            buffer: &mut *buffer,
            dtype,
            at,
        };
        dock.fetch(&stretch, width, to)?;
    }
    Ok(())
}

/// Takes a rank's rows of an output. A dock that adds gradients up does so before they are rounded.
pub(super) fn store<K: Kernel>(
    rank: &Rank<K>,
    port: &Port,
    request: &Request,
    dock: &mut dyn RowIo<K>,
) -> Result<(), StreamError> {
    let shape = &request.shape;
    let (heads, width) = (heads(port.role, shape), width(port.role, shape));
    let dtype = rank.plan().buffers[port.buffer.0].dtype;
    let rounded = match port.role {
        Role::Lse => request.dtype.sum(),
        _ => request.dtype,
    };
    for (at, batch, tokens) in own_places(port, request, rank.plan().rank, heads.len() * width) {
        let stretch = RowRange {
            role: port.role,
            batch,
            tokens,
            heads: &heads,
        };
        let from = BufferSlot {
            buffer: rank.buffer(port.buffer),
            dtype,
            at,
        };
        dock.deliver(from, &stretch, width, rounded)?;
    }
    Ok(())
}

/// Where each run of a port begins in its buffer `[batch, rows, …]`: (address, batch entry, run).
fn places(port: &Port, shape: &Shape, row: usize) -> Vec<(usize, usize, Run)> {
    let mut at = 0;
    let mut places = Vec::new();
    for batch in 0..shape.batch {
        for &run in &port.runs {
            places.push((at, batch, run));
            at += run.count * row;
        }
    }
    places
}

/// The same for the rows that are this rank's to write: where all ranks have all rows, shard by
/// shard, each writes those of its own tokens.
fn own_places(port: &Port, request: &Request, rank: usize, row: usize) -> Vec<(usize, usize, Run)> {
    let shape = &request.shape;
    let mut places = places(port, shape, row);
    if request.queries == Queries::Replicated && port.runs.len() > 1 {
        let own = request.sharding.runs(shape.tokens, rank);
        places.retain(|(_, _, run)| own.contains(run));
    }
    places
}
