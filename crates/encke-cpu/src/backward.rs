//! The backward pass: recomputes the scores, and from them the gradients of queries, keys and
//! values.
//!
//! A task takes blocks of queries over panels of keys, and adds to dq, to dk and dv, or to all
//! three. If a job has enough (batch, segment, head group) combinations, each of them is one task
//! that owns all of its rows: five products per pair. If it has few, one set of tasks owns the
//! queries and another one owns the keys: seven products, but any number of tasks. The choice
//! depends on the job alone, and no two tasks add to the same row, so the result is the same for
//! any number of threads.

use std::ops::Range;

use encke_core::dtype::Slice;
use encke_core::job::Job;
use encke_core::kernel::{Gradients, Upstream};
use encke_core::{Data, Element};

use crate::forward::{accumulate, products};
use crate::grid::{QueryBlock, QueryGrid, Tile};
use crate::microkernel::multiply_rows;
use crate::panel;
use crate::real::Real;
use crate::schedule;
use crate::scratch::{Scratch, ScratchPool};
use crate::shape::{BACKWARD_TILES, KEYS, MAX_LANES, VECTORS, lanes, padded, tiles};
use crate::shared::SharedRows;
use crate::softmax::CausalMask;
use crate::vector::{SimdTask, Vector};

/// From this many (batch, segment, head group) combinations on, each of them is one task.
const MIN_GROUPS_FOR_ONE_SWEEP: usize = 4;
/// Keys of a task that owns keys only: many panels, since each task packs the queries again.
const KEYS_PER_TASK: usize = 8 * KEYS;

/// The tensors that the backward pass reads.
pub(crate) struct BackwardInputs<'a> {
    pub q: Slice<'a>,
    pub k: Slice<'a>,
    pub v: Slice<'a>,
    pub upstream: Upstream<Slice<'a>>,
}

/// Sizes of one task's panels: q, dout and dq as lanes; q and dout as rows; lse and delta; scores
/// and dp; k, v, dk and dv.
pub(crate) fn sizes<X: Vector>(dim: usize) -> [usize; 13] {
    let (tile, width) = (lanes::<X>(), padded::<X>(dim));
    let (block, cells) = (
        tiles(BACKWARD_TILES, dim) * width * tile,
        tiles(BACKWARD_TILES, dim) * tile,
    );
    let (scores, keys) = (KEYS * tile, KEYS * width);
    [
        block, block, block, block, block, cells, cells, scores, scores, keys, keys, keys, keys,
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

/// Blocks of queries over a range of keys, and which gradients the task adds to.
struct BackwardTask {
    batch: usize,
    segment: usize,
    group: usize,
    blocks: Vec<Range<usize>>,
    keys: Range<usize>,
    writes_dq: bool,
    writes_dk_dv: bool,
}

/// Adds the job's share of the gradients.
pub(crate) fn backward<X: Vector, const R: usize>(
    x: X,
    pool: &ScratchPool<Scratch<X::A>>,
    job: &Job,
    inputs: BackwardInputs<'_>,
    gradients: Gradients<'_, Data>,
) {
    let grid = QueryGrid::new(job, lanes::<X>(), tiles(BACKWARD_TILES, job.dim), 1);
    let call = BackwardCall {
        x,
        job,
        grid: &grid,
        inputs,
        dq: SharedRows::new(X::A::slice_mut(gradients.dq)),
        dk: SharedRows::new(X::A::slice_mut(gradients.dk)),
        dv: SharedRows::new(X::A::slice_mut(gradients.dv)),
    };
    let run = |tasks: Vec<BackwardTask>| {
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
    };
    let groups: Vec<(usize, usize, usize)> = grid.group_indices(job).collect();
    let task = |&(batch, segment, group): &(usize, usize, usize)| BackwardTask {
        batch,
        segment,
        group,
        blocks: grid.blocks(group).collect(),
        keys: 0..job.keys,
        writes_dq: true,
        writes_dk_dv: true,
    };
    if groups.len() >= MIN_GROUPS_FOR_ONE_SWEEP {
        return run(groups.iter().map(task).collect());
    }
    let of_queries = groups.iter().flat_map(|group| {
        grid.blocks(group.2).map(move |block| BackwardTask {
            blocks: vec![block],
            writes_dk_dv: false,
            ..task(group)
        })
    });
    run(of_queries.collect());
    let of_keys = groups.iter().flat_map(|group| {
        (0..job.keys)
            .step_by(KEYS_PER_TASK)
            .map(move |first| BackwardTask {
                keys: first..(first + KEYS_PER_TASK).min(job.keys),
                writes_dq: false,
                ..task(group)
            })
    });
    run(of_keys.collect());
}

/// One run of a task.
struct BackwardTaskRun<'a, X: Vector, const R: usize> {
    call: &'a BackwardCall<'a, X>,
    task: &'a BackwardTask,
    scratch: &'a mut Scratch<X::A>,
}

panel::panels! {
    /// The panels of a task, in the order of [`sizes`].
    BackwardPanels { q, dout, dq, q_rows, dout_rows, lse, delta, scores, dp, k, v, dk, dv }
}

/// Properties of the queries of a block.
struct BlockVisibility {
    visible: [[usize; MAX_LANES]; BACKWARD_TILES],
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
        let mut panels = BackwardPanels::new(scratch.panels(sizes::<X>(call.job.dim)));
        for tiles in &task.blocks {
            let block = QueryBlock {
                batch: task.batch,
                segment: task.segment,
                group: task.group,
                tiles: tiles.clone(),
            };
            let mut visibility = BlockVisibility {
                visible: [[0; MAX_LANES]; BACKWARD_TILES],
                finite: true,
            };
            for i in 0..tiles.len() {
                call.load(&block, i, &mut visibility, &mut panels);
            }
            panels.dq.fill(X::A::ZERO);
            call.attend_keys::<R>(task, &block, &visibility, &mut panels);
            if task.writes_dq {
                for i in 0..tiles.len() {
                    call.store_queries(&block, i, &mut panels);
                }
            }
        }
    }
}

impl<X: Vector> BackwardCall<'_, X> {
    #[inline(always)]
    fn tile(&self, block: &QueryBlock, i: usize) -> Tile {
        self.grid.tile(block.group, block.tiles.start + i)
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
        let (dim, width, tile) = (job.dim, padded::<X>(job.dim), self.tile(block, i));
        let Tile { head, first, count } = tile;
        let at = i * width * lanes..(i + 1) * width * lanes;
        let (batch, segment) = (block.batch, block.segment);
        let cell = |row: usize| job.cells.at(batch, segment, first + row, head);
        let q_address = |row: usize| job.q.at(batch, segment, first + row, head);
        let upstream = &self.inputs.upstream;
        let q_rows = &mut panels.q_rows[at.clone()];
        let dout_rows = &mut panels.dout_rows[at.clone()];
        panel::rows(self.inputs.q, dim, count, q_address, width, q_rows);
        let dout_address = |row: usize| cell(row) * dim;
        panel::rows(upstream.dout, dim, count, dout_address, width, dout_rows);
        let cells = i * lanes..(i + 1) * lanes;
        let (lse, delta) = (&mut panels.lse[cells.clone()], &mut panels.delta[cells]);
        lse.fill(X::A::ZERO);
        delta.fill(X::A::ZERO);
        for lane in 0..lanes {
            visibility.visible[i][lane] = 0;
            if lane >= count {
                continue;
            }
            let row_lse = X::A::get(upstream.lse, cell(lane));
            if row_lse == X::A::NEG_INFINITY {
                q_rows[lane * width..][..width].fill(X::A::ZERO);
                dout_rows[lane * width..][..width].fill(X::A::ZERO);
                continue;
            }
            lse[lane] = row_lse;
            delta[lane] = X::A::get(upstream.delta, cell(lane));
            visibility.visible[i][lane] = job.visible(first + lane).end;
        }
        let (scale, gain) = (X::A::from_f64(job.scale), X::A::from_f64(job.gain));
        for (rows, factor) in [(&mut *q_rows, scale), (&mut *dout_rows, gain)] {
            panel::scale(rows, factor);
            visibility.finite &= panel::finite(rows);
        }
        let (x, size) = (self.x, (lanes, width));
        panel::transpose(x, q_rows, size, &mut panels.q[at.clone()]);
        panel::transpose(x, dout_rows, size, &mut panels.dout[at]);
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
        let (job, lanes) = (self.job, lanes::<X>());
        let width = padded::<X>(job.dim);
        let tiles = block.tiles.len();
        let most = visibility.visible[..tiles]
            .iter()
            .flatten()
            .copied()
            .max()
            .unwrap_or(0);
        let head = self.grid.groups[block.group][0];
        for start in (task.keys.start..task.keys.end.min(most)).step_by(KEYS) {
            let count = KEYS.min(task.keys.end - start);
            let address = |j: usize| job.k.at(block.batch, block.segment, start + j, head);
            let (k, v) = (self.inputs.k, self.inputs.v);
            panel::rows(k, job.dim, count, address, width, panels.k);
            panel::rows(v, job.dim, count, address, width, panels.v);
            let finite = panel::finite(panels.k) && panel::finite(panels.v);
            if task.writes_dk_dv {
                panels.dk.fill(X::A::ZERO);
                panels.dv.fill(X::A::ZERO);
            }
            for i in 0..tiles {
                let visible = &visibility.visible[i][..lanes];
                let last = visible.iter().copied().max().unwrap_or(0);
                if last <= start {
                    continue;
                }
                let rows = (last - start).min(count).next_multiple_of(R);
                let mask = CausalMask::new::<X>(visible, start, rows);
                let finite = finite && visibility.finite;
                self.pairs::<R>(task, i, rows, mask, finite, panels);
            }
            if task.writes_dk_dv {
                for j in 0..count {
                    let row = j * width..j * width + job.dim;
                    // SAFETY: keys of different (batch, segment, row, key head) do not overlap
                    // (`CpuKernel::backward` checks that), and no other task has these.
                    let (dk, dv) = unsafe {
                        (
                            self.dk.row(address(j), job.dim),
                            self.dv.row(address(j), job.dim),
                        )
                    };
                    add(&panels.dk[row.clone()], dk);
                    add(&panels.dv[row], dv);
                }
            }
        }
    }

    /// One tile of queries and `rows` keys. `finite` means that all elements are finite.
    #[inline(always)]
    fn pairs<const R: usize>(
        &self,
        task: &BackwardTask,
        i: usize,
        rows: usize,
        mask: Option<CausalMask<X::A>>,
        finite: bool,
        panels: &mut BackwardPanels<'_, X::A>,
    ) {
        let (x, dim, lanes) = (self.x, self.job.dim, lanes::<X>());
        let width = padded::<X>(dim);
        let at = i * width * lanes..(i + 1) * width * lanes;
        let cells = i * lanes..(i + 1) * lanes;
        let (k, v) = (&panels.k[..rows * width], &panels.v[..rows * width]);
        let scores = X::of_mut(&mut panels.scores[..rows * lanes]);
        let dp = X::of_mut(&mut panels.dp[..rows * lanes]);
        products::<X, R>(x, k, width, dim, X::of(&panels.q[at.clone()]), scores);
        products::<X, R>(x, v, width, dim, X::of(&panels.dout[at.clone()]), dp);
        let lse: [X::V; VECTORS] = vectors(x, &panels.lse[cells.clone()]);
        let delta: [X::V; VECTORS] = vectors(x, &panels.delta[cells]);
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
        if let Some(mask) = &mask {
            mask.hide(x, scores, X::A::ZERO);
            mask.hide(x, dp, X::A::ZERO);
        }
        let skip_hidden = mask.filter(|_| !finite);
        if task.writes_dq {
            let (ones, dq) = ([x.splat(X::A::ONE); VECTORS], &mut panels.dq[at.clone()]);
            let dq = X::of_mut(dq);
            match &skip_hidden {
                None => accumulate::<X, R>(x, k, width, dp, &ones, dq),
                Some(mask) => mask.accumulate(x, k, width, dp, &ones, dq),
            }
        }
        if task.writes_dk_dv {
            let (q_rows, dout_rows) = (&panels.q_rows[at.clone()], &panels.dout_rows[at]);
            let both = [
                (&panels.dp[..rows * lanes], q_rows, &mut *panels.dk),
                (&panels.scores[..rows * lanes], dout_rows, &mut *panels.dv),
            ];
            for (weights, rows, sums) in both {
                match &skip_hidden {
                    None => accumulate_keys::<X, R>(x, weights, rows, width, sums),
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

/// sums[j] += Σ_i weights[j][i] · rows[i].
#[inline(always)]
fn accumulate_keys<X: Vector, const R: usize>(
    x: X,
    weights: &[X::A],
    rows: &[X::A],
    width: usize,
    sums: &mut [X::A],
) {
    let (lanes, step) = (lanes::<X>(), width / X::WIDTH);
    let rows = X::of(rows);
    for (weights, sums) in weights
        .chunks_exact(R * lanes)
        .zip(sums.chunks_exact_mut(R * width))
    {
        let mut by_row: [&[X::A]; R] = [&[]; R];
        for (row, weights) in by_row.iter_mut().zip(weights.chunks_exact(lanes)) {
            *row = weights;
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
