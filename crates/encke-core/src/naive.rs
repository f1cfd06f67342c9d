//! The oracle: every kernel operation as plain loops over addresses, in f64.
//!
//! It is slow and never used for speed. It defines what a job computes, and the conformance suite
//! compares every other kernel with it.
//!
//! The decision here: operands are widened to f64 as a whole, everything is computed cell by cell
//! with the [`OnlineSoftmax`] of the specification, and only results are rounded.

use crate::dtype::{DType, Data, Slice};
use crate::job::{Block, Job};
use crate::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use crate::memory::HostKernel;
use crate::partial::OnlineSoftmax;
use crate::plan::Pass;

/// The kernel that all others are tested against.
#[derive(Debug, Clone, Copy, Default)]
pub struct NaiveKernel;

impl HostKernel for NaiveKernel {
    fn name(&self) -> &'static str {
        "naive"
    }
}

impl Kernel for NaiveKernel {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> Result<()> {
        let empty = || OnlineSoftmax::new(job.value_dim);
        match state {
            SoftmaxState::Accumulate { carry, starts } => {
                let sum = carry.m.as_slice().dtype();
                let cells = attend_cells(job, [q, k, v], sum, |cell| match starts {
                    true => empty(),
                    false => load(carry, cell, job.value_dim),
                });
                for (cell, running) in cells {
                    store(&running, carry, cell);
                }
            }
            SoftmaxState::Finish { carry, out, lse } => {
                let sum = lse.as_slice().dtype();
                let before = |cell| match carry {
                    Some(carry) => load(carry, cell, job.value_dim),
                    None => empty(),
                };
                for (cell, running) in attend_cells(job, [q, k, v], sum, before) {
                    write_cell(job, cell, &running, out, lse);
                }
            }
        }
        Ok(())
    }

    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> Result<()> {
        for (source, target) in block.addresses() {
            let mut running = load(to, target, block.width);
            running.merge(&load(from, source, block.width));
            store(&running, to, target);
        }
        Ok(())
    }

    fn finish(
        &self,
        cells: usize,
        dim: usize,
        gain: f64,
        carry: &Carry<Data>,
        out: &mut Data,
        lse: &mut Data,
    ) -> Result<()> {
        for cell in 0..cells {
            let finished = load(carry, cell, dim).finish();
            for (c, x) in finished.out.iter().enumerate() {
                out.set(cell * dim + c, gain * x);
            }
            lse.set(cell, finished.lse);
        }
        Ok(())
    }

    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: Slice<'_>,
        dout: Slice<'_>,
        dlse: Option<Slice<'_>>,
        delta: &mut Data,
    ) -> Result<()> {
        let (out, dout) = (out.to_f64(), dout.to_f64());
        for cell in 0..cells {
            let product = dot(row(&out, cell * dim, dim), row(&dout, cell * dim, dim));
            let from_lse = dlse.map_or(0.0, |dlse| dlse.get(cell));
            delta.set(cell, product - from_lse);
        }
        Ok(())
    }

    fn backward(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        upstream: Upstream<Slice<'_>>,
        gradients: Gradients<'_, Data>,
    ) -> Result<()> {
        let (dim, value_dim) = (job.dim, job.value_dim);
        let (q, k, v, dout) = (q.to_f64(), k.to_f64(), v.to_f64(), upstream.dout.to_f64());
        let (lse, delta) = (upstream.lse.to_f64(), upstream.delta.to_f64());
        let mut dq = gradients.dq.to_f64();
        let mut dk = gradients.dk.to_f64();
        let mut dv = gradients.dv.to_f64();
        for (b, s, h) in heads_of(job) {
            for i in 0..job.queries {
                let cell = job.cells.at(b, s, i, h);
                if lse[cell] == f64::NEG_INFINITY {
                    continue; // a query that sees no key, in this job or any other
                }
                let delta = delta[job.delta().at(b, s, i, h)];
                let at_q = job.q.at(b, s, i, h);
                let at_dq = job.dq.as_ref().unwrap_or(&job.q).at(b, s, i, h);
                let dout = row(&dout, cell * value_dim, value_dim);
                for j in job.visible(i) {
                    let key = job.k.at(b, s, j, h);
                    let value = job.value(key);
                    let product = dot(row(&q, at_q, dim), row(&k, key, dim));
                    let (score, derivative) = job.score(h, i, j, product);
                    let score = upstream.lse.dtype().round(score);
                    let p = (score - lse[cell]).exp();
                    let kept = job.dropout_factor((b, s, h), i, j) * job.gain;
                    let dp = match kept {
                        0.0 => -delta,
                        _ => kept * dot(dout, row(&v, value, value_dim)) - delta,
                    };
                    let ds = p * dp * derivative;
                    if kept != 0.0 {
                        add(&mut dv, value, p * kept, dout);
                    }
                    add(&mut dq, at_dq, job.scale * ds, row(&k, key, dim));
                    add(&mut dk, key, job.scale * ds, row(&q, at_q, dim));
                }
            }
        }
        round(&dq, gradients.dq);
        round(&dk, gradients.dk);
        round(&dv, gradients.dv);
        Ok(())
    }

    fn repeats_bits(&self) -> bool {
        true
    }

    fn workspace_bytes(&self, _: &Job, _: Pass, _: DType) -> usize {
        0 // widened copies are not counted: plans never use the oracle
    }
}

/// The softmax of each cell after a job, starting from `before(cell)`. The cells are distinct.
/// Scores are rounded to the type of the sums: the row max is stored in it.
fn attend_cells(
    job: &Job,
    [q, k, v]: [Slice<'_>; 3],
    sum: DType,
    before: impl Fn(usize) -> OnlineSoftmax,
) -> Vec<(usize, OnlineSoftmax)> {
    let (q, k, v) = (q.to_f64(), k.to_f64(), v.to_f64());
    let mut cells = Vec::new();
    for (b, s, h) in heads_of(job) {
        for i in 0..job.queries {
            let cell = job.cells.at(b, s, i, h);
            let query = row(&q, job.q.at(b, s, i, h), job.dim);
            let mut running = before(cell);
            for j in job.visible(i) {
                let key = job.k.at(b, s, j, h);
                let (score, _) = job.score(h, i, j, dot(query, row(&k, key, job.dim)));
                let value = row(&v, job.value(key), job.value_dim);
                let factor = job.dropout_factor((b, s, h), i, j);
                running.absorb_dropped(sum.round(score), factor, value);
            }
            cells.push((cell, running));
        }
    }
    cells
}

/// Writes out and lse of one cell.
fn write_cell(job: &Job, cell: usize, running: &OnlineSoftmax, out: &mut Data, lse: &mut Data) {
    let finished = running.finish();
    for (c, x) in finished.out.iter().enumerate() {
        out.set(cell * job.value_dim + c, job.gain * x);
    }
    lse.set(cell, finished.lse);
}

/// Every (batch, segment, head) of a job.
fn heads_of(job: &Job) -> impl Iterator<Item = (usize, usize, usize)> {
    let (batch, segments, heads) = (job.batch, job.segments, job.heads);
    (0..batch)
        .flat_map(move |b| (0..segments).flat_map(move |s| (0..heads).map(move |h| (b, s, h))))
}

fn row(values: &[f64], at: usize, dim: usize) -> &[f64] {
    &values[at..at + dim]
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(values: &mut [f64], at: usize, factor: f64, row: &[f64]) {
    for (x, y) in values[at..].iter_mut().zip(row) {
        *x += factor * y;
    }
}

/// Stores every element, rounded; unchanged elements keep their bits.
fn round(values: &[f64], into: &mut Data) {
    for (i, &x) in values.iter().enumerate() {
        into.set(i, x);
    }
}

fn load(carry: &Carry<Data>, cell: usize, dim: usize) -> OnlineSoftmax {
    let acc = carry.acc.as_slice();
    OnlineSoftmax {
        acc: (cell * dim..(cell + 1) * dim).map(|i| acc.get(i)).collect(),
        m: carry.m.as_slice().get(cell),
        l: carry.l.as_slice().get(cell),
    }
}

fn store(running: &OnlineSoftmax, carry: &mut Carry<Data>, cell: usize) {
    for (c, &x) in running.acc.iter().enumerate() {
        carry.acc.set(cell * running.acc.len() + c, x);
    }
    carry.m.set(cell, running.m);
    carry.l.set(cell, running.l);
}
