//! Every type, pattern, head count and ring against candle's own attention.

use candle_core::{DType, Device};
use encke::{Cut, Pattern, Precision};
use encke_candle::{Attention, attention};

use crate::graph::{CheckResult, DeviceCheck, compare, longnet, pass, random_on, to_text, wide};
use crate::plain;
use crate::tally::Tally;

/// Largest relative difference allowed for results stored in a type.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        _ => 3e-2,
    }
}

/// Sizes of the tensors.
#[derive(Debug, Clone, Copy)]
struct AttentionSizes {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

pub fn run(tally: &mut Tally, device: &Device) {
    let cases = [(2, 96, 4, 2, 64), (1, 160, 4, 1, 128), (1, 75, 3, 3, 40)];
    let patterns = [
        ("dense", Pattern::dense()),
        ("causal", Pattern::dense().causal(true)),
        ("dilated", longnet([32, 96], [1, 3])),
    ];
    let rings = [
        (1, Cut::Contiguous),
        (2, Cut::Contiguous),
        (4, Cut::Zigzag),
        (3, Cut::Striped),
    ];
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let mut furthest = 0.0f64;
        let all = cases
            .iter()
            .flat_map(|case| patterns.iter().map(move |of| (*case, of)));
        let checks = all.map(|((batch, tokens, heads, kv_heads, dim), (name, pattern))| {
            let case = AttentionSizes {
                batch,
                tokens,
                heads,
                kv_heads,
                dim,
            };
            let to_text = check(case, pattern, &rings, dtype, device);
            let apart = to_text.map_err(|what| format!("{name} {case:?}: {what}"))?;
            furthest = furthest.max(apart);
            Ok(())
        });
        tally.group(&format!("{dtype:?} on rings of 1, 2, 3 and 4"), checks);
        println!("  furthest from f64 on the CPU: {furthest:.1e}");
    }
    let checks: [DeviceCheck; 2] = [same_gpu, narrowed];
    let checks = checks.into_iter().map(|check| check(device));
    tally.group(
        "candle's own attention on the same GPU; narrower compute types",
        checks,
    );
}

fn check(
    case: AttentionSizes,
    pattern: &Pattern,
    rings: &[(usize, Cut)],
    dtype: DType,
    device: &Device,
) -> CheckResult<f64> {
    let (q, kv) = (
        [case.batch, case.tokens, case.heads, case.dim],
        [case.batch, case.tokens, case.kv_heads, case.dim],
    );
    let qkv = [
        random_on(1, q, dtype, device)?,
        random_on(2, kv, dtype, device)?,
        random_on(3, kv, dtype, device)?,
    ];
    let host = [wide(&qkv[0])?, wide(&qkv[1])?, wide(&qkv[2])?];
    let expected = pass(&host, |q, k, v| plain::attention(q, k, v, pattern))?;
    let mut furthest: f64 = 0.0;
    for (ranks, cut) in rings {
        let settings = encke::Attention::builder().pattern(pattern.clone());
        let settings = settings.ranks(*ranks).sharding(cut.clone());
        let attend = Attention::new(settings).map_err(to_text)?;
        let ring = |what: String| format!("{ranks} ranks ({cut:?}): {what}");
        let got = pass(&qkv, |q, k, v| attention(q, k, v, &attend)).map_err(ring)?;
        if let Some(other) = got
            .iter()
            .find(|x| x.dtype() != dtype || !x.device().is_cuda())
        {
            return Err(format!(
                "a result in {:?} on {:?}",
                other.dtype(),
                other.device()
            ));
        }
        furthest = furthest.max(compare(&got, &expected, tolerance(dtype)).map_err(ring)?);
    }
    Ok(furthest)
}

/// A longer sequence against candle's softmax attention on the same GPU, in f32.
fn same_gpu(device: &Device) -> CheckResult<()> {
    let pattern = Pattern::dense().causal(true);
    let qkv = [
        random_on(4, [1, 512, 8, 64], DType::F32, device)?,
        random_on(5, [1, 512, 2, 64], DType::F32, device)?,
        random_on(6, [1, 512, 2, 64], DType::F32, device)?,
    ];
    let expected = pass(&qkv, |q, k, v| plain::attention(q, k, v, &pattern))?;
    let settings = encke::Attention::builder()
        .pattern(pattern.clone())
        .ranks(4);
    let attend = Attention::new(settings).map_err(to_text)?;
    let got = pass(&qkv, |q, k, v| attention(q, k, v, &attend))?;
    let apart = compare(&got, &expected, 5e-5)?;
    println!("  furthest from candle's own on the same GPU (f32, 512 tokens): {apart:.1e}");
    Ok(())
}

/// f32 inputs computed in bf16: the output is in bf16, gradients in the arguments' type.
fn narrowed(device: &Device) -> CheckResult<()> {
    let qkv = [7, 8, 9].map(|seed| random_on(seed, [1, 64, 2, 64], DType::F32, device));
    let [q, k, v] = qkv;
    let qkv = [q?, k?, v?];
    let expected = pass(&qkv, |q, k, v| plain::attention(q, k, v, &Pattern::dense()))?;
    for precision in [Precision::Fastest, Precision::Compute(encke::DType::Bf16)] {
        let settings = encke::Attention::builder().precision(precision).ranks(2);
        let attend = Attention::new(settings).map_err(to_text)?;
        let got = pass(&qkv, |q, k, v| attention(q, k, v, &attend))?;
        compare(&got, &expected, tolerance(DType::BF16))?;
        let types = got.each_ref().map(|x| x.dtype());
        if types != [DType::BF16, DType::F32, DType::F32, DType::F32] {
            return Err(format!("{precision:?} has results in {types:?}"));
        }
    }
    Ok(())
}
