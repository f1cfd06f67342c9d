//! Who adds to which keys when.
//!
//! The decision here: tasks that add to the same rows of dk and dv are a chain. A task adds to a block
//! of keys after those before it in its chain have, so that rows are added to by one task at a time, in
//! an order that is part of the job, without atomic additions and without a second pass. They compute
//! at the same time, each a block or more behind the other, and wait for none that has not begun.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use encke_core::job::Job;

use super::super::pack::WIDTH;
use super::super::schedule;

/// Tasks of a job that is large enough.
const TASKS: usize = 32;
/// Tiles below which a task is not cut further: keys are packed, and added to, for each task.
const FEWEST_TILES: usize = 16;

/// Queries of one head, and the keys they see.
#[derive(Debug)]
pub(super) struct Task<'a> {
    pub batch: usize,
    pub segment: usize,
    /// The heads that share those keys.
    pub heads: &'a [usize],
    pub head: usize,
    pub queries: std::ops::Range<usize>,
    pairs: usize,
    /// Its place in the chain of those with the same keys.
    place: usize,
    chain: Arc<[Progress]>,
}

/// How far a task has come: it has added to its keys before this one.
#[derive(Debug, Default)]
struct Progress(AtomicUsize);

impl Progress {
    /// Where a task is that adds to no more keys.
    const END: usize = usize::MAX;

    fn get(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, key: usize) {
        self.0.store(key, Ordering::Release);
    }
}

/// A task that runs. When it ends, however it does, nobody waits for it any longer.
pub(super) struct Running<'a> {
    task: &'a Task<'a>,
    /// How many of its chain have ended; those that may not have are behind them.
    ended: usize,
}

impl<'a> Running<'a> {
    pub fn new(task: &'a Task<'a>) -> Running<'a> {
        Running { task, ended: 0 }
    }

    /// Waits until all before it have added to their keys up to `start`. That the last of them has is
    /// not enough: it may have seen fewer keys, and be at its end while others are not.
    pub fn wait(&mut self, start: usize) {
        let before = &self.task.chain[..self.task.place];
        for (place, progress) in before.iter().enumerate().skip(self.ended) {
            let mut at = progress.get();
            while at <= start {
                std::thread::yield_now();
                at = progress.get();
            }
            if at == Progress::END && place == self.ended {
                self.ended += 1;
            }
        }
    }

    /// Says that it has added to all keys before `end`.
    pub fn pass(&self, end: usize) {
        self.task.chain[self.task.place].set(end);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.pass(Progress::END);
    }
}

/// All tasks of a job, the longest first, and those of a chain in its order. `most` is how many tiles a
/// task may have.
pub(super) fn tasks<'a>(job: &Job, groups: &'a [Vec<usize>], most: usize) -> Vec<Task<'a>> {
    let each = job.batch * job.segments * job.heads;
    let count = |tiles: usize| job.queries.div_ceil(tiles * WIDTH) * each;
    let mut tiles = most;
    while tiles >= 2 * FEWEST_TILES && count(tiles) < TASKS {
        tiles /= 2;
    }
    let mut tasks = Vec::new();
    for (batch, segment) in schedule::places(job) {
        for heads in groups {
            let mut chain = Vec::new();
            for &head in heads {
                for first in (0..job.queries).step_by(tiles * WIDTH) {
                    let queries = first..job.queries.min(first + tiles * WIDTH);
                    let rows = queries.clone().step_by(WIDTH);
                    let seen = rows.map(|row| job.visible((row + WIDTH).min(queries.end) - 1));
                    let pairs: usize = seen.sum();
                    if pairs > 0 {
                        chain.push((pairs, head, queries));
                    }
                }
            }
            chain.sort_by_key(|(pairs, ..)| Reverse(*pairs));
            let progress: Arc<[Progress]> = chain.iter().map(|_| Progress::default()).collect();
            let links = chain.into_iter().enumerate();
            tasks.extend(links.map(|(place, (pairs, head, queries))| Task {
                batch,
                segment,
                heads,
                head,
                queries,
                pairs,
                place,
                chain: Arc::clone(&progress),
            }));
        }
    }
    tasks.sort_by_key(|task| (Reverse(task.pairs), task.place));
    tasks
}
