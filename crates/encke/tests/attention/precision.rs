//! Low precision, judged as FlashAttention does: at most twice the error of a reference that
//! rounds its inputs and its result, plus a rounding floor; and flat in the size of the ring.

use encke::{Attention, Cut, DType, Data, Pattern, Precision, Shape, Tensor};

use crate::support::{TestTensors, difference, errors, expected};

#[test]
fn errors_are_those_of_rounding_and_do_not_grow_with_the_ring() {
    let shape = Shape::new(1, 512, 2, 1, 64).expect("legal");
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        // Rounding the exact result once costs half a unit in the last place of its largest
        // element; gradients of bf16 inputs depend on the rounded output as well.
        let floor = dtype.epsilon();
        for causal in [false, true] {
            let of = |ranks: usize, cut: Cut| {
                let pattern = Pattern::dense().causal(causal);
                let builder = Attention::builder()
                    .pattern(pattern)
                    .ranks(ranks)
                    .sharding(cut);
                errors(builder, &shape, dtype, 77)
            };
            let alone = of(1, Cut::Contiguous);
            let most = if dtype == DType::F32 { 20.0 } else { 2.0 };
            for (ranks, cut) in [
                (1, Cut::Contiguous),
                (4, Cut::Zigzag),
                (16, Cut::Contiguous),
                (64, Cut::Striped),
            ] {
                let errors = of(ranks, cut);
                let [out, lse, dq, dk, dv] = errors;
                for error in [out, dq, dk, dv] {
                    assert!(error <= most * floor, "{dtype} {ranks}: {errors:?}");
                }
                assert!(lse <= 2e-6, "{dtype} {ranks}: lse {lse:e}");
                assert!(
                    out <= 2.0 * alone[0] + DType::F32.epsilon(),
                    "{dtype} {ranks}"
                );
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let shape = Shape::new(1, 64, 1, 1, 16).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F64, 13);
    // Scores up to about ten thousand.
    let factor = 1e4 / 16.0 * shape.dim as f64;
    let q: Vec<f64> = tensors
        .q
        .to_f64()
        .iter()
        .map(|x| x * factor / 4.0)
        .collect();
    let q = Tensor::from_f64(DType::F64, tensors.q.dims(), &q).expect("sizes agree");
    let tensors = TestTensors { q, ..tensors };
    let attention = Attention::builder().ranks(5).build().expect("legal");
    let forward = tensors.forward(&attention);
    let backward = tensors.backward(&attention, &forward);
    let [out, lse, dq, dk, dv] = expected(&shape, &Pattern::dense(), &tensors);
    assert!(lse.iter().any(|x| x.abs() > 1e3));
    for (got, expected) in [
        (forward.out.data(), &out),
        (forward.lse.data(), &lse),
        (backward.dq.data(), &dq),
        (backward.dk.data(), &dk),
        (backward.dv.data(), &dv),
    ] {
        // With one key taking all the weight, gradients are differences of nearly equal values
        // and can vanish, so the error is relative to at least 1.
        let one: Vec<f64> = expected.iter().copied().chain([1.0]).collect();
        let got = Data::F64(got.to_f64().into_iter().chain([1.0]).collect());
        assert!(difference(&got, &one) < 1e-10);
    }
}

#[test]
fn an_explicit_compute_type_is_used() {
    let shape = Shape::new(1, 40, 2, 2, 8).expect("legal");
    let tensors = TestTensors::random(&shape, DType::Bf16, 6);
    let builder = Attention::builder().ranks(2);
    let wide = builder
        .precision(Precision::Compute(DType::F64))
        .build()
        .expect("legal");
    let forward = tensors.forward(&wide);
    assert_eq!(
        (forward.out.dtype(), forward.lse.dtype()),
        (DType::F64, DType::F64)
    );
    let [out, ..] = expected(&shape, &Pattern::dense(), &tensors);
    assert!(difference(forward.out.data(), &out) < 1e-13);
    let narrow = Attention::builder().build().expect("legal");
    let forward = tensors.forward(&narrow);
    assert_eq!(
        (forward.out.dtype(), forward.lse.dtype()),
        (DType::Bf16, DType::F32)
    );
}
