//! Checks the results of every variant.

use encke_core::dtype::Slice;
use encke_core::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use encke_core::naive::NaiveKernel;
use encke_core::{DType, Data};
use encke_cpu::internals::PagePool;

use crate::tensors::{BenchElement, BenchTensors, elements_of, job};
use crate::variants::{backwards, forwards};

/// The largest difference, relative to the largest element.
fn error(got: &[f32], expected: &Data) -> f64 {
    let expected = expected.to_f64();
    let size = expected.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
    let pairs = got.iter().zip(&expected);
    pairs.fold(0.0, |worst: f64, (x, y)| {
        worst.max((f64::from(*x) - y).abs())
    }) / size
}

/// Compares every variant with the oracle, at a size that is no multiple of its blocks.
pub fn check<N: BenchElement>() {
    let pool = PagePool::default();
    for (dim, causal) in [(64, true), (128, false), (40, true)] {
        let job = job(333, 2, dim, causal);
        let mut tensors = BenchTensors::<N>::new(&job);
        let cells = job.queries * job.heads;
        let zeros = |count: usize| Data::zeros(DType::F32, count);
        let mut carry = Carry {
            acc: zeros(cells * dim),
            m: Data::F32(vec![f32::NEG_INFINITY; cells]),
            l: zeros(cells),
        };
        let [q, k, v, dout] = tensors.data.clone();
        let state = SoftmaxState::Accumulate {
            carry: &mut carry,
            starts: false,
        };
        NaiveKernel
            .attend(&job, q.as_slice(), k.as_slice(), v.as_slice(), state)
            .unwrap();
        let mut worst = [0.0f64; 2];
        let (mut out, mut lse) = (zeros(cells * dim), zeros(cells));
        NaiveKernel
            .finish(cells, dim, 1.0, &carry, &mut out, &mut lse)
            .unwrap();
        for (name, run) in forwards::<N>() {
            tensors.forward(run, &pool, &job);
            let mut mean = elements_of::<f32>(&tensors.carry.acc).to_vec();
            let sums = elements_of::<f32>(&tensors.carry.l);
            for (row, l) in mean.chunks_mut(dim).zip(sums) {
                row.iter_mut().for_each(|x| *x /= l);
            }
            let off = error(&mean, &out);
            assert!(off < N::TOLERANCE[0], "{name}, dim {dim}: error {off:e}");
            worst[0] = worst[0].max(off);
        }
        tensors.finish(&job);
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| zeros(cells * dim));
        let upstream = Upstream {
            dout: dout.as_slice(),
            lse: Slice::F32(&tensors.lse),
            delta: Slice::F32(&tensors.delta),
        };
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        NaiveKernel
            .backward(
                &job,
                q.as_slice(),
                k.as_slice(),
                v.as_slice(),
                upstream,
                gradients,
            )
            .unwrap();
        for (name, run) in backwards::<N>() {
            tensors.gradients.iter_mut().for_each(|data| data.fill(0.0));
            tensors.backward(run, &pool, &job);
            for (got, expected) in tensors.gradients.iter().zip([&dq, &dk, &dv]) {
                let off = error(got, expected);
                assert!(off < N::TOLERANCE[1], "{name}, dim {dim}: error {off:e}");
                worst[1] = worst[1].max(off);
            }
        }
        println!(
            "checked {}, dim {dim}: largest error of all variants {:.1e} forward, {:.1e} backward",
            N::DTYPE,
            worst[0],
            worst[1]
        );
    }
}
