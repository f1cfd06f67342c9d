//! Sinks: one more term in each softmax, without a key and without a value (spec section 10).
//!
//! The decision here: a sink changes a finished softmax, row by row: out shrinks, lse grows. So it
//! is applied to the results of a call, on any device and any ring, and the backward pass needs
//! only the new out and lse.

use crate::dtype::Data;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, View};

/// An error unless there is one sink for each of `heads` heads.
pub fn check(sinks: &[f64], heads: usize) -> Result<()> {
    match sinks.len() == heads {
        true => Ok(()),
        false => Err(Error::ShapeMismatch {
            tensor: "sinks",
            got: vec![sinks.len()],
            expected: vec![heads],
        }),
    }
}

/// Adds a sink for each head to out `[b, n, heads, d]` and lse `[b, n, heads, 1]`. A row that sees
/// no key keeps out = 0 and gets the sink as its lse.
pub fn apply(sinks: &[f64], out: &mut Tensor, lse: &mut Tensor) -> Result<()> {
    let [.., heads, dim] = out.dims();
    check(sinks, heads)?;
    let lse = lse.data_mut();
    let cells = lse.as_slice().len();
    let mut factors = Vec::with_capacity(cells);
    for cell in 0..cells {
        let (old, sink) = (lse.as_slice().get(cell), sinks[cell % heads]);
        let top = old.max(sink);
        let new = match top == f64::NEG_INFINITY {
            true => top,
            false => top + ((old - top).exp() + (sink - top).exp()).ln(),
        };
        lse.set(cell, new);
        factors.push(if old == f64::NEG_INFINITY {
            0.0
        } else {
            (old - new).exp()
        });
    }
    match out.data_mut() {
        Data::F64(x) => scale(x, dim, &factors, |x, factor| x * factor),
        Data::F32(x) => scale(x, dim, &factors, |x, factor| (f64::from(x) * factor) as f32),
        data => {
            for (cell, factor) in factors.iter().enumerate() {
                for i in cell * dim..(cell + 1) * dim {
                    data.set(i, data.as_slice().get(i) * factor);
                }
            }
        }
    }
    Ok(())
}

fn scale<E: Copy>(elements: &mut [E], dim: usize, factors: &[f64], times: impl Fn(E, f64) -> E) {
    for (row, factor) in elements.chunks_exact_mut(dim).zip(factors) {
        row.iter_mut().for_each(|x| *x = times(*x, *factor));
    }
}

/// The gradient of the sinks, from out and lse with them: −Σ exp(sink − lse)·(dout·out − dlse).
pub fn gradient(
    sinks: &[f64],
    [out, lse, dout]: [&View<'_>; 3],
    dlse: Option<&View<'_>>,
) -> Result<Vec<f64>> {
    let [batch, tokens, heads, dim] = out.dims();
    check(sinks, heads)?;
    let mut gradient = vec![0.0; heads];
    for (b, t) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))) {
        for (head, sum) in gradient.iter_mut().enumerate() {
            let at = |of: &View<'_>, c: usize| of.data().get(of.row(b, t, head) + c);
            let products = (0..dim).map(|c| at(out, c) * at(dout, c));
            let delta = products.sum::<f64>() - dlse.map_or(0.0, |of| at(of, 0));
            if sinks[head] > f64::NEG_INFINITY {
                *sum -= (sinks[head] - at(lse, 0)).exp() * delta;
            }
        }
    }
    Ok(gradient)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{CallTensors, random_pattern};
    use crate::{DType, Scores, Shape, reference};

    #[test]
    fn sinks_applied_afterwards_are_sinks_in_the_softmax() {
        for seed in 0..40 {
            let shape = Shape::new(2, 13, 4, 2, 3).unwrap();
            let pattern = random_pattern(seed, &shape);
            let tensors = CallTensors::random(&shape, seed);
            let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
            let (dout, dlse) = (tensors.dout.to_f64(), tensors.dlse.to_f64());
            let sinks = [0.3, -1.0, 40.0, f64::NEG_INFINITY];
            let plain = Scores::from(0.7);
            let scores = Scores {
                sinks: Some(sinks.into()),
                ..plain.clone()
            };
            let expected =
                reference::forward(&shape, &pattern, scores.clone(), &q, &k, &v).unwrap();
            let without = reference::forward(&shape, &pattern, plain, &q, &k, &v).unwrap();
            let tensor = |values: &[f64], dim: usize| {
                Tensor::from_f64(DType::F64, [2, 13, 4, dim], values).unwrap()
            };
            let (mut out, mut lse) = (tensor(&without.out, 3), tensor(&without.lse, 1));
            apply(&sinks, &mut out, &mut lse).unwrap();
            let back =
                reference::backward(&shape, &pattern, scores, &q, &k, &v, &dout, Some(&dlse));
            let views = [&out.view(), &lse.view(), &tensors.dout.view()];
            let got = gradient(&sinks, views, Some(&tensors.dlse.view())).unwrap();
            let close = |got: &[f64], expected: &[f64]| {
                let mut pairs = got.iter().zip(expected);
                pairs.all(|(x, y)| x == y || (x - y).abs() < 1e-12 * y.abs().max(1.0))
            };
            assert!(close(&out.to_f64(), &expected.out), "out, seed {seed}");
            assert!(close(&lse.to_f64(), &expected.lse), "lse, seed {seed}");
            assert!(close(&got, &back.unwrap().dsinks), "dsinks, seed {seed}");
        }
    }

    #[test]
    fn another_number_of_sinks_than_heads_is_refused() {
        let mut out = Tensor::zeros(DType::F32, [1, 2, 4, 3]);
        let mut lse = Tensor::zeros(DType::F32, [1, 2, 4, 1]);
        assert!(apply(&[0.0; 3], &mut out, &mut lse).is_err());
    }
}
