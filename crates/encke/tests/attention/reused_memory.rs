//! Results in memory reused from earlier results: the same bits as in fresh memory.

use std::sync::Arc;

use encke::{Attention, CacheLimits, DType, Data, GroupScale, Mode, Pattern, Shape, Tensor};

use crate::support::TestTensors;

/// Large enough for its results to be pooled, and fast: segments of 64.
fn shape() -> Shape {
    Shape::new(1, 8192, 2, 2, 32).expect("legal")
}

/// One token in `dilation` takes part; the other rows of the output are zero.
fn pattern(dilation: usize) -> Pattern {
    let mode = Mode::Group {
        scale: GroupScale::One,
    };
    Pattern::dilated(&[64], &[dilation], mode).expect("sizes are positive")
}

fn attention(dilation: usize, ranks: usize) -> Attention {
    let builder = Attention::builder().pattern(pattern(dilation));
    builder.ranks(ranks).build().expect("legal")
}

/// The results of both passes.
fn results(tensors: &TestTensors, attention: &Attention) -> Vec<Tensor> {
    let forward = tensors.forward(attention);
    let backward = tensors.backward(attention, &forward);
    let (out, lse) = ((*forward.out).clone(), (*forward.lse).clone());
    vec![
        out,
        lse,
        backward.dq.clone(),
        backward.dk.clone(),
        backward.dv.clone(),
    ]
}

#[test]
fn results_do_not_depend_on_the_previous_contents_of_their_memory() {
    for (dtype, ranks) in [(DType::F32, 1), (DType::Bf16, 1), (DType::F32, 3)] {
        let tensors = TestTensors::random(&shape(), dtype, 5);
        let attention = attention(4, ranks);
        let expected = results(&tensors, &attention);
        let kept = attention.stats().pooled_bytes;
        assert!(kept >= 3 << 20, "results were dropped: {kept} bytes");
        assert_eq!(results(&tensors, &attention), expected, "as they were left");
        // The caller overwrites the results before dropping them.
        let forward = tensors.forward(&attention);
        let mut backward = tensors.backward(&attention, &forward);
        drop(forward.checkpoint);
        let mut out = Arc::try_unwrap(forward.out).expect("the only reference");
        for tensor in [
            &mut out,
            &mut backward.dq,
            &mut backward.dk,
            &mut backward.dv,
        ] {
            let ones = vec![1.0; tensor.data().as_slice().len()];
            *tensor.data_mut() = Data::from_f64(dtype, &ones);
        }
        drop((out, backward));
        assert_eq!(
            results(&tensors, &attention),
            expected,
            "changed, {dtype} {ranks}"
        );
    }
}

#[test]
fn results_of_one_shape_are_memory_for_another() {
    // As many elements, but other rows are zero.
    let wide = Shape::new(1, 4096, 2, 2, 64).expect("legal");
    let [tall, wide] = [shape(), wide].map(|shape| TestTensors::random(&shape, DType::F32, 6));
    let fresh = |tensors: &TestTensors| results(tensors, &attention(16, 1));
    let expected = [fresh(&tall), fresh(&wide)];
    let shared = attention(16, 1);
    for _ in 0..3 {
        let got = [results(&tall, &shared), results(&wide, &shared)];
        assert_eq!(got, expected);
    }
}

#[test]
fn a_cache_limit_of_zero_pools_nothing() {
    let none = CacheLimits {
        pools: 0,
        ..CacheLimits::default()
    };
    let builder = Attention::builder().pattern(pattern(4)).keep_at_most(none);
    let attention = builder.build().expect("legal");
    results(&TestTensors::random(&shape(), DType::F32, 7), &attention);
    assert_eq!(attention.stats().pooled_bytes, 0);
}
