//! The forward pass: tiles of 32 queries against packed keys and values, continuing the carry.
//!
//! A task is a block of query rows of all heads that share their keys. It packs its queries once,
//! and keys and values about a thousand at a time into the L2 cache, where all its tiles read them.
//! If every query sees a window that fits there, a task is longer: its queries advance some hundred
//! at a time, and the keys that they see anew take the place of those that they no longer see.
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

use std::ops::Range;

use encke_core::job::Job;

use super::config::{AmxForwardConfig, SMALL_DIM_MAX};
use super::element::{ScoreScale, TileElement};
use super::pack::WIDTH;
use super::schedule;
use super::scratch::PagePool;
use super::softmax::KeyBounds;
use super::tiles::TileUnit;
use crate::pieces::pieces;
use crate::schedule::{ActiveCall, head_groups};
use crate::target::Target;
use call::{AmxForwardCall, AmxForwardLayout, AmxForwardTile, PackedKeys};
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
    let tasks = tasks::tasks(job, &groups, &pieces, &call.layout, target);
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
        let rows = self.layout.tiles / task.heads.len() * WIDTH;
        let end = task.first + task.count;
        let mut packed = PackedKeys::new(task.piece.keys.start);
        // Rows after the last visible key need not exist.
        let mut visible = (task.first..end).rev().map(|row| task.piece.visible(row));
        let visible = visible.find(|keys| !keys.is_empty());
        let last_key = visible.map_or(0, |keys| keys.end);
        for first in (task.first..end).step_by(rows) {
            let rows = first..end.min(first + rows);
            // SAFETY: the caller's promise.
            unsafe {
                let tiles = self.load_tiles(task, rows, scratch);
                if self.layout.advances {
                    self.advance::<T, S>(task, tiles, (&mut packed, last_key), scratch);
                } else {
                    self.attend_packs::<T, S>(task, tiles, scratch);
                }
                for (i, tile) in tiles.iter().enumerate() {
                    self.store_tile(task, i, tile, scratch);
                }
            }
        }
    }

    /// Loads the tiles of some rows of a task.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`]; the tiles must be gone before the next are loaded.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_tiles<'s>(
        &self,
        task: &AmxForwardTask<'_>,
        rows: Range<usize>,
        scratch: *mut u8,
    ) -> &'s mut [AmxForwardTile] {
        let tiles_each = rows.len().div_ceil(WIDTH);
        let count = tiles_each * task.heads.len();
        assert!(count <= self.layout.tiles);
        let states = scratch.wrapping_add(self.layout.states);
        // SAFETY: the region is that large, aligned to a page, and any bits are a tile.
        let tiles =
            unsafe { std::slice::from_raw_parts_mut(states.cast::<AmxForwardTile>(), count) };
        for (i, tile) in tiles.iter_mut().enumerate() {
            tile.head = task.heads[i / tiles_each];
            tile.first = rows.start + i % tiles_each * WIDTH;
            tile.count = WIDTH.min(rows.end - tile.first);
            // SAFETY: the rows are this task's own, scratch memory as the layout says.
            unsafe { self.load_tile(task, i, tile, scratch) };
        }
        tiles
    }

    /// Attends all tiles to the keys they see, some hundred at a time.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn attend_packs<T: TileUnit, S: AmxForwardConfig>(
        &self,
        task: &AmxForwardTask<'_>,
        tiles: &mut [AmxForwardTile],
        scratch: *mut u8,
    ) {
        let KeyBounds { start, end } = seen_by(tiles);
        let keys = task.piece.keys.start;
        let size = self.block_keys::<S>();
        let start = keys + start.saturating_sub(keys) / size * size;
        let mut packs = (start..end).step_by(S::PACKED_KEYS);
        while let Some(first) = match self.job.tiles {
            None => packs.next(),
            Some(_) => packs.next_back(),
        } {
            let last = end.min(first + S::PACKED_KEYS);
            let mut packed = PackedKeys::new(first);
            // SAFETY: the caller's promise.
            unsafe {
                self.pack_keys(task, &mut packed, first, last, scratch);
                for (index, tile) in tiles.iter_mut().enumerate() {
                    self.attend::<T, S>(task, tile, index, packed, scratch);
                }
            }
        }
    }

    /// Packs the keys that tiles see and the ones before them did not, and attends the tiles. No
    /// query of the task sees a key from `last_key` on.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn advance<T: TileUnit, S: AmxForwardConfig>(
        &self,
        task: &AmxForwardTask<'_>,
        tiles: &mut [AmxForwardTile],
        (packed, last_key): (&mut PackedKeys, usize),
        scratch: *mut u8,
    ) {
        let KeyBounds { start, end } = seen_by(tiles);
        if start >= end {
            return;
        }
        let keys = task.piece.keys.start;
        let group = |key: usize| keys + (key - keys) / WIDTH * WIDTH;
        let end = (group(end - 1) + WIDTH).min(last_key);
        // SAFETY: the caller's promise.
        unsafe {
            if packed.end < end {
                self.pack_keys(task, packed, packed.end.max(group(start)), end, scratch);
            }
            for (index, tile) in tiles.iter_mut().enumerate() {
                self.attend::<T, S>(task, tile, index, *packed, scratch);
            }
        }
    }
}

/// The keys from the first to the last that a query of some tiles sees.
fn seen_by(tiles: &[AmxForwardTile]) -> KeyBounds {
    let start = tiles.iter().map(|tile| tile.seen.start).min();
    let end = tiles.iter().map(|tile| tile.seen.end).max();
    KeyBounds {
        start: start.unwrap_or(usize::MAX),
        end: end.unwrap_or(0),
    }
}
