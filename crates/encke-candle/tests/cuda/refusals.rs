//! What is refused, and that the words name what was wrong. (candle hands on an error's words only.)

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use encke::{CheckpointPolicy, MixingGradient, Mode, OffsetRule, Pattern};
use encke_candle::{Attention, attention};

use crate::graph::{Check, Told, numbers, told};
use crate::tally::Tally;

pub fn run(tally: &mut Tally, device: &Device) {
    let checks: [Check; 3] = [places, shapes, settings];
    let checks = checks.into_iter().map(|check| check(device));
    tally.group("refusals", checks);
}

/// A refusal must be there, with its words.
fn refused(got: candle_core::Result<Tensor>, words: &str) -> Told<()> {
    let Err(error) = got else {
        return Err(format!("not refused, with {words:?}"));
    };
    let said = error.to_string();
    match said.contains(words) {
        true => Ok(()),
        false => Err(format!("{words:?} is not in {said:?}")),
    }
}

fn places(device: &Device) -> Told<()> {
    let attend = Attention::new(encke::Attention::builder()).map_err(told)?;
    let there = numbers(1, [1, 8, 2, 8], DType::F32, device)?;
    let here = numbers(1, [1, 8, 2, 8], DType::F32, &Device::Cpu)?;
    let words = "k is on the CPU, but q is on cuda:0";
    refused(attention(&there, &here, &there, &attend), words)?;
    let words = "v is on cuda:0, but q is on the CPU";
    refused(attention(&here, &here, &there, &attend), words)?;
    let host = encke::Attention::builder().build().map_err(told)?;
    let ring = Attention::on(Arc::new(host));
    let words = "this attention was made of a ring of the host";
    refused(attention(&there, &there, &there, &ring), words)?;
    attention(&here, &here, &here, &attend).map_err(told)?;
    Ok(())
}

fn shapes(device: &Device) -> Told<()> {
    let attend = Attention::new(encke::Attention::builder()).map_err(told)?;
    let x = numbers(1, [1, 8, 4, 8], DType::F32, device)?;
    let whole = Tensor::zeros((1, 8, 4, 8), DType::U32, device).map_err(told)?;
    refused(attention(&x, &whole, &x, &attend), "k holds U32")?;
    let shorter = x.narrow(1, 0, 7).map_err(told)?;
    refused(attention(&x, &x, &shorter, &attend), "[1, 7, 4, 8]")?;
    let three = x.narrow(2, 0, 3).map_err(told)?;
    let words = "4 query heads cannot be grouped over 3";
    refused(attention(&x, &three, &three, &attend), words)?;
    let narrow = x.to_dtype(DType::BF16).map_err(told)?;
    refused(attention(&x, &x, &narrow, &attend), "bf16")?;
    Ok(())
}

fn settings(device: &Device) -> Told<()> {
    let x = numbers(1, [1, 32, 4, 8], DType::F32, device)?;
    let refuses = |settings: encke::Builder, words: &str| {
        let attend = Attention::new(settings).map_err(told)?;
        refused(attention(&x, &x, &x, &attend), words)
    };
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let pattern = Pattern::dilated(&[8, 32], &[1, 4], mode).map_err(told)?;
    let builder = encke::Attention::builder;
    refuses(builder().pattern(pattern), "combined on the host")?;
    refuses(builder().ranks(3).redundancy(1), "use redundancy 0")?;
    refuses(
        builder().checkpoint(CheckpointPolicy::Offload),
        "a checkpoint in a file",
    )
}
