//! Inputs that are not contiguous: read in place, without a copy.

use candle_core::{DType, Device, Tensor, Var};
use encke::Pattern;
use encke_candle::{Attention, attention};

use crate::plain::{self, distance, random};

fn attend() -> Attention {
    Attention::new(encke::Attention::builder().pattern(Pattern::dense().causal(true))).unwrap()
}

fn assert_equals_plain(q: &Tensor, k: &Tensor, v: &Tensor, attend: &Attention) {
    let got = attention(q, k, v, attend).unwrap();
    let pattern = Pattern::dense().causal(true);
    let [q, k, v] = [q, k, v].map(|x| x.contiguous().unwrap());
    let expected = plain::attention(&q, &k, &v, &pattern).unwrap();
    assert!(distance(&got, &expected) < 1e-12);
}

/// Input bytes that the last forward pass read in place.
fn borrowed(attend: &Attention) -> usize {
    let report = attend.reports().forward.expect("a pass was run");
    report
        .memory
        .iter()
        .map(|memory| memory.borrowed_bytes)
        .sum()
}

#[test]
fn transposed_and_sliced_tensors_give_the_right_result() {
    let (n, heads, dim) = (24, 3, 8);

    // Heads first, as in most models.
    let attend = attend();
    let [q, k, v] = [1, 2, 3].map(|seed| random(seed, [2, heads, n, dim]).transpose(1, 2).unwrap());
    assert!(!q.is_contiguous());
    assert_equals_plain(&q, &k, &v, &attend);

    // Slices of one fused projection.
    let fused = random(4, [2, n, 3 * heads, dim]);
    let part = |i: usize| fused.narrow(2, i * heads, heads).unwrap();
    assert_equals_plain(&part(0), &part(1), &part(2), &attend);

    // The ends of longer sequences.
    let longer = random(5, [2, n + 5, heads, dim]).narrow(1, 5, n).unwrap();
    assert_equals_plain(&longer, &longer, &longer, &attend);
}

/// A rank reads candle's memory in place where rows are contiguous, wherever they start.
#[test]
fn contiguous_rows_are_read_in_place() {
    let (n, heads, dim) = (24, 3, 8);
    let attend = attend();
    let longer = random(5, [1, n + 5, heads, dim]).narrow(1, 5, n).unwrap();
    assert_equals_plain(&longer, &longer, &longer, &attend);
    assert_eq!(borrowed(&attend), 3 * n * heads * dim * 8);
}

#[test]
fn a_broadcast_head_gives_the_right_result() {
    let attend = attend();
    let one = random(6, [1, 24, 1, 8]);
    let all = one.broadcast_as((1, 24, 4, 8)).unwrap();
    assert_eq!(all.stride()[2], 0);
    let q = random(7, [1, 24, 4, 8]);
    assert_equals_plain(&q, &all, &all, &attend);
}

#[test]
fn rows_that_are_not_contiguous_are_copied() {
    let attend = attend();
    let x = random(8, [1, 24, 8, 3]).transpose(2, 3).unwrap();
    assert_ne!(x.stride()[3], 1);
    assert_equals_plain(&x, &x, &x, &attend);
}

/// The incoming gradient may be strided too, and gradients flow through views.
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

/// Without a tracked gradient the result is contiguous and holds no graph.
#[test]
fn a_forward_pass_without_gradients_saves_nothing() {
    let attend = attend();
    let x = Tensor::zeros((1, 16, 2, 8), DType::F32, &Device::Cpu).unwrap();
    let out = attention(&x, &x, &x, &attend).unwrap();
    assert!(!out.track_op());
    assert!(out.is_contiguous());
}
