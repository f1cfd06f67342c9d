//! The tile kernels on emulated tiles: packing, products, and the conformance suite.
//!
//! The tests reach the parts of the kernels through `encke_cpu::internals`. On a machine with tiles
//! the suite runs on those in `conformance.rs`, with the kernel that users have.
#![cfg(target_arch = "x86_64")]

mod grid;
mod kernel;
mod packing;
mod windows;

use encke_core::conformance::{self, KernelSuite, Random, extent};
use encke_core::dtype::Slice;
use encke_core::job::{Band, Job, Mask, Operand};
use encke_core::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::naive::NaiveKernel;
use encke_core::plan::Pass;
use encke_core::{DType, Data};
use encke_cpu::internals::{
    self, AmxBackwardConfig, AmxForwardConfig, Emulated, Target, backward_with_config,
    forward_with_config,
};
use half::{bf16, f16};
use kernel::{TestedElement, TileKernel, available, elements, f32_elements};

fn conform<N: TestedElement>() {
    KernelSuite::of_this_run()
        .run(&TileKernel::<Emulated, N>::new(), &[N::DTYPE])
        .unwrap();
}

#[test]
fn emulated_tiles_conform() {
    if available::<Emulated>() {
        conform::<bf16>();
        conform::<f16>();
        conform::<f32>();
    }
}

/// Random cases with scores from 1e-40 to 1e30, beyond those of the suite.
#[test]
fn scores_of_any_size_match_the_oracle() {
    fn check<N: TestedElement>(seeds: std::ops::Range<u64>) {
        let kernel = TileKernel::<Emulated, N>::new();
        conformance::scores(&kernel, &[N::DTYPE], KernelSuite::default(), seeds).unwrap();
    }
    if available::<Emulated>() {
        check::<bf16>(1000..extent(1100, 1800));
        check::<f16>(1800..extent(1850, 2200));
        check::<f32>(2200..extent(2300, 3000));
    }
}

/// One batch entry; pairs of heads share their keys; rows of consecutive tokens are contiguous.
fn job(queries: usize, keys: usize, heads: usize, dim: usize, causal: Option<Band>) -> Job {
    let operand = |unit: usize, heads: Vec<usize>| Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: unit * (heads.iter().max().unwrap() + 1),
        heads: heads.into_iter().map(|head| unit * head).collect(),
    };
    Job {
        batch: 1,
        segments: 1,
        queries,
        keys,
        heads,
        dim,
        value_dim: dim,
        q: operand(dim, (0..heads).collect()),
        k: operand(dim, (0..heads).map(|head| head / 2).collect()),
        cells: operand(1, (0..heads).collect()),
        delta: None,
        dq: None,
        mask: causal.map(Mask::Band),
        transform: None,
        dropout: None,
        scale: 1.0 / (dim as f64).sqrt(),
        gain: 0.5,
        tiles: None,
    }
}

/// The input tensors of a job.
#[derive(Clone)]
struct TileKernelInputs {
    q: Data,
    k: Data,
    v: Data,
    dout: Data,
}

impl TileKernelInputs {
    fn new<N: TestedElement>(job: &Job, seed: u64) -> TileKernelInputs {
        let mut random = Random::new(seed);
        let mut tensor = |rows: usize, heads: usize| {
            let values: Vec<f64> = (0..rows * heads * job.dim)
                .map(|_| 2.0 * random.unit())
                .collect();
            Data::from_f64(N::DTYPE, &values)
        };
        let key_heads = job.heads.div_ceil(2);
        TileKernelInputs {
            q: tensor(job.queries, job.heads),
            k: tensor(job.keys, key_heads),
            v: tensor(job.keys, key_heads),
            dout: tensor(job.queries, job.heads),
        }
    }
}

/// The results of both passes.
struct TileKernelOutputs {
    /// acc, m and l; then the output and lse computed from them.
    carry: Carry<Data>,
    out: Data,
    lse: Data,
    /// dq, dk and dv.
    gradients: [Data; 3],
}

impl TileKernelOutputs {
    /// acc, dq, dk or dv.
    fn tensor(&self, index: usize) -> Vec<f64> {
        match index {
            0 => self.carry.acc.to_f64(),
            _ => self.gradients[index - 1].to_f64(),
        }
    }
}

/// Forward and backward. Backward gets the output and lse of `forward`, if given, instead of its
/// own.
fn run<K: for<'a> Kernel<Buffer = Data, Input<'a> = Slice<'a>>>(
    kernel: &K,
    job: &Job,
    inputs: &TileKernelInputs,
    forward: Option<&TileKernelOutputs>,
) -> TileKernelOutputs {
    let (cells, dim) = (job.queries * job.heads, job.dim);
    let zeros = |count: usize| Data::zeros(DType::F32, count);
    let mut carry = Carry {
        acc: zeros(cells * dim),
        m: zeros(cells),
        l: zeros(cells),
    };
    kernel.fill(&mut carry.m, f64::NEG_INFINITY).unwrap();
    let [q, k, v, dout] = [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].map(Data::as_slice);
    let state = SoftmaxState::Accumulate {
        carry: &mut carry,
        starts: false,
    };
    kernel.attend(job, q, k, v, state).unwrap();
    let (mut out, mut lse) = (zeros(cells * dim), zeros(cells));
    let oracle = NaiveKernel;
    oracle
        .finish(cells, dim, job.gain, &carry, &mut out, &mut lse)
        .unwrap();
    let (final_out, final_lse) = forward.map_or((&out, &lse), |x| (&x.out, &x.lse));
    let mut delta = zeros(cells);
    oracle
        .delta(cells, dim, final_out.as_slice(), dout, None, &mut delta)
        .unwrap();
    let keys = k.len();
    let mut gradients = [zeros(cells * dim), zeros(keys), zeros(keys)];
    let [dq, dk, dv] = &mut gradients;
    let upstream = Upstream {
        dout,
        lse: final_lse.as_slice(),
        delta: delta.as_slice(),
    };
    let gradients_mut = Gradients { dq, dk, dv };
    kernel
        .backward(job, q, k, v, upstream, gradients_mut)
        .unwrap();
    TileKernelOutputs {
        carry,
        out,
        lse,
        gradients,
    }
}

/// Fails if elements differ by more than `tolerance` times the largest expected one.
fn close(what: &str, got: &Data, expected: &Data, tolerance: f64) {
    let (got, expected) = (got.to_f64(), expected.to_f64());
    let finite = expected.iter().filter(|x| x.is_finite());
    let size = finite.fold(0.0, |size: f64, x| size.max(x.abs()));
    for (i, (x, y)) in got.iter().zip(&expected).enumerate() {
        let same = x == y || (x.is_nan() && y.is_nan());
        assert!(
            same || (x - y).abs() <= tolerance * size,
            "{what}: element {i} is {x} instead of {y} (largest {size})"
        );
    }
}

fn check<N: TestedElement>(job: &Job, seed: u64, what: &str) {
    let inputs = TileKernelInputs::new::<N>(job, seed);
    let expected = run(&NaiveKernel, job, &inputs, None);
    let kernel = TileKernel::<Emulated, N>::new();
    let got = run(&kernel, job, &inputs, Some(&expected));
    let what = format!("{what}, {}", N::DTYPE);
    close_outputs::<N>(&what, &got, &expected);
    for (name, i) in [("dq", 0), ("dk", 1), ("dv", 2)] {
        let (got, expected) = (&got.gradients[i], &expected.gradients[i]);
        close(
            &format!("{what}, {name}"),
            got,
            expected,
            2.0 * N::TOLERANCE[1],
        );
    }
}

fn close_outputs<N: TestedElement>(
    what: &str,
    got: &TileKernelOutputs,
    expected: &TileKernelOutputs,
) {
    let [of_lse, of_out] = N::TOLERANCE;
    close(&format!("{what}, lse"), &got.lse, &expected.lse, of_lse);
    close(&format!("{what}, out"), &got.out, &expected.out, of_out);
}

const DENSE: Band = Band::causal((0, 1), (0, 1));

#[test]
fn long_sequences_match_the_oracle_across_block_boundaries() {
    if !available::<Emulated>() {
        return;
    }
    for (queries, keys, heads, dim, causal) in [
        (1100, 1300, 1, 64, None),
        (1100, 1300, 3, 40, Some(DENSE)),
        (1200, 1200, 2, 64, Some(DENSE)),
        (300, 2100, 2, 128, Some(Band::causal((5000, 3), (30, 5)))),
        (2100, 90, 1, 80, Some(Band::causal((0, 1), (700, 9)))),
    ] {
        let job = job(queries, keys, heads, dim, causal);
        let what = format!("{queries} queries, {keys} keys, {heads} heads of {dim}");
        check::<bf16>(&job, 3, &what);
        check::<f16>(&job, 3, &what);
        check::<f32>(&job, 3, &what);
    }
}

#[test]
fn negative_and_zero_scales_match_the_oracle() {
    if !available::<Emulated>() {
        return;
    }
    for scale in [-0.3, 0.0] {
        let mut job = job(70, 100, 2, 24, Some(DENSE));
        job.scale = scale;
        let what = format!("scale {scale}");
        check::<bf16>(&job, 4, &what);
        check::<f16>(&job, 4, &what);
        check::<f32>(&job, 4, &what);
    }
}

/// Weights relative to the old row max would overflow here: some lanes need a new one, in a tile
/// whose other lanes do not.
#[test]
fn a_row_max_that_rises_late_does_not_overflow_the_weights() {
    if available::<Emulated>() {
        check_rising_max::<bf16>();
        check_rising_max::<f16>();
        check_rising_max::<f32>();
    }
}

fn check_rising_max<N: TestedElement>() {
    let job = job(96, 1500, 1, 64, None);
    let mut inputs = TileKernelInputs::new::<N>(&job, 12);
    // Every third query points along the first channel, in which keys grow from block to block.
    let (mut q, mut k) = (inputs.q.to_f64(), inputs.k.to_f64());
    for (i, row) in q.chunks_mut(64).enumerate() {
        row[0] = if i % 3 == 0 { 24.0 } else { 0.0 };
    }
    for (j, row) in k.chunks_mut(64).enumerate() {
        row[0] = (j / 100) as f64 * 4.0;
    }
    inputs.q = Data::from_f64(N::DTYPE, &q);
    inputs.k = Data::from_f64(N::DTYPE, &k);
    let expected = run(&NaiveKernel, &job, &inputs, None);
    let got = run(&TileKernel::<Emulated, N>::new(), &job, &inputs, None);
    // Scores are up to 168, so f32 holds them, and the logarithms of weights, to 1e-5.
    let [of_lse, of_out] = N::TOLERANCE;
    close("rising, lse", &got.lse, &expected.lse, of_lse);
    close("rising, out", &got.out, &expected.out, of_out.max(2e-5));
}

#[test]
fn results_are_bitwise_equal_for_any_number_of_threads() {
    if available::<Emulated>() {
        compare_thread_counts::<bf16>();
        compare_thread_counts::<f16>();
        compare_thread_counts::<f32>();
    }
}

fn compare_thread_counts<N: TestedElement>() {
    let job = job(1100, 1100, 3, 24, Some(DENSE));
    let inputs = TileKernelInputs::new::<N>(&job, 5);
    let bits = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.unwrap().install(|| {
            let kernel = TileKernel::<Emulated, N>::new();
            let got = run(&kernel, &job, &inputs, None);
            let Carry { acc, m, l } = &got.carry;
            let held = kernel.pool.bytes();
            let of = |pass| internals::workspace_bytes::<N>(&job, pass);
            let workspace = of(Pass::Forward).max(of(Pass::Backward { dlse: false }));
            assert!(held > 0 && held <= workspace);
            let all = [acc, m, l].into_iter().chain(&got.gradients);
            all.map(|data| data.bytes().to_vec()).collect::<Vec<_>>()
        })
    };
    let one = bits(1);
    assert!(one == bits(2), "two threads");
    assert!(one == bits(5), "five threads");
}

/// A row that is not finite must spoil the results it is visible to, and change no bit of the
/// others.
#[test]
fn hidden_nonfinite_elements_change_no_bit() {
    if available::<Emulated>() {
        hide_nonfinite_elements::<bf16>();
        hide_nonfinite_elements::<f16>();
        hide_nonfinite_elements::<f32>();
    }
}

fn hide_nonfinite_elements<N: TestedElement>() {
    let kernel = TileKernel::<Emulated, N>::new();
    let job = job(150, 150, 2, 40, Some(DENSE));
    let inputs = TileKernelInputs::new::<N>(&job, 6);
    let before = run(&kernel, &job, &inputs, None);
    for (value, row) in [(f64::NAN, 70), (f64::INFINITY, 7), (f64::NEG_INFINITY, 149)] {
        // Element 3 of the row, for the first head.
        let poison = |data: &Data, heads: usize| {
            let mut data = data.clone();
            data.set(row * heads * job.dim + 3, value);
            data
        };
        // One tensor at a time: a non-finite k spoils the weights, which would mask the effect of
        // v.
        let (mut k, mut v) = (inputs.clone(), inputs.clone());
        let (mut q, mut dout) = (inputs.clone(), inputs.clone());
        k.k = poison(&inputs.k, 1);
        v.v = poison(&inputs.v, 1);
        q.q = poison(&inputs.q, 2);
        dout.dout = poison(&inputs.dout, 2);
        for (name, inputs) in [("k", &k), ("v", &v), ("q", &q), ("dout", &dout)] {
            let what = format!("{value} in row {row} of {name}");
            let expected = run(&NaiveKernel, &job, inputs, Some(&before));
            let got = run(&kernel, &job, inputs, Some(&before));
            for tensor in 0..4 {
                let [got, expected, before] = [&got, &expected, &before].map(|x| x.tensor(tensor));
                for (i, before) in before.iter().enumerate() {
                    // Queries have two heads, keys have one.
                    let free = match (name, tensor) {
                        ("k" | "v", 0 | 1) => i / (2 * job.dim) >= row,
                        ("k" | "v", _) => i / job.dim == row,
                        (_, 0 | 1) => i / job.dim == 2 * row,
                        _ => i / job.dim <= row,
                    };
                    let (got, expected) = (got[i], expected[i]);
                    let same = got == *before || (free && !value.is_nan());
                    let same = same || (free && got.is_nan() == expected.is_nan());
                    assert!(
                        same,
                        "{what}: element {i} of tensor {tensor}: {before} -> {got}"
                    );
                }
            }
        }
    }
}

/// A configuration with unusual values everywhere.
struct OddConfig;

impl AmxForwardConfig for OddConfig {
    const EXP_DEGREE: usize = 5;
    const KEYS: usize = 96;
    const PACKED_KEYS: usize = 192;
    const QUERY_ELEMENTS: usize = 1 << 13;
}

impl AmxBackwardConfig for OddConfig {
    const EXP_DEGREE: usize = 5;
    const KEYS: usize = 96;
    const QUERY_TILES: usize = 3;
    const QUERY_ELEMENTS: usize = 1 << 12;
}

#[test]
fn configurations_change_only_the_order_of_sums() {
    if available::<Emulated>() {
        change_configuration::<bf16>();
        change_configuration::<f16>();
        change_configuration::<f32>();
    }
}

fn change_configuration<N: TestedElement>() {
    let job = job(333, 444, 2, 64, Some(DENSE));
    let inputs = TileKernelInputs::new::<N>(&job, 8);
    let expected = run(&NaiveKernel, &job, &inputs, None);
    let pool = internals::PagePool::default();
    let mut got = run(&NaiveKernel, &job, &inputs, None);
    let cells = job.queries * job.heads;
    let Carry { acc, m, l } = &mut got.carry;
    NaiveKernel.fill(acc, 0.0).unwrap();
    NaiveKernel.fill(m, f64::NEG_INFINITY).unwrap();
    NaiveKernel.fill(l, 0.0).unwrap();
    let [q, k, v, dout] =
        [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].map(|data| elements::<N>(data.as_slice()));
    forward_with_config::<Emulated, N, OddConfig>(
        &pool,
        &job,
        [q, k, v],
        Target::new(
            SoftmaxState::Accumulate {
                carry: &mut got.carry,
                starts: false,
            },
            &job,
        ),
    );
    NaiveKernel
        .finish(
            cells,
            job.dim,
            job.gain,
            &got.carry,
            &mut got.out,
            &mut got.lse,
        )
        .unwrap();
    close_outputs::<N>("odd", &got, &expected);
    let mut delta = Data::zeros(DType::F32, cells);
    NaiveKernel
        .delta(
            cells,
            job.dim,
            expected.out.as_slice(),
            inputs.dout.as_slice(),
            None,
            &mut delta,
        )
        .unwrap();
    let inputs = internals::AmxBackwardInputs {
        q,
        k,
        v,
        dout,
        lse: elements(expected.lse.as_slice()),
        delta: elements(delta.as_slice()),
    };
    for data in &mut got.gradients {
        NaiveKernel.fill(data, 0.0).unwrap();
    }
    let [dq, dk, dv] = &mut got.gradients;
    backward_with_config::<Emulated, N, OddConfig>(
        &pool,
        &job,
        inputs,
        f32_elements(dq),
        f32_elements(dk),
        f32_elements(dv),
    );
    for (i, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
        close(
            name,
            &got.gradients[i],
            &expected.gradients[i],
            2.0 * N::TOLERANCE[1],
        );
    }
}
