//! Division of a forward call into tasks.

use std::cmp::Reverse;

use encke_core::job::{Job, Piece};

use super::super::pack::WIDTH;
use super::call::{AmxForwardLayout, MIN_TILES};
use crate::schedule::batch_segments;

/// A block of query rows of heads that share their keys.
#[derive(Debug)]
pub struct AmxForwardTask<'a> {
    pub batch: usize,
    pub segment: usize,
    pub heads: &'a [usize],
    /// The piece of the mask that has the rows.
    pub piece: &'a Piece,
    pub first: usize,
    pub count: usize,
    /// About how many pairs of a query and a key the task computes, in units of 32.
    pairs: usize,
}

/// All tasks of a job, the longest first. A task has at most as many tiles as the layout says, and
/// fewer if there would be less than `target` tasks.
pub fn tasks<'a>(
    job: &Job,
    groups: &'a [Vec<usize>],
    pieces: &'a [Piece],
    layout: &AmxForwardLayout,
    target: usize,
) -> Vec<AmxForwardTask<'a>> {
    let tiles = pieces
        .iter()
        .map(|piece| piece.queries.len().div_ceil(WIDTH));
    let total = tiles.sum::<usize>() * job.heads * job.batch * job.segments;
    let mut limit = layout.task_tiles;
    while limit >= 2 * MIN_TILES && total.div_ceil(limit) < target {
        limit /= 2;
    }
    let mut tasks = Vec::new();
    for (batch, segment) in batch_segments(job) {
        for heads in groups
            .iter()
            .flat_map(|group| group.chunks(limit.min(layout.tiles)))
        {
            let rows = limit / heads.len() * WIDTH;
            for piece in pieces {
                // On a grid, tiles begin at its multiples of 32 rows.
                let before = job.tiles.map_or(0, |tiles| tiles.query % WIDTH);
                let aligned = match before {
                    0 => piece.queries.start,
                    _ => (piece.queries.start + WIDTH - before).min(piece.queries.end),
                };
                let first = (piece.queries.start..aligned).step_by(WIDTH);
                for first in first.chain((aligned..piece.queries.end).step_by(rows)) {
                    let end = if first < aligned {
                        aligned
                    } else {
                        piece.queries.end
                    };
                    let count = rows.min(end - first);
                    let keys = |row: usize| {
                        let last = (row + WIDTH).min(first + count) - 1;
                        piece.visible(last).end - piece.visible(row).start
                    };
                    let tiles = (first..first + count).step_by(WIDTH);
                    let pairs = tiles.map(keys).sum::<usize>();
                    tasks.push(AmxForwardTask {
                        batch,
                        segment,
                        heads,
                        piece,
                        first,
                        count,
                        pairs: pairs * heads.len(),
                    });
                }
            }
        }
    }
    tasks.sort_by_key(|task| Reverse(task.pairs));
    tasks
}
