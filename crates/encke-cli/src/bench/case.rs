//! What is timed: generated tensors, and how what comes out is held against the reference.

use std::collections::BTreeMap;

use anyhow::Result;
use encke::plan::program::Role;
use encke::{Backward, DType, Data, Forward, Request, Tensor};
use encke_core::host;
use encke_core::job::Block;
use encke_core::sharding::Run;
use encke_ring::out_of_core::{Generator, RowRange, Sampled, Source};

use crate::check::{Checked, places};
use crate::tensors::Tensors;

/// Rows of the output that are checked, wherever they are; each branch has some of its own beside.
const ROWS: usize = 64;

/// The rows of one process, with what they were made from.
pub struct Case {
    pub tensors: Tensors,
    request: Request,
    generator: Generator,
    runs: Vec<Run>,
}

impl Case {
    /// The tokens of these runs, of all tensors.
    pub fn new(request: &Request, seed: u64, runs: &[Run]) -> Result<Case> {
        let shape = &request.shape;
        let generator = Generator::new(seed, shape.dim);
        let tensor = |role: Role, heads: usize| tensor(&generator, request, role, heads, runs);
        let tensors = Tensors {
            q: tensor(Role::Q, shape.heads)?,
            k: tensor(Role::K, shape.kv_heads)?,
            v: tensor(Role::V, shape.kv_heads)?,
            dout: tensor(Role::Dout, shape.heads)?,
        };
        Ok(Case {
            tensors,
            request: request.clone(),
            generator,
            runs: runs.to_vec(),
        })
    }

    /// Tokens of the whole sequence.
    #[cfg(feature = "mpi")]
    pub fn tokens(&self) -> usize {
        self.request.shape.tokens
    }

    /// Holds rows of an output against the reference.
    pub fn check(&self, forward: &Forward, checked: &mut Checked) -> Result<()> {
        let mut rows = BTreeMap::new();
        for (token, head) in places(&self.request, &self.generator, ROWS) {
            let Some(row) = self.row(token) else { continue };
            let at = row * self.request.shape.heads + head;
            let dim = self.request.shape.dim;
            let (out, lse) = (forward.out.data(), forward.lse.data());
            let out = (at * dim..(at + 1) * dim).map(|i| out.as_slice().get(i));
            let sampled = Sampled {
                out: out.collect(),
                lse: lse.as_slice().get(at),
            };
            rows.insert((token, head), sampled);
        }
        checked.check(&self.request, &self.generator, rows)
    }

    /// The row of a token, if it is here.
    fn row(&self, token: usize) -> Option<usize> {
        let mut before = 0;
        for run in &self.runs {
            let past = token.checked_sub(run.first);
            if let Some(past) = past
                && past.is_multiple_of(run.stride)
                && past / run.stride < run.count
            {
                return Some(before + past / run.stride);
            }
            before += run.count;
        }
        None
    }
}

/// Rows of a tensor, made run by run and rounded as kernels round.
fn tensor(
    generator: &Generator,
    request: &Request,
    role: Role,
    heads: usize,
    runs: &[Run],
) -> Result<Tensor> {
    let shape = &request.shape;
    let rows: usize = runs.iter().map(|run| run.count).sum();
    let dims = [shape.batch, rows, heads, shape.dim];
    let mut data = Data::zeros(request.dtype, dims.iter().product());
    let all: Vec<usize> = (0..heads).collect();
    let mut at = 0;
    for batch in 0..shape.batch {
        for run in runs {
            let count = run.count * heads * shape.dim;
            let mut numbers = Data::zeros(DType::F32, count);
            let stretch = RowRange {
                role,
                batch,
                tokens: *run,
                heads: &all,
            };
            generator.read(&stretch, &mut numbers)?;
            let block = Block::contiguous(count, 0, at);
            host::copy(&block, false, numbers.as_slice(), &mut data);
            at += count;
        }
    }
    Ok(Tensor::from_data(data, dims)?)
}

/// The largest difference of two rings' gradients, as a share of the largest number.
pub fn apart(one: &Backward, other: &Backward) -> f64 {
    let tensors = [
        (&one.dq, &other.dq),
        (&one.dk, &other.dk),
        (&one.dv, &other.dv),
    ];
    let share = |(one, other): (&Tensor, &Tensor)| {
        let (one, other) = (one.to_f64(), other.to_f64());
        let largest = one.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let worst = one.iter().zip(&other).map(|(x, y)| (x - y).abs());
        // A NaN is as far as can be; `max` alone would drop it.
        let worst = worst.fold(0.0, |most: f64, x| match x.is_nan() {
            true => f64::INFINITY,
            false => most.max(x),
        });
        if worst == 0.0 { 0.0 } else { worst / largest }
    };
    tensors.into_iter().map(share).fold(0.0, f64::max)
}

/// How far gradients of two right rings may be apart: they add the same terms in another order, in
/// the type of sums, and round once or, where pairs are rounded too, a few times.
pub fn allowed(dtype: DType) -> f64 {
    256.0 * dtype.sum().epsilon() + 8.0 * dtype.epsilon()
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke::{Attention, Pass, Shape};

    fn request() -> Request {
        let shape = Shape::new(2, 96, 2, 1, 8).unwrap();
        let attention = Attention::builder().build().unwrap();
        let plan = attention.plan(shape, DType::F32, Pass::Forward).unwrap();
        plan.request().clone()
    }

    fn case(runs: &[Run]) -> Case {
        Case::new(&request(), 3, runs).unwrap()
    }

    fn run(first: usize, stride: usize, count: usize) -> Run {
        Run {
            first,
            stride,
            count,
        }
    }

    #[test]
    fn rows_of_any_cut_are_those_of_the_whole() {
        let whole = case(&[run(0, 1, 96)]);
        let part = case(&[run(7, 3, 5), run(60, 1, 4)]);
        assert_eq!(part.row(8), None);
        assert_eq!(part.row(22), None);
        for (token, row) in [(7, 0), (19, 4), (60, 5), (63, 8)] {
            assert_eq!(part.row(token), Some(row));
            for batch in 0..2 {
                let numbers = |of: &Tensor, row: usize| {
                    let at = of.view().row(batch, row, 0);
                    of.to_f64()[at..at + 8].to_vec()
                };
                let here = numbers(&part.tensors.k, row);
                assert_eq!(here, numbers(&whole.tensors.k, token));
            }
        }
    }

    #[test]
    fn a_wrong_row_and_a_wrong_gradient_are_found() {
        let case = case(&[run(0, 1, 96)]);
        let attention = Attention::builder().build().unwrap();
        let (q, k, v) = case.tensors.views();
        let dout = case.tensors.dout.view();
        let forward = attention.forward(&q, &k, &v).unwrap();
        let mut checked = Checked::default();
        case.check(&forward, &mut checked).unwrap();
        assert!(checked.rows >= 64 && checked.wrong == 0, "{checked:?}");
        // Another k: almost every row is another one.
        let forward = attention.forward(&q, &v, &v).unwrap();
        let mut checked = Checked::default();
        case.check(&forward, &mut checked).unwrap();
        assert!(checked.wrong > 60, "{checked:?}");
        let backward = |v| {
            let of = attention.forward(&q, &k, v).unwrap();
            let kept = &of.checkpoint;
            attention.backward(&q, &k, v, kept, &dout, None).unwrap()
        };
        assert_eq!(apart(&backward(&v), &backward(&v)), 0.0);
        assert!(apart(&backward(&v), &backward(&k)) > allowed(DType::Bf16));
    }
}
