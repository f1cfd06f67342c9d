//! Benchmark of the CPU kernel: `cargo run --release -p encke-cpu --example speed`.
//!
//! Runs the conformance suite first. Attention counts four operations per pair and channel forward
//! and ten backward, so work that a kernel does twice does not count as speed.

use std::time::Instant;

use encke_core::conformance;
use encke_core::job::{Band, Job, Mask, Operand};
use encke_core::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::{DType, Data};
use encke_cpu::CpuKernel;

const TOKENS: usize = 4096;
const DIM: usize = 64;
const HEADS: usize = 2;

fn job(causal: bool) -> Job {
    let operand = |unit: usize| Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: HEADS * unit,
        heads: (0..HEADS).map(|h| h * unit).collect(),
    };
    let mask = Band::causal((0, 1), (0, 1));
    Job {
        batch: 1,
        segments: 1,
        queries: TOKENS,
        keys: TOKENS,
        heads: HEADS,
        dim: DIM,
        value_dim: DIM,
        q: operand(DIM),
        k: operand(DIM),
        cells: operand(1),
        delta: None,
        dq: None,
        mask: causal.then_some(Mask::Band(mask)),
        transform: None,
        dropout: None,
        scale: 1.0 / (DIM as f64).sqrt(),
        gain: 1.0,
        tiles: None,
    }
}

/// The shortest of three runs, in seconds.
fn best(mut body: impl FnMut()) -> f64 {
    let mut time = || {
        let start = Instant::now();
        body();
        start.elapsed().as_secs_f64()
    };
    (0..3).map(|_| time()).fold(f64::INFINITY, f64::min)
}

fn measure(kernel: &CpuKernel, dtype: DType, causal: bool) {
    let (cells, sum, job) = (TOKENS * HEADS, dtype.sum(), job(causal));
    let mut random = conformance::Random::new(7);
    let mut tensor = || {
        let values: Vec<f64> = (0..cells * DIM).map(|_| random.unit()).collect();
        Data::from_f64(dtype, &values)
    };
    let [q, k, v, dout] = [tensor(), tensor(), tensor(), tensor()];
    let mut carry = Carry {
        acc: Data::zeros(sum, cells * DIM),
        m: Data::zeros(sum, cells),
        l: Data::zeros(sum, cells),
    };
    let forward = best(|| {
        kernel.fill(&mut carry.acc, 0.0).unwrap();
        kernel.fill(&mut carry.l, 0.0).unwrap();
        kernel.fill(&mut carry.m, f64::NEG_INFINITY).unwrap();
        let state = SoftmaxState::Accumulate {
            carry: &mut carry,
            starts: false,
        };
        kernel
            .attend(&job, q.as_slice(), k.as_slice(), v.as_slice(), state)
            .unwrap();
    });
    let (mut out, mut lse) = (Data::zeros(dtype, cells * DIM), Data::zeros(sum, cells));
    kernel
        .finish(cells, DIM, 1.0, &carry, &mut out, &mut lse)
        .unwrap();
    let mut delta = Data::zeros(sum, cells);
    kernel
        .delta(
            cells,
            DIM,
            out.as_slice(),
            dout.as_slice(),
            None,
            &mut delta,
        )
        .unwrap();
    let [mut dq, mut dk, mut dv] = [0; 3].map(|_| Data::zeros(sum, cells * DIM));
    let backward = best(|| {
        let upstream = Upstream {
            dout: dout.as_slice(),
            lse: lse.as_slice(),
            delta: delta.as_slice(),
        };
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        kernel
            .backward(
                &job,
                q.as_slice(),
                k.as_slice(),
                v.as_slice(),
                upstream,
                gradients,
            )
            .unwrap();
    });
    let operations = job.pairs() as f64 * DIM as f64 * 1e-9;
    println!(
        "{dtype:>4} {:>6}: forward {:6.1} GFLOP/s, backward {:6.1} GFLOP/s",
        if causal { "causal" } else { "full" },
        4.0 * operations / forward,
        10.0 * operations / backward,
    );
}

fn main() {
    let kernel = CpuKernel::new().expect("an instruction set");
    conformance::kernel(&kernel, &[DType::F32]).expect("the kernel conforms");
    println!(
        "{TOKENS} tokens, dim {DIM}, {} threads",
        rayon::current_num_threads()
    );
    for dtype in DType::ALL {
        measure(&kernel, dtype, false);
        measure(&kernel, dtype, true);
    }
}
