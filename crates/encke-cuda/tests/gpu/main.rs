//! All tests on a GPU: every kernel family under the kernel suite, every kind of hop under the
//! transport suite, and whole rings against the reference. Prints the number of passed checks; an
//! argument selects the groups whose name contains it, `--part=1/4` a quarter of them. Without a
//! GPU it prints the reason, skips and passes, unless `ENCKE_GPU` is set.

mod few_queries;
mod nccl;
mod rings;
mod rows;
mod suites;
mod tally;
mod wires;

use std::process::ExitCode;

use encke_cuda::{CudaKernel, Hops};

use tally::GpuTally;

fn main() -> ExitCode {
    let open = |hops| CudaKernel::new(0).map(|kernel| kernel.hops(hops));
    let (pointer, pinned) = match (open(Hops::Pointer), open(Hops::Pinned)) {
        (Ok(pointer), Ok(pinned)) => (pointer, pinned),
        (Err(error), _) | (_, Err(error)) => {
            println!("skipped: {error}");
            return match std::env::var_os("ENCKE_GPU") {
                Some(_) => ExitCode::FAILURE,
                None => ExitCode::SUCCESS,
            };
        }
    };
    println!("{}", pointer.device().name());
    let mut tally = GpuTally::from_arguments();
    few_queries::run(&mut tally, || open(Hops::Pointer));
    suites::run(&mut tally, || open(Hops::Pointer));
    wires::run(&mut tally, &pointer, &pinned);
    nccl::run(&mut tally, &pointer);
    rows::run(&mut tally, &pointer);
    rings::run(&mut tally, pointer, pinned);
    tally.finish()
}
