//! The generated tensors that are timed, and the check of the results.

use std::collections::BTreeMap;

use anyhow::Result;
use encke::plan::program::Role;
use encke::{Backward, DType, Data, Forward, Request, Tensor};
use encke_core::host;
use encke_core::job::Block;
use encke_core::sharding::Run;
use encke_ring::out_of_core::{Generator, RowRange, SampledRow, TensorSource};

use crate::process::check_memory;
use crate::row_check::{RowCheck, sampled_rows};
use crate::tensors::{RandomTensors, input_bytes};

/// Uniformly sampled rows that are checked, in addition to those of each branch.
const ROWS: usize = 64;

/// The rows of one process, with the generator they come from.
pub(super) struct GeneratedTensors {
    pub tensors: RandomTensors,
    request: Request,
    generator: Generator,
    runs: Vec<Run>,
}

impl GeneratedTensors {
    /// Generates the rows of these tokens, of all tensors.
    pub fn new(request: &Request, seed: u64, runs: &[Run]) -> Result<GeneratedTensors> {
        let shape = &request.shape;
        let rows = runs.iter().map(|run| run.count).sum();
        check_memory("the input tensors", input_bytes(shape, request.dtype, rows))?;
        let generator = Generator::new(seed, shape.dim);
        let tensor = |role: Role, heads: usize| tensor(&generator, request, role, heads, runs);
        let tensors = RandomTensors {
            q: tensor(Role::Q, shape.heads)?,
            k: tensor(Role::K, shape.kv_heads)?,
            v: tensor(Role::V, shape.kv_heads)?,
            dout: tensor(Role::Dout, shape.heads)?,
        };
        Ok(GeneratedTensors {
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

    /// Compares rows of the output with the reference.
    pub fn check(&self, forward: &Forward, checked: &mut RowCheck) -> Result<()> {
        let mut rows = BTreeMap::new();
        for (token, head) in sampled_rows(&self.request, &self.generator, ROWS) {
            let Some(row) = self.row(token) else { continue };
            let at = row * self.request.shape.heads + head;
            let dim = self.request.shape.dim;
            let (out, lse) = (forward.out.data(), forward.lse.data());
            let out = (at * dim..(at + 1) * dim).map(|i| out.as_slice().get(i));
            let sampled = SampledRow {
                out: out.collect(),
                lse: lse.as_slice().get(at),
            };
            rows.insert((token, head), sampled);
        }
        checked.check(&self.request, &self.generator, rows)
    }

    /// The row of a token, if this process has it.
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

/// Generates rows of a tensor in f32 and rounds them as kernels do.
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
    let mut data = Data::try_zeros(request.dtype, dims.iter().product())?;
    let all: Vec<usize> = (0..heads).collect();
    let mut at = 0;
    for batch in 0..shape.batch {
        for run in runs {
            let count = run.count * heads * shape.dim;
            let mut elements = Data::try_zeros(DType::F32, count)?;
            let rows = RowRange {
                role,
                batch,
                tokens: *run,
                heads: &all,
            };
            generator.read(&rows, &mut elements)?;
            let block = Block::contiguous(count, 0, at);
            host::copy(&block, false, elements.as_slice(), &mut data);
            at += count;
        }
    }
    Ok(Tensor::from_data(data, dims)?)
}

/// The largest difference of two rings' gradients, relative to the largest value.
pub(super) fn gradient_difference(one: &Backward, other: &Backward) -> f64 {
    let tensors = [
        (&one.dq, &other.dq),
        (&one.dk, &other.dk),
        (&one.dv, &other.dv),
    ];
    let relative = |(one, other): (&Tensor, &Tensor)| {
        let (one, other) = (one.to_f64(), other.to_f64());
        let largest = one.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let worst = one.iter().zip(&other).map(|(x, y)| (x - y).abs());
        // `f64::max` would drop a NaN.
        let worst = worst.fold(0.0, |most: f64, x| match x.is_nan() {
            true => f64::INFINITY,
            false => most.max(x),
        });
        if worst == 0.0 { 0.0 } else { worst / largest }
    };
    tensors.into_iter().map(relative).fold(0.0, f64::max)
}

/// The allowed relative difference of the gradients of two rings: they add the same terms in
/// another order, in the type of sums, and round once or, where pairs are rounded too, a few times.
pub fn gradient_tolerance(dtype: DType) -> f64 {
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

    fn tensors(runs: &[Run]) -> GeneratedTensors {
        GeneratedTensors::new(&request(), 3, runs).unwrap()
    }

    fn run(first: usize, stride: usize, count: usize) -> Run {
        Run {
            first,
            stride,
            count,
        }
    }

    #[test]
    fn rows_of_any_shard_equal_those_of_the_whole_sequence() {
        let whole = tensors(&[run(0, 1, 96)]);
        let part = tensors(&[run(7, 3, 5), run(60, 1, 4)]);
        assert_eq!(part.row(8), None);
        assert_eq!(part.row(22), None);
        for (token, row) in [(7, 0), (19, 4), (60, 5), (63, 8)] {
            assert_eq!(part.row(token), Some(row));
            for batch in 0..2 {
                let elements = |of: &Tensor, row: usize| {
                    let at = of.view().row(batch, row, 0);
                    of.to_f64()[at..at + 8].to_vec()
                };
                let here = elements(&part.tensors.k, row);
                assert_eq!(here, elements(&whole.tensors.k, token));
            }
        }
    }

    #[test]
    fn a_wrong_row_and_a_wrong_gradient_are_found() {
        let case = tensors(&[run(0, 1, 96)]);
        let attention = Attention::builder().build().unwrap();
        let (q, k, v) = case.tensors.views();
        let dout = case.tensors.dout.view();
        let forward = attention.forward(&q, &k, &v).unwrap();
        let mut checked = RowCheck::default();
        case.check(&forward, &mut checked).unwrap();
        assert!(checked.rows >= 64 && checked.wrong == 0, "{checked:?}");
        // With v as k, almost every row is wrong.
        let forward = attention.forward(&q, &v, &v).unwrap();
        let mut checked = RowCheck::default();
        case.check(&forward, &mut checked).unwrap();
        assert!(checked.wrong > 60, "{checked:?}");
        let backward = |v| {
            let of = attention.forward(&q, &k, v).unwrap();
            let kept = &of.checkpoint;
            attention.backward(&q, &k, v, kept, &dout, None).unwrap()
        };
        assert_eq!(gradient_difference(&backward(&v), &backward(&v)), 0.0);
        assert!(
            gradient_difference(&backward(&v), &backward(&k)) > gradient_tolerance(DType::Bf16)
        );
    }
}
