//! The forward pass: tiles of 32 queries against packed keys and values, continuing the carry.
//!
//! A task is a block of query rows of all heads that share their keys. It packs its queries once,
//! and keys and values about a thousand at a time into the L2 cache, where all its tiles read them.
//! Key blocks that none of the queries sees are not touched, and only blocks that some query does
//! not see as a whole are masked.
//!
//! The decision here: each tile goes through scores, softmax and values block by block, one tile
//! after the other. Computing scores ahead of their softmax, or interleaving several tiles, was
//! tried and gained nothing; blocks that fit the L1 cache did.

mod attend;
mod call;
mod load_store;
mod tasks;

use encke_core::job::Job;

use super::config::{AmxForwardConfig, SMALL_DIM_MAX};
use super::element::{ScoreScale, TileElement};
use super::pack::WIDTH;
use super::schedule;
use super::scratch::PagePool;
use super::tiles::TileUnit;
use crate::pieces::pieces;
use crate::schedule::{ActiveCall, head_groups};
use crate::target::Target;
use call::{AmxForwardCall, AmxForwardLayout, AmxForwardTile};
use tasks::AmxForwardTask;

/// Attends the queries of the job to its keys.
///
/// No two (batch entry, segment, row, head) may share a cell. Panics if the tiles are not
/// available, or if a row lies outside its buffer.
pub fn forward<T: TileUnit, N: TileElement>(
    pool: &PagePool,
    job: &Job,
    inputs: [&[N]; 3],
    target: Target<'_, f32>,
) {
    if job.dim <= SMALL_DIM_MAX {
        forward_with_config::<T, N, N::SmallDim>(pool, job, inputs, target);
    } else {
        forward_with_config::<T, N, N::LargeDim>(pool, job, inputs, target);
    }
}

/// [`forward`] with a configuration of the caller's choice.
pub fn forward_with_config<T: TileUnit, N: TileElement, S: AmxForwardConfig>(
    pool: &PagePool,
    job: &Job,
    [q, k, v]: [&[N]; 3],
    target: Target<'_, f32>,
) {
    assert!(T::available(), "{} tiles are not available here", T::NAME);
    let call = AmxForwardCall {
        job,
        q,
        k,
        v,
        target,
        steps: job.dim.div_ceil(WIDTH),
        scale: ScoreScale::new(job.scale),
        layout: AmxForwardLayout::new::<N, S>(job),
    };
    let (groups, pieces) = (head_groups(job), pieces(job));
    let active = ActiveCall::new();
    let target = active.task_target();
    let tasks = tasks::tasks(job, &groups, &pieces, call.layout.tiles, target);
    let bytes = call.layout.bytes;
    schedule::run::<T, AmxForwardTask<'_>>(pool, bytes, &tasks, |task, scratch| {
        // SAFETY: the tiles are available and configured, scratch memory is as large as the
        // layout says, and tasks have no query row in common.
        unsafe { call.run_task::<T, S>(task, scratch) };
    });
}

/// Scratch bytes of one thread.
pub fn scratch_bytes<N: TileElement>(job: &Job) -> usize {
    if job.dim <= SMALL_DIM_MAX {
        AmxForwardLayout::new::<N, N::SmallDim>(job).bytes
    } else {
        AmxForwardLayout::new::<N, N::LargeDim>(job).bytes
    }
}

impl<N: TileElement> AmxForwardCall<'_, N> {
    /// Computes one task.
    ///
    /// # Safety
    /// The tiles are available and configured on this thread, `scratch` is memory as the layout
    /// says, and no other task has these query rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn run_task<T: TileUnit, S: AmxForwardConfig>(
        &self,
        task: &AmxForwardTask<'_>,
        scratch: *mut u8,
    ) {
        let tiles_each = task.count.div_ceil(WIDTH);
        let count = tiles_each * task.heads.len();
        assert!(count <= self.layout.tiles);
        let states = scratch.wrapping_add(self.layout.states);
        // SAFETY: the region is that large, aligned to a page, and any bits are a tile.
        let tiles =
            unsafe { std::slice::from_raw_parts_mut(states.cast::<AmxForwardTile>(), count) };
        for (i, tile) in tiles.iter_mut().enumerate() {
            tile.head = task.heads[i / tiles_each];
            tile.first = task.first + i % tiles_each * WIDTH;
            tile.count = WIDTH.min(task.first + task.count - tile.first);
            // SAFETY: the rows are this task's own, scratch memory as the layout says.
            unsafe { self.load_tile(task, i, tile, scratch) };
        }
        let start = tiles.iter().map(|tile| tile.seen.start).min();
        let most = tiles.iter().map(|tile| tile.seen.end).max().unwrap_or(0);
        let keys = task.piece.keys.start;
        let before = start.map_or(0, |start| start.saturating_sub(keys));
        let size = self.block_keys::<S>();
        let start = keys + before / size * size;
        let mut packs = (start..most).step_by(S::PACKED_KEYS);
        while let Some(first) = match self.job.tiles {
            None => packs.next(),
            Some(_) => packs.next_back(),
        } {
            // SAFETY: as above.
            unsafe {
                let packed = self.pack_keys(task, first, S::PACKED_KEYS.min(most - first), scratch);
                for (index, tile) in tiles.iter_mut().enumerate() {
                    self.attend::<T, S>(task, tile, index, packed, scratch);
                }
            }
        }
        for (i, tile) in tiles.iter().enumerate() {
            // SAFETY: as above.
            unsafe { self.store_tile(task, i, tile, scratch) };
        }
    }
}
