//! The suite that every kernel passes, on every family of kernels the GPU has.

use encke_core::DType;
use encke_core::conformance::Suite;
use encke_cuda::{CudaKernel, Path, Summation};

use crate::tally::Tally;

/// Head dimensions of the suite's usual cases that tensor maps can describe.
const EVEN: &[usize] = &[8, 16, 40, 64, 80, 128];
/// Those that have tiles of their own.
const WIDE: &[usize] = &[32, 64, 96, 128, 192, 256];

/// Runs all families. What a family does not take is refused, so nothing is tested twice.
pub fn run(tally: &mut Tally, open: impl Fn() -> encke_cuda::Result<CudaKernel>) {
    let narrow: &[DType] = &[DType::Bf16, DType::F16];
    let usual = Suite::default();
    let even = Suite {
        dims: EVEN,
        ..usual
    };
    let fast = Suite {
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
        usual,
        narrow,
    );
}

fn family(
    tally: &mut Tally,
    open: impl Fn() -> encke_cuda::Result<CudaKernel>,
    name: &str,
    (path, summation): (Path, Summation),
    suite: Suite,
    dtypes: &[DType],
) {
    let wide = Suite {
        dims: WIDE,
        ..suite
    };
    let signed = Suite {
        signs: true,
        ..suite
    };
    let kernel = open().map(|kernel| kernel.path(path).summation(summation));
    let checks = [("usual", suite), ("wide", wide), ("signs", signed)];
    for (kind, suite) in checks {
        let each = dtypes.iter().map(|dtype| match &kernel {
            Ok(kernel) => suite
                .run(kernel, &[*dtype])
                .map_err(|failure| failure.message),
            Err(error) => Err(error.to_string()),
        });
        tally.group(
            &format!("kernel suite of {name}, {kind}, 400 cases a type"),
            each,
        );
    }
}
