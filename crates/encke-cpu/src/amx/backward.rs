//! The backward pass: five products of tiles for each pair of blocks, one exponential.
//!
//! A task packs some hundred queries of a head, keeps their dq in scratch memory, and passes over
//! all keys that are visible to them, block by block. dk and dv of a block are summed over the
//! packed queries and then added to their rows.

mod block;
mod call;
mod chain;
mod load_store;

use encke_core::job::Job;

use super::config::{AmxBackwardConfig, SMALL_DIM_MAX};
use super::element::{ScoreScale, TileElement};
use super::gradient::Factors;
use super::pack::WIDTH;
use super::schedule;
use super::scratch::PagePool;
use super::tiles::TileUnit;
use crate::pieces::pieces;
use crate::schedule::head_groups;
use crate::shared::SharedRows;
pub use call::AmxBackwardInputs;
use call::{AmxBackwardCall, AmxBackwardLayout};
use chain::{AmxBackwardTask, ChainGuard, tasks};

/// Adds the job's share of the gradients.
///
/// Rows of different batch entries and segments, query rows of different heads, and key rows of
/// heads at different addresses must not overlap. Panics if the tiles are not available, or if a
/// row lies outside its buffer.
pub fn backward<T: TileUnit, N: TileElement>(
    pool: &PagePool,
    job: &Job,
    inputs: AmxBackwardInputs<'_, N>,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    if job.dim <= SMALL_DIM_MAX {
        backward_with_config::<T, N, N::SmallDim>(pool, job, inputs, dq, dk, dv);
    } else {
        backward_with_config::<T, N, N::LargeDim>(pool, job, inputs, dq, dk, dv);
    }
}

/// [`backward`] with a configuration of the caller's choice.
pub fn backward_with_config<T: TileUnit, N: TileElement, S: AmxBackwardConfig>(
    pool: &PagePool,
    job: &Job,
    inputs: AmxBackwardInputs<'_, N>,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    assert!(T::available(), "{} tiles are not available here", T::NAME);
    let call = AmxBackwardCall {
        job,
        inputs,
        dq: SharedRows::new(dq),
        dk: SharedRows::new(dk),
        dv: SharedRows::new(dv),
        steps: job.dim.div_ceil(WIDTH),
        factors: Factors {
            scale: ScoreScale::new(job.scale),
            gain: job.gain as f32,
        },
        layout: AmxBackwardLayout::new::<N, S>(job),
    };
    let (groups, pieces) = (head_groups(job), pieces(job));
    let tasks = tasks(job, &groups, &pieces, [call.layout.tiles, S::QUERY_TILES]);
    let bytes = call.layout.bytes;
    schedule::run::<T, AmxBackwardTask<'_>>(pool, bytes, &tasks, |task, scratch| {
        // SAFETY: the tiles are available and configured, scratch memory is as large as the layout
        // says, tasks have no query row in common, and tasks with the same keys form a chain and
        // start in its order.
        unsafe { call.run_task::<T, S>(task, scratch) };
    });
}

/// Scratch bytes of one thread.
pub fn scratch_bytes<N: TileElement>(job: &Job) -> usize {
    if job.dim <= SMALL_DIM_MAX {
        AmxBackwardLayout::new::<N, N::SmallDim>(job).bytes
    } else {
        AmxBackwardLayout::new::<N, N::LargeDim>(job).bytes
    }
}

impl<N: TileElement> AmxBackwardCall<'_, N> {
    /// Computes one task.
    ///
    /// # Safety
    /// The tiles are available and configured on this thread, `scratch` is memory as the layout
    /// says, no other task has these query rows, all tasks with these key rows are in its chain,
    /// and the tasks before it in the chain have started.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run_task<T: TileUnit, S: AmxBackwardConfig>(
        &self,
        task: &AmxBackwardTask<'_>,
        scratch: *mut u8,
    ) {
        let mut chain = ChainGuard::new(task);
        // SAFETY: the caller's promise; rows of dk and dv are written only after the chain's wait.
        unsafe {
            let tiles = self.pack_queries(task, scratch);
            let start = tiles.iter().map(|tile| tile.seen.start).min();
            let most = tiles.iter().map(|tile| tile.seen.end).max().unwrap_or(0);
            let rows = &task.piece.keys;
            let before = start.map_or(0, |start| start.saturating_sub(rows.start));
            let start = rows.start + before / S::KEYS * S::KEYS;
            chain.publish(start);
            for start in (start..most).step_by(S::KEYS) {
                // Rows after the last visible one are neither read nor written.
                let count = S::KEYS.min(most - start);
                if tiles.iter().any(|tile| tile.sees(start, count)) {
                    let keys = self.pack_keys(task, start, count, scratch);
                    self.block::<T, S>(task, tiles, keys, scratch);
                    chain.wait(start);
                    self.add_dk_dv(task, keys, scratch);
                }
                chain.publish(start + S::KEYS.min(rows.end - start));
            }
            drop(chain);
            self.add_dq(task, tiles, scratch);
        }
    }
}
