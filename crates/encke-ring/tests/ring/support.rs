//! Comparison of a ring with the reference.

use std::time::Duration;

pub use encke_core::conformance::{CallTensors, Configuration};
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Request};
use encke_core::{Tensor, reference};
use encke_ring::ThreadRing;

pub const DEADLINE: Duration = Duration::from_secs(60);

/// The largest difference, relative to the largest element; infinities must agree.
pub fn difference(got: &Tensor, expected: &[f64]) -> f64 {
    let got = got.to_f64();
    assert_eq!(got.len(), expected.len());
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-3, |most: f64, x| most.max(x.abs()));
    let each = got.iter().zip(expected).map(|(a, b)| match a == b {
        true => 0.0,
        false => (a - b).abs() / scale,
    });
    each.fold(0.0, |most, x| {
        if x.is_nan() {
            f64::INFINITY
        } else {
            x.max(most)
        }
    })
}

/// The results of both passes of a case.
pub struct RingResults {
    pub out: Tensor,
    pub lse: Tensor,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
}

/// Runs a case forward and backward.
pub fn run<K: Kernel>(ring: &ThreadRing<K>, case: &Configuration) -> Result<RingResults, String> {
    let tensors = CallTensors::random(&case.request.shape, case.seed);
    let words = |error: encke_ring::RingError| format!("seed {}: {error}", case.seed);
    let inputs = [
        (Role::Q, tensors.q.view()),
        (Role::K, tensors.k.view()),
        (Role::V, tensors.v.view()),
    ];
    let mut forward = ring.run(&case.request, &inputs).map_err(words)?;
    let mut take = |role| {
        forward
            .take(role)
            .expect("a forward pass returns out and lse")
    };
    let (out, lse) = (take(Role::Out), take(Role::Lse));
    let request = Request {
        pass: Pass::Backward { dlse: true },
        ..case.request.clone()
    };
    let more = [
        (Role::Out, out.view()),
        (Role::Lse, lse.view()),
        (Role::Dout, tensors.dout.view()),
        (Role::Dlse, tensors.dlse.view()),
    ];
    let inputs: Vec<_> = inputs.into_iter().chain(more).collect();
    let mut backward = ring.run(&request, &inputs).map_err(words)?;
    let mut take = |role| {
        backward
            .take(role)
            .expect("a backward pass returns gradients")
    };
    let (dq, dk, dv) = (take(Role::Dq), take(Role::Dk), take(Role::Dv));
    Ok(RingResults {
        out,
        lse,
        dq,
        dk,
        dv,
    })
}

/// Compares a case with the reference.
pub fn check<K: Kernel>(ring: &ThreadRing<K>, case: &Configuration) -> Result<(), String> {
    let got = run(ring, case)?;
    let Request { shape, pattern, .. } = &case.request;
    let tensors = CallTensors::random(shape, case.seed);
    let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
    let scores = case.request.scores();
    let forward = reference::forward(shape, pattern, scores.clone(), &q, &k, &v);
    let forward = forward.map_err(|error| error.to_string())?;
    let (dout, dlse) = (tensors.dout.to_f64(), tensors.dlse.to_f64());
    let gradients = reference::backward(shape, pattern, scores, &q, &k, &v, &dout, Some(&dlse));
    let gradients = gradients.map_err(|error| error.to_string())?;
    for (name, got, expected) in [
        ("out", &got.out, &forward.out),
        ("lse", &got.lse, &forward.lse),
        ("dq", &got.dq, &gradients.dq),
        ("dk", &got.dk, &gradients.dk),
        ("dv", &got.dv, &gradients.dv),
    ] {
        let error = difference(got, expected);
        if error > 1e-12 {
            return Err(format!("{name} is off by {error:e} in {case:?}"));
        }
    }
    Ok(())
}
