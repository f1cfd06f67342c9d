//! The job and the tensors of a benchmark, and a timer.

use std::marker::PhantomData;
use std::time::Instant;

use encke_core::conformance::Random;
use encke_core::job::{Band, Job, Mask, Operand};
use encke_core::kernel::{Carry, SoftmaxState};
use encke_core::{DType, Data};
use encke_cpu::internals::{AmxBackwardInputs, PagePool, Target, TileElement};
use half::bf16;

use crate::variants::{BackwardFn, ForwardFn};

/// The shortest and the median time of `runs` runs, in seconds.
pub fn time(runs: usize, mut body: impl FnMut()) -> (f64, f64) {
    let mut seconds: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            body();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[0], seconds[runs / 2])
}

/// Self-attention of `tokens` tokens.
pub fn job(tokens: usize, heads: usize, dim: usize, causal: bool) -> Job {
    let operand = |unit: usize| Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: heads * unit,
        heads: (0..heads).map(|head| head * unit).collect(),
    };
    let mask = Band::causal((0, 1), (0, 1));
    Job {
        batch: 1,
        segments: 1,
        queries: tokens,
        keys: tokens,
        heads,
        dim,
        value_dim: dim,
        q: operand(dim),
        k: operand(dim),
        cells: operand(1),
        delta: None,
        dq: None,
        mask: causal.then_some(Mask::Band(mask)),
        transform: None,
        dropout: None,
        scale: 1.0 / (dim as f64).sqrt(),
        gain: 1.0,
        tiles: None,
    }
}

/// An element type that is benchmarked.
pub trait BenchElement: TileElement {
    /// The largest allowed errors, forward and backward, relative to the largest element.
    const TOLERANCE: [f64; 2];
}

impl BenchElement for bf16 {
    const TOLERANCE: [f64; 2] = [5e-3, 1e-2];
}

impl BenchElement for f32 {
    // Loose enough for the exponential of degree 3.
    const TOLERANCE: [f64; 2] = [1e-4, 2e-4];
}

/// The elements of a buffer of this type.
pub fn elements_of<N: TileElement>(data: &Data) -> &[N] {
    N::of_slice(data.as_slice()).expect("elements of type N")
}

/// The tensors of a job, inputs and results.
pub struct BenchTensors<N> {
    /// q, k, v and dout.
    pub data: [Data; 4],
    element: PhantomData<N>,
    pub carry: Carry<Data>,
    pub lse: Vec<f32>,
    pub delta: Vec<f32>,
    pub gradients: [Vec<f32>; 3],
}

impl<N: BenchElement> BenchTensors<N> {
    pub fn new(job: &Job) -> BenchTensors<N> {
        let cells = job.queries * job.heads;
        let mut random = Random::new(7);
        let mut tensor = || {
            let value = |_| 1.7 * random.unit();
            let values: Vec<f64> = (0..cells * job.dim).map(value).collect();
            Data::from_f64(N::DTYPE, &values)
        };
        BenchTensors {
            data: [tensor(), tensor(), tensor(), tensor()],
            element: PhantomData,
            carry: Carry {
                acc: Data::zeros(DType::F32, cells * job.dim),
                m: Data::zeros(DType::F32, cells),
                l: Data::zeros(DType::F32, cells),
            },
            lse: vec![0.0; cells],
            delta: vec![0.0; cells],
            gradients: [(); 3].map(|()| vec![0.0; cells * job.dim]),
        }
    }

    pub fn forward(&mut self, run: ForwardFn<N>, pool: &PagePool, job: &Job) {
        let Carry { acc, m, l } = &mut self.carry;
        for (buffer, value) in [(acc, 0.0), (m, f32::NEG_INFINITY), (l, 0.0)] {
            if let Data::F32(elements) = buffer {
                elements.fill(value);
            }
        }
        let state = SoftmaxState::Accumulate {
            carry: &mut self.carry,
            starts: false,
        };
        let target = Target::new(state, job);
        let [q, k, v, _] = self.data.each_ref().map(elements_of);
        run(pool, job, [q, k, v], target);
    }

    /// Computes lse and delta, which backward reads, from the carry of forward.
    pub fn finish(&mut self, job: &Job) {
        let dout = self.data[3].to_f64();
        let Carry { acc, m, l } = &self.carry;
        let [acc, m, l] = [acc, m, l].map(elements_of::<f32>);
        for cell in 0..m.len() {
            let row = cell * job.dim..(cell + 1) * job.dim;
            let pairs = acc[row.clone()].iter().zip(&dout[row]);
            let product: f32 = pairs.map(|(x, &y)| x * y as f32).sum();
            self.lse[cell] = m[cell] + l[cell].ln();
            self.delta[cell] = product / l[cell];
        }
    }

    pub fn backward(&mut self, run: BackwardFn<N>, pool: &PagePool, job: &Job) {
        let [q, k, v, dout] = self.data.each_ref().map(elements_of);
        let inputs = AmxBackwardInputs {
            q,
            k,
            v,
            dout,
            lse: &self.lse,
            delta: &self.delta,
        };
        let [dq, dk, dv] = &mut self.gradients;
        run(pool, job, inputs, dq, dk, dv);
    }
}
