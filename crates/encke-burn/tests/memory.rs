//! Memory of a training step, measured by the allocator: linear here, quadratic in Burn's own.

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Distribution, Tensor};
use encke_burn::{Attention, attention};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Peak bytes of a forward and a backward pass over `tokens` tokens, inputs not counted.
fn peak(tokens: usize, run: impl Fn(Tensor<4>) -> Tensor<4>) -> usize {
    let device = Device::flex().autodiff();
    let x = Tensor::<4>::random([1, tokens, 2, 16], Distribution::Default, &device);
    let x = x.require_grad();
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let gradients = run(x.clone()).sum().backward();
    assert!(x.grad(&gradients).is_some());
    ALLOCATOR.peak_usage() - before
}

/// A single test, so that nothing else allocates at the same time.
#[test]
fn memory_is_linear_and_that_of_burn_quadratic() {
    // A new ring for each call, so that no memory of an earlier call is used again.
    let ours = |x: Tensor<4>| {
        let ring = Attention::new(encke::Attention::builder().ranks(2)).unwrap();
        attention(x.clone(), x.clone(), x, &ring).unwrap()
    };
    let burns = |x: Tensor<4>| {
        let x = x.swap_dims(1, 2);
        let options = AttentionModuleOptions::default();
        attention_fallback(x.clone(), x.clone(), x, None, None, options)
    };
    // The first call starts threads.
    peak(64, ours);
    let [small, large] = [512, 2048].map(|tokens| peak(tokens, ours));
    let [small_burn, large_burn] = [512, 2048].map(|tokens| peak(tokens, burns));
    eprintln!("Encke {small} and {large} bytes, Burn {small_burn} and {large_burn}");
    assert!(large < 5 * small, "Encke: {small} bytes, then {large}");
    assert!(
        large_burn > 12 * small_burn,
        "Burn: {small_burn} bytes, then {large_burn}"
    );
    assert!(large_burn > 20 * large, "{large_burn} and {large} bytes");
}
