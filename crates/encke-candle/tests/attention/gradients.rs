//! Forward and backward through candle's autograd, against candle's own attention.

use candle_core::{DType, Device, Tensor, Var};
use encke::{
    CheckpointPolicy, Cut, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Precision,
};
use encke_candle::{Attention, attention};

use crate::plain::{self, distance, random};

fn mix(gradient: MixingGradient) -> Mode {
    Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient,
    }
}

fn patterns() -> Vec<Pattern> {
    let group = Mode::Group {
        scale: GroupScale::One,
    };
    let mix = mix(MixingGradient::Exact);
    vec![
        Pattern::dense(),
        Pattern::dense().causal(true),
        Pattern::dilated(&[8, 24], &[1, 3], mix)
            .unwrap()
            .causal(true),
        Pattern::dilated(&[7, 16], &[2, 4], mix).unwrap(),
        Pattern::dilated(&[8, 30], &[1, 2], group)
            .unwrap()
            .causal(true),
    ]
}

/// The output, and the gradients of a loss that weighs every output element differently.
fn loss_and_gradients(
    qkv: &[Tensor; 3],
    run: impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor,
) -> (Tensor, [Tensor; 3]) {
    let [q, k, v] = qkv.each_ref().map(|x| Var::from_tensor(x).unwrap());
    let out = run(&q, &k, &v);
    let dims: [usize; 4] = out.dims().try_into().unwrap();
    let weights = random(99, dims).to_dtype(out.dtype()).unwrap();
    let loss = (&out * weights).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    let of = |x: &Var| {
        gradients
            .get(x)
            .expect("every argument has a gradient")
            .clone()
    };
    (out, [of(&q), of(&k), of(&v)])
}

fn inputs(dtype: DType) -> [Tensor; 3] {
    let (b, n, d) = (2, 37, 8);
    [(1, 4), (2, 2), (3, 2)]
        .map(|(seed, heads)| random(seed, [b, n, heads, d]).to_dtype(dtype).unwrap())
}

fn compare(settings: encke::Builder, pattern: &Pattern, dtype: DType, tolerance: f64) {
    let attend = Attention::new(settings.pattern(pattern.clone())).unwrap();
    let inputs = inputs(dtype);
    let (out, gradients) =
        loss_and_gradients(&inputs, |q, k, v| attention(q, k, v, &attend).unwrap());
    assert_eq!(out.dtype(), dtype);
    // The oracle computes in f64 from the same rounded inputs.
    let wide = inputs.map(|x| x.to_dtype(DType::F64).unwrap());
    let (expected, expected_gradients) =
        loss_and_gradients(&wide, |q, k, v| plain::attention(q, k, v, pattern).unwrap());
    let apart = distance(&out, &expected);
    assert!(
        apart < tolerance,
        "out of {pattern:?} in {dtype:?}: {apart:e}"
    );
    for (name, (got, expected)) in ["dq", "dk", "dv"]
        .into_iter()
        .zip(gradients.iter().zip(&expected_gradients))
    {
        assert_eq!(got.dtype(), dtype, "{name}");
        let apart = distance(got, expected);
        assert!(
            apart < tolerance,
            "{name} of {pattern:?} in {dtype:?}: {apart:e}"
        );
    }
}

#[test]
fn every_pattern_and_ring_equals_candles_own_attention() {
    for pattern in patterns() {
        for (ranks, cut) in [(1, Cut::Contiguous), (2, Cut::Zigzag), (5, Cut::Striped)] {
            let settings = encke::Attention::builder().ranks(ranks).sharding(cut);
            compare(settings, &pattern, DType::F64, 1e-12);
        }
    }
}

#[test]
fn every_type_is_within_its_rounding_error() {
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 3e-2), (DType::F16, 4e-3)] {
        for pattern in patterns() {
            compare(
                encke::Attention::builder().ranks(3),
                &pattern,
                dtype,
                tolerance,
            );
        }
    }
}

#[test]
fn every_checkpoint_policy_gives_the_same_gradient_bits() {
    let pattern = patterns().remove(2);
    let inputs = inputs(DType::F32);
    let run = |policy| {
        let settings = encke::Attention::builder()
            .pattern(pattern.clone())
            .ranks(2);
        let attend = Attention::new(settings.checkpoint(policy)).unwrap();
        let (_, gradients) =
            loss_and_gradients(&inputs, |q, k, v| attention(q, k, v, &attend).unwrap());
        gradients.map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    let kept = run(CheckpointPolicy::KeepOutput);
    assert_eq!(kept, run(CheckpointPolicy::Recompute));
    assert_eq!(kept, run(CheckpointPolicy::Offload));
}

/// Each call has its own operation: one attention applied twice in a graph, and two backward passes
/// through one graph, do not disturb each other.
#[test]
fn one_attention_serves_many_calls_and_many_backward_passes() {
    let pattern = patterns().remove(1);
    let attend = Attention::new(encke::Attention::builder().pattern(pattern.clone())).unwrap();
    let inputs = inputs(DType::F64);
    let twice = |run: &dyn Fn(&Tensor, &Tensor, &Tensor) -> Tensor| {
        loss_and_gradients(&inputs, |q, k, v| {
            let first = run(q, k, v);
            run(&first, &(k * 0.5).unwrap(), v)
        })
    };
    let (_, got) = twice(&|q, k, v| attention(q, k, v, &attend).unwrap());
    let (_, expected) = twice(&|q, k, v| plain::attention(q, k, v, &pattern).unwrap());
    for (got, expected) in got.iter().zip(&expected) {
        assert!(distance(got, expected) < 1e-12);
    }

    let [q, k, v] = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
    let loss = attention(&q, &k, &v, &attend).unwrap().sum_all().unwrap();
    let (once, again) = (loss.backward().unwrap(), loss.backward().unwrap());
    assert_eq!(distance(once.get(&k).unwrap(), again.get(&k).unwrap()), 0.0);
}

#[test]
fn narrow_arithmetic_returns_gradients_in_the_arguments_type() {
    let settings = encke::Attention::builder().precision(Precision::Compute(encke::DType::Bf16));
    let attend = Attention::new(settings).unwrap();
    let inputs = inputs(DType::F32);
    let (out, gradients) =
        loss_and_gradients(&inputs, |q, k, v| attention(q, k, v, &attend).unwrap());
    assert_eq!(out.dtype(), DType::BF16);
    assert!(
        gradients
            .iter()
            .all(|gradient| gradient.dtype() == DType::F32)
    );
}

#[test]
fn errors_name_the_offending_dimension_or_type() {
    let attend = Attention::new(encke::Attention::builder()).unwrap();
    let x = random(1, [1, 8, 4, 4]);
    let message =
        |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, k, v, &attend).unwrap_err().to_string();
    let flat = x.reshape((8, 16)).unwrap();
    assert!(message(&flat, &x, &x).contains("q has 2 dimensions, [8, 16]"));
    let whole = Tensor::zeros((1, 8, 4, 4), DType::U32, &Device::Cpu).unwrap();
    assert!(message(&x, &whole, &x).contains("k holds U32"));
    let shorter = x.narrow(1, 0, 7).unwrap();
    assert!(message(&x, &x, &shorter).contains('7'));
    let three = x.narrow(2, 0, 3).unwrap();
    assert!(message(&x, &three, &three).contains("4 query heads cannot be grouped over 3"));
    let narrow = x.to_dtype(DType::F32).unwrap();
    assert!(message(&x, &narrow, &x).contains("f32"));
}
