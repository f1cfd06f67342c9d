//! The forward pass: tiles of 32 queries against packed keys and values, continuing the carry.
//!
//! A task is a block of query rows of all heads that share their keys. It packs its queries once,
//! and keys and values a thousand at a time, into the second-level cache, where all its tiles meet
//! them. Key blocks past the last visible key are not touched and only diagonal ones are masked.
//!
//! The decision here: one tile after the other goes through scores, softmax and values, block by
//! block. Letting scores run ahead of their softmax, or several tiles take turns, was tried and
//! gained nothing; blocks that fit the first-level cache did.

mod attend;
mod carry;

use encke_core::job::Job;

use super::number::{Number, Scale};
use super::pack::WIDTH;
use super::schedule;
use super::scratch::{Divider, Pool};
use super::shape::{MOST_OF_SHORT, Shape};
use super::softmax::Running;
use super::tiles::{SLAB_BYTES, Tiles};
use crate::target::Target;

/// Tiles below which a task is not cut further: keys are packed for each task.
const FEWEST_TILES: usize = 8;
/// Tiles of the largest task: keys that are packed once for 2048 queries take less time than for
/// half as many, and twice as many are no faster.
const MOST_TILES: usize = 64;

/// Attends the queries of the job to its keys.
///
/// Cells of different batch entries, segments, rows and heads must be different cells. Panics if the
/// tiles are not available, or if a row lies outside its buffer.
pub(crate) fn forward<T: Tiles, N: Number>(
    pool: &Pool,
    job: &Job,
    given: [&[N]; 3],
    target: Target<'_, f32>,
) {
    if job.dim <= MOST_OF_SHORT {
        forward_shaped::<T, N, N::Short>(pool, job, given, target);
    } else {
        forward_shaped::<T, N, N::Long>(pool, job, given, target);
    }
}

/// The same with sizes of one's own choice.
pub(crate) fn forward_shaped<T: Tiles, N: Number, S: Shape>(
    pool: &Pool,
    job: &Job,
    [q, k, v]: [&[N]; 3],
    target: Target<'_, f32>,
) {
    assert!(T::available(), "{} tiles are not available here", T::NAME);
    let run = Run {
        job,
        q,
        k,
        v,
        target,
        steps: job.dim.div_ceil(WIDTH),
        scale: Scale::new(job.scale),
        layout: Layout::new::<N, S>(job),
    };
    let groups = schedule::groups(job);
    let share = crate::schedule::Share::new();
    let tasks = tasks(job, &groups, run.layout.tiles, share.tasks());
    schedule::run::<T, Task<'_>>(pool, run.layout.bytes, &tasks, |task, scratch| {
        // SAFETY: the tiles are available and configured, scratch memory is as large as the
        // layout says, and tasks have no query row in common.
        unsafe { run.task::<T, S>(task, scratch) };
    });
}

/// Scratch bytes of one thread.
pub(crate) fn bytes<N: Number>(job: &Job) -> usize {
    if job.dim <= MOST_OF_SHORT {
        Layout::new::<N, N::Short>(job).bytes
    } else {
        Layout::new::<N, N::Long>(job).bytes
    }
}

/// A block of query rows of some heads that share their keys.
#[derive(Debug)]
struct Task<'a> {
    batch: usize,
    segment: usize,
    heads: &'a [usize],
    first: usize,
    count: usize,
    pairs: usize,
}

/// All tasks of a job, the longest first. `most` is how many tiles a task may have, `wanted` how many
/// tasks there should be.
fn tasks<'a>(job: &Job, groups: &'a [Vec<usize>], most: usize, wanted: usize) -> Vec<Task<'a>> {
    let tiles_each = job.queries.div_ceil(WIDTH);
    let total = tiles_each * job.heads * job.batch * job.segments;
    let mut limit = most;
    while limit >= 2 * FEWEST_TILES && total.div_ceil(limit) < wanted {
        limit /= 2;
    }
    let mut tasks = Vec::new();
    for (batch, segment) in schedule::places(job) {
        for heads in groups.iter().flat_map(|group| group.chunks(limit)) {
            let rows = limit / heads.len() * WIDTH;
            for first in (0..job.queries).step_by(rows) {
                let count = rows.min(job.queries - first);
                let seen = |row: usize| job.visible(row.min(first + count - 1));
                let tiles = (first..first + count).step_by(WIDTH);
                let pairs = tiles.map(|row| seen(row + WIDTH - 1)).sum::<usize>();
                tasks.push(Task {
                    batch,
                    segment,
                    heads,
                    first,
                    count,
                    pairs: pairs * heads.len(),
                });
            }
        }
    }
    tasks.sort_by_key(|task| std::cmp::Reverse(task.pairs));
    tasks
}

/// Where things lie in scratch memory.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// The most tiles of a task.
    tiles: usize,
    running: usize,
    queries: usize,
    sums: usize,
    keys: usize,
    values: usize,
    clean: usize,
    scores: usize,
    weights: usize,
    bytes: usize,
}

impl Layout {
    fn new<N: Number, S: Shape>(job: &Job) -> Layout {
        const { assert!(S::PACKED.is_multiple_of(S::KEYS) && S::KEYS.is_multiple_of(WIDTH)) };
        const { assert!(S::PACKED <= 64 * WIDTH) };
        let steps = job.dim.div_ceil(WIDTH);
        let width = steps * WIDTH;
        // No more than the job has, whoever shares keys.
        let tiles = (S::NUMBERS / width / WIDTH)
            .clamp(FEWEST_TILES, MOST_TILES)
            .min(job.queries.div_ceil(WIDTH) * job.heads);
        let [keys, packed] = [S::KEYS, S::PACKED].map(|most| job.keys.min(most).div_ceil(WIDTH));
        let (slabs, stacks) = (
            |count: usize| count * SLAB_BYTES,
            |count: usize| count * N::STACK,
        );
        let mut divider = Divider::default();
        let mut layout = Layout {
            tiles,
            running: divider.take(tiles * size_of::<Tile>()),
            sums: divider.take(slabs(tiles * 2 * steps)),
            scores: divider.take(slabs(2 * keys)),
            queries: divider.take(stacks(tiles * steps)),
            keys: divider.take(stacks(packed * steps)),
            values: divider.take(stacks(packed * steps)),
            clean: divider.take(stacks(keys * steps)),
            weights: 0,
            bytes: 0,
        };
        layout.weights = match N::IN_PLACE {
            true => layout.scores,
            false => divider.take(stacks(keys)),
        };
        layout.bytes = divider.bytes();
        layout
    }
}

/// 32 queries of one head.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Tile {
    running: Running,
    head: usize,
    first: usize,
    count: usize,
    /// The fewest and the most keys that any of them sees.
    least: usize,
    most: usize,
}

/// Keys and values that are packed at the moment.
#[derive(Debug, Clone, Copy)]
struct Packed {
    first: usize,
    count: usize,
    /// A bit for each 32 keys with a value that is not finite.
    broken: u64,
}

/// What all tasks of a call share.
struct Run<'a, N> {
    job: &'a Job,
    q: &'a [N],
    k: &'a [N],
    v: &'a [N],
    target: Target<'a, f32>,
    /// Steps of 32 channels.
    steps: usize,
    scale: Scale,
    layout: Layout,
}

impl<N: Number> Run<'_, N> {
    /// Computes one task.
    ///
    /// # Safety
    /// The tiles are available and configured on this thread, `scratch` is memory as the layout
    /// says, and no other task has these query rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn task<T: Tiles, S: Shape>(&self, task: &Task<'_>, scratch: *mut u8) {
        let tiles_each = task.count.div_ceil(WIDTH);
        let count = tiles_each * task.heads.len();
        assert!(count <= self.layout.tiles);
        let running = scratch.wrapping_add(self.layout.running).cast::<Tile>();
        // SAFETY: the region is that large, aligned to a page, and any bits are a tile.
        let tiles = unsafe { std::slice::from_raw_parts_mut(running, count) };
        for (i, tile) in tiles.iter_mut().enumerate() {
            tile.head = task.heads[i / tiles_each];
            tile.first = task.first + i % tiles_each * WIDTH;
            tile.count = WIDTH.min(task.first + task.count - tile.first);
            // SAFETY: the rows are this task's own, scratch memory as the layout says.
            unsafe { self.load(task, i, tile, scratch) };
        }
        let most = tiles.iter().map(|tile| tile.most).max().unwrap_or(0);
        for first in (0..most).step_by(S::PACKED) {
            // SAFETY: as above.
            unsafe {
                let packed = self.pack(task, first, S::PACKED.min(most - first), scratch);
                for (number, tile) in tiles.iter_mut().enumerate() {
                    self.attend::<T, S>(tile, number, packed, scratch);
                }
            }
        }
        for (i, tile) in tiles.iter().enumerate() {
            // SAFETY: as above.
            unsafe { self.store(task, i, tile, scratch) };
        }
    }

    fn queries(&self, tile: usize, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(self.layout.queries + tile * self.steps * N::STACK)
    }

    fn sums(&self, tile: usize, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(self.layout.sums + tile * 2 * self.steps * SLAB_BYTES)
    }

    fn block_of_scores(&self, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(self.layout.scores)
    }

    fn block_of_weights(&self, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(self.layout.weights)
    }

    /// Packed keys (or values) from number `from` on, a multiple of 32.
    fn block(&self, region: usize, from: usize, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(region + from / WIDTH * self.steps * N::STACK)
    }
}
