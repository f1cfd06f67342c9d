//! Random tensors with which calls are timed.

use encke_core::conformance::Random;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Request};
use encke_core::{Tensor, View};
use encke_ring::{RingError, ThreadRing};

/// Random tensors for calls of one shape and dtype, on any ring.
#[derive(Debug)]
pub struct BenchmarkInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    out: Tensor,
    dout: Tensor,
}

impl BenchmarkInputs {
    /// Tensors of the request's shape and dtype.
    pub fn new(request: &Request) -> Result<BenchmarkInputs, RingError> {
        let shape = &request.shape;
        let mut random = Random::new(11);
        let mut tensor = |rows: usize, heads: usize, dim: usize| {
            let dims = [shape.batch, rows, heads, dim];
            let values: Vec<f64> = (0..dims.iter().product()).map(|_| random.unit()).collect();
            Tensor::from_f64(request.dtype, dims, &values)
        };
        Ok(BenchmarkInputs {
            q: tensor(shape.queries, shape.heads, shape.dim)?,
            dout: tensor(shape.queries, shape.heads, shape.value_dim)?,
            k: tensor(shape.tokens, shape.kv_heads, shape.dim)?,
            v: tensor(shape.tokens, shape.kv_heads, shape.value_dim)?,
            out: tensor(shape.queries, shape.heads, shape.value_dim)?,
            lse: Tensor::from_f64(
                request.dtype.sum(),
                [shape.batch, shape.queries, shape.heads, 1],
                &vec![10.0; shape.batch * shape.queries * shape.heads],
            )?,
        })
    }

    /// q, k and v.
    pub fn inputs(&self) -> [View<'_>; 3] {
        [self.q.view(), self.k.view(), self.v.view()]
    }

    /// The gradient of the output, for the backward pass.
    pub fn dout(&self) -> View<'_> {
        self.dout.view()
    }

    /// Runs a call; seconds from its start to the end of the last rank.
    pub fn seconds<K: Kernel>(
        &self,
        ring: &ThreadRing<K>,
        request: &Request,
    ) -> Result<f64, RingError> {
        let mut inputs = vec![
            (Role::Q, self.q.view()),
            (Role::K, self.k.view()),
            (Role::V, self.v.view()),
        ];
        if request.pass != Pass::Forward {
            // Speed does not depend on the values of out and lse as long as they are finite.
            inputs.extend([
                (Role::Out, self.out.view()),
                (Role::Lse, self.lse.view()),
                (Role::Dout, self.dout.view()),
            ]);
        }
        let outcome = ring.run(request, &inputs)?;
        Ok(outcome.trace.end().as_secs_f64())
    }

    /// As [`BenchmarkInputs::seconds`], of the second of two calls: the first one allocates.
    pub fn warm_seconds<K: Kernel>(
        &self,
        ring: &ThreadRing<K>,
        request: &Request,
    ) -> Result<f64, RingError> {
        self.seconds(ring, request)?;
        self.seconds(ring, request)
    }
}
