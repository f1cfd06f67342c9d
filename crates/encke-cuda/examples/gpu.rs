//! Runs the whole conformance suite on a GPU and says what passed.

use std::process::ExitCode;
use std::time::Instant;

use encke_core::{DType, conformance};
use encke_cuda::CudaKernel;

fn main() -> ExitCode {
    let kernel = match CudaKernel::new(0) {
        Ok(kernel) => kernel,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!(
        "{} {:?}",
        kernel.device().name(),
        kernel.device().capability()
    );
    let mut failed = 0;
    for dtype in DType::ALL {
        let start = Instant::now();
        match conformance::kernel(&kernel, &[dtype]) {
            Ok(()) => println!("{dtype}: passed in {:?}", start.elapsed()),
            Err(error) => {
                failed += 1;
                println!("{dtype}: {error}");
            }
        }
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
