//! The order in which tasks add to the rows of dk and dv.
//!
//! The decision here: tasks that add to the same rows of dk and dv form a chain. A task adds to a
//! block of keys after all tasks before it in the chain have done so. One task at a time adds to a
//! row, in an order that the job alone determines, without atomic additions and without a second
//! pass. The tasks of a chain compute at the same time, each at least one block behind the one
//! before it, and wait only for tasks that have started.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use encke_core::job::{Job, Piece};

use super::super::pack::WIDTH;
use crate::pieces::forgets;
use crate::schedule::batch_segments;

/// The number of tasks that a job is divided into if it is large enough.
const TASKS: usize = 32;
/// Tasks of fewer than twice as many tiles are not divided: each task packs keys and adds to them.
const MIN_TILES: usize = 16;

/// Queries of one head, and the keys that are visible to them.
#[derive(Debug)]
pub struct AmxBackwardTask<'a> {
    pub batch: usize,
    pub segment: usize,
    /// The heads that share those keys.
    pub heads: &'a [usize],
    pub head: usize,
    /// The piece of the mask that has the queries.
    pub piece: &'a Piece,
    pub queries: Range<usize>,
    /// Tasks of larger ranks start first. It never rises along a chain.
    rank: usize,
    /// Its position in the chain of tasks with the same keys.
    position: usize,
    chain: Arc<[ChainProgress]>,
}

/// The progress of a task: it has added to all its keys before this one.
#[derive(Debug, Default)]
struct ChainProgress(AtomicUsize);

impl ChainProgress {
    /// The task adds to no more keys.
    const END: usize = usize::MAX;

    fn get(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, key: usize) {
        self.0.store(key, Ordering::Release);
    }
}

/// A running task's place in its chain. Dropping it, also on a panic, releases the tasks that wait.
pub struct ChainGuard<'a> {
    task: &'a AmxBackwardTask<'a>,
    /// How many tasks at the front of the chain have ended.
    ended: usize,
}

impl<'a> ChainGuard<'a> {
    pub fn new(task: &'a AmxBackwardTask<'a>) -> ChainGuard<'a> {
        ChainGuard { task, ended: 0 }
    }

    /// Waits until all tasks before this one have added to their keys up to `start`. Checking only
    /// the last of them is not enough: fewer keys may be visible to it, so that it can end earlier
    /// than the others.
    pub fn wait(&mut self, start: usize) {
        let before = &self.task.chain[..self.task.position];
        for (position, progress) in before.iter().enumerate().skip(self.ended) {
            let mut at = progress.get();
            while at <= start {
                std::thread::yield_now();
                at = progress.get();
            }
            if at == ChainProgress::END && position == self.ended {
                self.ended += 1;
            }
        }
    }

    /// Announces that this task has added to all keys before `end`.
    pub fn publish(&self, end: usize) {
        self.task.chain[self.task.position].set(end);
    }
}

impl Drop for ChainGuard<'_> {
    fn drop(&mut self) {
        self.publish(ChainProgress::END);
    }
}

/// Queries of one head, and about how many pairs they have, in units of 32.
struct ChainLink {
    pairs: usize,
    head: usize,
    queries: Range<usize>,
}

/// The tasks of heads that share the keys of a piece, in the order of their chain.
fn links(piece: &Piece, heads: &[usize], rows: usize) -> Vec<ChainLink> {
    let mut chain = Vec::new();
    for &head in heads {
        for first in piece.queries.clone().step_by(rows) {
            let queries = first..piece.queries.end.min(first + rows);
            let tiles = queries.clone().step_by(WIDTH);
            let keys = |row: usize| {
                let last = (row + WIDTH).min(queries.end) - 1;
                piece.visible(last).end - piece.visible(row).start
            };
            let pairs: usize = tiles.map(keys).sum();
            if pairs > 0 {
                chain.push(ChainLink {
                    pairs,
                    head,
                    queries,
                });
            }
        }
    }
    if forgets(piece) {
        // From the last queries to the first: each task then begins with keys that the tasks before
        // it do not see, and reaches those that they see after them.
        chain.sort_by_key(|link| Reverse(link.queries.start));
        let most = chain.iter().map(|link| link.pairs).max().unwrap_or(0);
        chain.iter_mut().for_each(|link| link.pairs = most);
    } else {
        chain.sort_by_key(|link| Reverse(link.pairs));
    }
    chain
}

/// All tasks of a job: the longest first, and the tasks of a chain in its order. A task has at most
/// `max_tiles` tiles, a multiple of `group_tiles` unless the piece ends. How a piece is divided
/// depends on no other piece.
pub fn tasks<'a>(
    job: &Job,
    groups: &'a [Vec<usize>],
    pieces: &'a [Piece],
    [max_tiles, group_tiles]: [usize; 2],
) -> Vec<AmxBackwardTask<'a>> {
    let heads = job.batch * job.segments * job.heads;
    let mut tasks = Vec::new();
    for piece in pieces.iter().filter(|piece| !piece.keys.is_empty()) {
        let count = |tiles: usize| piece.queries.len().div_ceil(tiles * WIDTH) * heads;
        let available = piece.queries.len().div_ceil(WIDTH);
        let mut tiles = max_tiles.min(available.next_multiple_of(group_tiles));
        while tiles >= 2 * MIN_TILES && count(tiles) < TASKS {
            tiles /= 2;
        }
        for (batch, segment) in batch_segments(job) {
            for heads in groups {
                let chain = links(piece, heads, tiles * WIDTH);
                let progress: Arc<[ChainProgress]> =
                    chain.iter().map(|_| ChainProgress::default()).collect();
                let links = chain.into_iter().enumerate();
                tasks.extend(links.map(|(position, link)| AmxBackwardTask {
                    batch,
                    segment,
                    heads,
                    head: link.head,
                    piece,
                    queries: link.queries,
                    rank: link.pairs,
                    position,
                    chain: Arc::clone(&progress),
                }));
            }
        }
    }
    tasks.sort_by_key(|task| (Reverse(task.rank), task.position));
    tasks
}
