//! Attention on the matrix tiles of x86 processors (AMX), in bf16 and, by pieces, in f16 and f32.
//!
//! The tiles multiply about sixteen times as fast as vectors do, so this is an arm of its own and
//! not one more instance of the vector kernel: what is multiplied must be bf16, or a sum of some
//! ([`number`]), and packed, and the softmax, which stays with the vectors, takes much of the time.
//!
//! The decision that shaped this module: scores are computed transposed, keys as rows and queries
//! as lanes. The softmax then needs no reduction across lanes, its weights are where the next
//! product wants them, and rows of k are factors as they lie.
//!
//! The module knows tiles by a trait with one primitive, and every line but that primitive is
//! tested on machines that have no tiles.

pub(crate) mod backward;
pub(crate) mod detect;
#[allow(dead_code)] // for tests and the speed example
pub(crate) mod emulated;
pub(crate) mod forward;
mod gradient;
mod mend;
pub(crate) mod number;
pub(crate) mod pack;
mod schedule;
pub(crate) mod scratch;
pub(crate) mod shape;
pub(crate) mod softmax;
pub(crate) mod tiles;
pub(crate) mod vector;

pub(crate) use backward::{Given, backward};
pub(crate) use detect::available;
pub(crate) use forward::forward;
pub(crate) use number::Number;
pub(crate) use scratch::Pool;
pub(crate) use tiles::Hardware;

use encke_core::job::Job;
use encke_core::plan::Pass;

/// Queries, and keys, that are computed together.
pub(crate) const TILE: [usize; 2] = [pack::WIDTH; 2];

/// Scratch bytes that one call of a pass may hold at once, on the threads of the current pool.
pub(crate) fn workspace_bytes<N: Number>(job: &Job, pass: Pass) -> usize {
    let task = match pass {
        Pass::Forward => forward::bytes::<N>(job),
        Pass::Backward { .. } => backward::bytes::<N>(job),
    };
    rayon::current_num_threads() * task
}
