//! The forward pass: a block of queries against the keys visible to them, continuing the carry.
//!
//! Scores exist for one panel of keys and one tile of queries at a time. Panels that no query of a
//! block sees are not packed, a tile skips rows that are hidden from all its queries, and only
//! tiles that do not see a whole panel are masked.
//!
//! A job on a grid takes its panels from the last to the first and continues the carry's sums, so
//! that a row's bits do not depend on where its keys are cut into jobs.

use encke_core::Element;
use encke_core::dtype::Slice;
use encke_core::job::Job;

use crate::dropout::{DropWeights, LEFT_OUT, TileDropout, accumulate_marked};
use crate::grid::{QueryBlock, QueryGrid, Tile};
use crate::microkernel::{accumulate, products};
use crate::panel;
use crate::ranges::{KeyPanel, LaneRanges, RangeMask};
use crate::real::Real;
use crate::schedule;
use crate::scratch::{Scratch, ScratchPool};
use crate::shape::{FORWARD_TILES, KEYS, VECTORS, lanes, padded, tiles, widest};
use crate::softmax;
use crate::target::Target;
use crate::transform::{TileTransform, TransformScores};
use crate::vector::{SimdTask, Vector};

/// Sizes of one task's panels: queries and outputs as lanes, m and l of each lane, scores, keys
/// and values.
pub(crate) fn sizes<X: Vector>(job: &Job) -> [usize; 7] {
    let [width, value_width] = [job.dim, job.value_dim].map(padded::<X>);
    let cells = tiles(FORWARD_TILES, widest(job)) * lanes::<X>();
    [
        cells * width,
        cells * value_width,
        cells,
        cells,
        KEYS * lanes::<X>(),
        KEYS * width,
        KEYS * value_width,
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
        tiles(FORWARD_TILES, widest(job)),
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
        let mut panels = ForwardPanels::new(scratch.panels(sizes::<X>(call.job)));
        let mut ranges = [LaneRanges::EMPTY; FORWARD_TILES];
        let piece = &call.grid.pieces[block.piece];
        for (i, tile) in block.tiles.clone().enumerate() {
            let tile = call.grid.tile(block.group, block.piece, tile);
            call.load(block, i, tile, &mut panels);
            for lane in 0..lanes::<X>() {
                // Lanes without a query repeat the last one, so that they need no mask.
                let row = tile.first + lane.min(tile.count - 1);
                let visible = piece.visible(row);
                ranges[i].set::<X>(
                    lane,
                    match &call.job.tiles {
                        None => visible,
                        Some(tiles) => tiles.visible(row, visible),
                    },
                );
            }
        }
        call.attend::<R>(block, &ranges[..block.tiles.len()], &mut panels);
        for (i, tile) in block.tiles.clone().enumerate() {
            let tile = call.grid.tile(block.group, block.piece, tile);
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
        panel::transpose(self.x, rows, (lanes, width), &mut panels.q[at]);
        let cells = i * lanes..(i + 1) * lanes;
        let value_width = padded::<X>(job.value_dim);
        let out = &mut panels.out[cells.start * value_width..cells.end * value_width];
        out.fill(X::A::ZERO);
        if self.target.continues && self.target.previous.is_some() {
            let rows = &mut panels.v[..lanes * value_width];
            rows.fill(X::A::ZERO);
            for lane in 0..tile.count {
                let row = &mut rows[lane * value_width..][..job.value_dim];
                // SAFETY: as below.
                unsafe { self.target.initial_sums(self.cell(block, tile, lane), row) };
            }
            panel::transpose(self.x, rows, (lanes, value_width), out);
        }
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
        let (dim, lanes) = (self.job.value_dim, lanes::<X>());
        let width = padded::<X>(dim);
        let out = &panels.out[i * width * lanes..(i + 1) * width * lanes];
        let rows = &mut panels.v[..lanes * width];
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
        ranges: &[LaneRanges],
        panels: &mut ForwardPanels<'_, X::A>,
    ) {
        let (job, lanes) = (self.job, lanes::<X>());
        let [width, value_width] = [job.dim, job.value_dim].map(padded::<X>);
        let keys = &self.grid.pieces[block.piece].keys;
        let visible = LaneRanges::union(ranges);
        let head = self.grid.groups[block.group][0];
        let descending = job.tiles.is_some();
        let size = job.tiles.map_or(KEYS, |tiles| tiles.tile.min(KEYS));
        let mut covering = KeyPanel::cover::<R>(keys, visible.clone(), keys.clone(), size);
        while let Some(panel) = match descending {
            false => covering.next(),
            true => covering.next_back(),
        } {
            let KeyPanel { first, count } = panel;
            let key = |row: usize| job.k.at(block.batch, block.segment, row, head);
            let address = |j: usize| key(first + j);
            let value_address = |j: usize| job.value(address(j));
            let used = count.next_multiple_of(R);
            let k = &mut panels.k[..used * width];
            let v = &mut panels.v[..used * value_width];
            panel::rows(self.k, job.dim, count, address, width, k);
            panel::rows(self.v, job.value_dim, count, value_address, value_width, v);
            // Hidden values are multiplied by zero weights, which hides only finite ones.
            let finite = job.mask.is_none() || panel::finite(&v[..count * value_width]);
            let (next_first, next) = match descending {
                false => (first + count, (visible.end - first - count).min(size)),
                true => {
                    let before = first.saturating_sub(visible.start).min(size);
                    (first - before, before)
                }
            };
            for (i, ranges_of_tile) in ranges.iter().enumerate() {
                for j in i * next / ranges.len()..(i + 1) * next / ranges.len() {
                    let next = key(next_first + j);
                    panel::prefetch(self.k, next, job.dim);
                    panel::prefetch(self.v, job.value(next), job.value_dim);
                }
                let Some(rows) = ranges_of_tile.rows::<R>(&panel) else {
                    continue;
                };
                let start = first + rows.start;
                let mask = RangeMask::new::<X>(ranges_of_tile, start, rows.len());
                let cells = i * lanes..(i + 1) * lanes;
                let q = X::of(&panels.q[cells.start * width..cells.end * width]);
                let out = &mut panels.out[cells.start * value_width..cells.end * value_width];
                let out = X::of_mut(out);
                let scores = X::of_mut(&mut panels.scores[..rows.len() * lanes]);
                let k = &k[rows.start * width..rows.end * width];
                let v = &v[rows.start * value_width..rows.end * value_width];
                let (x, k, v) = (self.x, (k, width), (v, value_width));
                match &mask {
                    None => products::<X, R>(x, k, job.dim, q, scores, |_| 0..VECTORS),
                    Some(RangeMask { seen, .. }) => {
                        products::<X, R>(x, k, job.dim, q, scores, |rows| seen.vectors(rows));
                    }
                }
                if job.transform.is_some() {
                    self.transform(block, i, start, scores);
                }
                if let Some(mask) = &mask {
                    mask.hide(self.x, scores, X::A::NEG_INFINITY);
                }
                let m = X::of_mut(&mut panels.m[cells.clone()]);
                let l = X::of_mut(&mut panels.l[cells]);
                let keep = softmax::weights(self.x, scores, m, l);
                if job.dropout.is_some() {
                    let dropped = if finite { 0.0 } else { LEFT_OUT };
                    self.drop_pairs(block, i, start, scores, dropped);
                    if !finite {
                        if let Some(mask) = &mask {
                            mask.hide(self.x, scores, X::A::from_f64(LEFT_OUT));
                        }
                        accumulate_marked(x, v.0, v.1, scores, &keep, out);
                        continue;
                    }
                }
                match &mask {
                    None => accumulate::<X, R>(x, v, scores, &keep, out),
                    Some(RangeMask { seen, .. }) if finite => {
                        seen.accumulate::<X, R>(x, v, scores, &keep, out);
                    }
                    Some(mask) => mask.accumulate(x, v.0, v.1, scores, &keep, out),
                }
            }
        }
    }

    /// Transforms the scores of tile `i` and the keys from `key` on.
    #[cold]
    fn transform(&self, block: &QueryBlock, i: usize, key: usize, scores: &mut [X::V]) {
        let piece = &self.grid.pieces[block.piece];
        let tile = block.tiles.start + i;
        let tile = self.grid.tile(block.group, block.piece, tile);
        if let Some(transform) = &TileTransform::new(self.job, piece, tile, key) {
            let x = self.x;
            x.run(TransformScores {
                x,
                transform,
                scores,
            });
        }
    }

    /// Multiplies the weights of tile `i` and the keys from `key` on by their factors; those of
    /// dropped pairs become `dropped`.
    #[cold]
    fn drop_pairs(
        &self,
        block: &QueryBlock,
        i: usize,
        key: usize,
        weights: &mut [X::V],
        dropped: f64,
    ) {
        let piece = &self.grid.pieces[block.piece];
        let tile = block.tiles.start + i;
        let tile = self.grid.tile(block.group, block.piece, tile);
        let at = (block.batch, block.segment);
        if let Some(dropout) = &TileDropout::new(self.job, piece, at, tile, key) {
            let x = self.x;
            x.run(DropWeights {
                x,
                dropout,
                weights,
                dropped,
            });
        }
    }
}
