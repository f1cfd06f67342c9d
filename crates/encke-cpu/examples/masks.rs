//! What masks, dropout and widths of values cost:
//! `cargo run --release -p encke-cpu --example masks`.
//!
//! Runs the conformance suite first, and compares packed documents with separate calls bit by bit.
//! Every line is a ratio of processor times in one process, each the shortest of many short
//! alternating runs: other guests of a machine slow some of them down.

use encke_core::conformance::{self, Random};
use encke_core::dropout::Dropout;
use encke_core::job::{Band, Job, JobDropout, Mask, Operand, Piece, Window};
use encke_core::kernel::{Gradients, Kernel, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::{DType, Data};
use encke_cpu::CpuKernel;

const DIM: usize = 64;
const HEADS: usize = 2;
const DTYPE: DType = DType::F32;
/// Tokens of the windows.
const WINDOW_TOKENS: usize = 16 << 10;
/// Tokens of all documents together.
const TOKENS: usize = 32 << 10;
/// Tokens of the calls that windows are compared with.
const DENSE_TOKENS: usize = 4 << 10;
const DOCUMENTS: usize = 512;
/// Runs of each alternative.
const RUNS: usize = 12;

/// A job over tokens `first` and after, without a mask.
fn job(first: usize, tokens: usize, [dim, value_dim]: [usize; 2]) -> Job {
    let operand = |unit: usize| Operand {
        offset: first * HEADS * unit,
        batch: 0,
        segment: 0,
        row: HEADS * unit,
        heads: (0..HEADS).map(|h| h * unit).collect(),
    };
    Job {
        batch: 1,
        segments: 1,
        queries: tokens,
        keys: tokens,
        heads: HEADS,
        dim,
        value_dim,
        q: operand(dim),
        k: operand(dim),
        cells: operand(1),
        delta: None,
        dq: None,
        mask: None,
        transform: None,
        dropout: None,
        scale: 1.0 / (dim as f64).sqrt(),
        gain: 1.0,
        tiles: None,
    }
}

/// A job of usual widths with a band of this window.
fn banded(first: usize, tokens: usize, window: Window) -> Job {
    let band = Band {
        window,
        ..Band::causal((0, 1), (0, 1))
    };
    Job {
        mask: Some(Mask::Band(band)),
        ..job(first, tokens, [DIM, DIM])
    }
}

/// Tensors as large as some jobs need, and their results.
struct MaskTensors {
    cells: usize,
    value_dim: usize,
    /// q, k, v and dout.
    inputs: [Data; 4],
    /// out, lse and delta.
    outputs: [Data; 3],
    /// dq, dk and dv.
    gradients: [Data; 3],
}

impl MaskTensors {
    fn new(tokens: usize, [dim, value_dim]: [usize; 2]) -> MaskTensors {
        let cells = tokens * HEADS;
        let mut random = Random::new(7);
        let mut tensor = |dim: usize| {
            let values: Vec<f64> = (0..cells * dim).map(|_| random.unit()).collect();
            Data::from_f64(DTYPE, &values)
        };
        let zeros = |dim: usize| Data::zeros(DTYPE, cells * dim);
        MaskTensors {
            cells,
            value_dim,
            inputs: [dim, dim, value_dim, value_dim].map(&mut tensor),
            outputs: [value_dim, 1, 1].map(zeros),
            gradients: [dim, dim, value_dim].map(zeros),
        }
    }

    /// Forward over jobs one after the other.
    fn forward(&mut self, kernel: &CpuKernel, jobs: &[Job]) {
        let [q, k, v, _] = self.inputs.each_ref().map(Data::as_slice);
        let [out, lse, _] = &mut self.outputs;
        for job in jobs {
            let state = SoftmaxState::Finish {
                carry: None,
                out,
                lse,
            };
            kernel.attend(job, q, k, v, state).expect("forward");
        }
    }

    fn delta(&mut self, kernel: &CpuKernel) {
        let [out, _, delta] = &mut self.outputs;
        let (out, dout) = (out.as_slice(), self.inputs[3].as_slice());
        let size = (self.cells, self.value_dim);
        let done = kernel.delta(size.0, size.1, out, dout, None, delta);
        done.expect("delta");
    }

    /// Backward over jobs one after the other.
    fn backward(&mut self, kernel: &CpuKernel, jobs: &[Job]) {
        let [q, k, v, dout] = self.inputs.each_ref().map(Data::as_slice);
        let [_, lse, delta] = self.outputs.each_ref().map(Data::as_slice);
        let [dq, dk, dv] = &mut self.gradients;
        for job in jobs {
            let upstream = Upstream { dout, lse, delta };
            let gradients = Gradients { dq, dk, dv };
            let done = kernel.backward(job, q, k, v, upstream, gradients);
            done.expect("backward");
        }
    }

    /// All bits of the results of some jobs.
    fn results(&mut self, kernel: &CpuKernel, jobs: &[Job]) -> Vec<u8> {
        for gradient in &mut self.gradients {
            kernel.fill(gradient, 0.0).expect("a fill");
        }
        self.forward(kernel, jobs);
        self.delta(kernel);
        self.backward(kernel, jobs);
        let all = self.outputs.iter().chain(&self.gradients);
        all.flat_map(|data| data.bytes().to_vec()).collect()
    }
}

/// Jobs to time, and the tensors they run on.
struct TimedJobs {
    name: String,
    jobs: Vec<Job>,
    tensors: MaskTensors,
}

impl TimedJobs {
    fn new(name: impl Into<String>, jobs: Vec<Job>, tokens: usize) -> TimedJobs {
        let dims = [jobs[0].dim, jobs[0].value_dim];
        TimedJobs {
            name: name.into(),
            jobs,
            tensors: MaskTensors::new(tokens, dims),
        }
    }

    fn pairs(&self) -> f64 {
        self.jobs.iter().map(|job| job.pairs() as f64).sum()
    }
}

/// Seconds that the processor has spent on all threads of this process.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes one timespec.
    let error = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(error, 0, "no clock of processor time");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Prints the processor time per pair of each alternative, divided by that of the first one.
fn compare(kernel: &CpuKernel, title: &str, mut alternatives: Vec<TimedJobs>) {
    let mut best = vec![[f64::INFINITY; 2]; alternatives.len()];
    for _ in 0..RUNS {
        for (alternative, best) in alternatives.iter_mut().zip(&mut best) {
            let (tensors, jobs) = (&mut alternative.tensors, &alternative.jobs);
            // The second call finds its tensors where the first has left them, in the cache.
            for _ in 0..2 {
                let start = processor_seconds();
                tensors.forward(kernel, jobs);
                best[0] = best[0].min(processor_seconds() - start);
            }
            tensors.delta(kernel);
            for _ in 0..2 {
                let start = processor_seconds();
                tensors.backward(kernel, jobs);
                best[1] = best[1].min(processor_seconds() - start);
            }
        }
    }
    println!("{title}, processor time per pair:");
    let first = alternatives[0].pairs();
    for (alternative, seconds) in alternatives.iter().zip(&best) {
        let ratio = |pass: usize| seconds[pass] / alternative.pairs() / (best[0][pass] / first);
        println!(
            "  {:<32} {:>5.0} M pairs, forward {:.2}, backward {:.2}",
            alternative.name,
            alternative.pairs() * 1e-6,
            ratio(0),
            ratio(1),
        );
    }
}

/// One packed causal job over documents of mixed lengths, and a job for each of them.
fn documents() -> (Job, Vec<Job>) {
    let mut random = Random::new(3);
    // Most documents are short, one in sixteen is long.
    let mut lengths: Vec<usize> = (0..DOCUMENTS)
        .map(|i| match i % 16 {
            0 => 128 + random.below(384),
            _ => 1 + random.below(80),
        })
        .collect();
    let before_last: usize = lengths[..DOCUMENTS - 1].iter().sum();
    lengths[DOCUMENTS - 1] = TOKENS - before_last;
    let mut first = 0;
    let (mut pieces, mut separate) = (Vec::new(), Vec::new());
    for tokens in lengths {
        pieces.push(Piece {
            queries: first..first + tokens,
            keys: first..first + tokens,
            band: Some(Band::causal((0, 1), (0, 1))),
        });
        separate.push(banded(first, tokens, Window::CAUSAL));
        first += tokens;
    }
    let packed = Job {
        mask: Some(Mask::Documents(pieces.into())),
        ..job(0, TOKENS, [DIM, DIM])
    };
    (packed, separate)
}

/// A causal job with dropout.
fn dropping(tokens: usize) -> Job {
    Job {
        dropout: Some(JobDropout {
            dropout: Dropout::new(0.1, 5).expect("a probability"),
            first_token: 0,
            segment_step: 0,
            document: 0,
            heads: (0..HEADS).collect(),
            all_heads: HEADS,
        }),
        ..banded(0, tokens, Window::CAUSAL)
    }
}

fn main() {
    let kernel = CpuKernel::new().expect("an instruction set");
    conformance::kernel(&kernel, &[DTYPE]).expect("the kernel conforms");
    let (packed, separate) = documents();
    let mut tensors = MaskTensors::new(TOKENS, [DIM, DIM]);
    let packed_bits = tensors.results(&kernel, std::slice::from_ref(&packed));
    let separate_bits = tensors.results(&kernel, &separate);
    assert!(packed_bits == separate_bits, "documents have other bits");
    drop(tensors);
    println!(
        "{}, dim {DIM}, {HEADS} heads, {} threads; results checked",
        kernel.instruction_set(),
        rayon::current_num_threads()
    );

    let causal = || banded(0, DENSE_TOKENS, Window::CAUSAL);
    let dense = job(0, DENSE_TOKENS, [DIM, DIM]);
    let windowed = |width: usize| {
        let window = Window {
            left: Some(width - 1),
            right: Some(0),
        };
        let jobs = vec![banded(0, WINDOW_TOKENS, window)];
        TimedJobs::new(format!("window {width}"), jobs, WINDOW_TOKENS)
    };
    let title = format!("windows over {WINDOW_TOKENS} tokens");
    let widths = [8 << 10, 4 << 10, 2 << 10, 1 << 10];
    compare(&kernel, &title, widths.map(windowed).into());

    let alternatives = vec![
        TimedJobs::new("dense", vec![dense], DENSE_TOKENS),
        TimedJobs::new("causal", vec![causal()], DENSE_TOKENS),
    ];
    compare(&kernel, "causal", alternatives);

    let title = format!("{DOCUMENTS} causal documents of mixed lengths, {TOKENS} tokens");
    let alternatives = vec![
        TimedJobs::new("a call for each", separate, TOKENS),
        TimedJobs::new("packed", vec![packed], TOKENS),
    ];
    compare(&kernel, &title, alternatives);

    let alternatives = vec![
        TimedJobs::new("causal", vec![causal()], DENSE_TOKENS),
        TimedJobs::new("dropout", vec![dropping(DENSE_TOKENS)], DENSE_TOKENS),
    ];
    compare(&kernel, "dropout", alternatives);

    let widths = |dims: [usize; 2]| {
        let name = format!("keys of {}, values of {}", dims[0], dims[1]);
        TimedJobs::new(name, vec![job(0, DENSE_TOKENS, dims)], DENSE_TOKENS)
    };
    let alternatives = [[128, 128], [128, 64], [64, 128], [64, 64]].map(widths);
    compare(&kernel, "widths of values", alternatives.into());
}
