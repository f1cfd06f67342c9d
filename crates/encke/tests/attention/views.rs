//! Borrowed tensors: any strides whose last dimension is contiguous.

use encke::{Attention, DType, Shape, Tensor, View};

use crate::support::TestTensors;

/// The same elements laid out `[b, h, n, d]` with gaps, as a view `[b, n, h, d]`.
fn transposed(tensor: &Tensor) -> (Vec<f32>, [usize; 4]) {
    let [b, n, h, d] = tensor.dims();
    let row = d + 3;
    let strides = [h * n * row, row, n * row, 1];
    let mut data = vec![f32::NAN; b * h * n * row];
    for (i, x) in tensor.to_f64().into_iter().enumerate() {
        let (c, head, token, batch) = (i % d, i / d % h, i / d / h % n, i / d / h / n);
        data[batch * strides[0] + token * strides[1] + head * strides[2] + c] = x as f32;
    }
    (data, strides)
}

#[test]
fn strides_do_not_matter() {
    let shape = Shape::new(2, 37, 4, 2, 5).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F32, 10);
    let attention = Attention::builder().ranks(3).build().expect("legal");
    let plain = tensors.forward(&attention);
    let expected = tensors.backward(&attention, &plain);
    let [q, k, v, dout] = [&tensors.q, &tensors.k, &tensors.v, &tensors.dout].map(transposed);
    let view = |(data, strides): &(Vec<f32>, [usize; 4]), dims| {
        let data: &'static [f32] = data.clone().leak();
        View::strided(data, dims, *strides).expect("it fits")
    };
    let (q, dout) = (view(&q, tensors.q.dims()), view(&dout, tensors.q.dims()));
    let (k, v) = (view(&k, tensors.k.dims()), view(&v, tensors.k.dims()));
    let forward = attention.forward(&q, &k, &v).expect("legal");
    assert_eq!(forward.out, plain.out);
    let backward = attention.backward(&q, &k, &v, &forward.checkpoint, &dout, None);
    let backward = backward.expect("legal");
    assert_eq!(
        (backward.dq, backward.dk, backward.dv),
        (expected.dq, expected.dk, expected.dv)
    );
}

#[test]
fn a_token_stride_of_zero_repeats_a_row() {
    // Legal, because views are only read.
    let values = [1.0f32, 2.0, 3.0];
    let view = View::strided(&values, [1, 9, 1, 3], [0, 0, 0, 1]).expect("it fits");
    let attention = Attention::builder().ranks(2).build().expect("legal");
    let forward = attention.forward(&view, &view, &view).expect("legal");
    for row in forward.out.to_f64().chunks(3) {
        for (a, b) in row.iter().zip([1.0, 2.0, 3.0]) {
            assert!((a - b).abs() < 1e-6);
        }
    }
}

#[test]
fn views_that_cannot_be_read_are_refused() {
    let values = [0.0f32; 24];
    let error = View::strided(&values, [1, 3, 2, 4], [24, 1, 12, 3]).expect_err("inner stride 3");
    assert!(error.to_string().contains("stride 3"), "{error}");
    let error = View::contiguous(&values, [1, 4, 2, 4]).expect_err("too short");
    assert!(
        error.to_string().contains("needs 32 elements, got 24"),
        "{error}"
    );
    let error = View::strided(&values, [2, 3, 2, 4], [usize::MAX, 8, 4, 1]);
    assert!(
        error
            .expect_err("it overflows")
            .to_string()
            .contains("overflows")
    );
}
