//! Extra terms of the denominator: sinks and phantom keys (spec section 10).
//!
//! The decision here: such a term changes a finished softmax, row by row: out shrinks, lse grows.
//! So it is added to the results of a call, on any device and any ring, and the backward pass needs
//! only the new out and lse.

use crate::dtype::Data;
use crate::error::Result;
use crate::pattern::Pattern;
use crate::phantoms::Phantoms;
use crate::shape::Shape;
use crate::sharding::Run;
use crate::sinks;
use crate::tensor::Tensor;

/// The extra terms of the denominators of a call.
pub struct Denominator<'a> {
    /// Position of the first query.
    first: usize,
    sinks: Option<&'a [f64]>,
    phantoms: Option<Phantoms<'a>>,
}

impl<'a> Denominator<'a> {
    /// The extra terms of a call; an error if its pattern or shape does not take these sinks.
    pub fn new(
        pattern: &'a Pattern,
        shape: &Shape,
        sinks: Option<&'a [f64]>,
    ) -> Result<Denominator<'a>> {
        if let Some(sinks) = sinks {
            pattern.check_sinks()?;
            sinks::check(sinks, shape.heads)?;
        }
        Ok(Denominator {
            first: pattern.first_query(shape),
            sinks,
            phantoms: Phantoms::new(pattern, shape),
        })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sinks.is_none() && self.phantoms.is_none()
    }

    /// Adds the terms to out `[b, rows, slots, d]` and lse `[b, rows, slots, 1]` of these queries
    /// (by index in q). A row that sees no key keeps out = 0, and its lse is that of the terms.
    pub fn apply(&self, queries: &[Run], out: &mut Tensor, lse: &mut Tensor) {
        if self.is_empty() {
            return;
        }
        let [batch, rows, slots, dim] = out.dims();
        let indices = || queries.iter().flat_map(|run| run.tokens());
        assert_eq!(rows, indices().count(), "rows of these queries");
        let lse = lse.data_mut();
        let mut cell = 0;
        for _ in 0..batch {
            for query in indices() {
                for slot in 0..slots {
                    let term = self.term(slot, self.first + query);
                    if term > f64::NEG_INFINITY || term.is_nan() {
                        let factor = add(lse, cell, term);
                        scale(out.data_mut(), cell * dim..(cell + 1) * dim, factor);
                    }
                    cell += 1;
                }
            }
        }
    }

    /// The logarithms of the extra terms of these queries, `[rows, slots]`; minus infinity where
    /// there are none.
    pub fn logarithms(&self, queries: &[Run], slots: usize) -> Vec<f64> {
        let rows = queries.iter().flat_map(|run| run.tokens());
        rows.flat_map(|query| (0..slots).map(move |slot| self.term(slot, self.first + query)))
            .collect()
    }

    /// The logarithm of the extra terms of one row: minus infinity if there are none.
    fn term(&self, slot: usize, position: usize) -> f64 {
        let sink = self.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[slot]);
        match self.phantoms.as_ref().map(|of| of.of(slot, position)) {
            None | Some(0) => sink,
            Some(count) => log_add(sink, (count as f64).ln()),
        }
    }
}

/// Adds a term to the lse of a cell. Returns the factor of its out.
fn add(lse: &mut Data, cell: usize, term: f64) -> f64 {
    let old = lse.as_slice().get(cell);
    let new = log_add(old, term);
    lse.set(cell, new);
    match old == f64::NEG_INFINITY {
        true => 0.0,
        false => (old - new).exp(),
    }
}

fn log_add(a: f64, b: f64) -> f64 {
    let top = a.max(b);
    match top == f64::NEG_INFINITY {
        true => top,
        false => top + ((a - top).exp() + (b - top).exp()).ln(),
    }
}

fn scale(data: &mut Data, row: std::ops::Range<usize>, factor: f64) {
    match data {
        Data::F64(x) => x[row].iter_mut().for_each(|x| *x *= factor),
        Data::F32(x) => x[row]
            .iter_mut()
            .for_each(|x| *x = (f64::from(*x) * factor) as f32),
        data => row.for_each(|i| data.set(i, data.as_slice().get(i) * factor)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{CallTensors, random_pattern};
    use crate::{DType, Padding, Scores, Window, reference};

    const ALL: Run = Run::leading(13);

    fn close(got: &[f64], expected: &[f64]) -> bool {
        let mut pairs = got.iter().zip(expected);
        pairs.all(|(x, y)| x == y || (x - y).abs() < 1e-12 * y.abs().max(1.0))
    }

    /// The pattern without a window, with torchscale's padding.
    fn padded(pattern: Pattern) -> Pattern {
        pattern.window(Window::ALL).padding(Padding::Torchscale)
    }

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
            let terms = Denominator::new(&pattern, &shape, Some(&sinks)).unwrap();
            terms.apply(&[ALL], &mut out, &mut lse);
            let back =
                reference::backward(&shape, &pattern, scores, &q, &k, &v, &dout, Some(&dlse));
            let views = [&out.view(), &lse.view(), &tensors.dout.view()];
            let got = sinks::gradient(&sinks, views, Some(&tensors.dlse.view())).unwrap();
            assert!(close(&out.to_f64(), &expected.out), "out, seed {seed}");
            assert!(close(&lse.to_f64(), &expected.lse), "lse, seed {seed}");
            assert!(close(&got, &back.unwrap().dsinks), "dsinks, seed {seed}");
        }
    }

    #[test]
    fn another_number_of_sinks_than_heads_is_refused() {
        let (pattern, shape) = (Pattern::dense(), Shape::new(1, 2, 4, 4, 3).unwrap());
        assert!(Denominator::new(&pattern, &shape, Some(&[0.0; 3])).is_err());
    }

    #[test]
    fn phantoms_added_afterwards_are_phantoms_in_the_softmax() {
        for seed in 0..60 {
            let shape = Shape::new(2, 13, 4, 2, 3).unwrap();
            let pattern = padded(random_pattern(seed, &shape));
            if pattern.check(&shape).is_err() {
                continue;
            }
            let tensors = CallTensors::random(&shape, seed);
            let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
            let expected = reference::forward(&shape, &pattern, 0.7, &q, &k, &v).unwrap();
            let plain = pattern.clone().padding(Padding::None);
            let without = reference::forward(&shape, &plain, 0.7, &q, &k, &v).unwrap();
            let tensor = |values: &[f64], dim: usize| {
                Tensor::from_f64(DType::F64, [2, 13, 4, dim], values).unwrap()
            };
            let (mut out, mut lse) = (tensor(&without.out, 3), tensor(&without.lse, 1));
            let terms = Denominator::new(&pattern, &shape, None).unwrap();
            terms.apply(&[ALL], &mut out, &mut lse);
            assert!(close(&out.to_f64(), &expected.out), "out, seed {seed}");
            assert!(close(&lse.to_f64(), &expected.lse), "lse, seed {seed}");
        }
    }
}
