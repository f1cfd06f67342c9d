//! A job, its numbers, and how long something takes.

use std::time::Instant;

use encke_core::conformance::Random;
use encke_core::job::{Causal, Job, Operand};
use encke_core::kernel::Carry;
use half::bf16;

use crate::amx::{Given, Pool};
use crate::shared::Shared;
use crate::target::{After, Target};
use crate::variants::{Backward, Forward};

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

/// A job's numbers, in and out.
pub struct Numbers {
    pub given: [Vec<bf16>; 4],
    pub acc: Vec<f32>,
    pub m: Vec<f32>,
    pub l: Vec<f32>,
    pub lse: Vec<f32>,
    pub delta: Vec<f32>,
    pub gradients: [Vec<f32>; 3],
}

impl Numbers {
    pub fn new(job: &Job) -> Numbers {
        let cells = job.queries * job.heads;
        let mut random = Random::new(7);
        let mut numbers = || {
            let number = |_| bf16::from_f64(1.7 * random.unit());
            (0..cells * job.dim).map(number).collect::<Vec<bf16>>()
        };
        Numbers {
            given: [numbers(), numbers(), numbers(), numbers()],
            acc: vec![0.0; cells * job.dim],
            m: vec![f32::NEG_INFINITY; cells],
            l: vec![0.0; cells],
            lse: vec![0.0; cells],
            delta: vec![0.0; cells],
            gradients: [(); 3].map(|()| vec![0.0; cells * job.dim]),
        }
    }

    pub fn forward(&mut self, run: Forward, pool: &Pool, job: &Job) {
        self.acc.fill(0.0);
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
        let [q, k, v, _] = self.given.each_ref().map(Vec::as_slice);
        let (acc, m, l) = (
            Shared::new(&mut self.acc),
            Shared::new(&mut self.m),
            Shared::new(&mut self.l),
        );
        let target = Target {
            before: Some(Carry { acc, m, l }),
            after: After::Carry(Carry { acc, m, l }),
        };
        run(pool, job, [q, k, v], target);
    }

    /// What backward is told, from what forward left.
    pub fn finish(&mut self, job: &Job) {
        for cell in 0..self.m.len() {
            let row = cell * job.dim..(cell + 1) * job.dim;
            let pairs = self.acc[row.clone()].iter().zip(&self.given[3][row]);
            let product: f32 = pairs.map(|(x, y)| x * y.to_f32()).sum();
            self.lse[cell] = self.m[cell] + self.l[cell].ln();
            self.delta[cell] = product / self.l[cell];
        }
    }

    pub fn backward(&mut self, run: Backward, pool: &Pool, job: &Job) {
        let [q, k, v, dout] = self.given.each_ref().map(Vec::as_slice);
        let given = Given {
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
