//! Tasks in waves: computed in parallel, stored one after the other.
//!
//! Rows of different tasks interleave in memory, and safe code cannot hand out interleaved rows of
//! one vector to several threads. So the tasks of a wave compute into tiles of their own, and the
//! tiles are stored when the wave is done; storing is a small part of the work.
//!
//! The decision here: a task's arithmetic never depends on the wave it is in, so the number of
//! threads decides how long it takes and nothing else.

use rayon::prelude::*;

use crate::real::Real;
use crate::scratch::{Pool, Tile, Work};
use crate::tile::LANES;

/// Tasks of a wave for each thread: enough to even out tasks of different length.
const TASKS_PER_THREAD: usize = 8;

/// Up to [`LANES`] rows of one head in one segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub batch: usize,
    pub segment: usize,
    pub head: usize,
    pub first: usize,
    pub count: usize,
}

/// The tasks of a job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub batch: usize,
    pub segments: usize,
    pub heads: usize,
    pub rows: usize,
}

impl Grid {
    /// How many tasks there are.
    pub fn tasks(&self) -> usize {
        self.batch * self.segments * self.heads * self.rows.div_ceil(LANES)
    }

    /// Where a task works.
    pub fn place(&self, task: usize) -> Place {
        let blocks = self.rows.div_ceil(LANES);
        let (rest, block) = (task / blocks, task % blocks);
        let (rest, head) = (rest / self.heads, rest % self.heads);
        let first = block * LANES;
        Place {
            batch: rest / self.segments,
            segment: rest % self.segments,
            head,
            first,
            count: LANES.min(self.rows - first),
        }
    }
}

/// The most scratch memory one call uses.
pub(crate) fn bytes<A: Real>(dim: usize) -> usize {
    let threads = rayon::current_num_threads();
    threads * (TASKS_PER_THREAD * Tile::<A>::bytes(dim) + Work::<A>::bytes(dim))
}

/// Runs all tasks of a grid. `compute` may read what `store` writes: waves do not overlap.
pub(crate) fn run<A: Real, S: Sync>(
    pool: &Pool<A>,
    dim: usize,
    grid: Grid,
    state: &mut S,
    compute: impl Fn(&S, Place, &mut Work<A>, &mut Tile<A>) + Sync,
    mut store: impl FnMut(&mut S, Place, &Tile<A>, &mut [A]),
) {
    let tasks = grid.tasks();
    if tasks == 0 {
        return;
    }
    let wave = tasks.min(TASKS_PER_THREAD * rayon::current_num_threads());
    let mut tiles = pool.take(wave, dim);
    for start in (0..tasks).step_by(wave) {
        let live = &mut tiles[..wave.min(tasks - start)];
        let shared = &*state;
        let each = live.par_iter_mut().enumerate().with_max_len(1);
        each.for_each(|(i, tile)| {
            let place = grid.place(start + i);
            pool.with_work(dim, |work| compute(shared, place, work, tile));
        });
        pool.with_work(dim, |work| {
            for (i, tile) in live.iter().enumerate() {
                store(state, grid.place(start + i), tile, &mut work.row);
            }
        });
    }
    pool.give_back(tiles);
}
