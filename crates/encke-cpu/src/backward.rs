//! The backward pass, in two deterministic halves: dq with queries as lanes, then dk and dv with
//! keys as lanes.
//!
//! Scores are computed in both halves. The alternative, one half that adds dq from many threads,
//! needs atomic additions, and then the order of arrival would be part of the result.

use encke_core::Data;
use encke_core::job::Job;
use encke_core::kernel::{Gradients, Upstream};

use crate::forward::{diagonal, visible};
use crate::real::Real;
use crate::scratch::{Pool, Tile, Work};
use crate::tile::{self, LANES, Lanes, Mask, ROWS};
use crate::wave::{self, Grid, Place};

/// Everything backward reads.
pub(crate) struct Given<'a> {
    pub q: &'a Data,
    pub k: &'a Data,
    pub v: &'a Data,
    pub upstream: Upstream<'a, Data>,
}

/// Adds the job's share of the gradients.
pub(crate) fn backward<A: Real>(
    pool: &Pool<A>,
    job: &Job,
    given: &Given<'_>,
    gradients: Gradients<'_, Data>,
) {
    queries(pool, job, given, gradients.dq);
    keys(pool, job, given, gradients.dk, gradients.dv);
}

/// Factors all pairs of a job share.
struct Factors<A> {
    scale: A,
    gain: A,
}

impl<A: Real> Factors<A> {
    fn new(job: &Job) -> Factors<A> {
        Factors {
            scale: A::from_f64(job.scale),
            gain: A::from_f64(job.gain),
        }
    }

    /// Turns a row of scores into weights times gain, and a row of dout·v into scale·dS.
    fn weigh(
        &self,
        score: &mut Lanes<A>,
        product: &mut Lanes<A>,
        lse: &Lanes<A>,
        delta: &Lanes<A>,
    ) {
        for i in 0..LANES {
            let p = (score[i] - lse[i]).exp();
            product[i] = self.scale * (p * (self.gain * product[i] - delta[i]));
            score[i] = self.gain * p;
        }
    }
}

fn queries<A: Real>(pool: &Pool<A>, job: &Job, given: &Given<'_>, dq: &mut Data) {
    let grid = Grid {
        batch: job.batch,
        segments: job.segments,
        heads: job.heads,
        rows: job.queries,
    };
    let compute = |_: &&mut Data, place: Place, work: &mut Work<A>, tile: &mut Tile<A>| {
        query_task(job, place, given, work, tile);
    };
    let target = job.dq.as_ref().unwrap_or(&job.q);
    let store = |dq: &mut &mut Data, at: Place, tile: &Tile<A>, row: &mut [A]| {
        for lane in 0..at.count {
            let address = target.at(at.batch, at.segment, at.first + lane, at.head);
            add(&tile.sums[0], lane, row, dq, address);
        }
    };
    let mut dq = dq;
    wave::run(pool, job.dim, grid, &mut dq, compute, store);
}

/// Adds one lane to a row of a buffer.
fn add<A: Real>(sums: &[Lanes<A>], lane: usize, row: &mut [A], target: &mut Data, at: usize) {
    A::load(target.as_slice(), at, row);
    for (x, sums) in row.iter_mut().zip(sums) {
        *x += sums[lane];
    }
    A::store(row, target, at);
}

/// dq of up to 32 queries.
fn query_task<A: Real>(
    job: &Job,
    at: Place,
    given: &Given<'_>,
    work: &mut Work<A>,
    tile: &mut Tile<A>,
) {
    let factors = Factors::new(job);
    let Work {
        lanes,
        rows,
        weights: [scores, products],
        row,
    } = work;
    let cell = |i: usize| job.cells.at(at.batch, at.segment, at.first + i, at.head);
    let address = |i: usize| job.q.at(at.batch, at.segment, at.first + i, at.head);
    tile::load_lanes(given.q.as_slice(), at.count, address, row, &mut lanes[0]);
    let dout = given.upstream.dout.as_slice();
    tile::load_lanes(dout, at.count, |i| cell(i) * job.dim, row, &mut lanes[1]);
    let (mut lse, mut delta) = ([A::ZERO; LANES], [A::ZERO; LANES]);
    let mut visible = visible(job, at);
    for i in 0..at.count {
        lse[i] = A::get(given.upstream.lse.as_slice(), cell(i));
        delta[i] = A::get(given.upstream.delta.as_slice(), cell(i));
        if lse[i] == A::NEG_INFINITY {
            visible[i] = 0; // it saw nothing anywhere, so nothing depends on it
        }
    }
    let (least, most) = bounds(&visible);
    tile.sums[0].fill([A::ZERO; LANES]);
    for start in (0..most).step_by(ROWS) {
        let count = ROWS.min(most - start);
        let address = |j: usize| job.k.at(at.batch, at.segment, start + j, at.head);
        tile::load_rows(given.k.as_slice(), job.dim, count, address, &mut rows[0]);
        tile::load_rows(given.v.as_slice(), job.dim, count, address, &mut rows[1]);
        let [k, v] = rows.each_ref().map(|rows| &rows[..count * job.dim]);
        let (scores, products) = (&mut scores[..count], &mut products[..count]);
        tile::scores(k, &lanes[0], factors.scale, scores);
        tile::scores(v, &lanes[1], A::ONE, products);
        for (score, product) in scores.iter_mut().zip(&mut *products) {
            factors.weigh(score, product, &lse, &delta);
        }
        let mask = (least < start + count).then(|| diagonal(&visible, start));
        if let Some(mask) = &mask {
            mask.hide(products, A::ZERO);
        }
        let ones = [A::ONE; LANES];
        tile::accumulate(k, products, mask.as_ref(), &ones, &mut tile.sums[0]);
    }
}

fn bounds(visible: &[usize]) -> (usize, usize) {
    let fold = |(least, most): (usize, usize), &x: &usize| (least.min(x), most.max(x));
    visible.iter().fold((usize::MAX, 0), fold)
}

/// Query heads that read the same keys, told apart by the address of those.
fn groups(job: &Job) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for head in 0..job.heads {
        let same = |group: &&mut Vec<usize>| job.k.heads[group[0]] == job.k.heads[head];
        match groups.iter_mut().find(same) {
            Some(group) => group.push(head),
            None => groups.push(vec![head]),
        }
    }
    groups
}

fn keys<A: Real>(pool: &Pool<A>, job: &Job, given: &Given<'_>, dk: &mut Data, dv: &mut Data) {
    let groups = groups(job);
    let grid = Grid {
        batch: job.batch,
        segments: job.segments,
        heads: groups.len(),
        rows: job.keys,
    };
    let mut gradients = [dk, dv];
    let compute = |_: &[&mut Data; 2], at: Place, work: &mut Work<A>, tile: &mut Tile<A>| {
        key_task(job, at, &groups[at.head], given, work, tile);
    };
    let store = |gradients: &mut [&mut Data; 2], at: Place, tile: &Tile<A>, row: &mut [A]| {
        let head = groups[at.head][0];
        for lane in 0..at.count {
            let address = job.k.at(at.batch, at.segment, at.first + lane, head);
            for (gradient, sums) in gradients.iter_mut().zip(&tile.sums) {
                add(sums, lane, row, gradient, address);
            }
        }
    };
    wave::run(pool, job.dim, grid, &mut gradients, compute, store);
}

/// dk and dv of up to 32 keys, from all query heads that read them.
fn key_task<A: Real>(
    job: &Job,
    at: Place,
    heads: &[usize],
    given: &Given<'_>,
    work: &mut Work<A>,
    tile: &mut Tile<A>,
) {
    let Work { lanes, row, .. } = &mut *work;
    let address = |j: usize| job.k.at(at.batch, at.segment, at.first + j, heads[0]);
    tile::load_lanes(given.k.as_slice(), at.count, address, row, &mut lanes[0]);
    tile::load_lanes(given.v.as_slice(), at.count, address, row, &mut lanes[1]);
    for sums in &mut tile.sums {
        sums.fill([A::ZERO; LANES]);
    }
    for &head in heads {
        for start in (0..job.queries).step_by(ROWS) {
            let count = ROWS.min(job.queries - start);
            // Positions rise: where the last query of a block sees none of these keys, none does.
            if job.visible(start + count - 1) > at.first {
                let queries = Place {
                    head,
                    first: start,
                    count,
                    ..at
                };
                key_block(job, at, queries, given, work, tile);
            }
        }
    }
}

/// What one block of query rows adds to dk and dv.
fn key_block<A: Real>(
    job: &Job,
    at: Place,
    queries: Place,
    given: &Given<'_>,
    work: &mut Work<A>,
    tile: &mut Tile<A>,
) {
    let factors = Factors::new(job);
    let Work {
        lanes,
        rows,
        weights: [scores, products],
        ..
    } = work;
    let Place { head, count, .. } = queries;
    let cell = |i: usize| job.cells.at(at.batch, at.segment, queries.first + i, head);
    let address = |i: usize| job.q.at(at.batch, at.segment, queries.first + i, head);
    let dout = given.upstream.dout.as_slice();
    tile::load_rows(given.q.as_slice(), job.dim, count, address, &mut rows[0]);
    tile::load_rows(dout, job.dim, count, |i| cell(i) * job.dim, &mut rows[1]);
    let [q, dout] = rows.each_ref().map(|rows| &rows[..count * job.dim]);
    let (scores, products) = (&mut scores[..count], &mut products[..count]);
    tile::scores(q, &lanes[0], factors.scale, scores);
    tile::scores(dout, &lanes[1], A::ONE, products);
    let mut seen = [0; ROWS];
    for (i, (score, product)) in scores.iter_mut().zip(&mut *products).enumerate() {
        let lse = A::get(given.upstream.lse.as_slice(), cell(i));
        let delta = A::get(given.upstream.delta.as_slice(), cell(i));
        if lse != A::NEG_INFINITY {
            let visible = job.visible(queries.first + i);
            seen[i] = visible.saturating_sub(at.first).min(LANES);
        }
        factors.weigh(score, product, &[lse; LANES], &[delta; LANES]);
    }
    let whole = seen[..count].iter().all(|&seen| seen >= at.count);
    let mask = (!whole).then(|| transposed(&seen));
    if let Some(mask) = &mask {
        mask.hide(scores, A::ZERO);
        mask.hide(products, A::ZERO);
    }
    let ones = [A::ONE; LANES];
    let [dk, dv] = &mut tile.sums;
    tile::accumulate(q, products, mask.as_ref(), &ones, dk);
    tile::accumulate(dout, scores, mask.as_ref(), &ones, dv);
}

/// The mask with keys as lanes: query i sees lane x where x < seen[i], that is −seen[i] < −x.
fn transposed(seen: &[usize; ROWS]) -> Mask {
    Mask {
        row: seen.map(|seen| -(seen as i32)),
        lane: std::array::from_fn(|lane| -(lane as i32)),
    }
}
