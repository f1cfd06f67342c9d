//! Everything on a GPU: every family of kernels under the suite for kernels, every kind of hop under
//! the suite for transports, and whole rings against the reference. Prints how much passed; an argument
//! picks the groups whose name contains it; where there is no GPU it says so and passes, because it cannot
//! know, unless `ENCKE_GPU` is set.

mod nccl;
mod rings;
mod rows;
mod suites;
mod tally;
mod wires;

use std::process::ExitCode;

use encke_cuda::{CudaKernel, Hops};

use tally::Tally;

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
    let mut tally = Tally::from_arguments();
    suites::run(&mut tally, || open(Hops::Pointer));
    wires::run(&mut tally, &pointer, &pinned);
    nccl::run(&mut tally, &pointer);
    rows::run(&mut tally, &pointer);
    rings::run(&mut tally, pointer, pinned);
    tally.conclude()
}
