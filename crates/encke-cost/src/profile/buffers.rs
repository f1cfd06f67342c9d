//! The buffers that jobs are timed on: rows of a whole sequence, or of one rank.

use encke_core::conformance::Random;
use encke_core::job::Job;
use encke_core::kernel::{Carry, Gradients, Kernel, KernelError, SoftmaxState, Upstream};
use encke_core::sharding::Run as Tokens;
use encke_core::{Data, Tensor};

use crate::probe_sizes::ProbeSizes;

/// The operands of both passes for some rows.
#[derive(Debug)]
pub(super) struct ProbeBuffers<B = Data> {
    /// q, k, v and dout.
    pub inputs: [B; 4],
    pub carry: Carry<B>,
    pub lse: B,
    pub delta: B,
    pub gradients: [B; 3],
}

impl<B> ProbeBuffers<B> {
    /// Random operands of `rows` rows.
    pub fn new<K: Kernel<Buffer = B>>(
        kernel: &K,
        sizes: ProbeSizes,
        rows: usize,
    ) -> Result<ProbeBuffers<B>, KernelError> {
        let ProbeSizes {
            heads, dim, dtype, ..
        } = sizes;
        let (cells, sum) = (rows * heads, dtype.sum());
        let mut random = Random::new(7);
        let all = [Tokens {
            first: 0,
            stride: 1,
            count: rows,
        }];
        let mut random_rows = || {
            let values: Vec<f64> = (0..cells * dim).map(|_| random.unit()).collect();
            let values = Data::from_f64(dtype, &values);
            let tensor = Tensor::from_data(values, [1, rows, heads, dim]);
            let mut buffer = kernel.allocate(dtype, cells * dim)?;
            kernel.upload(
                &tensor.expect("as many elements as the shape has").view(),
                &all,
                &mut buffer,
            )?;
            Ok(buffer)
        };
        let filled = |elements: usize, value: f64| {
            let mut buffer = kernel.allocate(sum, elements)?;
            kernel.fill(&mut buffer, value)?;
            Ok(buffer)
        };
        Ok(ProbeBuffers {
            inputs: [
                random_rows()?,
                random_rows()?,
                random_rows()?,
                random_rows()?,
            ],
            carry: Carry {
                acc: filled(cells * dim, 0.0)?,
                m: filled(cells, f64::NEG_INFINITY)?,
                l: filled(cells, 0.0)?,
            },
            // Any finite lse is valid; one that is too small gives probabilities above 1.
            lse: filled(cells, 10.0)?,
            delta: filled(cells, 0.0)?,
            gradients: [
                filled(cells * dim, 0.0)?,
                filled(cells * dim, 0.0)?,
                filled(cells * dim, 0.0)?,
            ],
        })
    }

    /// Runs a job forward or backward.
    pub fn run<K: Kernel<Buffer = B>>(
        &mut self,
        kernel: &K,
        job: &Job,
        backward: bool,
    ) -> Result<(), KernelError> {
        let [q, k, v, dout] = self.inputs.each_ref().map(|data| kernel.input(data));
        if !backward {
            let state = SoftmaxState::Accumulate {
                carry: &mut self.carry,
                starts: false,
            };
            return kernel.attend(job, q, k, v, state);
        }
        let (lse, delta) = (kernel.input(&self.lse), kernel.input(&self.delta));
        let [dq, dk, dv] = &mut self.gradients;
        let upstream = Upstream { dout, lse, delta };
        kernel.backward(job, q, k, v, upstream, Gradients { dq, dk, dv })
    }
}
