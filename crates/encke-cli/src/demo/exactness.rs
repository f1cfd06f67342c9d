//! The first table: rings of 1 to 32 ranks against plain attention, output and gradients.

use std::time::Instant;

use anyhow::Result;
use encke::{Attention, Backward, DType, Forward, Pattern, Shape, Tensor, reference};
use encke_lab::longnet;
use encke_lab::table::TextTable;
use encke_lab::tensors::RandomTensors;
use encke_lab::terminal::{Paint, bar, say};

use super::{RINGS, SEED, answer, print_question};

/// The allowed error of f32 sums, relative to the largest value of a tensor.
const TOLERANCE: f64 = 1e-5;

const INTRODUCTION: &str = "\
1,024 tokens, 4 heads over 2 key heads, head dimension 32, f32, causal. Plain
attention is computed in f64, one query at a time. Shown is the largest error in a
tensor, relative to its largest value; one rounding to f32 is 6e-8. The time is that
of both passes.
";

const RESULT: &str = "\
The error does not grow with the ring: partial results
  carry their softmax denominator, so merging adds nothing but rounding.
";

/// Prints the table; false if an error exceeds the tolerance.
pub fn show(paint: Paint) -> Result<bool> {
    let question = "1. Does a ring compute what plain attention computes?";
    print_question(paint, question, INTRODUCTION)?;
    let shape = Shape::new(1, 1024, 4, 2, 32)?;
    let patterns = [
        ("dense", Pattern::dense().causal(true)),
        (
            "LongNet: every head mixes segments 128, 512, 1024 with dilations 1, 4, 8",
            longnet::pattern(&[128, 512, 1024], &[1, 4, 8])?,
        ),
    ];
    let progress = bar(patterns.len() * (1 + RINGS.len()));
    let mut worst: f64 = 0.0;
    for (name, pattern) in patterns {
        progress.set_message("plain attention");
        let plain = PlainAttention::new(&shape, &pattern)?;
        progress.inc(1);
        let mut table = TextTable::new(4, ["ranks", "out", "dq", "dk", "dv", "time"]);
        for ranks in RINGS {
            progress.set_message(format!("ring of {ranks}"));
            let begin = Instant::now();
            let (forward, backward) = plain.ring(&pattern, ranks)?;
            let took = begin.elapsed().as_secs_f64() * 1e3;
            let errors = plain.errors(&forward, &backward);
            worst = errors.iter().fold(worst, |worst, x| worst.max(*x));
            let mut cells = vec![ranks.to_string()];
            cells.extend(errors.iter().map(|error| format!("{error:.1e}")));
            cells.push(format!("{took:.0} ms"));
            table.row(cells);
            progress.inc(1);
        }
        progress.suspend(|| say(&format!("\n  {name}\n{table}")))?;
    }
    progress.finish_and_clear();
    let fine = worst <= TOLERANCE;
    let yes = answer(paint, fine);
    say(&format!("\n  All within {TOLERANCE:.0e}? {yes}. {RESULT}"))?;
    Ok(fine)
}

/// Plain attention and its gradients, with their inputs.
struct PlainAttention {
    tensors: RandomTensors,
    forward: reference::ReferenceForward,
    backward: reference::ReferenceGradients,
}

impl PlainAttention {
    fn new(shape: &Shape, pattern: &Pattern) -> Result<PlainAttention> {
        let tensors = RandomTensors::new(shape, DType::F32, SEED)?;
        let scale = shape.default_scale();
        let wide = |tensor: &Tensor| tensor.to_f64();
        let (q, k, v) = (wide(&tensors.q), wide(&tensors.k), wide(&tensors.v));
        let dout = wide(&tensors.dout);
        Ok(PlainAttention {
            forward: reference::forward(shape, pattern, scale, &q, &k, &v)?,
            backward: reference::backward(shape, pattern, scale, &q, &k, &v, &dout, None)?,
            tensors,
        })
    }

    /// The same attention on a ring.
    fn ring(&self, pattern: &Pattern, ranks: usize) -> Result<(Forward, Backward)> {
        let attention = Attention::builder().pattern(pattern.clone()).ranks(ranks);
        let attention = attention.build()?;
        let (q, k, v) = self.tensors.views();
        let dout = self.tensors.dout.view();
        let forward = attention.forward(&q, &k, &v)?;
        let backward = attention.backward(&q, &k, &v, &forward.checkpoint, &dout, None)?;
        Ok((forward, backward))
    }

    /// The errors of out, dq, dk, dv.
    fn errors(&self, forward: &Forward, backward: &Backward) -> [f64; 4] {
        let exact = &self.backward;
        [
            error(&forward.out, &self.forward.out),
            error(&backward.dq, &exact.dq),
            error(&backward.dk, &exact.dk),
            error(&backward.dv, &exact.dv),
        ]
    }
}

/// The largest difference relative to the largest value; infinite if one is NaN.
fn error(got: &Tensor, exact: &[f64]) -> f64 {
    let largest = exact.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let got = got.to_f64();
    let differences = got.iter().zip(exact).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0.0, |most: f64, x| match x.is_nan() {
        true => f64::INFINITY,
        false => most.max(x),
    });
    worst / largest
}
