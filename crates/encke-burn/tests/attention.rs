//! Forward and backward through Burn's autodiff, against Burn's own attention.

use burn::tensor::module::attention_fallback;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Tensor, TensorData};
use encke::{CheckpointPolicy, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_burn::{Attention, Error, attention};

/// Burn's own attention with a pattern, for tensors `[b, n, h, d]`: the logarithm of a pair's
/// multiplicity is its bias, which is the multiset softmax; a row without keys is 0.
fn burns_own(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, pattern: &Pattern) -> Tensor<4> {
    let [batch, tokens, heads, dim] = q.dims();
    let kv_heads = k.dims()[2];
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim).unwrap();
    let mut bias = Vec::with_capacity(heads * tokens * tokens);
    let mut seeing = Vec::with_capacity(heads * tokens);
    for head in 0..heads {
        for row in 0..tokens {
            let from = bias.len();
            let keys = (0..tokens).map(|key| pattern.multiplicity(&shape, head, row, key) as f64);
            bias.extend(keys.map(f64::ln));
            let sees = bias[from..].iter().any(|bias| *bias > f64::NEG_INFINITY);
            seeing.push(f64::from(u8::from(sees)));
            if !sees {
                bias[from..].fill(0.0);
            }
        }
    }
    let (device, dtype) = (q.device(), q.dtype());
    let tensor = |values: Vec<f64>, dims: [usize; 4]| {
        Tensor::<4>::from_data(TensorData::new(values, dims), (&device, dtype))
    };
    let bias = tensor(bias, [1, heads, tokens, tokens]).repeat_dim(0, batch);
    let seeing = tensor(seeing, [1, heads, tokens, 1]);
    let repeated = |x: Tensor<4>| {
        let x = x.reshape([batch, tokens, kv_heads, 1, dim]);
        let x = x.repeat_dim(3, heads / kv_heads);
        x.reshape([batch, tokens, heads, dim]).swap_dims(1, 2)
    };
    let options = AttentionModuleOptions::default();
    let (q, k, v) = (q.swap_dims(1, 2), repeated(k), repeated(v));
    let out = attention_fallback(q, k, v, None, Some(bias), options);
    (out * seeing).swap_dims(1, 2)
}

fn random(seed: u64, dims: [usize; 4], dtype: DType, device: &Device) -> Tensor<4> {
    let mut random = encke::conformance::Random::new(seed);
    let values: Vec<f64> = (0..dims.iter().product())
        .map(|_| 3.0 * random.unit())
        .collect();
    Tensor::from_data(TensorData::new(values, dims), (device, dtype))
}

fn values(x: Tensor<4>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().unwrap()
}

/// The largest difference, relative to the largest expected element.
fn distance(got: Tensor<4>, expected: Tensor<4>) -> f64 {
    assert_eq!(got.dims(), expected.dims());
    let (got, expected) = (values(got), values(expected));
    let largest = expected.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
    let pairs = got.iter().zip(&expected);
    let furthest = pairs.map(|(a, b)| (a - b).abs());
    let furthest = furthest.fold(0.0, |a: f64, x| match x.is_nan() {
        true => f64::INFINITY,
        false => a.max(x),
    });
    furthest / largest.max(1e-30)
}

fn inputs(dtype: DType, device: &Device) -> [Tensor<4>; 3] {
    [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| random(seed, [2, 37, heads, 8], dtype, device))
}

/// The output, and the gradients of a loss that weighs every output element differently.
fn differentiate(
    qkv: [Tensor<4>; 3],
    run: impl Fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>,
) -> (Tensor<4>, [Tensor<4>; 3]) {
    let [q, k, v] = qkv.map(Tensor::require_grad);
    let out = run(q.clone(), k.clone(), v.clone());
    let weights = random(99, out.dims(), out.dtype(), &out.device());
    let gradients = (out.clone() * weights).sum().backward();
    let of = |x: Tensor<4>| x.grad(&gradients).expect("every argument has a gradient");
    (out, [of(q), of(k), of(v)])
}

fn longnet(gradient: MixingGradient) -> Mode {
    Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient,
    }
}

fn patterns() -> Vec<Pattern> {
    let group = Mode::Group {
        scale: GroupScale::One,
    };
    let mix = longnet(MixingGradient::Exact);
    let dilated = |segments, rates, mode| Pattern::dilated(segments, rates, mode).unwrap();
    vec![
        Pattern::dense(),
        Pattern::dense().causal(true),
        dilated(&[8, 24], &[1, 3], mix).causal(true),
        dilated(&[7, 16], &[2, 4], mix),
        dilated(&[8, 30], &[1, 2], group).causal(true),
    ]
}

fn ring(pattern: &Pattern, ranks: usize) -> Attention {
    let settings = encke::Attention::builder().pattern(pattern.clone());
    Attention::new(settings.ranks(ranks)).unwrap()
}

#[test]
fn outputs_and_gradients_equal_those_of_burn() {
    let device = Device::flex().autodiff();
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::F64, 1e-12)] {
        for pattern in patterns() {
            let own = |q, k, v| burns_own(q, k, v, &pattern);
            let (out, gradients) = differentiate(inputs(dtype, &device), own);
            for ranks in [1, 4] {
                let settings = ring(&pattern, ranks);
                let ours = |q, k, v| attention(q, k, v, &settings).unwrap();
                let (got, ours) = differentiate(inputs(dtype, &device), ours);
                assert_eq!(got.dtype(), dtype);
                let far = distance(got, out.clone());
                assert!(far < limit, "{pattern:?}, {ranks} ranks, {dtype:?}: {far}");
                for ((got, own), name) in ours.into_iter().zip(&gradients).zip(["dq", "dk", "dv"]) {
                    let far = distance(got, own.clone());
                    assert!(
                        far < limit,
                        "{name}, {pattern:?}, {ranks} ranks, {dtype:?}: {far}"
                    );
                }
            }
        }
    }
}

/// Gradients of 16-bit tensors have their type, and differ from those of f32 by their rounding.
#[test]
fn types_of_16_bits_stay_so() {
    let device = Device::flex().autodiff();
    let pattern = Pattern::dense().causal(true);
    let settings = ring(&pattern, 2);
    let run = |q, k, v| attention(q, k, v, &settings).unwrap();
    for (dtype, limit) in [(DType::BF16, 0.03), (DType::F16, 0.004)] {
        let rounded = inputs(dtype, &device);
        let wide = rounded.clone().map(|x| x.cast(DType::F32));
        let (exact, exact_gradients) = differentiate(wide, run);
        let (out, gradients) = differentiate(rounded, run);
        assert_eq!(out.dtype(), dtype);
        assert!(distance(out, exact) < limit);
        for (got, exact) in gradients.into_iter().zip(exact_gradients) {
            assert_eq!(got.dtype(), dtype);
            assert!(distance(got, exact) < limit);
        }
    }
}

/// Tensors with the heads before the tokens are read in place; columns and flipped ones are copied.
#[test]
fn strided_tensors_give_the_same() {
    let device = Device::flex().autodiff();
    let settings = ring(&Pattern::dense().causal(true), 3);
    let run = |q, k, v| attention(q, k, v, &settings).unwrap();
    let plain = inputs(DType::F32, &device);
    let (out, gradients) = differentiate(plain.clone(), run);
    type Change = fn(Tensor<4>) -> Tensor<4>;
    let changes: [(Change, Change); 3] = [
        (|x| x.swap_dims(1, 2), |x| x.swap_dims(1, 2)),
        (|x| x.swap_dims(2, 3), |x| x.swap_dims(2, 3)),
        (|x| x.flip([1]), |x| x.flip([1])),
    ];
    for (there, back) in changes {
        // The change is made to a contiguous copy, so that its inverse is a strided view.
        let changed = plain.clone().map(|x| there(x).mul_scalar(1.0));
        let (got, ours) = differentiate(changed, |q, k, v| run(back(q), back(k), back(v)));
        assert!(distance(got, out.clone()) < 1e-6);
        for (got, expected) in ours.into_iter().zip(&gradients) {
            assert!(distance(back(got), expected.clone()) < 1e-6);
        }
    }
}

#[test]
fn untracked_tensors_give_the_same_output_and_no_graph() {
    let tracking = Device::flex().autodiff();
    let settings = ring(&Pattern::dense(), 2);
    let (out, gradients) = differentiate(inputs(DType::F32, &tracking), |q, k, v| {
        attention(q, k, v, &settings).unwrap()
    });
    let [q, k, v] = inputs(DType::F32, &Device::flex());
    let plain = attention(q, k, v, &settings).unwrap();
    assert!(!plain.device().is_autodiff());
    assert_eq!(values(plain), values(out.clone()));

    // Only v is tracked: it has the same gradient, the others have none.
    let [q, k, v] = inputs(DType::F32, &tracking);
    let v = v.require_grad();
    let out = attention(q.clone(), k, v.clone(), &settings).unwrap();
    let weights = random(99, out.dims(), out.dtype(), &tracking);
    let found = (out * weights).sum().backward();
    assert_eq!(
        values(v.grad(&found).unwrap()),
        values(gradients[2].clone())
    );
    assert!(q.grad(&found).is_none());
}

/// Burn's gradient checkpointing and Encke's checkpoint policies change no bit.
#[test]
fn checkpointing_changes_nothing() {
    let mix = longnet(MixingGradient::Detached);
    let pattern = Pattern::dilated(&[8, 24], &[1, 3], mix).unwrap();
    let run = |settings: Attention, device: Device| {
        differentiate(inputs(DType::F32, &device), |q, k, v| {
            attention(q, k, v, &settings).unwrap()
        })
    };
    let (out, gradients) = run(ring(&pattern, 2), Device::flex().autodiff());
    let expected = gradients.map(values);
    for policy in [
        CheckpointPolicy::KeepOutput,
        CheckpointPolicy::Recompute,
        CheckpointPolicy::Offload,
    ] {
        let settings = encke::Attention::builder().pattern(pattern.clone());
        let settings = Attention::new(settings.ranks(2).checkpoint(policy)).unwrap();
        let device = Device::flex().autodiff().gradient_checkpointing();
        let (got, gradients) = run(settings, device);
        assert_eq!(values(got), values(out.clone()), "{policy:?}");
        assert_eq!(gradients.map(values), expected, "{policy:?}");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_in_words() {
    let device = Device::flex().autodiff();
    let [q, k, _] = inputs(DType::F32, &device);
    let v = random(3, [2, 36, 2, 8], DType::F32, &device);
    let refused = attention(q, k, v, &ring(&Pattern::dense(), 1)).unwrap_err();
    assert!(matches!(refused, Error::Encke(_)));
    assert!(refused.to_string().contains("36"), "{refused}");
}
