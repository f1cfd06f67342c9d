//! The conformance suite for kernels on every kernel family of the GPU.

use encke_core::DType;
use encke_core::conformance::KernelSuite;
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
        wide_scores: false,
        // mma.sync multiplies the values of dropped pairs by 0.
        dropped_values: false,
        ..KernelSuite::default()
    };
    // Windows, documents, transformed scores and values of another width are computed by the fastest
    // family that can; dropout by mma.sync alone, and its suite tests it.
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
}

/// Few queries and many keys, which are split over the GPU; masks and scores that this is not for
/// are among them. A document's splits are those of its job.
fn long_keys(tally: &mut GpuTally, open: impl Fn() -> encke_cuda::Result<CudaKernel> + Sync) {
    let suite = KernelSuite {
        dims: LONG,
        document_bits: false,
        wide_scores: false,
        dropped_values: false,
        long_keys: true,
        ..KernelSuite::default()
    };
    let signed = KernelSuite {
        signs: true,
        masks: false,
        ..suite
    };
    let checks = [
        ("mma.sync, usual", Path::Mma, suite),
        ("whichever is fastest, usual", Path::Auto, suite),
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
