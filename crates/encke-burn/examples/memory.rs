//! Memory and time of a training step by length: this crate beside Burn's own attention.
//!
//! `cargo run --release -p encke-burn --example memory` prints a table; lengths can be given.

use std::time::Instant;

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, Tensor};
use encke::Pattern;
use encke_burn::{Attention, attention};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const HEADS: usize = 4;
const DIM: usize = 64;

/// Peak MiB beside the inputs, and milliseconds, of a forward and a backward pass.
fn step(tokens: usize, run: impl Fn([Tensor<4>; 3]) -> Tensor<4>) -> (f64, f64) {
    let device = Device::flex().autodiff();
    let random = || {
        let x = Tensor::<4>::random([1, tokens, HEADS, DIM], Distribution::Default, &device);
        x.require_grad()
    };
    let qkv = [random(), random(), random()];
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let start = Instant::now();
    let gradients = run(qkv.clone()).sum().backward();
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    assert!(qkv.iter().all(|x| x.grad(&gradients).is_some()));
    let bytes = ALLOCATOR.peak_usage() - before;
    (bytes as f64 / f64::from(1 << 20), milliseconds)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let lengths = std::env::args().skip(1).map(|length| length.parse());
    let mut lengths: Vec<usize> = lengths.collect::<Result<_, _>>()?;
    if lengths.is_empty() {
        lengths = vec![1024, 2048, 4096, 8192];
    }
    let settings = encke::Attention::builder().pattern(Pattern::dense().causal(true));
    let settings = Attention::new(settings)?;
    let ours = |[q, k, v]: [Tensor<4>; 3]| {
        attention(q, k, v, &settings).expect("the shapes of q, k and v are equal")
    };
    let burns = |qkv: [Tensor<4>; 3]| {
        let [q, k, v] = qkv.map(|x| x.swap_dims(1, 2));
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        attention_fallback(q, k, v, None, None, options).swap_dims(1, 2)
    };
    step(64, ours);
    println!("forward and backward, causal, f32, {HEADS} heads of {DIM}");
    println!(
        "{:>8} {:>10} {:>10} {:>10} {:>10}",
        "tokens", "Encke", "Burn", "Encke", "Burn"
    );
    for tokens in lengths {
        let (mib, ms) = step(tokens, ours);
        let (burn_mib, burn_ms) = step(tokens, burns);
        println!("{tokens:>8} {mib:>6.1} MiB {burn_mib:>6.0} MiB {ms:>7.0} ms {burn_ms:>7.0} ms");
    }
    Ok(())
}
