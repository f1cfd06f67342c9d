//! The forward pass: a block of queries against the keys visible to them, continuing the carry.
//!
//! Scores exist for one panel of keys and one tile of queries at a time. Panels past the last
//! visible key are not packed, a tile skips panels that are hidden from it, and only tiles on the
//! diagonal are masked.

use encke_core::Element;
use encke_core::dtype::Slice;
use encke_core::job::Job;

use crate::grid::{QueryBlock, QueryGrid, Tile};
use crate::microkernel::{multiply_columns, multiply_rows};
use crate::panel;
use crate::real::Real;
use crate::schedule;
use crate::scratch::{Scratch, ScratchPool};
use crate::shape::{FORWARD_TILES, KEYS, MAX_LANES, VECTORS, lanes, padded, tiles};
use crate::softmax::{self, CausalMask};
use crate::target::Target;
use crate::vector::{SimdTask, Vector};

/// Sizes of one task's panels: queries and outputs as lanes, m and l of each lane, scores, keys
/// and values.
pub(crate) fn sizes<X: Vector>(dim: usize) -> [usize; 7] {
    let (tile, width) = (lanes::<X>(), padded::<X>(dim));
    let panel = tiles(FORWARD_TILES, dim) * width * tile;
    let cells = tiles(FORWARD_TILES, dim) * tile;
    [
        panel,
        panel,
        cells,
        cells,
        KEYS * tile,
        KEYS * width,
        KEYS * width,
    ]
}

/// The data that all tasks of a job share.
struct ForwardCall<'a, X: Vector> {
    x: X,
    job: &'a Job,
    grid: &'a QueryGrid,
    q: Slice<'a>,
    k: Slice<'a>,
    v: Slice<'a>,
    target: Target<'a, X::A>,
}

/// Attends the queries of a job to its keys, `R` rows in registers at a time.
pub(crate) fn forward<X: Vector, const R: usize>(
    x: X,
    pool: &ScratchPool<Scratch<X::A>>,
    job: &Job,
    [q, k, v]: [Slice<'_>; 3],
    target: Target<'_, X::A>,
) {
    let active = schedule::ActiveCall::new();
    let grid = QueryGrid::new(
        job,
        lanes::<X>(),
        tiles(FORWARD_TILES, job.dim),
        active.task_target(),
    );
    let call = ForwardCall {
        x,
        job,
        grid: &grid,
        q,
        k,
        v,
        target,
    };
    let blocks = grid.all_blocks(job);
    schedule::run(&blocks, |queue| {
        pool.with(|scratch| {
            while let Some(block) = queue.take() {
                x.run(ForwardTaskRun::<X, R> {
                    call: &call,
                    block,
                    scratch,
                });
            }
        });
    });
}

/// One run of a task: a block of queries.
struct ForwardTaskRun<'a, X: Vector, const R: usize> {
    call: &'a ForwardCall<'a, X>,
    block: &'a QueryBlock,
    scratch: &'a mut Scratch<X::A>,
}

panel::panels! {
    /// The panels of a task, in the order of [`sizes`].
    ForwardPanels { q, out, m, l, scores, k, v }
}

impl<X: Vector, const R: usize> SimdTask for ForwardTaskRun<'_, X, R> {
    #[inline(always)]
    fn run(self) {
        let ForwardTaskRun {
            call,
            block,
            scratch,
        } = self;
        let mut panels = ForwardPanels::new(scratch.panels(sizes::<X>(call.job.dim)));
        let mut visible = [[0; MAX_LANES]; FORWARD_TILES];
        for (i, tile) in block.tiles.clone().enumerate() {
            let tile = call.grid.tile(block.group, tile);
            call.load(block, i, tile, &mut panels);
            for (lane, count) in visible[i][..lanes::<X>()].iter_mut().enumerate() {
                *count = call.job.visible(tile.first + lane.min(tile.count - 1)).end;
            }
        }
        call.attend::<R>(block, &visible, &mut panels);
        for (i, tile) in block.tiles.clone().enumerate() {
            let tile = call.grid.tile(block.group, tile);
            call.store(block, i, tile, &mut panels);
        }
    }
}

impl<X: Vector> ForwardCall<'_, X> {
    #[inline(always)]
    fn cell(&self, block: &QueryBlock, tile: Tile, lane: usize) -> usize {
        let row = tile.first + lane;
        self.job
            .cells
            .at(block.batch, block.segment, row, tile.head)
    }

    /// Packs the queries (times the scale) of tile `i` as lanes, and loads the row max and the sum
    /// of weights they start with. The carry's sums stay in memory until `store` adds them.
    #[inline(always)]
    fn load(&self, block: &QueryBlock, i: usize, tile: Tile, panels: &mut ForwardPanels<'_, X::A>) {
        let (job, lanes) = (self.job, lanes::<X>());
        let width = padded::<X>(job.dim);
        let at = i * width * lanes..(i + 1) * width * lanes;
        let address = |row: usize| {
            job.q
                .at(block.batch, block.segment, tile.first + row, tile.head)
        };
        let rows = &mut panels.k[..lanes * width];
        panel::rows(self.q, job.dim, tile.count, address, width, rows);
        panel::scale(rows, X::A::from_f64(job.scale));
        panel::transpose(self.x, rows, (lanes, width), &mut panels.q[at.clone()]);
        panels.out[at].fill(X::A::ZERO);
        let cells = i * lanes..(i + 1) * lanes;
        let (m, l) = (&mut panels.m[cells.clone()], &mut panels.l[cells]);
        m.fill(X::A::NEG_INFINITY);
        l.fill(X::A::ZERO);
        for lane in 0..tile.count {
            let cell = self.cell(block, tile, lane);
            // SAFETY: cells of different (batch, segment, row, head) do not overlap
            // (`CpuKernel::attend` checks that), and no other task has these.
            (m[lane], l[lane]) = unsafe { self.target.initial_max_and_sum(cell) };
        }
    }

    /// Adds the carry's sums to those of the tile, and stores the result.
    #[inline(always)]
    fn store(
        &self,
        block: &QueryBlock,
        i: usize,
        tile: Tile,
        panels: &mut ForwardPanels<'_, X::A>,
    ) {
        let (dim, lanes) = (self.job.dim, lanes::<X>());
        let width = padded::<X>(dim);
        let out = &panels.out[i * width * lanes..(i + 1) * width * lanes];
        let rows = &mut panels.k[..lanes * width];
        panel::transpose(self.x, out, (width, lanes), rows);
        for lane in 0..tile.count {
            let cell = self.cell(block, tile, lane);
            let row = &mut rows[lane * width..][..dim];
            let (m, l) = (panels.m[i * lanes + lane], panels.l[i * lanes + lane]);
            // SAFETY: as in `load`.
            unsafe { self.target.write_row(cell, row, m, l) };
        }
    }

    /// Processes all panels of keys that are visible to some query of the block.
    #[inline(always)]
    fn attend<const R: usize>(
        &self,
        block: &QueryBlock,
        visible: &[[usize; MAX_LANES]; FORWARD_TILES],
        panels: &mut ForwardPanels<'_, X::A>,
    ) {
        let (job, lanes) = (self.job, lanes::<X>());
        let width = padded::<X>(job.dim);
        let count_of_tiles = block.tiles.len();
        // Positions are ascending, so the last lane of a tile has the most visible keys.
        let most = (0..count_of_tiles)
            .map(|i| visible[i][lanes - 1])
            .max()
            .unwrap_or(0);
        let head = self.grid.groups[block.group][0];
        for start in (0..most).step_by(KEYS) {
            let count = KEYS.min(most - start);
            let address = |j: usize| job.k.at(block.batch, block.segment, start + j, head);
            let (k, v) = (&mut *panels.k, &mut *panels.v);
            panel::rows(self.k, job.dim, count, address, width, k);
            panel::rows(self.v, job.dim, count, address, width, v);
            // Hidden values are multiplied by zero weights, which hides only finite ones.
            let finite = job.mask.is_none() || panel::finite(&v[..count * width]);
            let next = most.saturating_sub(start + KEYS).min(KEYS);
            for (i, visible) in visible.iter().enumerate().take(count_of_tiles) {
                for j in i * next / count_of_tiles..(i + 1) * next / count_of_tiles {
                    panel::prefetch(self.k, address(KEYS + j), job.dim);
                    panel::prefetch(self.v, address(KEYS + j), job.dim);
                }
                if visible[lanes - 1] <= start {
                    continue;
                }
                let rows = (visible[lanes - 1] - start).min(count).next_multiple_of(R);
                let mask = CausalMask::new::<X>(&visible[..lanes], start, rows);
                let at = i * width * lanes..(i + 1) * width * lanes;
                let q = X::of(&panels.q[at.clone()]);
                let out = X::of_mut(&mut panels.out[at]);
                let scores = X::of_mut(&mut panels.scores[..rows * lanes]);
                products::<X, R>(self.x, &k[..rows * width], width, job.dim, q, scores);
                if let Some(mask) = &mask {
                    mask.hide(self.x, scores, X::A::NEG_INFINITY);
                }
                let cells = i * lanes..(i + 1) * lanes;
                let m = X::of_mut(&mut panels.m[cells.clone()]);
                let l = X::of_mut(&mut panels.l[cells]);
                let keep = softmax::weights(self.x, scores, m, l);
                let v = &v[..rows * width];
                match mask.filter(|_| !finite) {
                    None => accumulate::<X, R>(self.x, v, width, scores, &keep, out),
                    Some(mask) => mask.accumulate(self.x, v, width, scores, &keep, out),
                }
            }
        }
    }
}

/// scores[j] = Σ_c rows[j][c] · lanes[c], for every row.
#[inline(always)]
pub(crate) fn products<X: Vector, const R: usize>(
    x: X,
    rows: &[X::A],
    width: usize,
    dim: usize,
    lanes: &[X::V],
    scores: &mut [X::V],
) {
    let groups = rows.chunks_exact(R * width);
    for (rows, scores) in groups.zip(scores.chunks_exact_mut(R * VECTORS)) {
        let mut by_row: [&[X::A]; R] = [&[]; R];
        for (slot, row) in by_row.iter_mut().zip(rows.chunks_exact(width)) {
            *slot = &row[..dim];
        }
        let sums = multiply_rows::<X, R, VECTORS>(x, by_row, lanes, VECTORS, 0);
        for (scores, sums) in scores.chunks_exact_mut(VECTORS).zip(sums) {
            scores.copy_from_slice(&sums);
        }
    }
}

/// out[c] = keep · out[c] + Σ_j rows[j][c] · weights[j].
#[inline(always)]
pub(crate) fn accumulate<X: Vector, const R: usize>(
    x: X,
    rows: &[X::A],
    width: usize,
    weights: &[X::V],
    keep: &[X::V; VECTORS],
    out: &mut [X::V],
) {
    for (group, out) in out.chunks_exact_mut(R * VECTORS).enumerate() {
        let sums = multiply_columns::<X, R, VECTORS>(x, rows, width, group * R, weights);
        for (out, sums) in out.chunks_exact_mut(VECTORS).zip(sums) {
            for n in 0..VECTORS {
                out[n] = x.mul_add(keep[n], out[n], sums[n]);
            }
        }
    }
}
