//! The backward pass: scores once more, and from them the gradients of both sides.
//!
//! A sweep takes some blocks of queries over some panels of keys, and adds to dq, to dk and dv, or
//! to all three. Where a job has enough segments and heads, each of them is one sweep that owns all
//! of its rows: five products for every pair. Where it has few, one set of sweeps owns the queries
//! and another one the keys: seven products, but as many tasks as one likes. The choice depends
//! on the job alone, and no two tasks ever add to the same row, so the result is the same for any
//! number of threads.

use std::ops::Range;

use encke_core::Data;
use encke_core::dtype::Slice;
use encke_core::job::Job;
use encke_core::kernel::{Gradients, Upstream};

use crate::forward::{accumulate, products};
use crate::grid::{Block, Grid, Tile};
use crate::micro::across;
use crate::panel;
use crate::real::Real;
use crate::schedule;
use crate::scratch::{Pool, Scratch};
use crate::shape::{BACKWARD_TILES, KEYS, MOST_LANES, VECTORS, lanes, padded, tiles};
use crate::shared::Shared;
use crate::softmax::Mask;
use crate::vector::{Task, Vector};

/// From how many (batch, segment, head group) on each is a sweep of its own.
const ENOUGH: usize = 4;
/// Keys of a sweep that owns keys only: many panels, since queries are packed anew for each sweep.
const KEYS_OF_SWEEP: usize = 8 * KEYS;

/// Everything backward reads.
pub(crate) struct Given<'a> {
    pub q: Slice<'a>,
    pub k: Slice<'a>,
    pub v: Slice<'a>,
    pub upstream: Upstream<Slice<'a>>,
}

/// Sizes of one task's panels: q, dout and dq as lanes; q and dout as rows; lse and delta; scores
/// and products; k, v, dk and dv.
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

/// What the sweeps of a job share.
struct Backward<'a, X: Vector> {
    x: X,
    job: &'a Job,
    grid: &'a Grid,
    given: Given<'a>,
    dq: Shared<'a, X::A>,
    dk: Shared<'a, X::A>,
    dv: Shared<'a, X::A>,
}

/// Some blocks of queries over some keys, and whose gradients are wanted.
struct Sweep {
    batch: usize,
    segment: usize,
    group: usize,
    blocks: Vec<Range<usize>>,
    keys: Range<usize>,
    queries_too: bool,
    keys_too: bool,
}

/// Adds the job's share of the gradients.
pub(crate) fn backward<X: Vector, const R: usize>(
    x: X,
    pool: &Pool<X::A>,
    job: &Job,
    given: Given<'_>,
    gradients: Gradients<'_, Data>,
) {
    let grid = Grid::new(job, lanes::<X>(), tiles(BACKWARD_TILES, job.dim), 1);
    let backward = Backward {
        x,
        job,
        grid: &grid,
        given,
        dq: Shared::new(X::A::numbers(gradients.dq)),
        dk: Shared::new(X::A::numbers(gradients.dk)),
        dv: Shared::new(X::A::numbers(gradients.dv)),
    };
    let run = |sweeps: Vec<Sweep>| {
        schedule::run(&sweeps, |queue| {
            pool.with(|scratch| {
                while let Some(sweep) = queue.take() {
                    x.run(Run::<X, R> {
                        backward: &backward,
                        sweep,
                        scratch,
                    });
                }
            });
        });
    };
    let pieces: Vec<(usize, usize, usize)> = grid.pieces(job).collect();
    let sweep = |&(batch, segment, group): &(usize, usize, usize)| Sweep {
        batch,
        segment,
        group,
        blocks: grid.blocks(group).collect(),
        keys: 0..job.keys,
        queries_too: true,
        keys_too: true,
    };
    if pieces.len() >= ENOUGH {
        return run(pieces.iter().map(sweep).collect());
    }
    let of_queries = pieces.iter().flat_map(|piece| {
        grid.blocks(piece.2).map(move |block| Sweep {
            blocks: vec![block],
            keys_too: false,
            ..sweep(piece)
        })
    });
    run(of_queries.collect());
    let of_keys = pieces.iter().flat_map(|piece| {
        (0..job.keys)
            .step_by(KEYS_OF_SWEEP)
            .map(move |first| Sweep {
                keys: first..(first + KEYS_OF_SWEEP).min(job.keys),
                queries_too: false,
                ..sweep(piece)
            })
    });
    run(of_keys.collect());
}

struct Run<'a, X: Vector, const R: usize> {
    backward: &'a Backward<'a, X>,
    sweep: &'a Sweep,
    scratch: &'a mut Scratch<X::A>,
}

struct Panels<'a, A> {
    q: &'a mut [A],
    dout: &'a mut [A],
    dq: &'a mut [A],
    q_rows: &'a mut [A],
    dout_rows: &'a mut [A],
    lse: &'a mut [A],
    delta: &'a mut [A],
    scores: &'a mut [A],
    products: &'a mut [A],
    k: &'a mut [A],
    v: &'a mut [A],
    dk: &'a mut [A],
    dv: &'a mut [A],
}

/// What is known of the tiles of a block.
struct Seen {
    visible: [[usize; MOST_LANES]; BACKWARD_TILES],
    /// Whether all numbers of the queries are finite.
    finite: bool,
}

impl<X: Vector, const R: usize> Task for Run<'_, X, R> {
    #[inline(always)]
    fn run(self) {
        let Run {
            backward,
            sweep,
            scratch,
        } = self;
        let [
            q,
            dout,
            dq,
            q_rows,
            dout_rows,
            lse,
            delta,
            scores,
            products,
            k,
            v,
            dk,
            dv,
        ] = scratch.panels(sizes::<X>(backward.job.dim));
        let mut panels = Panels {
            q,
            dout,
            dq,
            q_rows,
            dout_rows,
            lse,
            delta,
            scores,
            products,
            k,
            v,
            dk,
            dv,
        };
        for tiles in &sweep.blocks {
            let block = Block {
                batch: sweep.batch,
                segment: sweep.segment,
                group: sweep.group,
                tiles: tiles.clone(),
            };
            let mut seen = Seen {
                visible: [[0; MOST_LANES]; BACKWARD_TILES],
                finite: true,
            };
            for i in 0..tiles.len() {
                backward.load(&block, i, &mut seen, &mut panels);
            }
            panels.dq.fill(X::A::ZERO);
            backward.sweep::<R>(sweep, &block, &seen, &mut panels);
            if sweep.queries_too {
                for i in 0..tiles.len() {
                    backward.store_queries(&block, i, &mut panels);
                }
            }
        }
    }
}

impl<X: Vector> Backward<'_, X> {
    #[inline(always)]
    fn tile(&self, block: &Block, i: usize) -> Tile {
        self.grid.tile(block.group, block.tiles.start + i)
    }

    /// Queries (times the scale) and their gradients (times the gain), as rows and as lanes. Rows
    /// that saw nothing anywhere become zeros that see nothing: nothing depends on them.
    #[inline(always)]
    fn load(&self, block: &Block, i: usize, seen: &mut Seen, panels: &mut Panels<'_, X::A>) {
        let (job, lanes) = (self.job, lanes::<X>());
        let (dim, width, tile) = (job.dim, padded::<X>(job.dim), self.tile(block, i));
        let Tile { head, first, count } = tile;
        let at = i * width * lanes..(i + 1) * width * lanes;
        let (batch, segment) = (block.batch, block.segment);
        let cell = |row: usize| job.cells.at(batch, segment, first + row, head);
        let q_address = |row: usize| job.q.at(batch, segment, first + row, head);
        let upstream = &self.given.upstream;
        let q_rows = &mut panels.q_rows[at.clone()];
        let dout_rows = &mut panels.dout_rows[at.clone()];
        panel::rows(self.given.q, dim, count, q_address, width, q_rows);
        let dout_address = |row: usize| cell(row) * dim;
        panel::rows(upstream.dout, dim, count, dout_address, width, dout_rows);
        let cells = i * lanes..(i + 1) * lanes;
        let (lse, delta) = (&mut panels.lse[cells.clone()], &mut panels.delta[cells]);
        lse.fill(X::A::ZERO);
        delta.fill(X::A::ZERO);
        for lane in 0..lanes {
            seen.visible[i][lane] = 0;
            if lane >= count {
                continue;
            }
            let of_row = X::A::get(upstream.lse, cell(lane));
            if of_row == X::A::NEG_INFINITY {
                q_rows[lane * width..][..width].fill(X::A::ZERO);
                dout_rows[lane * width..][..width].fill(X::A::ZERO);
                continue;
            }
            lse[lane] = of_row;
            delta[lane] = X::A::get(upstream.delta, cell(lane));
            seen.visible[i][lane] = job.visible(first + lane);
        }
        let (scale, gain) = (X::A::from_f64(job.scale), X::A::from_f64(job.gain));
        for (rows, factor) in [(&mut *q_rows, scale), (&mut *dout_rows, gain)] {
            panel::scale(rows, factor);
            seen.finite &= panel::finite(rows);
        }
        let (x, size) = (self.x, (lanes, width));
        panel::transpose(x, q_rows, size, &mut panels.q[at.clone()]);
        panel::transpose(x, dout_rows, size, &mut panels.dout[at]);
    }

    /// All panels of keys of the sweep that any query of the block sees.
    #[inline(always)]
    fn sweep<const R: usize>(
        &self,
        sweep: &Sweep,
        block: &Block,
        seen: &Seen,
        panels: &mut Panels<'_, X::A>,
    ) {
        let (job, lanes) = (self.job, lanes::<X>());
        let width = padded::<X>(job.dim);
        let tiles = block.tiles.len();
        let most = seen.visible[..tiles]
            .iter()
            .flatten()
            .copied()
            .max()
            .unwrap_or(0);
        let head = self.grid.groups[block.group][0];
        for start in (sweep.keys.start..sweep.keys.end.min(most)).step_by(KEYS) {
            let count = KEYS.min(sweep.keys.end - start);
            let address = |j: usize| job.k.at(block.batch, block.segment, start + j, head);
            let (k, v) = (self.given.k, self.given.v);
            panel::rows(k, job.dim, count, address, width, panels.k);
            panel::rows(v, job.dim, count, address, width, panels.v);
            let finite = panel::finite(panels.k) && panel::finite(panels.v);
            if sweep.keys_too {
                panels.dk.fill(X::A::ZERO);
                panels.dv.fill(X::A::ZERO);
            }
            for i in 0..tiles {
                let visible = &seen.visible[i][..lanes];
                let last = visible.iter().copied().max().unwrap_or(0);
                if last <= start {
                    continue;
                }
                let rows = (last - start).min(count).next_multiple_of(R);
                let mask = Mask::new::<X>(visible, start, rows);
                let exact = finite && seen.finite;
                self.pairs::<R>(sweep, i, rows, mask, exact, panels);
            }
            if sweep.keys_too {
                for j in 0..count {
                    let row = j * width..j * width + job.dim;
                    // SAFETY: keys of different (batch, segment, row, key head) do not overlap
                    // (checked before the job began), and this sweep alone has these.
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

    /// One tile of queries and `rows` keys.
    #[inline(always)]
    fn pairs<const R: usize>(
        &self,
        sweep: &Sweep,
        i: usize,
        rows: usize,
        mask: Option<Mask<X::A>>,
        exact: bool,
        panels: &mut Panels<'_, X::A>,
    ) {
        let (x, dim, lanes) = (self.x, self.job.dim, lanes::<X>());
        let width = padded::<X>(dim);
        let at = i * width * lanes..(i + 1) * width * lanes;
        let cells = i * lanes..(i + 1) * lanes;
        let (k, v) = (&panels.k[..rows * width], &panels.v[..rows * width]);
        let scores = X::of_mut(&mut panels.scores[..rows * lanes]);
        let products_of = X::of_mut(&mut panels.products[..rows * lanes]);
        products::<X, R>(x, k, width, dim, X::of(&panels.q[at.clone()]), scores);
        products::<X, R>(
            x,
            v,
            width,
            dim,
            X::of(&panels.dout[at.clone()]),
            products_of,
        );
        let lse: [X::V; VECTORS] = vectors(x, &panels.lse[cells.clone()]);
        let delta: [X::V; VECTORS] = vectors(x, &panels.delta[cells]);
        let pairs = scores
            .chunks_exact_mut(VECTORS)
            .zip(products_of.chunks_exact_mut(VECTORS));
        for (score, product) in pairs {
            for n in 0..VECTORS {
                let p = x.exp(x.sub(score[n], lse[n]));
                product[n] = x.mul(p, x.sub(product[n], delta[n]));
                score[n] = p;
            }
        }
        if let Some(mask) = &mask {
            mask.hide(x, scores, X::A::ZERO);
            mask.hide(x, products_of, X::A::ZERO);
        }
        let slow = mask.filter(|_| !exact);
        if sweep.queries_too {
            let (ones, dq) = ([x.splat(X::A::ONE); VECTORS], &mut panels.dq[at.clone()]);
            let dq = X::of_mut(dq);
            match &slow {
                None => accumulate::<X, R>(x, k, width, products_of, &ones, dq),
                Some(mask) => mask.accumulate(x, k, width, products_of, &ones, dq),
            }
        }
        if sweep.keys_too {
            let (q_rows, dout_rows) = (&panels.q_rows[at.clone()], &panels.dout_rows[at]);
            let both = [
                (&panels.products[..rows * lanes], q_rows, &mut *panels.dk),
                (&panels.scores[..rows * lanes], dout_rows, &mut *panels.dv),
            ];
            for (weights, rows, sums) in both {
                match &slow {
                    None => scatter::<X, R>(x, weights, rows, width, sums),
                    Some(mask) => mask.scatter(x, weights, rows, width, sums),
                }
            }
        }
    }

    /// Adds a tile's dq to its rows.
    #[inline(always)]
    fn store_queries(&self, block: &Block, i: usize, panels: &mut Panels<'_, X::A>) {
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
            // SAFETY: rows of different (batch, segment, row, head) do not overlap (checked before
            // the job began), and this sweep alone has these.
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
fn vectors<X: Vector>(x: X, numbers: &[X::A]) -> [X::V; VECTORS] {
    let mut vectors = [x.zero(); VECTORS];
    vectors.copy_from_slice(X::of(numbers));
    vectors
}

/// sums[j] += Σ_i weights[j][i] · rows[i].
#[inline(always)]
fn scatter<X: Vector, const R: usize>(
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
                let found = across::<X, R, 2>(x, by_row, rows, step, first);
                for (r, found) in found.into_iter().enumerate() {
                    for (n, found) in found.into_iter().enumerate() {
                        let sum = &mut sums[r * step + first + n];
                        *sum = x.add(*sum, found);
                    }
                }
                first += 2;
            } else {
                let found = across::<X, R, 1>(x, by_row, rows, step, first);
                for (r, [found]) in found.into_iter().enumerate() {
                    let sum = &mut sums[r * step + first];
                    *sum = x.add(*sum, found);
                }
                first += 1;
            }
        }
    }
}
