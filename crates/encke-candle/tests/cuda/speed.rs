//! Prints how long a long sequence takes on this GPU; no time is asserted.

use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use encke::Pattern;
use encke_candle::{Attention, attention};

use crate::graph::{CheckResult, to_text};
use crate::tally::Tally;

const TOKENS: usize = 16_384;
const TIMES: usize = 5;

pub fn run(tally: &mut Tally, device: &Device) {
    let checks = [1, 2, 4].into_iter().map(|ranks| times(ranks, device));
    tally.group("a long sequence", checks);
}

fn times(ranks: usize, device: &Device) -> CheckResult<()> {
    let settings = encke::Attention::builder().pattern(Pattern::dense().causal(true));
    let attend = Attention::new(settings.ranks(ranks)).map_err(to_text)?;
    let make = |heads: usize| -> candle_core::Result<Var> {
        let values = Tensor::randn(0f32, 1.0, (1, TOKENS, heads, 128), device)?;
        Var::from_tensor(&values.to_dtype(DType::BF16)?)
    };
    let (q, k, v) = (
        make(16).map_err(to_text)?,
        make(4).map_err(to_text)?,
        make(4).map_err(to_text)?,
    );
    let mut best = [f64::INFINITY; 2];
    for _ in 0..TIMES {
        device.synchronize().map_err(to_text)?;
        let start = Instant::now();
        let out = attention(&q, &k, &v, &attend).map_err(to_text)?;
        device.synchronize().map_err(to_text)?;
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        let loss = out.sum_all().map_err(to_text)?;
        device.synchronize().map_err(to_text)?;
        let start = Instant::now();
        let gradients = loss.backward().map_err(to_text)?;
        device.synchronize().map_err(to_text)?;
        best[1] = best[1].min(start.elapsed().as_secs_f64());
        let size = gradients.get(&q).ok_or("q has no gradient")?;
        let size = size.to_dtype(DType::F32).and_then(|x| x.sqr()?.sum_all());
        let size = size.and_then(|x| x.to_scalar::<f32>()).map_err(to_text)?;
        if !(size.is_finite() && size > 0.0) {
            return Err(format!("the square of q's gradient is {size}"));
        }
    }
    let [forward, backward] = best.map(|seconds| seconds * 1e3);
    println!(
        "  {TOKENS} tokens, 16 heads over 4, bf16, causal, {ranks} ranks: forward {forward:.2} ms, \
         backward {backward:.2} ms (candle's share included)"
    );
    Ok(())
}
