//! The smallest number of ranks that stays under a memory limit.
//!
//! Everything that is resident is planned, so the search needs only plans: it doubles the number of
//! ranks until a plan fits, then bisects.

use crate::memory::planned;
use encke_core::DType;
use encke_core::kernel::Kernel;
use encke_core::plan::{Plan, Request};

use super::error::StreamError;
use super::{sequential, staging};

/// Bytes that the process takes beside the buffers of a rank: its code, its threads' stacks, the
/// plan, and what the allocator keeps. Measured at about 8 MiB with 2 threads.
pub const PROGRAM_BYTES: usize = 16 << 20;

/// The largest number of ranks that is tried: planning more ranks takes too long.
pub const MAX_RANKS: usize = 1024;

/// A number of ranks that fits, and its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FittingRanks {
    /// The number of ranks.
    pub ranks: usize,
    /// Peak resident bytes: the largest rank, its workspace, staging, and the process itself.
    pub bytes: usize,
}

/// The smallest number of ranks with which all of `requests` stay under `limit` bytes. Of the
/// requests' shardings only the cut matters, not the number of ranks.
pub fn fit_ranks<K: Kernel>(
    kernel: &K,
    requests: &[Request],
    limit: usize,
) -> Result<FittingRanks, StreamError> {
    let most = requests
        .iter()
        .map(|request| request.shape.tokens)
        .fold(MAX_RANKS, usize::min);
    let try_ranks = |ranks: usize, limit: usize| {
        let mut bytes = 0;
        for request in requests {
            bytes = bytes.max(resident(kernel, request, ranks, limit)?);
            if bytes > limit {
                break;
            }
        }
        Ok::<usize, StreamError>(bytes)
    };
    let (mut below, mut ranks) = (0, 1);
    let mut bytes = try_ranks(ranks, limit)?;
    while bytes > limit {
        if ranks == most {
            let least = try_ranks(ranks, usize::MAX)?;
            return Err(StreamError::Limit {
                limit,
                least,
                ranks,
            });
        }
        below = ranks;
        ranks = (2 * ranks).min(most);
        bytes = try_ranks(ranks, limit)?;
    }
    while ranks - below > 1 {
        let middle = below + (ranks - below) / 2;
        let taken = try_ranks(middle, limit)?;
        if taken <= limit {
            (ranks, bytes) = (middle, taken);
        } else {
            below = middle;
        }
    }
    Ok(FittingRanks { ranks, bytes })
}

/// Bytes resident with the largest of `ranks` ranks, or with the first that exceeds `limit`.
fn resident<K: Kernel>(
    kernel: &K,
    request: &Request,
    ranks: usize,
    limit: usize,
) -> Result<usize, StreamError> {
    let request = request.clone().on_ranks(ranks)?;
    sequential::check(&request)?;
    let shape = request.shape;
    let row = shape.heads.max(shape.kv_heads) * shape.dim.max(shape.value_dim);
    // Gradients that are added to a file are kept once more, in the widest type.
    let staged = staging::bytes(row, request.dtype, request.dtype.sum())
        + staging::bytes(row, DType::F64, DType::F64) / 6;
    let plan = Plan::new(request)?;
    let mut most = 0;
    for rank in 0..ranks {
        let planned = planned(kernel, &plan.rank(rank)?, 1, plan.request());
        let bytes = planned.values().sum::<usize>() + staged + PROGRAM_BYTES;
        most = most.max(bytes);
        if most > limit {
            break;
        }
    }
    Ok(most)
}
