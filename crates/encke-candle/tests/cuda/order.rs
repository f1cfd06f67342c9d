//! Order between candle's stream and Encke's, memory that is freed and used again, and the same bits
//! however a pass is run.

use candle_core::{DType, Device, Tensor, Var};
use encke::{CheckpointPolicy, Pattern};
use encke_candle::{Attention, attention};

use crate::graph::{Check, Told, longnet, numbers, pass, same_bits, told};
use crate::plain::distance;
use crate::tally::Tally;

/// Steps that are enqueued without waiting.
const STEPS: usize = 40;

pub fn run(tally: &mut Tally, device: &Device) {
    // A stream of its own does not wait for the default one.
    let other = || Device::new_cuda_with_stream(0).map_err(told);
    let checks: [Check; 4] = [
        |device| hurried(device, 1),
        |device| hurried(device, 2),
        |device| hurried(device, 4),
        |device| hurried(device, 4),
    ];
    let checks = checks
        .into_iter()
        .enumerate()
        .map(|(at, check)| match at % 2 {
            0 => check(device),
            _ => check(&other()?),
        });
    tally.group("order between streams", checks);
    let checks: [Check; 3] = [policies, twice, many_threads];
    let checks = checks.into_iter().map(|check| check(device));
    tally.group("the same bits", checks);
}

/// Steps that follow one another without a word to the host, each on memory that the last has freed,
/// against the same steps with a pause after everything.
fn hurried(device: &Device, ranks: usize) -> Told<()> {
    let settings = encke::Attention::builder().pattern(longnet([64, 512], [1, 4]));
    let attend = Attention::new(settings.ranks(ranks)).map_err(told)?;
    let start = [
        numbers(1, [1, 512, 4, 64], DType::BF16, device)?,
        numbers(2, [1, 512, 2, 64], DType::BF16, device)?,
        numbers(3, [1, 512, 2, 64], DType::BF16, device)?,
    ];
    let run = |pauses: bool| -> candle_core::Result<Vec<Tensor>> {
        let pause = || match pauses {
            true => device.synchronize(),
            false => Ok(()),
        };
        let [mut q, mut k, mut v] = start.clone();
        let mut seen = Vec::new();
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
            // Bounded, and other numbers at every step.
            let next = |x: &Var| -> candle_core::Result<Tensor> {
                let gradient = gradients.get(x).ok_or_else(|| {
                    candle_core::Error::Msg("an argument without a gradient".into())
                })?;
                (x.as_tensor() * -0.9)? + (gradient.tanh()? * 0.5)?
            };
            (q, k, v) = (next(&vars[0])?, next(&vars[1])?, next(&vars[2])?);
            pause()?;
            seen.push(out.detach());
        }
        seen.extend([q, k, v]);
        Ok(seen)
    };
    let (slow, fast) = (run(true).map_err(told)?, run(false).map_err(told)?);
    for (step, (slow, fast)) in slow.iter().zip(&fast).enumerate() {
        let [slow, fast] = [slow, fast].map(|x| x.to_device(&Device::Cpu));
        let apart = distance(&fast.map_err(told)?, &slow.map_err(told)?);
        if apart != 0.0 {
            return Err(format!("{ranks} ranks: step {step} is {apart:e} apart"));
        }
    }
    Ok(())
}

fn inputs(dtype: DType, device: &Device) -> Told<[Tensor; 3]> {
    Ok([
        numbers(1, [2, 192, 4, 64], dtype, device)?,
        numbers(2, [2, 192, 2, 64], dtype, device)?,
        numbers(3, [2, 192, 2, 64], dtype, device)?,
    ])
}

/// Whatever is kept, and from run to run.
fn policies(device: &Device) -> Told<()> {
    for dtype in [DType::F32, DType::BF16] {
        let qkv = inputs(dtype, device)?;
        let run = |policy| {
            let settings = encke::Attention::builder().pattern(longnet([32, 192], [1, 3]));
            let attend = Attention::new(settings.ranks(2).checkpoint(policy)).map_err(told)?;
            pass(&qkv, |q, k, v| attention(q, k, v, &attend))
        };
        let kept = run(CheckpointPolicy::KeepOutput)?;
        same_bits(&run(CheckpointPolicy::KeepOutput)?, &kept)?;
        same_bits(&run(CheckpointPolicy::Recompute)?, &kept)?;
    }
    Ok(())
}

/// A graph that is gone back through twice.
fn twice(device: &Device) -> Told<()> {
    let attend = Attention::new(encke::Attention::builder().ranks(2)).map_err(told)?;
    let qkv = inputs(DType::F32, device)?;
    let q = Var::from_tensor(&qkv[0]).map_err(told)?;
    let out = attention(&q, &qkv[1], &qkv[2], &attend).map_err(told)?;
    let loss = out.sqr().and_then(|x| x.sum_all()).map_err(told)?;
    let mut gradients = Vec::new();
    for _ in 0..2 {
        let all = loss.backward().map_err(told)?;
        let gradient = all.get(&q).ok_or("q has no gradient")?;
        gradients.push(gradient.to_device(&Device::Cpu).map_err(told)?);
    }
    match distance(&gradients[1], &gradients[0]) {
        0.0 => Ok(()),
        apart => Err(format!("the second time is {apart:e} apart")),
    }
}

/// Layers that share one attention, on threads of their own.
fn many_threads(device: &Device) -> Told<()> {
    let settings = encke::Attention::builder().pattern(Pattern::dense().causal(true));
    let attend = Attention::new(settings.ranks(2)).map_err(told)?;
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
