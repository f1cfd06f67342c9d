//! The conformance suite on every instruction set, and the guarantees of this kernel beyond it.

use encke_core::conformance::{self, KernelSuite, Random, extent};
use encke_core::dropout::Dropout;
use encke_core::job::{Band, Job, JobDropout, Mask, Operand, Piece, ScoreTransform, Window};
use encke_core::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::plan::Pass;
use encke_core::{DType, Data};
use encke_cpu::{CpuKernel, InstructionSet};
use std::ops::Range;

/// Runs the suite on one instruction set, or prints why it cannot.
fn conforms(set: InstructionSet) {
    match CpuKernel::with(set) {
        Ok(kernel) => KernelSuite::of_this_run()
            .run(&kernel, &DType::ALL)
            .unwrap(),
        Err(error) => println!("skipped: {error}"),
    }
}

#[test]
fn portable_conforms() {
    conforms(InstructionSet::Portable);
}

#[test]
fn avx2_conforms() {
    conforms(InstructionSet::Avx2);
}

#[test]
fn avx512_conforms() {
    conforms(InstructionSet::Avx512);
}

#[test]
fn amx_conforms() {
    conforms(InstructionSet::Amx);
}

/// Random cases with scores from 1e-40 to 1e30, beyond those of the suite.
#[test]
fn scores_of_any_size_match_the_oracle_on_every_instruction_set() {
    for set in InstructionSet::ALL {
        match CpuKernel::with(set) {
            Ok(kernel) => {
                let seeds = 1000..extent(1200, 3000);
                conformance::scores(&kernel, &DType::ALL, KernelSuite::default(), seeds).unwrap();
            }
            Err(error) => println!("skipped: {error}"),
        }
    }
}

/// An instruction of [`std::arch`] is inlined only into functions that are compiled for its
/// instruction set, and a closure is one only if it is inlined itself, which `#[inline(always)]`
/// ensures. A call instead costs a kernel a factor of ten to twenty and changes no result. This
/// program has the kernels of all instruction sets, whatever the processor.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn no_instruction_of_vectors_is_called() {
    use object::{Object, ObjectSymbol};

    let program = std::fs::read("/proc/self/exe").expect("a program can be read");
    let program = object::File::parse(&*program).expect("it is an ELF file");
    let functions = program.symbols().filter_map(|symbol| symbol.name().ok());
    let functions: Vec<&str> = functions.collect();
    let has = |function: &&&str, words: [&str; 2]| words.iter().all(|word| function.contains(word));
    let kernels = functions
        .iter()
        .filter(|of| has(of, ["encke_cpu", "backward"]));
    assert!(kernels.count() > 20, "names are in the program");
    // The search in text of the standard crates calls one.
    let called = functions.iter().filter(|name| !name.contains("movemask"));
    let called: Vec<_> = called.filter(|of| has(of, ["core_arch", "_mm"])).collect();
    assert!(
        called.is_empty(),
        "called from a closure without #[inline(always)], or from a function that is not inlined \
         into a SimdTask: {called:#?}"
    );
}

#[test]
fn instruction_sets_parse_by_name_and_missing_ones_are_errors() {
    for set in InstructionSet::ALL {
        match set.to_string().parse::<InstructionSet>() {
            Ok(parsed) => assert_eq!(parsed, set),
            Err(error) => {
                assert!(!set.is_available());
                assert!(error.to_string().contains("ENCKE_CPU"), "{error}");
            }
        }
    }
    let error = "sse9"
        .parse::<InstructionSet>()
        .expect_err("an unknown name");
    assert!(
        error.to_string().contains("portable, avx2, avx512"),
        "{error}"
    );
    assert!(InstructionSet::best().is_available());
}

const HEADS: usize = 3;

/// A dense causal job over `tokens` tokens.
fn job(tokens: usize, dim: usize) -> Job {
    let operand = |unit: usize| Operand {
        offset: 0,
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
        value_dim: dim,
        q: operand(dim),
        k: operand(dim),
        cells: operand(1),
        delta: None,
        dq: None,
        mask: Some(Mask::Band(Band::causal((0, 1), (0, 1)))),
        transform: None,
        dropout: None,
        scale: 0.3,
        gain: 1.0,
        tiles: None,
    }
}

/// Dropout of the heads of a job.
fn dropout(heads: usize) -> JobDropout {
    JobDropout {
        dropout: Dropout::new(0.3, 11).expect("a probability"),
        first_token: 6,
        segment_step: 0,
        document: 2,
        heads: (0..heads).collect(),
        all_heads: heads,
    }
}

/// Forward and backward of a job: out, lse, dq, dk and dv.
fn run(kernel: &CpuKernel, job: &Job, dtype: DType) -> Vec<Data> {
    let (cells, dim, sum) = (job.queries * HEADS, job.value_dim, dtype.sum());
    let mut random = Random::new(1);
    let mut tensor = |dim: usize| {
        let values: Vec<f64> = (0..cells * dim).map(|_| random.unit()).collect();
        Data::from_f64(dtype, &values)
    };
    let [q, k, v, dout] = [job.dim, job.dim, dim, dim].map(&mut tensor);
    let zeros = |count: usize| kernel.allocate(sum, count).unwrap();
    let mut carry = Carry {
        acc: zeros(cells * dim),
        m: zeros(cells),
        l: zeros(cells),
    };
    kernel.fill(&mut carry.m, f64::NEG_INFINITY).unwrap();
    let state = SoftmaxState::Accumulate {
        carry: &mut carry,
        starts: false,
    };
    kernel
        .attend(job, q.as_slice(), k.as_slice(), v.as_slice(), state)
        .unwrap();
    let (mut out, mut lse) = (zeros(cells * dim), zeros(cells));
    kernel
        .finish(cells, dim, 1.0, &carry, &mut out, &mut lse)
        .unwrap();
    let mut delta = zeros(cells);
    kernel
        .delta(
            cells,
            dim,
            out.as_slice(),
            dout.as_slice(),
            None,
            &mut delta,
        )
        .unwrap();
    let [mut dq, mut dk, mut dv] = [job.dim, job.dim, dim].map(|dim| zeros(cells * dim));
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
            job,
            q.as_slice(),
            k.as_slice(),
            v.as_slice(),
            upstream,
            gradients,
        )
        .unwrap();
    vec![out, lse, dq, dk, dv]
}

fn on_threads<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.unwrap().install(body)
}

/// Masks other than a causal one, for 150 tokens.
fn masks() -> [Mask; 3] {
    let window = Window {
        left: Some(20),
        right: Some(3),
    };
    let band = Band {
        window,
        ..Band::causal((0, 1), (0, 1))
    };
    let document = |rows: Range<usize>, band: Option<Band>| Piece {
        queries: rows.clone(),
        keys: rows,
        band,
    };
    let causal = Band::causal((0, 1), (0, 1));
    let long = [document(0..110, Some(causal)), document(110..150, None)];
    let short = (0..140).step_by(7);
    let short = short.map(|first| document(first..first + 7, Some(causal)));
    [
        Mask::Band(band),
        Mask::Documents(long.into()),
        Mask::Documents(short.collect()),
    ]
}

#[test]
fn results_are_bitwise_equal_for_any_number_of_threads() {
    let job = job(150, 24);
    same_on_any_number_of_threads(&job);
    for mask in masks() {
        let mask = Some(mask);
        same_on_any_number_of_threads(&Job {
            mask,
            ..job.clone()
        });
    }
    same_on_any_number_of_threads(&Job {
        value_dim: 40,
        dropout: Some(dropout(HEADS)),
        ..job
    });
}

fn same_on_any_number_of_threads(job: &Job) {
    for dtype in DType::ALL {
        let bits = |threads: usize| {
            let results = on_threads(threads, || {
                run(&CpuKernel::new().expect("an instruction set"), job, dtype)
            });
            results
                .iter()
                .map(|data| data.bytes().to_vec())
                .collect::<Vec<_>>()
        };
        let one = bits(1);
        assert_eq!(one, bits(2), "{dtype} on two threads");
        assert_eq!(one, bits(5), "{dtype} on five threads");
    }
}

/// k and v end with the last visible row, so a kernel that reads beyond it panics.
#[test]
fn rows_after_the_last_visible_key_are_not_touched() {
    let (tokens, dim) = (1000, 16);
    let window = Window {
        left: Some(40),
        right: Some(10),
    };
    let band = Band {
        window,
        ..Band::causal((300, 1), (0, 1))
    };
    let seeing = Job {
        queries: 50,
        keys: tokens,
        mask: Some(Mask::Band(band)),
        ..job(360, dim)
    };
    let elements = |rows: usize| Data::from_f64(DType::F32, &vec![0.5; rows * HEADS * dim]);
    let (q, k) = (elements(50), elements(360));
    let kernel = CpuKernel::new().expect("an instruction set");
    let (mut out, mut lse) = (elements(50), Data::zeros(DType::F32, 50 * HEADS));
    let state = SoftmaxState::Finish {
        carry: None,
        out: &mut out,
        lse: &mut lse,
    };
    let [q, k] = [&q, &k].map(Data::as_slice);
    kernel.attend(&seeing, q, k, k, state).unwrap();
    assert!(out.to_f64().iter().all(|x| (x - 0.5).abs() < 1e-5));
    let [mut dq, mut dk, mut dv] = [50, 360, 360].map(elements);
    let delta = Data::zeros(DType::F32, 50 * HEADS);
    let upstream = Upstream {
        dout: q,
        lse: lse.as_slice(),
        delta: delta.as_slice(),
    };
    let gradients = Gradients {
        dq: &mut dq,
        dk: &mut dk,
        dv: &mut dv,
    };
    kernel
        .backward(&seeing, q, k, k, upstream, gradients)
        .unwrap();
    // The first query sees keys from 260 on.
    let dv = dv.to_f64();
    let (before, from) = dv.split_at(260 * HEADS * dim);
    assert!(before.iter().all(|&x| x == 0.5) && from.iter().all(|&x| x > 0.5));
}

#[test]
fn slopes_without_positions_are_refused() {
    let sloping = Job {
        mask: None,
        transform: Some(ScoreTransform {
            softcap: None,
            slopes: Some([0.5; HEADS].into()),
        }),
        ..job(4, 8)
    };
    refused(&sloping, "positions");
}

#[test]
fn dropout_without_a_band_and_values_without_addresses_are_refused() {
    let dense = Job {
        mask: None,
        dropout: Some(dropout(HEADS)),
        ..job(4, 8)
    };
    refused(&dense, "band");
    let other_heads = Job {
        dropout: Some(dropout(HEADS - 1)),
        ..job(4, 8)
    };
    refused(&other_heads, "heads");
    let mut between = Job {
        value_dim: 4,
        ..job(4, 8)
    };
    between.k.row += 1;
    refused(&between, "multiples");
}

/// Fails if a job of 4 tokens and 8 channels runs, or if the error is another one.
fn refused(job: &Job, what: &str) {
    let kernel = CpuKernel::new().expect("an instruction set");
    let (q, mut out) = (
        Data::zeros(DType::F32, 4 * HEADS * 8),
        Data::zeros(DType::F32, 4 * HEADS * 8),
    );
    let mut lse = Data::zeros(DType::F32, 4 * HEADS);
    let state = SoftmaxState::Finish {
        carry: None,
        out: &mut out,
        lse: &mut lse,
    };
    let q = q.as_slice();
    let error = kernel.attend(job, q, q, q, state).unwrap_err();
    assert!(error.to_string().contains(what), "{error}");
}

/// The larger workspace of both passes.
fn workspace(kernel: &CpuKernel, job: &Job, dtype: DType) -> usize {
    let of = |pass| kernel.workspace_bytes(job, pass, dtype);
    of(Pass::Forward).max(of(Pass::Backward { dlse: false }))
}

#[test]
fn held_scratch_is_within_workspace_bytes_and_is_reused() {
    let plain = job(300, 64);
    scratch_is_within_workspace_bytes(&plain);
    for value_dim in [8, 128] {
        scratch_is_within_workspace_bytes(&Job {
            value_dim,
            dropout: Some(dropout(HEADS)),
            ..plain.clone()
        });
    }
}

fn scratch_is_within_workspace_bytes(job: &Job) {
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        let kernel = CpuKernel::new().expect("an instruction set");
        assert_eq!(kernel.scratch_bytes(), 0);
        on_threads(2, || {
            run(&kernel, job, dtype);
            let held = kernel.scratch_bytes();
            assert!(held > 0 && held <= workspace(&kernel, job, dtype));
            run(&kernel, job, dtype);
            // The scheduler decides which threads take part, so the second run may hold more.
            assert!(kernel.scratch_bytes() <= workspace(&kernel, job, dtype));
            assert!(kernel.scratch_bytes() >= held);
            kernel.release_scratch();
            assert_eq!(kernel.scratch_bytes(), 0);
            run(&kernel, job, dtype);
            assert!(kernel.scratch_bytes() > 0);
        });
    }
}

#[test]
fn workspace_does_not_grow_with_the_sequence() {
    let kernel = CpuKernel::new().expect("an instruction set");
    for dtype in [DType::F32, DType::Bf16, DType::F64] {
        let bytes = |tokens: usize| workspace(&kernel, &job(tokens, 64), dtype);
        assert_eq!(bytes(2048), bytes(1 << 20));
        // A short sequence may need less.
        assert!(bytes(1) <= bytes(2048));
    }
}

#[test]
fn an_impossible_allocation_is_a_typed_error() {
    let kernel = CpuKernel::new().expect("an instruction set");
    assert!(kernel.allocate(DType::F32, usize::MAX / 8).is_err());
}
