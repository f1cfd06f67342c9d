//! `longnet sample`: what a trained model would write.
//!
//! Every byte is a forward pass over all that was written so far; nothing is kept between two of them.

use std::path::PathBuf;

use anyhow::{Result, bail};
use candle_core::D;
use clap::Args;
use encke::conformance::Random;
use encke_candle::Attention;
use encke_lab::Verdict;
use encke_lab::number::count;
use encke_lab::terminal::{bar, say};

use crate::adamw::AdamW;
use crate::checkpoint::Read;
use crate::model::LongNet;
use crate::weights::Weights;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet sample model.safetensors --prompt 'In the year '
  longnet sample model.safetensors --bytes 500 --temperature 0.5 --seed 7";

/// Options of the command.
#[derive(Debug, Args)]
pub struct Options {
    /// What `longnet train --checkpoint` kept.
    model: PathBuf,

    /// What the text begins with.
    #[arg(long, default_value = "\n")]
    prompt: String,

    /// Bytes to write.
    #[arg(long, default_value = "200", value_parser = count)]
    bytes: usize,

    /// Below 1 it is more careful, at 0 it always takes the likeliest byte.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,

    /// Where randomness begins.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.prompt.is_empty() {
        bail!("--prompt is empty; give it at least one byte to go on from");
    }
    if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
        bail!(
            "--temperature {} is below 0 or no number",
            options.temperature
        );
    }
    let read = Read::open(&options.model)?;
    let settings = &read.told.settings;
    let attention = Attention::new(encke::Attention::builder().pattern(settings.pattern()?))?;
    let weights = Weights::new(settings.seed);
    let model = LongNet::new(settings.sizes, &attention, &weights.builder())?;
    read.restore(&mut AdamW::new(&weights, 0.0)?)?;

    let mut random = Random::new(options.seed);
    let mut written: Vec<u32> = options.prompt.bytes().map(u32::from).collect();
    let begun = written.len();
    let progress = bar(options.bytes);
    for _ in 0..options.bytes {
        // A sequence is never longer than those it was trained on.
        let from = written.len().saturating_sub(settings.tokens);
        let next = likely(&model, &written[from..], options.temperature, &mut random)?;
        written.push(next);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let new: Vec<u8> = written[begun..].iter().map(|token| *token as u8).collect();
    say(&format!(
        "{}{}\n",
        options.prompt,
        String::from_utf8_lossy(&new)
    ))?;
    Ok(Verdict::Fine)
}

/// A byte that may follow.
fn likely(model: &LongNet, written: &[u32], temperature: f64, random: &mut Random) -> Result<u32> {
    let rows: Vec<usize> = (0..written.len()).collect();
    let rows = model.rows(&[written.to_vec()], &rows)?;
    let last = rows.narrow(1, written.len() - 1, 1)?.reshape((1, ()))?;
    let logits = model.logits(&last)?;
    if temperature == 0.0 {
        return Ok(logits.argmax(D::Minus1)?.to_vec1::<u32>()?[0]);
    }
    let weights = candle_nn::ops::softmax(&(logits / temperature)?, D::Minus1)?;
    let weights: Vec<f32> = weights.flatten_all()?.to_vec1()?;
    let mut left = (random.unit() + 1.0) / 2.0;
    for (byte, weight) in weights.iter().enumerate() {
        left -= f64::from(*weight);
        if left < 0.0 {
            return Ok(byte as u32);
        }
    }
    Ok(weights.len() as u32 - 1)
}
