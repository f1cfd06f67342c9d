//! `longnet sample`: samples text from a trained model.
//!
//! Every byte is a forward pass over the text so far; there is no KV cache.

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
use crate::checkpoint::CheckpointFile;
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
    /// A checkpoint of `longnet train`.
    model: PathBuf,

    /// Beginning of the text.
    #[arg(long, default_value = "\n")]
    prompt: String,

    /// Bytes to sample.
    #[arg(long, default_value = "200", value_parser = count)]
    bytes: usize,

    /// Softmax temperature; 0 always takes the most likely byte.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,

    /// Seed of the samples.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.prompt.is_empty() {
        bail!("--prompt is empty; give at least one byte");
    }
    if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
        bail!(
            "--temperature {} is negative or not finite",
            options.temperature
        );
    }
    let file = CheckpointFile::open(&options.model)?;
    let settings = &file.header.settings;
    let attention = Attention::new(encke::Attention::builder().pattern(settings.pattern()?))?;
    let weights = Weights::new(settings.seed);
    let model = LongNet::new(settings.sizes, &attention, &weights.builder())?;
    file.restore(&mut AdamW::new(&weights, 0.0)?)?;

    let mut random = Random::new(options.seed);
    let mut written: Vec<u32> = options.prompt.bytes().map(u32::from).collect();
    let begun = written.len();
    let progress = bar(options.bytes);
    for _ in 0..options.bytes {
        // The context is at most as long as the training sequences.
        let from = written.len().saturating_sub(settings.tokens);
        let next = sample_next(&model, &written[from..], options.temperature, &mut random)?;
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

/// Samples the next byte.
fn sample_next(
    model: &LongNet,
    written: &[u32],
    temperature: f64,
    random: &mut Random,
) -> Result<u32> {
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
