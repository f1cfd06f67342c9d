//! Division of a backward job into tasks.
//!
//! A (batch, segment, head group, piece of the mask) that is a small share of the job is one task
//! that owns all of its rows: five products per pair. For one that is a large share, a set of tasks
//! owns the queries and another one owns the keys: seven products, but any number of tasks. The
//! choice depends on the job alone, no two tasks add to the same row, and both add in the same
//! order, so the result is the same for any number of threads.

use std::ops::Range;

use encke_core::job::Job;

use crate::grid::QueryGrid;
use crate::schedule::batch_segments;
use crate::shape::KEYS;

/// A (batch, segment, head group, piece) is one task if it has at most one in so many of the pairs.
const ONE_SWEEP_SHARE: u128 = 4;
/// Keys of a task that owns keys only: many panels, since each task packs the queries again.
const KEYS_PER_TASK: usize = 8 * KEYS;

/// Blocks of queries over a range of keys, and which gradients the task adds to.
pub(super) struct BackwardTask {
    pub batch: usize,
    pub segment: usize,
    pub group: usize,
    pub piece: usize,
    /// The blocks; `None` for all of the piece.
    pub blocks: Option<Vec<Range<usize>>>,
    pub keys: Range<usize>,
    pub writes_dq: bool,
    pub writes_dk_dv: bool,
}

/// All tasks of a job: those that add to dq, some of which add to dk and dv as well, and then the
/// others.
pub(super) fn tasks(job: &Job, grid: &QueryGrid) -> [Vec<BackwardTask>; 2] {
    let pairs: Vec<u128> = grid.pieces.iter().map(|piece| piece.pairs()).collect();
    let parts = job.batch * job.segments * grid.groups.len();
    let total = pairs.iter().sum::<u128>() * parts as u128;
    let mut tasks = [Vec::new(), Vec::new()];
    for (batch, segment) in batch_segments(job) {
        for (group, piece) in grid.parts().filter(|&(_, piece)| pairs[piece] > 0) {
            let rows = grid.pieces[piece].keys.clone();
            let task = |blocks: Option<Vec<Range<usize>>>, keys: &Range<usize>| BackwardTask {
                batch,
                segment,
                group,
                piece,
                writes_dq: true,
                writes_dk_dv: true,
                blocks,
                keys: keys.clone(),
            };
            if pairs[piece] * ONE_SWEEP_SHARE <= total {
                tasks[0].push(task(None, &rows));
                continue;
            }
            let blocks = || grid.blocks(group, piece);
            tasks[0].extend(blocks().map(|block| BackwardTask {
                writes_dk_dv: false,
                ..task(Some(vec![block]), &rows)
            }));
            let visible = |tiles: Range<usize>| (grid.visible(group, piece, tiles.clone()), tiles);
            let blocks: Vec<_> = blocks().map(visible).collect();
            tasks[1].extend(rows.clone().step_by(KEYS_PER_TASK).map(|first| {
                let keys = first..(first + KEYS_PER_TASK).min(rows.end);
                let sees = |(visible, _): &&(Range<usize>, _)| {
                    visible.start < keys.end && keys.start < visible.end
                };
                let blocks = blocks.iter().filter(sees).map(|(_, tiles)| tiles.clone());
                BackwardTask {
                    writes_dq: false,
                    ..task(Some(blocks.collect()), &keys)
                }
            }));
        }
    }
    if grid.pieces.len() > 1 {
        // Tasks of long pieces first, so that the last one to finish is short.
        let pairs = |task: &BackwardTask| match &task.blocks {
            None => pairs[task.piece],
            Some(_) => u128::MAX,
        };
        tasks[0].sort_by_key(|task| std::cmp::Reverse(pairs(task)));
    }
    tasks
}
