//! A job, its numbers, and how long something takes.

use std::marker::PhantomData;
use std::time::Instant;

use encke_core::Data;
use encke_core::conformance::Random;
use encke_core::job::{Causal, Job, Operand};
use encke_core::kernel::Carry;
use half::bf16;

use crate::variants::{BackwardFn, ForwardFn};
use encke_cpu::internals::SharedRows;
use encke_cpu::internals::{AmxBackwardInputs, PagePool, TileElement};
use encke_cpu::internals::{ForwardOutput, Target};

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

/// Attention of so many tokens to themselves.
pub fn job(tokens: usize, heads: usize, dim: usize, causal: bool) -> Job {
    let operand = |unit: usize| Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: heads * unit,
        heads: (0..heads).map(|head| head * unit).collect(),
    };
    let mask = Causal {
        query: 0,
        query_step: 1,
        key: 0,
        key_step: 1,
    };
    Job {
        batch: 1,
        segments: 1,
        queries: tokens,
        keys: tokens,
        heads,
        dim,
        q: operand(dim),
        k: operand(dim),
        cells: operand(1),
        dq: None,
        causal: causal.then_some(mask),
        scale: 1.0 / (dim as f64).sqrt(),
        gain: 1.0,
    }
}

/// A type of numbers that is timed.
pub trait BenchElement: TileElement {
    /// How far variants may be off, relative to the largest number: forward and backward.
    const TOLERANCE: [f64; 2];
}

impl BenchElement for bf16 {
    const TOLERANCE: [f64; 2] = [5e-3, 1e-2];
}

impl BenchElement for f32 {
    // Wide enough for the exponential of degree 3.
    const TOLERANCE: [f64; 2] = [1e-4, 2e-4];
}

/// The numbers of a buffer of this type.
pub fn elements_of<N: BenchElement>(data: &Data) -> &[N] {
    N::of_slice(data.as_slice()).expect("they are of this type")
}

/// A job's numbers, in and out.
pub struct BenchTensors<N> {
    /// q, k, v and dout.
    pub data: [Data; 4],
    kind: PhantomData<N>,
    pub acc: Vec<f32>,
    pub m: Vec<f32>,
    pub l: Vec<f32>,
    pub lse: Vec<f32>,
    pub delta: Vec<f32>,
    pub gradients: [Vec<f32>; 3],
}

impl<N: BenchElement> BenchTensors<N> {
    pub fn new(job: &Job) -> BenchTensors<N> {
        let cells = job.queries * job.heads;
        let mut random = Random::new(7);
        let mut tensor = || {
            let number = |_| 1.7 * random.unit();
            let values: Vec<f64> = (0..cells * job.dim).map(number).collect();
            Data::from_f64(N::DTYPE, &values)
        };
        BenchTensors {
            data: [tensor(), tensor(), tensor(), tensor()],
            kind: PhantomData,
            acc: vec![0.0; cells * job.dim],
            m: vec![f32::NEG_INFINITY; cells],
            l: vec![0.0; cells],
            lse: vec![0.0; cells],
            delta: vec![0.0; cells],
            gradients: [(); 3].map(|()| vec![0.0; cells * job.dim]),
        }
    }

    pub fn forward(&mut self, run: ForwardFn<N>, pool: &PagePool, job: &Job) {
        self.acc.fill(0.0);
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
        let (acc, m, l) = (
            SharedRows::new(&mut self.acc),
            SharedRows::new(&mut self.m),
            SharedRows::new(&mut self.l),
        );
        let target = Target {
            previous: Some(Carry { acc, m, l }),
            output: ForwardOutput::Carry(Carry { acc, m, l }),
        };
        let [q, k, v, _] = self.data.each_ref().map(elements_of);
        run(pool, job, [q, k, v], target);
    }

    /// What backward is told, from what forward left.
    pub fn finish(&mut self, job: &Job) {
        let dout = self.data[3].to_f64();
        for cell in 0..self.m.len() {
            let row = cell * job.dim..(cell + 1) * job.dim;
            let pairs = self.acc[row.clone()].iter().zip(&dout[row]);
            let product: f32 = pairs.map(|(x, &y)| x * y as f32).sum();
            self.lse[cell] = self.m[cell] + self.l[cell].ln();
            self.delta[cell] = product / self.l[cell];
        }
    }

    pub fn backward(&mut self, run: BackwardFn<N>, pool: &PagePool, job: &Job) {
        let [q, k, v, dout] = self.data.each_ref().map(elements_of);
        let given = AmxBackwardInputs {
            q,
            k,
            v,
            dout,
            lse: &self.lse,
            delta: &self.delta,
        };
        let [dq, dk, dv] = &mut self.gradients;
        run(pool, job, given, dq, dk, dv);
    }
}
