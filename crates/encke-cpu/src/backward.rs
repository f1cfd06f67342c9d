//! The backward pass: recomputes the scores, and from them the gradients of queries, keys and
//! values.
//!
//! A task takes blocks of queries over panels of keys, and adds to dq, to dk and dv, or to all
//! three ([`tasks`]). No two tasks add to the same row.

mod tasks;

use std::ops::Range;

use encke_core::dtype::Slice;
use encke_core::job::Job;
use encke_core::kernel::{Gradients, Upstream};
use encke_core::{Data, Element};

use crate::dropout::{
    DropWeights, LEFT_OUT, MarkDropped, MultiplyFactors, TileDropout, accumulate_marked_keys,
};
use crate::grid::{QueryBlock, QueryGrid, Tile};
use crate::microkernel::{accumulate, multiply_rows, products};
use crate::panel;
use crate::ranges::{KeyPanel, LaneRanges, RangeMask};
use crate::real::Real;
use crate::schedule;
use crate::scratch::{Scratch, ScratchPool};
use crate::shape::{BACKWARD_TILES, KEYS, VECTORS, lanes, padded, tiles, widest};
use crate::shared::SharedRows;
use crate::transform::{TileTransform, TransformGradients};
use crate::vector::{SimdTask, Vector};
use tasks::BackwardTask;

/// The tensors that the backward pass reads.
pub(crate) struct BackwardInputs<'a> {
    pub q: Slice<'a>,
    pub k: Slice<'a>,
    pub v: Slice<'a>,
    pub upstream: Upstream<Slice<'a>>,
}

/// Sizes of one task's panels: q, dout and dq as lanes; q and dout as rows; lse and delta; scores
/// and dp; k, v, dk and dv; factors of dropout, if the job has it.
pub(crate) fn sizes<X: Vector>(job: &Job) -> [usize; 14] {
    let cells = tiles(BACKWARD_TILES, widest(job)) * lanes::<X>();
    let [width, value_width] = [job.dim, job.value_dim].map(padded::<X>);
    let (q, dout) = (cells * width, cells * value_width);
    let (k, v) = (KEYS * width, KEYS * value_width);
    let scores = KEYS * lanes::<X>();
    let factors = if job.dropout.is_some() { scores } else { 0 };
    [
        q, dout, q, q, dout, cells, cells, scores, scores, k, v, k, v, factors,
    ]
}

/// The data that all tasks of a job share.
struct BackwardCall<'a, X: Vector> {
    x: X,
    job: &'a Job,
    grid: &'a QueryGrid,
    inputs: BackwardInputs<'a>,
    dq: SharedRows<'a, X::A>,
    dk: SharedRows<'a, X::A>,
    dv: SharedRows<'a, X::A>,
}

/// Adds the job's share of the gradients.
pub(crate) fn backward<X: Vector, const R: usize>(
    x: X,
    pool: &ScratchPool<Scratch<X::A>>,
    job: &Job,
    inputs: BackwardInputs<'_>,
    gradients: Gradients<'_, Data>,
) {
    let grid = QueryGrid::new(job, lanes::<X>(), tiles(BACKWARD_TILES, widest(job)), 1);
    let call = BackwardCall {
        x,
        job,
        grid: &grid,
        inputs,
        dq: SharedRows::new(X::A::slice_mut(gradients.dq)),
        dk: SharedRows::new(X::A::slice_mut(gradients.dk)),
        dv: SharedRows::new(X::A::slice_mut(gradients.dv)),
    };
    let [first, second] = tasks::tasks(job, &grid);
    for tasks in [first, second] {
        schedule::run(&tasks, |queue| {
            pool.with(|scratch| {
                while let Some(task) = queue.take() {
                    x.run(BackwardTaskRun::<X, R> {
                        call: &call,
                        task,
                        scratch,
                    });
                }
            });
        });
    }
}

/// One run of a task.
struct BackwardTaskRun<'a, X: Vector, const R: usize> {
    call: &'a BackwardCall<'a, X>,
    task: &'a BackwardTask,
    scratch: &'a mut Scratch<X::A>,
}

panel::panels! {
    /// The panels of a task, in the order of [`sizes`].
    BackwardPanels {
        q, dout, dq, q_rows, dout_rows, lse, delta, scores, dp, k, v, dk, dv, factors
    }
}

/// Properties of the queries of a block.
struct BlockVisibility {
    ranges: [LaneRanges; BACKWARD_TILES],
    /// Whether all elements of q and dout are finite.
    finite: bool,
}

impl<X: Vector, const R: usize> SimdTask for BackwardTaskRun<'_, X, R> {
    #[inline(always)]
    fn run(self) {
        let BackwardTaskRun {
            call,
            task,
            scratch,
        } = self;
        let mut panels = BackwardPanels::new(scratch.panels(sizes::<X>(call.job)));
        let all = call.grid.blocks(task.group, task.piece);
        let all = all.filter(|_| task.blocks.is_none());
        for tiles in task.blocks.iter().flatten().cloned().chain(all) {
            let block = QueryBlock {
                batch: task.batch,
                segment: task.segment,
                group: task.group,
                piece: task.piece,
                tiles,
            };
            let mut visibility = BlockVisibility {
                ranges: [LaneRanges::EMPTY; BACKWARD_TILES],
                finite: true,
            };
            let count = block.tiles.len();
            for i in 0..count {
                call.load(&block, i, &mut visibility, &mut panels);
            }
            let size = count * padded::<X>(call.job.dim) * lanes::<X>();
            panels.dq[..size].fill(X::A::ZERO);
            call.attend_keys::<R>(task, &block, &visibility, &mut panels);
            if task.writes_dq {
                for i in 0..count {
                    call.store_queries(&block, i, &mut panels);
                }
            }
        }
    }
}

/// A tile of queries and rows of a panel of keys.
struct BackwardPairs<A> {
    /// The index of the tile in its block.
    tile: usize,
    rows: Range<usize>,
    mask: Option<RangeMask<A>>,
    transform: Option<TileTransform<A>>,
    dropout: Option<TileDropout<A>>,
    /// Whether all elements of the block and the panel are finite.
    finite: bool,
}

impl<X: Vector> BackwardCall<'_, X> {
    #[inline(always)]
    fn tile(&self, block: &QueryBlock, i: usize) -> Tile {
        self.grid
            .tile(block.group, block.piece, block.tiles.start + i)
    }

    /// Packs queries (times the scale) and dout (times the gain), as rows and as lanes. Rows
    /// without any visible key, in this job or another, become zeros with no visible key.
    #[inline(always)]
    fn load(
        &self,
        block: &QueryBlock,
        i: usize,
        visibility: &mut BlockVisibility,
        panels: &mut BackwardPanels<'_, X::A>,
    ) {
        let (job, lanes) = (self.job, lanes::<X>());
        let (dim, value_dim) = (job.dim, job.value_dim);
        let [width, value_width] = [dim, value_dim].map(padded::<X>);
        let Tile { head, first, count } = self.tile(block, i);
        let at = i * width * lanes..(i + 1) * width * lanes;
        let value_at = i * value_width * lanes..(i + 1) * value_width * lanes;
        let (batch, segment) = (block.batch, block.segment);
        let cell = |row: usize| job.cells.at(batch, segment, first + row, head);
        let q_address = |row: usize| job.q.at(batch, segment, first + row, head);
        let upstream = &self.inputs.upstream;
        let q_rows = &mut panels.q_rows[at.clone()];
        let dout_rows = &mut panels.dout_rows[value_at.clone()];
        panel::rows(self.inputs.q, dim, count, q_address, width, q_rows);
        let (dout, dout_address) = (upstream.dout, |row: usize| cell(row) * value_dim);
        panel::rows(dout, value_dim, count, dout_address, value_width, dout_rows);
        let cells = i * lanes..(i + 1) * lanes;
        let (lse, delta) = (&mut panels.lse[cells.clone()], &mut panels.delta[cells]);
        lse.fill(X::A::ZERO);
        delta.fill(X::A::ZERO);
        let piece = &self.grid.pieces[block.piece];
        for lane in 0..count {
            let row_lse = X::A::get(upstream.lse, cell(lane));
            if row_lse == X::A::NEG_INFINITY {
                q_rows[lane * width..][..width].fill(X::A::ZERO);
                dout_rows[lane * value_width..][..value_width].fill(X::A::ZERO);
                continue;
            }
            lse[lane] = row_lse;
            let at_delta = job.delta().at(batch, segment, first + lane, head);
            delta[lane] = X::A::get(upstream.delta, at_delta);
            visibility.ranges[i].set::<X>(lane, piece.visible(first + lane));
        }
        let (scale, gain) = (X::A::from_f64(job.scale), X::A::from_f64(job.gain));
        for (rows, factor) in [(&mut *q_rows, scale), (&mut *dout_rows, gain)] {
            panel::scale(rows, factor);
            visibility.finite &= panel::finite(rows);
        }
        let (x, dout) = (self.x, &mut panels.dout[value_at]);
        panel::transpose(x, q_rows, (lanes, width), &mut panels.q[at]);
        panel::transpose(x, dout_rows, (lanes, value_width), dout);
    }

    /// Processes all panels of the task's keys that are visible to some query of the block.
    #[inline(always)]
    fn attend_keys<const R: usize>(
        &self,
        task: &BackwardTask,
        block: &QueryBlock,
        visibility: &BlockVisibility,
        panels: &mut BackwardPanels<'_, X::A>,
    ) {
        let job = self.job;
        let [width, value_width] = [job.dim, job.value_dim].map(padded::<X>);
        let ranges = &visibility.ranges[..block.tiles.len()];
        let piece = &self.grid.pieces[block.piece];
        let visible = LaneRanges::union(ranges);
        let head = self.grid.groups[block.group][0];
        for panel in KeyPanel::cover::<R>(&piece.keys, visible, task.keys.clone(), KEYS) {
            let KeyPanel { first, count } = panel;
            let address = |j: usize| job.k.at(block.batch, block.segment, first + j, head);
            let value_address = |j: usize| job.value(address(j));
            let used = count.next_multiple_of(R);
            let k = &mut panels.k[..used * width];
            let v = &mut panels.v[..used * value_width];
            let BackwardInputs {
                k: from_k,
                v: from_v,
                ..
            } = self.inputs;
            panel::rows(from_k, job.dim, count, address, width, k);
            panel::rows(from_v, job.value_dim, count, value_address, value_width, v);
            let finite = panel::finite(k) && panel::finite(v) && visibility.finite;
            if task.writes_dk_dv {
                panels.dk[..used * width].fill(X::A::ZERO);
                panels.dv[..used * value_width].fill(X::A::ZERO);
            }
            for (i, ranges) in ranges.iter().enumerate() {
                let Some(rows) = ranges.rows::<R>(&panel) else {
                    continue;
                };
                let key = first + rows.start;
                let mask = RangeMask::new::<X>(ranges, key, rows.len());
                let transform = match job.transform {
                    None => None,
                    Some(_) => TileTransform::new(job, piece, self.tile(block, i), key),
                };
                let dropout = match job.dropout {
                    None => None,
                    Some(_) => {
                        let at = (block.batch, block.segment);
                        TileDropout::new(job, piece, at, self.tile(block, i), key)
                    }
                };
                let tile = BackwardPairs {
                    tile: i,
                    rows,
                    mask,
                    transform,
                    dropout,
                    finite,
                };
                self.pairs::<R>(task, tile, panels);
            }
            if task.writes_dk_dv {
                for j in 0..count {
                    // SAFETY: keys of different (batch, segment, row, key head) do not overlap
                    // (`CpuKernel::backward` checks that), nor do their values, pieces have no
                    // key in common, and no other task has these.
                    let (dk, dv) = unsafe {
                        (
                            self.dk.row(address(j), job.dim),
                            self.dv.row(value_address(j), job.value_dim),
                        )
                    };
                    add(&panels.dk[j * width..][..job.dim], dk);
                    add(&panels.dv[j * value_width..][..job.value_dim], dv);
                }
            }
        }
    }

    /// One tile of queries and some keys.
    #[inline(always)]
    fn pairs<const R: usize>(
        &self,
        task: &BackwardTask,
        pairs: BackwardPairs<X::A>,
        panels: &mut BackwardPanels<'_, X::A>,
    ) {
        let (x, lanes) = (self.x, lanes::<X>());
        let (dim, value_dim) = (self.job.dim, self.job.value_dim);
        let [width, value_width] = [dim, value_dim].map(padded::<X>);
        let BackwardPairs {
            tile, rows, mask, ..
        } = pairs;
        let cells = tile * lanes..(tile + 1) * lanes;
        let at = cells.start * width..cells.end * width;
        let value_at = cells.start * value_width..cells.end * value_width;
        let count = rows.len() * lanes;
        let value_rows = rows.start * value_width..rows.end * value_width;
        let rows = rows.start * width..rows.end * width;
        let (k, v) = (&panels.k[rows.clone()], &panels.v[value_rows.clone()]);
        let scores = X::of_mut(&mut panels.scores[..count]);
        let dp = X::of_mut(&mut panels.dp[..count]);
        let q = X::of(&panels.q[at.clone()]);
        let dout = X::of(&panels.dout[value_at.clone()]);
        match &mask {
            None => {
                products::<X, R>(x, (k, width), dim, q, scores, |_| 0..VECTORS);
                products::<X, R>(x, (v, value_width), value_dim, dout, dp, |_| 0..VECTORS);
            }
            Some(RangeMask { seen, .. }) => {
                let vectors = |rows| seen.vectors(rows);
                products::<X, R>(x, (k, width), dim, q, scores, vectors);
                products::<X, R>(x, (v, value_width), value_dim, dout, dp, vectors);
            }
        }
        let factors = &mut panels.factors[..];
        if let Some(dropout) = &pairs.dropout {
            draw_factors(x, dropout, &mut factors[..count], dp);
        }
        let lse: [X::V; VECTORS] = vectors(x, &panels.lse[cells.clone()]);
        let delta: [X::V; VECTORS] = vectors(x, &panels.delta[cells]);
        if let Some(transform) = &pairs.transform {
            x.run(TransformGradients {
                x,
                transform,
                scores: &mut *scores,
                dp: &mut *dp,
                lse,
                delta,
            });
        } else {
            let pairs = scores
                .chunks_exact_mut(VECTORS)
                .zip(dp.chunks_exact_mut(VECTORS));
            for (score, dp) in pairs {
                for n in 0..VECTORS {
                    let p = x.exp(x.sub(score[n], lse[n]));
                    dp[n] = x.mul(p, x.sub(dp[n], delta[n]));
                    score[n] = p;
                }
            }
        }
        let marked = pairs.dropout.is_some() && !pairs.finite;
        if pairs.dropout.is_some() {
            let factors = X::of(&factors[..count]);
            let weights = &mut *scores;
            x.run(MultiplyFactors {
                x,
                factors,
                weights,
            });
            if marked {
                mark_dropped(x, factors, scores);
            }
        }
        if let Some(mask) = &mask {
            let hidden = if marked { LEFT_OUT } else { 0.0 };
            mask.hide(x, scores, X::A::from_f64(hidden));
            mask.hide(x, dp, X::A::ZERO);
        }
        if task.writes_dq {
            let (ones, dq) = ([x.splat(X::A::ONE); VECTORS], &mut panels.dq[at.clone()]);
            let dq = X::of_mut(dq);
            match &mask {
                None => accumulate::<X, R>(x, (k, width), dp, &ones, dq),
                Some(RangeMask { seen, .. }) if pairs.finite => {
                    seen.accumulate::<X, R>(x, (k, width), dp, &ones, dq);
                }
                Some(mask) => mask.accumulate(x, k, width, dp, &ones, dq),
            }
        }
        if task.writes_dk_dv {
            let (q_rows, dout_rows) = (&panels.q_rows[at], &panels.dout_rows[value_at]);
            let (dk, dv) = (&mut panels.dk[rows], &mut panels.dv[value_rows]);
            let both = [
                (&panels.dp[..count], q_rows, width, dk, false),
                (&panels.scores[..count], dout_rows, value_width, dv, marked),
            ];
            for (weights, rows, width, sums, marked) in both {
                if marked {
                    accumulate_marked_keys(x, weights, rows, width, sums);
                    continue;
                }
                match &mask {
                    None => accumulate_keys::<X, R>(x, weights, rows, width, sums, |_| 0..lanes),
                    Some(RangeMask { seen, .. }) if pairs.finite => {
                        let used = |rows| seen.lanes::<X>(rows);
                        accumulate_keys::<X, R>(x, weights, rows, width, sums, used);
                    }
                    Some(mask) => mask.accumulate_keys(x, weights, rows, width, sums),
                }
            }
        }
    }

    /// Adds a tile's dq to its rows.
    #[inline(always)]
    fn store_queries(&self, block: &QueryBlock, i: usize, panels: &mut BackwardPanels<'_, X::A>) {
        let (job, lanes) = (self.job, lanes::<X>());
        let (width, tile) = (padded::<X>(job.dim), self.tile(block, i));
        let target = job.dq.as_ref().unwrap_or(&job.q);
        let scale = X::A::from_f64(job.scale);
        let dq = &panels.dq[i * width * lanes..(i + 1) * width * lanes];
        let rows = &mut panels.k[..lanes * width];
        panel::transpose(self.x, dq, (width, lanes), rows);
        for lane in 0..tile.count {
            let row = &rows[lane * width..][..job.dim];
            let address = target.at(block.batch, block.segment, tile.first + lane, tile.head);
            // SAFETY: rows of different (batch, segment, row, head) do not overlap
            // (`CpuKernel::backward` checks that), and no other task has these.
            let sums = unsafe { self.dq.row(address, job.dim) };
            for (sum, &x) in sums.iter_mut().zip(row) {
                *sum += scale * x;
            }
        }
    }
}

/// Draws the factors of a tile's weights, and multiplies the gradients of the weights by them.
#[cold]
fn draw_factors<X: Vector>(
    x: X,
    dropout: &TileDropout<X::A>,
    factors: &mut [X::A],
    dp: &mut [X::V],
) {
    factors.fill(X::A::ONE);
    let factors = X::of_mut(factors);
    let weights = &mut *factors;
    x.run(DropWeights {
        x,
        dropout,
        weights,
        dropped: 0.0,
    });
    x.run(MultiplyFactors {
        x,
        factors,
        weights: dp,
    });
}

/// Marks the weights of pairs with a factor of 0.
#[cold]
fn mark_dropped<X: Vector>(x: X, factors: &[X::V], weights: &mut [X::V]) {
    x.run(MarkDropped {
        x,
        factors,
        weights,
    });
}

#[inline(always)]
fn add<A: Real>(from: &[A], to: &mut [A]) {
    for (sum, &x) in to.iter_mut().zip(from) {
        *sum += x;
    }
}

#[inline(always)]
fn vectors<X: Vector>(x: X, lanes: &[X::A]) -> [X::V; VECTORS] {
    let mut vectors = [x.zero(); VECTORS];
    vectors.copy_from_slice(X::of(lanes));
    vectors
}

/// sums[j] += Σ_i weights[j][i] · rows[i] over the lanes i that are `used` by rows j. The weights
/// of the others are 0.
#[inline(always)]
fn accumulate_keys<X: Vector, const R: usize>(
    x: X,
    weights: &[X::A],
    rows: &[X::A],
    width: usize,
    sums: &mut [X::A],
    used: impl Fn(Range<usize>) -> Range<usize>,
) {
    let (lanes, step) = (lanes::<X>(), width / X::WIDTH);
    let all_rows = X::of(rows);
    let groups = weights.chunks_exact(R * lanes);
    for (group, (weights, sums)) in groups.zip(sums.chunks_exact_mut(R * width)).enumerate() {
        let used = used(group * R..(group + 1) * R);
        let rows = &all_rows[used.start * step..];
        let mut by_row: [&[X::A]; R] = [&[]; R];
        for (row, weights) in by_row.iter_mut().zip(weights.chunks_exact(lanes)) {
            *row = &weights[used.clone()];
        }
        let sums = X::of_mut(sums);
        let mut first = 0;
        while first < step {
            if first + 2 <= step {
                let found = multiply_rows::<X, R, 2>(x, by_row, rows, step, first);
                for (r, found) in found.into_iter().enumerate() {
                    for (n, found) in found.into_iter().enumerate() {
                        let sum = &mut sums[r * step + first + n];
                        *sum = x.add(*sum, found);
                    }
                }
                first += 2;
            } else {
                let found = multiply_rows::<X, R, 1>(x, by_row, rows, step, first);
                for (r, [found]) in found.into_iter().enumerate() {
                    let sum = &mut sums[r * step + first];
                    *sum = x.add(*sum, found);
                }
                first += 1;
            }
        }
    }
}
