//! candle's tensors on a GPU: forward and backward through candle's autograd, against candle's own
//! attention in f64 on the CPU and in f32 on the same GPU. Prints how much passed and how far apart; an
//! argument picks the groups whose name contains it; where there is no GPU it says so and passes, because
//! it cannot know, unless `ENCKE_GPU` is set.

mod graph;
mod layers;
mod layouts;
mod numbers;
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
            // candle's errors go on with a backtrace.
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
    numbers::run(&mut tally, &device);
    layouts::run(&mut tally, &device);
    order::run(&mut tally, &device);
    layers::run(&mut tally, &device);
    speed::run(&mut tally, &device);
    tally.conclude()
}
