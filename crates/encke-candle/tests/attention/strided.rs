//! Inputs that are not contiguous: read where they lie, with the right answer and without a copy.

use candle_core::{DType, Device, Tensor, Var};
use encke::Pattern;
use encke_candle::{Attention, attention};

use crate::plain::{self, distance, random};

fn attend() -> Attention {
    Attention::new(encke::Attention::builder().pattern(Pattern::dense().causal(true))).unwrap()
}

fn expect(q: &Tensor, k: &Tensor, v: &Tensor, attend: &Attention) {
    let got = attention(q, k, v, attend).unwrap();
    let pattern = Pattern::dense().causal(true);
    let [q, k, v] = [q, k, v].map(|x| x.contiguous().unwrap());
    let expected = plain::attention(&q, &k, &v, &pattern).unwrap();
    assert!(distance(&got, &expected) < 1e-12);
}

/// Bytes of the last forward pass that were read in the caller's own memory.
fn lent(attend: &Attention) -> usize {
    let report = attend.reports().forward.expect("a pass was run");
    report.memory.iter().map(|memory| memory.lent_bytes).sum()
}

#[test]
fn transposed_and_sliced_tensors_are_right() {
    let (n, heads, dim) = (24, 3, 8);

    // Heads first, as most models have them.
    let attend = attend();
    let [q, k, v] = [1, 2, 3].map(|seed| random(seed, [2, heads, n, dim]).transpose(1, 2).unwrap());
    assert!(!q.is_contiguous());
    expect(&q, &k, &v, &attend);

    // One projection that makes all three.
    let fused = random(4, [2, n, 3 * heads, dim]);
    let part = |i: usize| fused.narrow(2, i * heads, heads).unwrap();
    expect(&part(0), &part(1), &part(2), &attend);

    // The ends of longer sequences.
    let longer = random(5, [2, n + 5, heads, dim]).narrow(1, 5, n).unwrap();
    expect(&longer, &longer, &longer, &attend);
}

/// A rank reads candle's own memory where rows lie as it would hold them, wherever they begin.
#[test]
fn contiguous_rows_are_lent_to_the_rank() {
    let (n, heads, dim) = (24, 3, 8);
    let attend = attend();
    let longer = random(5, [1, n + 5, heads, dim]).narrow(1, 5, n).unwrap();
    expect(&longer, &longer, &longer, &attend);
    assert_eq!(lent(&attend), 3 * n * heads * dim * 8);
}

#[test]
fn a_head_that_is_broadcast_is_read_once_for_all() {
    let attend = attend();
    let one = random(6, [1, 24, 1, 8]);
    let all = one.broadcast_as((1, 24, 4, 8)).unwrap();
    assert_eq!(all.stride()[2], 0);
    let q = random(7, [1, 24, 4, 8]);
    expect(&q, &all, &all, &attend);
}

#[test]
fn rows_that_are_not_contiguous_are_copied_and_right() {
    let attend = attend();
    let x = random(8, [1, 24, 8, 3]).transpose(2, 3).unwrap();
    assert_ne!(x.stride()[3], 1);
    expect(&x, &x, &x, &attend);
}

/// The gradient that arrives may be strided, too, and gradients flow back through views.
#[test]
fn gradients_flow_through_transposes() {
    let attend = attend();
    let pattern = Pattern::dense().causal(true);
    let x = Var::from_tensor(&random(9, [2, 3, 16, 8])).unwrap();
    let weights = random(10, [2, 3, 16, 8]);
    let gradient = |run: &dyn Fn(&Tensor) -> Tensor| {
        let out = run(&x.transpose(1, 2).unwrap()).transpose(1, 2).unwrap();
        let loss = (out * &weights).unwrap().sum_all().unwrap();
        loss.backward().unwrap().get(&x).unwrap().clone()
    };
    let got = gradient(&|x| attention(x, x, x, &attend).unwrap());
    let expected = gradient(&|x| plain::attention(x, x, x, &pattern).unwrap());
    assert!(distance(&got, &expected) < 1e-12);
}

/// A result is candle's own memory: nothing of the call holds on to it, and it is not copied.
#[test]
fn a_forward_pass_alone_keeps_nothing() {
    let attend = attend();
    let x = Tensor::zeros((1, 16, 2, 8), DType::F32, &Device::Cpu).unwrap();
    let out = attention(&x, &x, &x, &attend).unwrap();
    assert!(!out.track_op());
    assert!(out.is_contiguous());
}
