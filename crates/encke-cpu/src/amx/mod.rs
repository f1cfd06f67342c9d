//! Attention on the matrix tiles of x86 processors (AMX): in bf16, and in f16 and f32 split into
//! several bf16.
//!
//! The tiles multiply about sixteen times as fast as vectors do, so this is a kernel of its own and
//! not one more instance of the vector kernel: factors must be bf16, or sums of a few bf16
//! ([`element`]), and packed; and the softmax, which stays on vectors, takes much of the time.
//!
//! The decision that shaped this module: scores are computed transposed, with keys as rows and
//! queries as lanes. The softmax then needs no reduction across lanes, its weights are already laid
//! out for the next product, and rows of k are factors without a transposition.
//!
//! The kernels reach the tiles through a trait with one primitive ([`tiles::TileUnit`]), so that
//! every line except that primitive is tested on machines without tiles.

pub(crate) mod backward;
pub(crate) mod config;
pub(crate) mod detect;
pub(crate) mod element;
pub(crate) mod emulated;
pub(crate) mod forward;
mod gradient;
mod huge;
mod nonfinite;
pub(crate) mod pack;
mod schedule;
pub(crate) mod scratch;
pub(crate) mod softmax;
pub(crate) mod tiles;
pub(crate) mod vector;

pub(crate) use backward::{AmxBackwardInputs, backward};
pub(crate) use detect::available;
pub(crate) use element::TileElement;
pub(crate) use forward::forward;
pub(crate) use scratch::PagePool;
pub(crate) use tiles::Hardware;

use encke_core::job::Job;
use encke_core::plan::Pass;

/// Whether the tiles compute a job accurately. They take values below 2⁻¹²⁶ as 0 and sum q·k
/// without the scale, so jobs with a scale far from 1 are left to the vectors, and so are jobs that
/// transform their scores, have dropout, or have values of another width than keys.
pub fn supports(job: &Job) -> bool {
    const LIMIT: f64 = (1 << 30) as f64;
    job.transform.is_none()
        && job.dropout.is_none()
        && job.dim == job.value_dim
        && (job.scale == 0.0 || (LIMIT.recip()..=LIMIT).contains(&job.scale.abs()))
}

/// Queries and keys that are computed together.
pub(crate) const TILE: [usize; 2] = [pack::WIDTH; 2];

/// Scratch bytes that one call of a pass may hold at once, on all threads.
pub fn workspace_bytes<N: TileElement>(job: &Job, pass: Pass) -> usize {
    let task = match pass {
        Pass::Forward => forward::scratch_bytes::<N>(job),
        Pass::Backward { .. } | Pass::BackwardByBranch => backward::scratch_bytes::<N>(job),
    };
    encke_pool::threads() * task
}
