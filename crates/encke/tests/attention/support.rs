//! Random tensors, and the comparison of an [`Attention`] with the reference.

use encke::conformance::Random;
use encke::{
    Attention, Backward, Builder, DType, Data, Forward, Pattern, Shape, Tensor, reference,
};

/// q, k, v and dout of one shape.
pub struct TestTensors {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub dout: Tensor,
}

pub fn tensor(random: &mut Random, dtype: DType, dims: [usize; 4]) -> Tensor {
    let count = dims.iter().product();
    let values: Vec<f64> = (0..count).map(|_| 2.0 * random.unit()).collect();
    Tensor::from_f64(dtype, dims, &values).expect("sizes agree")
}

impl TestTensors {
    pub fn random(shape: &Shape, dtype: DType, seed: u64) -> TestTensors {
        let mut random = Random::new(seed);
        let of = |heads: usize| [shape.batch, shape.tokens, heads, shape.dim];
        TestTensors {
            q: tensor(&mut random, dtype, of(shape.heads)),
            k: tensor(&mut random, dtype, of(shape.kv_heads)),
            v: tensor(&mut random, dtype, of(shape.kv_heads)),
            dout: tensor(&mut random, dtype, of(shape.heads)),
        }
    }

    pub fn forward(&self, attention: &Attention) -> Forward {
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        attention.forward(&q, &k, &v).expect("the call is legal")
    }

    pub fn backward(&self, attention: &Attention, forward: &Forward) -> Backward {
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        let checkpoint = &forward.checkpoint;
        let backward = attention.backward(&q, &k, &v, checkpoint, &self.dout.view(), None);
        backward.expect("the call is legal")
    }
}

/// Largest difference, relative to the largest expected element; infinities must agree.
pub fn difference(got: &Data, expected: &[f64]) -> f64 {
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-30, |most: f64, x| most.max(x.abs()));
    let got = got.to_f64();
    assert_eq!(got.len(), expected.len());
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

/// The reference's (out, lse, dq, dk, dv) for tensors as they are stored.
pub fn expected(shape: &Shape, pattern: &Pattern, tensors: &TestTensors) -> [Vec<f64>; 5] {
    let [q, k, v, dout] = [&tensors.q, &tensors.k, &tensors.v, &tensors.dout].map(Tensor::to_f64);
    let scale = shape.default_scale();
    let forward = reference::forward(shape, pattern, scale, &q, &k, &v).expect("legal");
    let backward = reference::backward(shape, pattern, scale, &q, &k, &v, &dout, None);
    let backward = backward.expect("legal");
    [
        forward.out,
        forward.lse,
        backward.dq,
        backward.dk,
        backward.dv,
    ]
}

/// Errors of (out, lse, dq, dk, dv) against the reference.
pub fn errors(builder: Builder, shape: &Shape, dtype: DType, seed: u64) -> [f64; 5] {
    let attention = builder.build().expect("the settings are legal");
    let tensors = TestTensors::random(shape, dtype, seed);
    let forward = tensors.forward(&attention);
    let backward = tensors.backward(&attention, &forward);
    let [out, lse, dq, dk, dv] = expected(shape, attention.pattern(), &tensors);
    [
        difference(forward.out.data(), &out),
        difference(forward.lse.data(), &lse),
        difference(backward.dq.data(), &dq),
        difference(backward.dk.data(), &dk),
        difference(backward.dv.data(), &dv),
    ]
}
