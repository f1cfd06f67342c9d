//! Invalid calls are refused with a message that names the problem. (candle passes on only the
//! text.)

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use encke::{CheckpointPolicy, MixingGradient, Mode, OffsetRule, Pattern};
use encke_candle::{Attention, attention};

use crate::graph::{CheckResult, DeviceCheck, random_on, to_text};
use crate::tally::Tally;

pub fn run(tally: &mut Tally, device: &Device) {
    let checks: [DeviceCheck; 3] = [devices, shapes, settings];
    let checks = checks.into_iter().map(|check| check(device));
    tally.group("refusals", checks);
}

/// Fails unless the call was refused with `message` in its text.
fn refused(got: candle_core::Result<Tensor>, message: &str) -> CheckResult<()> {
    let Err(error) = got else {
        return Err(format!("not refused, expected {message:?}"));
    };
    let text = error.to_string();
    match text.contains(message) {
        true => Ok(()),
        false => Err(format!("{message:?} is not in {text:?}")),
    }
}

fn devices(device: &Device) -> CheckResult<()> {
    let attend = Attention::new(encke::Attention::builder()).map_err(to_text)?;
    let gpu = random_on(1, [1, 8, 2, 8], DType::F32, device)?;
    let cpu = random_on(1, [1, 8, 2, 8], DType::F32, &Device::Cpu)?;
    let message = "k is on the CPU, but q is on cuda:0";
    refused(attention(&gpu, &cpu, &gpu, &attend), message)?;
    let message = "v is on cuda:0, but q is on the CPU";
    refused(attention(&cpu, &cpu, &gpu, &attend), message)?;
    let host = encke::Attention::builder().build().map_err(to_text)?;
    let ring = Attention::from_backend(Arc::new(host));
    let message = "this attention was made of a host backend";
    refused(attention(&gpu, &gpu, &gpu, &ring), message)?;
    attention(&cpu, &cpu, &cpu, &attend).map_err(to_text)?;
    Ok(())
}

fn shapes(device: &Device) -> CheckResult<()> {
    let attend = Attention::new(encke::Attention::builder()).map_err(to_text)?;
    let x = random_on(1, [1, 8, 4, 8], DType::F32, device)?;
    let whole = Tensor::zeros((1, 8, 4, 8), DType::U32, device).map_err(to_text)?;
    refused(attention(&x, &whole, &x, &attend), "k holds U32")?;
    let shorter = x.narrow(1, 0, 7).map_err(to_text)?;
    refused(attention(&x, &x, &shorter, &attend), "[1, 7, 4, 8]")?;
    let three = x.narrow(2, 0, 3).map_err(to_text)?;
    let message = "4 query heads cannot be grouped over 3";
    refused(attention(&x, &three, &three, &attend), message)?;
    let narrow = x.to_dtype(DType::BF16).map_err(to_text)?;
    refused(attention(&x, &x, &narrow, &attend), "bf16")?;
    Ok(())
}

fn settings(device: &Device) -> CheckResult<()> {
    let x = random_on(1, [1, 32, 4, 8], DType::F32, device)?;
    let refuses = |settings: encke::Builder, message: &str| {
        let attend = Attention::new(settings).map_err(to_text)?;
        refused(attention(&x, &x, &x, &attend), message)
    };
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let pattern = Pattern::dilated(&[8, 32], &[1, 4], mode).map_err(to_text)?;
    let builder = encke::Attention::builder;
    refuses(builder().pattern(pattern), "combined on the host")?;
    refuses(builder().ranks(3).redundancy(1), "use redundancy 0")?;
    refuses(
        builder().checkpoint(CheckpointPolicy::Offload),
        "a checkpoint in a file",
    )
}
