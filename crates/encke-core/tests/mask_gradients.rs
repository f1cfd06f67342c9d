//! The gradients of masks, scores, sinks, dropout, fewer queries and values of another width,
//! against central differences of the reference's forward pass.

use encke_core::conformance::{CallTensors, Configuration, Random};
use encke_core::reference::{self, ReferenceGradients};
use encke_core::{Scores, Shape};

const STEP: f64 = 1e-5;

/// One call, with its operands.
#[derive(Clone)]
struct MaskedCase {
    configuration: Configuration,
    scores: Scores,
    operands: [Vec<f64>; 4],
    dout: Vec<f64>,
    dlse: Vec<f64>,
}

impl MaskedCase {
    /// A random mask on few tokens; every second case has sinks.
    fn new(seed: u64) -> MaskedCase {
        let mut configuration = Configuration::masked(seed);
        let request = &mut configuration.request;
        let shape = Shape {
            batch: 1,
            dim: request.shape.dim.min(2),
            ..request.shape.with_tokens(request.shape.tokens.min(9))
        };
        request.shape = shape;
        if let Some(documents) = request.pattern.document_list() {
            let mut left = shape.tokens;
            let mut lengths = Vec::new();
            for range in documents.ranges() {
                lengths.extend(Some(range.len().min(left)).filter(|length| *length > 0));
                left -= range.len().min(left);
            }
            let documents = encke_core::Documents::new(&lengths).unwrap();
            request.pattern = request.pattern.clone().documents(Some(documents));
        }
        request.pattern = request.pattern.clone().query_offset(None);
        let mut random = Random::new(seed);
        let sinks = random
            .once_in(2)
            .then(|| (0..shape.heads).map(|_| 2.0 * random.unit()).collect());
        let scores = Scores {
            sinks,
            ..request.scores()
        };
        let tensors = CallTensors::random(&shape, seed);
        let sinks = scores.sinks.as_ref().map_or(Vec::new(), |of| of.to_vec());
        MaskedCase {
            scores,
            operands: [
                tensors.q.to_f64(),
                tensors.k.to_f64(),
                tensors.v.to_f64(),
                sinks,
            ],
            dout: tensors.dout.to_f64(),
            dlse: tensors.dlse.to_f64(),
            configuration,
        }
    }

    fn scores(&self) -> Scores {
        let sinks = &self.operands[3];
        Scores {
            sinks: (!sinks.is_empty()).then(|| sinks.as_slice().into()),
            ..self.scores.clone()
        }
    }

    /// sum(out * dout) + sum(lse * dlse), without rows that see nothing.
    fn objective(&self) -> f64 {
        let request = &self.configuration.request;
        let [q, k, v, _] = &self.operands;
        let done =
            reference::forward(&request.shape, &request.pattern, self.scores(), q, k, v).unwrap();
        let of_out: f64 = done.out.iter().zip(&self.dout).map(|(x, g)| x * g).sum();
        let seen = done.lse.iter().zip(&self.dlse);
        let seen = seen.filter(|(lse, _)| lse.is_finite());
        of_out + seen.map(|(x, g)| x * g).sum::<f64>()
    }

    fn gradients(&self) -> ReferenceGradients {
        let request = &self.configuration.request;
        let [q, k, v, _] = &self.operands;
        let (dout, dlse) = (&self.dout, Some(&self.dlse[..]));
        let scores = self.scores();
        reference::backward(
            &request.shape,
            &request.pattern,
            scores,
            q,
            k,
            v,
            dout,
            dlse,
        )
        .unwrap()
    }
}

#[test]
fn gradients_of_masks_match_finite_differences() {
    let (mut dropped, mut sinks, mut fewer, mut capped) = (0, 0, 0, 0);
    for seed in 0..60 {
        let case = MaskedCase::new(seed);
        let request = &case.configuration.request;
        dropped += usize::from(request.dropout.is_some());
        sinks += usize::from(!case.operands[3].is_empty());
        fewer += usize::from(request.shape.queries < request.shape.tokens);
        capped += usize::from(request.softcap.is_some());
        let ReferenceGradients { dq, dk, dv, dsinks } = case.gradients();
        for (index, gradient) in [dq, dk, dv, dsinks].iter().enumerate() {
            let largest = gradient.iter().fold(1.0, |a: f64, x| a.max(x.abs()));
            for (i, got) in gradient.iter().enumerate() {
                let mut moved = case.clone();
                moved.operands[index][i] += STEP;
                let above = moved.objective();
                moved.operands[index][i] -= 2.0 * STEP;
                let expected = (above - moved.objective()) / (2.0 * STEP);
                assert!(
                    (got - expected).abs() <= 2e-8 * largest,
                    "seed {seed}: operand {index}, element {i} is {got}, the difference {expected}"
                );
            }
        }
    }
    for (what, count) in [
        ("dropout", dropped),
        ("sinks", sinks),
        ("fewer queries", fewer),
        ("softcaps", capped),
    ] {
        assert!(count >= 5, "only {count} cases with {what}");
    }
}
