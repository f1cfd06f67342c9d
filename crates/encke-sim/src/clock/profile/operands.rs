//! Rows that jobs are timed with: those of a whole sequence, or of one rank's part of it.

use encke_core::conformance::Random;
use encke_core::job::Job;
use encke_core::kernel::{Carry, Gradients, Kernel, KernelError, Upstream};
use encke_core::{DType, Data};

use super::Sizes;

/// Everything that a rank has of its rows.
#[derive(Debug)]
pub(super) struct Operands {
    /// q, k, v and dout.
    pub inputs: [Data; 4],
    pub carry: Carry<Data>,
    pub lse: Data,
    pub delta: Data,
    pub gradients: [Data; 3],
}

impl Operands {
    /// So many rows of random numbers.
    pub fn new(sizes: Sizes, rows: usize) -> Operands {
        let Sizes {
            heads, dim, dtype, ..
        } = sizes;
        let (cells, sum) = (rows * heads, dtype.sum());
        let mut random = Random::new(7);
        let mut numbers = || {
            let values: Vec<f64> = (0..cells * dim).map(|_| random.unit()).collect();
            Data::from_f64(dtype, &values)
        };
        let all = |dtype: DType, elements: usize, value: f64| {
            Data::from_f64(dtype, &vec![value; elements])
        };
        Operands {
            inputs: [numbers(), numbers(), numbers(), numbers()],
            carry: Carry {
                acc: all(sum, cells * dim, 0.0),
                m: all(sum, cells, f64::NEG_INFINITY),
                l: all(sum, cells, 0.0),
            },
            // Any finite lse will do, but one that is too small makes numbers no real pass has.
            lse: all(sum, cells, 10.0),
            delta: all(sum, cells, 0.0),
            gradients: [0; 3].map(|_| all(sum, cells * dim, 0.0)),
        }
    }

    /// Carries out a job one way.
    pub fn run<K: Kernel<Buffer = Data>>(
        &mut self,
        kernel: &K,
        job: &Job,
        backward: bool,
    ) -> Result<(), KernelError> {
        let [q, k, v, dout] = self.inputs.each_ref().map(|data| kernel.input(data));
        if !backward {
            return kernel.forward(job, q, k, v, false, &mut self.carry);
        }
        let (lse, delta) = (kernel.input(&self.lse), kernel.input(&self.delta));
        let [dq, dk, dv] = &mut self.gradients;
        let upstream = Upstream { dout, lse, delta };
        kernel.backward(job, q, k, v, upstream, Gradients { dq, dk, dv })
    }
}
