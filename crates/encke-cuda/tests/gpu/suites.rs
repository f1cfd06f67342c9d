//! The conformance suite for kernels on every kernel family of the GPU.

use encke_core::DType;
use encke_core::conformance::{KernelSuite, extent, scores};
use encke_cuda::{CudaKernel, Path, Summation};

use crate::tally::GpuTally;

/// Head dimensions of the suite's default cases that tensor maps can describe.
const ALIGNED: &[usize] = &[8, 16, 40, 64, 80, 128];
/// Head dimensions with tilings of their own.
const WIDE: &[usize] = &[32, 64, 96, 128, 192, 256];

/// Head dimensions of cases with many keys: a few, with and without 16-byte rows.
const LONG: &[usize] = &[20, 64, 128, 192];

/// Shares of a suite that run concurrently.
const SHARES: u64 = 8;

/// Runs all families. Unsupported jobs are refused, so no family is tested through another.
pub fn run(tally: &mut GpuTally, open: impl Fn() -> encke_cuda::Result<CudaKernel> + Sync) {
    let narrow: &[DType] = &[DType::Bf16, DType::F16];
    let usual = KernelSuite {
        narrow_weights: true,
        // mma.sync multiplies the values of dropped pairs by 0.
        dropped_values: false,
        ..KernelSuite::default()
    };
    // Windows, documents, transformed scores and values of another width are computed by the
    // fastest family that can; dropout by mma.sync alone, and its suite tests it.
    let mixed = KernelSuite {
        dropout: false,
        // Hopper cuts tiles of keys where the job's rows say, not where documents begin.
        document_bits: false,
        ..usual
    };
    let even = KernelSuite {
        dims: ALIGNED,
        masks: false,
        dropout: false,
        ..usual
    };
    let fast = KernelSuite {
        repeatable: false,
        ..even
    };
    family(
        tally,
        &open,
        "plain",
        (Path::Plain, Summation::Deterministic),
        usual,
        &DType::ALL,
    );
    family(
        tally,
        &open,
        "mma.sync",
        (Path::Mma, Summation::Deterministic),
        usual,
        narrow,
    );
    family(
        tally,
        &open,
        "Hopper",
        (Path::Hopper, Summation::Deterministic),
        even,
        narrow,
    );
    family(
        tally,
        &open,
        "Hopper, fast",
        (Path::Hopper, Summation::Fast),
        fast,
        narrow,
    );
    family(
        tally,
        &open,
        "whichever is fastest",
        (Path::Auto, Summation::Deterministic),
        mixed,
        narrow,
    );
    long_keys(tally, &open);
    let odd = KernelSuite {
        dims: &[20, 64, 192],
        ..usual
    };
    let even = KernelSuite {
        dims: &[64, 128],
        ..even
    };
    let all = &DType::ALL[..];
    any_scores(tally, &open, "plain", Path::Plain, odd, all);
    any_scores(tally, &open, "mma.sync", Path::Mma, odd, narrow);
    any_scores(tally, &open, "Hopper", Path::Hopper, even, narrow);
}

/// More cases of scores of any size, of few keys and of many, each counted.
fn any_scores(
    tally: &mut GpuTally,
    open: impl Fn() -> encke_cuda::Result<CudaKernel> + Sync,
    name: &str,
    path: Path,
    suite: KernelSuite,
    dtypes: &[DType],
) {
    for (long_keys, cases) in [(false, extent(100, 2000)), (true, extent(20, 500))] {
        let suite = KernelSuite { long_keys, ..suite };
        let share = |dtype: DType, first: u64| -> Vec<Result<(), String>> {
            let kernel = match open() {
                Ok(kernel) => kernel.path(path),
                Err(error) => return vec![Err(error.to_string())],
            };
            let seeds = (first..cases).step_by(SHARES as usize);
            let case = |seed| scores(&kernel, &[dtype], suite, [seed]);
            let ended = seeds.map(|seed| case(seed).map_err(|failure| failure.message));
            ended.collect()
        };
        let share = &share;
        let each = dtypes.iter().flat_map(|dtype| {
            std::thread::scope(|scope| {
                let run = |first| scope.spawn(move || share(*dtype, first));
                let threads: Vec<_> = (0..SHARES).map(run).collect();
                let panicked = |_| vec![Err("a share panicked".to_string())];
                let ended = threads.into_iter().map(|thread| thread.join());
                let ended = ended.flat_map(|checks| checks.unwrap_or_else(panicked));
                ended.collect::<Vec<_>>()
            })
        });
        let kind = if long_keys { "many" } else { "few" };
        tally.group(&format!("any scores, {kind} keys, {name}"), each);
    }
}

/// Few queries and many keys, which are split over the GPU; masks and scores that this is not for
/// are among them. A document's splits are those of its job.
fn long_keys(tally: &mut GpuTally, open: impl Fn() -> encke_cuda::Result<CudaKernel> + Sync) {
    let suite = KernelSuite {
        dims: LONG,
        document_bits: false,
        narrow_weights: true,
        dropped_values: false,
        long_keys: true,
        ..KernelSuite::default()
    };
    let mixed = suite;
    let signed = KernelSuite {
        signs: true,
        masks: false,
        ..mixed
    };
    let checks = [
        ("mma.sync, usual", Path::Mma, suite),
        ("whichever is fastest, usual", Path::Auto, mixed),
        ("whichever is fastest, signs", Path::Auto, signed),
    ];
    for (name, path, suite) in checks {
        let kernel = || open().map(|kernel| kernel.path(path));
        let dtypes = [DType::Bf16, DType::F16].into_iter();
        let each = dtypes.map(|dtype| shares(kernel, suite, dtype));
        tally.group(&format!("few queries, many keys of {name}"), each);
    }
}

/// Runs a suite in shares, each with its own kernel: compiling programs dominates the time, and one
/// kernel compiles sequentially.
fn shares(
    kernel: impl Fn() -> encke_cuda::Result<CudaKernel> + Sync,
    suite: KernelSuite,
    dtype: DType,
) -> Result<(), String> {
    std::thread::scope(|scope| {
        let run = |share: u64| {
            let kernel = &kernel;
            scope.spawn(move || {
                let kernel = kernel().map_err(|error| error.to_string())?;
                let share = (share, SHARES);
                let ended = KernelSuite { share, ..suite }.run(&kernel, &[dtype]);
                ended.map_err(|failure| failure.message)
            })
        };
        let threads: Vec<_> = (0..SHARES).map(run).collect();
        threads.into_iter().try_for_each(|thread| {
            let panicked = |_| Err("a share panicked".to_string());
            thread.join().unwrap_or_else(panicked)
        })
    })
}

fn family(
    tally: &mut GpuTally,
    open: impl Fn() -> encke_cuda::Result<CudaKernel> + Sync,
    name: &str,
    (path, summation): (Path, Summation),
    suite: KernelSuite,
    dtypes: &[DType],
) {
    let wide = KernelSuite {
        dims: WIDE,
        ..suite
    };
    let signed = KernelSuite {
        signs: true,
        ..suite
    };
    let kernel = || open().map(|kernel| kernel.path(path).summation(summation));
    let checks = [("usual", suite), ("wide", wide), ("signs", signed)];
    for (kind, suite) in checks {
        let each = dtypes.iter().map(|dtype| shares(kernel, suite, *dtype));
        tally.group(&format!("kernel suite of {name}, {kind}"), each);
    }
}
