//! candle's tensors on a GPU: forward and backward through candle's autograd, against candle's own
//! attention in f64 on the CPU and in f32 on the same GPU. Prints the groups passed and the largest
//! differences; an argument selects the groups whose name contains it. Without a GPU the test is
//! skipped and passes, unless `ENCKE_GPU` is set.

mod accuracy;
mod graph;
mod layers;
mod layouts;
mod order;
#[path = "../attention/plain.rs"]
mod plain;
mod refusals;
mod speed;
#[path = "../../../encke-cuda/tests/gpu/tally.rs"]
mod tally;

use std::process::ExitCode;

use candle_core::Device;

use tally::Tally;

fn main() -> ExitCode {
    let device = match Device::new_cuda(0) {
        Ok(device) => device,
        Err(error) => {
            // candle's errors continue with a backtrace.
            let error = error.to_string();
            println!("skipped: {}", error.lines().next().unwrap_or_default());
            return match std::env::var_os("ENCKE_GPU") {
                Some(_) => ExitCode::FAILURE,
                None => ExitCode::SUCCESS,
            };
        }
    };
    let mut tally = Tally::from_arguments();
    refusals::run(&mut tally, &device);
    accuracy::run(&mut tally, &device);
    layouts::run(&mut tally, &device);
    order::run(&mut tally, &device);
    layers::run(&mut tally, &device);
    speed::run(&mut tally, &device);
    tally.conclude()
}
