//! Order between candle's stream and Encke's, reuse of freed memory, and the same bits under every
//! checkpoint policy and on many threads.

use candle_core::{DType, Device, Tensor, Var};
use encke::{CheckpointPolicy, Pattern};
use encke_candle::{Attention, attention};

use crate::graph::{CheckResult, DeviceCheck, longnet, pass, random_on, same_bits, to_text};
use crate::plain::distance;
use crate::tally::Tally;

/// Steps that are enqueued without waiting.
const STEPS: usize = 40;

pub fn run(tally: &mut Tally, device: &Device) {
    // A non-default stream does not wait for the default one.
    let other = || Device::new_cuda_with_stream(0).map_err(to_text);
    let checks: [DeviceCheck; 4] = [
        |device| without_synchronizing(device, 1),
        |device| without_synchronizing(device, 2),
        |device| without_synchronizing(device, 4),
        |device| without_synchronizing(device, 4),
    ];
    let checks = checks
        .into_iter()
        .enumerate()
        .map(|(at, check)| match at % 2 {
            0 => check(device),
            _ => check(&other()?),
        });
    tally.group("order between streams", checks);
    let checks: [DeviceCheck; 3] = [policies, twice, many_threads];
    let checks = checks.into_iter().map(|check| check(device));
    tally.group("the same bits", checks);
}

/// Steps enqueued without host synchronization, each reusing memory that the step before freed,
/// against the same steps with a synchronization after every operation.
fn without_synchronizing(device: &Device, ranks: usize) -> CheckResult<()> {
    let settings = encke::Attention::builder().pattern(longnet([64, 512], [1, 4]));
    let attend = Attention::new(settings.ranks(ranks)).map_err(to_text)?;
    let start = [
        random_on(1, [1, 512, 4, 64], DType::BF16, device)?,
        random_on(2, [1, 512, 2, 64], DType::BF16, device)?,
        random_on(3, [1, 512, 2, 64], DType::BF16, device)?,
    ];
    let run = |synchronizes: bool| -> candle_core::Result<Vec<Tensor>> {
        let pause = || match synchronizes {
            true => device.synchronize(),
            false => Ok(()),
        };
        let [mut q, mut k, mut v] = start.clone();
        let mut results = Vec::new();
        for step in 0..STEPS {
            let scale = 1.0 + step as f64 / STEPS as f64;
            let vars = [
                Var::from_tensor(&q)?,
                Var::from_tensor(&k)?,
                Var::from_tensor(&v)?,
            ];
            pause()?;
            let out = attention(&vars[0], &vars[1], &vars[2], &attend)?;
            pause()?;
            let gradients = (out.sqr()? * scale)?.sum_all()?.backward()?;
            pause()?;
            // Bounded, and different values at every step.
            let next = |x: &Var| -> candle_core::Result<Tensor> {
                let gradient = gradients.get(x).ok_or_else(|| {
                    candle_core::Error::Msg("an argument without a gradient".into())
                })?;
                (x.as_tensor() * -0.9)? + (gradient.tanh()? * 0.5)?
            };
            (q, k, v) = (next(&vars[0])?, next(&vars[1])?, next(&vars[2])?);
            pause()?;
            results.push(out.detach());
        }
        results.extend([q, k, v]);
        Ok(results)
    };
    let (slow, fast) = (run(true).map_err(to_text)?, run(false).map_err(to_text)?);
    for (step, (slow, fast)) in slow.iter().zip(&fast).enumerate() {
        let [slow, fast] = [slow, fast].map(|x| x.to_device(&Device::Cpu));
        let apart = distance(&fast.map_err(to_text)?, &slow.map_err(to_text)?);
        if apart != 0.0 {
            return Err(format!("{ranks} ranks: step {step} is {apart:e} apart"));
        }
    }
    Ok(())
}

fn inputs(dtype: DType, device: &Device) -> CheckResult<[Tensor; 3]> {
    Ok([
        random_on(1, [2, 192, 4, 64], dtype, device)?,
        random_on(2, [2, 192, 2, 64], dtype, device)?,
        random_on(3, [2, 192, 2, 64], dtype, device)?,
    ])
}

/// The same bits under every checkpoint policy, and in every run.
fn policies(device: &Device) -> CheckResult<()> {
    for dtype in [DType::F32, DType::BF16] {
        let qkv = inputs(dtype, device)?;
        let run = |policy| {
            let settings = encke::Attention::builder().pattern(longnet([32, 192], [1, 3]));
            let attend = Attention::new(settings.ranks(2).checkpoint(policy)).map_err(to_text)?;
            pass(&qkv, |q, k, v| attention(q, k, v, &attend))
        };
        let kept = run(CheckpointPolicy::KeepOutput)?;
        same_bits(&run(CheckpointPolicy::KeepOutput)?, &kept)?;
        same_bits(&run(CheckpointPolicy::Recompute)?, &kept)?;
    }
    Ok(())
}

/// Two backward passes through one graph.
fn twice(device: &Device) -> CheckResult<()> {
    let attend = Attention::new(encke::Attention::builder().ranks(2)).map_err(to_text)?;
    let qkv = inputs(DType::F32, device)?;
    let q = Var::from_tensor(&qkv[0]).map_err(to_text)?;
    let out = attention(&q, &qkv[1], &qkv[2], &attend).map_err(to_text)?;
    let loss = out.sqr().and_then(|x| x.sum_all()).map_err(to_text)?;
    let mut gradients = Vec::new();
    for _ in 0..2 {
        let all = loss.backward().map_err(to_text)?;
        let gradient = all.get(&q).ok_or("q has no gradient")?;
        gradients.push(gradient.to_device(&Device::Cpu).map_err(to_text)?);
    }
    match distance(&gradients[1], &gradients[0]) {
        0.0 => Ok(()),
        apart => Err(format!("the second time is {apart:e} apart")),
    }
}

/// One attention shared by several threads.
fn many_threads(device: &Device) -> CheckResult<()> {
    let settings = encke::Attention::builder().pattern(Pattern::dense().causal(true));
    let attend = Attention::new(settings.ranks(2)).map_err(to_text)?;
    let qkv = inputs(DType::BF16, device)?;
    let run = || pass(&qkv, |q, k, v| attention(q, k, v, &attend));
    let alone = run()?;
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.collect()
    });
    for ended in together {
        let results = ended.map_err(|_| "a thread panicked")??;
        same_bits(&results, &alone)?;
    }
    Ok(())
}
