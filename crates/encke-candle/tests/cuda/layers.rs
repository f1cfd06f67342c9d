//! The module on a GPU: weights and their gradients as on the CPU, on every ring.

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarBuilder;
use encke_candle::{Attention, LayerConfig, RingDilatedAttention};

use crate::graph::{CheckResult, longnet, random_on, to_text, wide};
use crate::plain::distance;
use crate::tally::Tally;

const WIDTH: usize = 256;

pub fn run(tally: &mut Tally, device: &Device) {
    let all = [(DType::F32, 3e-5), (DType::BF16, 6e-2)];
    let all = all
        .into_iter()
        .flat_map(|of| [1, 2, 4].map(|ranks| (of, ranks)));
    let checks = all.map(|((dtype, tolerance), ranks)| {
        let compared = compare(ranks, dtype, device, tolerance);
        compared.map_err(|what| format!("{dtype:?} on {ranks} ranks: {what}"))
    });
    tally.group("RingDilatedAttention on rings of 1, 2 and 4", checks);
}

/// A ring on the GPU against one rank on the CPU, in f64 from the same rounded weights.
fn compare(ranks: usize, dtype: DType, device: &Device, tolerance: f64) -> CheckResult<()> {
    let got = layer(ranks, dtype, device, dtype)?;
    for (name, right) in layer(1, DType::F64, &Device::Cpu, dtype)? {
        let apart = distance(&wide(&got[&name])?, &right);
        if apart > tolerance {
            return Err(format!("{name}: {apart:.1e} apart"));
        }
    }
    Ok(())
}

/// The output and the gradients of all weights, from weights rounded to `rounded`.
fn layer(
    ranks: usize,
    dtype: DType,
    device: &Device,
    rounded: DType,
) -> CheckResult<HashMap<String, Tensor>> {
    let config = LayerConfig {
        kv_heads: 2,
        qk_norm: true,
        ..LayerConfig::new(WIDTH, 4)
    };
    let make = |seed: usize, dims: &[usize]| -> CheckResult<Tensor> {
        let (rows, columns) = (dims[0], dims.get(1).copied().unwrap_or(1));
        let values = random_on(seed, [1, 1, rows, columns], DType::F64, &Device::Cpu)?;
        // The size of typical weights.
        let values = (values * 0.1).and_then(|x| x.reshape(dims));
        let values = values.and_then(|x| x.to_dtype(rounded)?.to_dtype(dtype));
        values.and_then(|x| x.to_device(device)).map_err(to_text)
    };
    let dim = config.head_dim;
    let shapes: [(&str, Vec<usize>); 6] = [
        ("q.weight", vec![4 * dim, WIDTH]),
        ("k.weight", vec![2 * dim, WIDTH]),
        ("v.weight", vec![2 * dim, WIDTH]),
        ("out.weight", vec![WIDTH, 4 * dim]),
        ("q_norm", vec![dim]),
        ("k_norm", vec![dim]),
    ];
    let mut weights = HashMap::new();
    for (seed, (name, dims)) in shapes.iter().enumerate() {
        let var = Var::from_tensor(&make(seed + 1, dims)?).map_err(to_text)?;
        weights.insert((*name).to_string(), var);
    }
    let tensors = weights.iter();
    let tensors = tensors.map(|(name, var)| (name.clone(), var.as_tensor().clone()));
    let builder = VarBuilder::from_tensors(tensors.collect(), dtype, device);
    let settings = encke::Attention::builder().pattern(longnet([16, 64], [1, 4]));
    let attention = Attention::new(settings.ranks(ranks)).map_err(to_text)?;
    let layer = RingDilatedAttention::new(config, &attention, builder).map_err(to_text)?;
    let x = make(20, &[2 * 64, WIDTH])?
        .reshape((2, 64, WIDTH))
        .map_err(to_text)?;
    let x = (x * 10.0).map_err(to_text)?;
    let out = layer.forward(&x).map_err(to_text)?;
    let loss = out.sqr().and_then(|x| x.sum_all()).map_err(to_text)?;
    let gradients = loss.backward().map_err(to_text)?;
    let mut results = HashMap::from([("out".to_string(), wide(&out)?)]);
    for (name, var) in &weights {
        let gradient = gradients.get(var);
        let gradient = gradient.ok_or_else(|| format!("{name} has no gradient"))?;
        results.insert(name.clone(), wide(gradient)?);
    }
    Ok(results)
}
