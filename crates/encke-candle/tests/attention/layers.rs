//! The module: its weights and heads, and the same results on every ring.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use encke::{MixingGradient, Mode, OffsetRule, Pattern};
use encke_candle::{Attention, LayerConfig, RingDilatedAttention, attention, rms_norm};

use crate::plain::{distance, random};

fn longnet(ranks: usize) -> Attention {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[8, 32], &[1, 4], mode)
        .unwrap()
        .causal(true);
    Attention::new(encke::Attention::builder().pattern(pattern).ranks(ranks)).unwrap()
}

fn rows(seed: usize) -> Tensor {
    random(seed, [1, 2, 32, 16]).squeeze(0).unwrap()
}

#[test]
fn a_layer_has_gradients_and_the_same_output_on_every_ring() {
    let config = LayerConfig {
        kv_heads: 2,
        qk_norm: true,
        ..LayerConfig::new(16, 4)
    };
    let weights = VarMap::new();
    let built = |ranks| {
        let weights = VarBuilder::from_varmap(&weights, DType::F64, &Device::Cpu);
        RingDilatedAttention::new(config, &longnet(ranks), weights).unwrap()
    };
    let one = built(1);
    let x = rows(1);
    let expected = one.forward(&x).unwrap();
    assert_eq!(expected.dims(), [2, 32, 16]);
    for ranks in [2, 3] {
        let got = built(ranks).forward(&x).unwrap();
        assert!(distance(&got, &expected) < 1e-12);
    }
    let names = weights.data().lock().unwrap().len();
    assert_eq!(names, 6, "four projections and two norms");
    let gradients = expected
        .sqr()
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    for variable in weights.all_vars() {
        let gradient = gradients
            .get(&variable)
            .expect("every weight has a gradient");
        let size: f64 = gradient
            .sqr()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar()
            .unwrap();
        assert!(size > 0.0);
    }
}

/// The layer is the projections around the operation.
#[test]
fn a_layer_equals_its_projections_around_attention() {
    let weights = VarMap::new();
    let builder = VarBuilder::from_varmap(&weights, DType::F64, &Device::Cpu);
    let layer = RingDilatedAttention::new(LayerConfig::new(16, 4), &longnet(1), builder).unwrap();
    let x = rows(2);
    let by_name = |name: &str| weights.data().lock().unwrap()[name].as_tensor().clone();
    let project = |x: &Tensor, name: &str| {
        x.broadcast_matmul(&by_name(&format!("{name}.weight")).t().unwrap())
            .unwrap()
    };
    let heads = |name: &str| project(&x, name).reshape((2, 32, 4, 4)).unwrap();
    let out = attention(&heads("q"), &heads("k"), &heads("v"), &longnet(1)).unwrap();
    let expected = project(&out.reshape((2, 32, 16)).unwrap(), "out");
    assert!(distance(&layer.forward(&x).unwrap(), &expected) < 1e-12);
}

#[test]
fn key_heads_must_divide_heads() {
    let weights = VarMap::new();
    let builder = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
    let config = LayerConfig {
        kv_heads: 3,
        ..LayerConfig::new(16, 4)
    };
    let refused = RingDilatedAttention::new(config, &longnet(1), builder).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("4 heads cannot share 3 key heads")
    );
}

/// The one-pass f32 norm against candle's own arithmetic in f64, gradients included.
#[test]
fn the_f32_norm_and_its_gradients_equal_those_in_f64() {
    let (x, gains) = (rows(3), random(4, [1, 1, 1, 16]).flatten_all().unwrap());
    let weights = rows(5);
    let run = |dtype: DType| {
        let x = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
        let gains = Var::from_tensor(&gains.to_dtype(dtype).unwrap()).unwrap();
        let normal = rms_norm(&x, &gains).unwrap();
        let loss = (&normal * weights.to_dtype(dtype).unwrap())
            .unwrap()
            .sum_all()
            .unwrap();
        let gradients = loss.backward().unwrap();
        let of = |x: &Var| gradients.get(x).unwrap().clone();
        [normal, of(&x), of(&gains)]
    };
    for (got, expected) in run(DType::F32).iter().zip(&run(DType::F64)) {
        let apart = distance(got, expected);
        assert!(apart < 1e-6, "{apart:e}");
    }
    let refused = rms_norm(
        &x.to_dtype(DType::F32).unwrap(),
        &Tensor::ones(8, DType::F32, &Device::Cpu).unwrap(),
    );
    assert!(refused.unwrap_err().to_string().contains("8 gains"));
}
