//! The forward pass: up to 32 queries against the keys they see, continuing the carry.
//!
//! Scores exist for one block of keys at a time. Blocks past the last visible key are not touched,
//! and only blocks on the diagonal are masked.

use encke_core::Data;
use encke_core::job::Job;
use encke_core::kernel::Carry;

use crate::real::Real;
use crate::scratch::{Pool, Tile, Work};
use crate::tile::{self, LANES, Lanes, Mask, ROWS};
use crate::wave::{self, Grid, Place};

/// Attends the queries of the job to its keys.
pub(crate) fn forward<A: Real>(
    pool: &Pool<A>,
    job: &Job,
    q: &Data,
    k: &Data,
    v: &Data,
    carry: &mut Carry<Data>,
) {
    let grid = Grid {
        batch: job.batch,
        segments: job.segments,
        heads: job.heads,
        rows: job.queries,
    };
    let compute = |carry: &Carry<Data>, place: Place, work: &mut Work<A>, tile: &mut Tile<A>| {
        load(job, place, carry, &mut work.row, tile);
        attend(job, place, [q, k, v], work, tile);
    };
    let store = |carry: &mut Carry<Data>, place: Place, tile: &Tile<A>, row: &mut [A]| {
        store(job, place, tile, row, carry);
    };
    wave::run(pool, job.dim, grid, carry, compute, store);
}

/// The cell of one lane.
fn cell(job: &Job, place: Place, lane: usize) -> usize {
    let row = place.first + lane;
    job.cells.at(place.batch, place.segment, row, place.head)
}

fn load<A: Real>(job: &Job, at: Place, carry: &Carry<Data>, row: &mut [A], tile: &mut Tile<A>) {
    let acc = carry.acc.as_slice();
    let address = |lane| cell(job, at, lane) * job.dim;
    tile::load_lanes(acc, at.count, address, row, &mut tile.sums[0]);
    tile.m.fill(A::NEG_INFINITY);
    tile.l.fill(A::ZERO);
    for lane in 0..at.count {
        let cell = cell(job, at, lane);
        tile.m[lane] = A::get(carry.m.as_slice(), cell);
        tile.l[lane] = A::get(carry.l.as_slice(), cell);
    }
}

fn store<A: Real>(job: &Job, at: Place, tile: &Tile<A>, row: &mut [A], carry: &mut Carry<Data>) {
    for lane in 0..at.count {
        let cell = cell(job, at, lane);
        tile::lane(&tile.sums[0], lane, row);
        A::store(row, &mut carry.acc, cell * job.dim);
        A::store(&tile.m[lane..=lane], &mut carry.m, cell);
        A::store(&tile.l[lane..=lane], &mut carry.l, cell);
    }
}

/// All blocks of keys that any of the queries sees.
fn attend<A: Real>(
    job: &Job,
    at: Place,
    [q, k, v]: [&Data; 3],
    work: &mut Work<A>,
    tile: &mut Tile<A>,
) {
    let visible = visible(job, at);
    let most = visible[at.count - 1];
    let address = |i: usize| job.q.at(at.batch, at.segment, at.first + i, at.head);
    let Work {
        lanes,
        rows,
        weights,
        row,
    } = work;
    tile::load_lanes(q.as_slice(), at.count, address, row, &mut lanes[0]);
    for start in (0..most).step_by(ROWS) {
        let count = ROWS.min(most - start);
        let address = |j: usize| job.k.at(at.batch, at.segment, start + j, at.head);
        tile::load_rows(k.as_slice(), job.dim, count, address, &mut rows[0]);
        tile::load_rows(v.as_slice(), job.dim, count, address, &mut rows[1]);
        let weights = &mut weights[0][..count];
        let keys = &rows[0][..count * job.dim];
        tile::scores(keys, &lanes[0], A::from_f64(job.scale), weights);
        // Positions rise, so the first query sees the fewest keys.
        let mask = (visible[0] < start + count).then(|| diagonal(&visible, start));
        if let Some(mask) = &mask {
            mask.hide(weights, A::NEG_INFINITY);
        }
        let keep = softmax(weights, &mut tile.m, &mut tile.l);
        let values = &rows[1][..count * job.dim];
        tile::accumulate(values, weights, mask.as_ref(), &keep, &mut tile.sums[0]);
    }
}

/// How many keys each lane sees; lanes without a query are given what the last one has.
pub(crate) fn visible(job: &Job, at: Place) -> [usize; LANES] {
    std::array::from_fn(|lane| job.visible(at.first + lane.min(at.count - 1)))
}

/// The mask of a block of keys that begins at `start`, with queries as lanes.
pub(crate) fn diagonal(visible: &[usize; LANES], start: usize) -> Mask {
    Mask {
        row: std::array::from_fn(|j| j as i32),
        lane: visible.map(|seen| seen.saturating_sub(start).min(ROWS) as i32),
    }
}

/// Turns scores into weights relative to the new maximum; returns what old sums are to be
/// multiplied with.
fn softmax<A: Real>(scores: &mut [Lanes<A>], m: &mut Lanes<A>, l: &mut Lanes<A>) -> Lanes<A> {
    let old = *m;
    for scores in scores.iter() {
        for (m, &score) in m.iter_mut().zip(scores) {
            *m = if score > *m { score } else { *m };
        }
    }
    // A lane that has seen nothing subtracts 0: minus infinity minus itself would be NaN.
    let base = m.map(|m| if m == A::NEG_INFINITY { A::ZERO } else { m });
    let mut sum = [A::ZERO; LANES];
    for scores in scores {
        for ((score, &base), sum) in scores.iter_mut().zip(&base).zip(&mut sum) {
            *score = (*score - base).exp();
            *sum += *score;
        }
    }
    let mut keep = [A::ZERO; LANES];
    for i in 0..LANES {
        keep[i] = (old[i] - base[i]).exp();
        l[i] = keep[i] * l[i] + sum[i];
    }
    keep
}
