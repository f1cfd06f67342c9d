//! `longnet train`: its options, and training on one rank.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke::Bits;
use encke_candle::Attention;
use encke_lab::Verdict;
use encke_lab::number::count;

use crate::model::ModelConfig;
use crate::settings::TrainingConfig;
use crate::threads;
use crate::trainer::Trainer;
use crate::training_run::{RunInputs, TrainingRing, TrainingRun};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet text story.txt --bytes 1M
  longnet train story.txt --checkpoint model.safetensors
      Four layers, sequences of 16384 bytes, 300 steps; saves the model.
  longnet train story.txt --ranks 4 --record p4.json
      A ring of four threads with a quarter of the rows each: the same losses, to rounding.
  longnet train story.txt --checkpoint model.safetensors --resume --ranks 2
      Resumes a run, on any ring.
  longnet train story.txt --dense --record dense.json
      Dense attention, for comparison.
  longnet train story.txt --ranks 4 --bits invariant:128 --record same.json
      The same losses on 1, 2 and 4 ranks, bit for bit.
  mpirun -n 4 longnet train story.txt --checkpoint model.safetensors
      A ring of four processes, with the bits of four threads. Build with --features mpi.";

/// Options of the command.
#[derive(Debug, Args)]
pub struct Options {
    /// The text: any file; its bytes are the tokens.
    text: PathBuf,

    /// Tokens of a sequence; a step is one sequence.
    #[arg(long, default_value = "16k", value_parser = count)]
    tokens: usize,

    /// Steps of the learning rate schedule.
    #[arg(long, default_value = "300", value_parser = count)]
    steps: usize,

    /// Stop after this step, before the end of the schedule.
    #[arg(long, value_name = "STEP", value_parser = count)]
    until: Option<usize>,

    /// Ranks of the ring, as threads [default: 1; under mpirun each process is a rank].
    #[arg(long, value_parser = count)]
    ranks: Option<usize>,

    #[command(flatten)]
    model: ModelOptions,

    /// Peak learning rate.
    #[arg(long, default_value_t = 3e-3)]
    rate: f64,

    /// Seed of weights and sequences.
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// What the bits of the losses depend on: planned (the ring, the fastest), or invariant, or
    /// invariant:TILE (the same losses on every ring, bit for bit) [default: planned].
    #[arg(long, value_name = "WHAT")]
    bits: Option<Bits>,

    /// The checkpoint file.
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,

    /// Steps between two checkpoints; the last step always writes one.
    #[arg(long, default_value = "100", value_name = "STEPS", value_parser = count)]
    every: usize,

    /// Resume from the checkpoint.
    #[arg(long, requires = "checkpoint")]
    resume: bool,

    /// File for losses and times, for `longnet report`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// The model.
#[derive(Debug, Args)]
struct ModelOptions {
    /// Layers.
    #[arg(long, default_value = "4", value_parser = count)]
    layers: usize,

    /// Model width.
    #[arg(long, default_value = "64", value_parser = count)]
    width: usize,

    /// Query heads.
    #[arg(long, default_value = "4", value_parser = count)]
    heads: usize,

    /// Key and value heads [default: as many as heads].
    #[arg(long, value_parser = count)]
    kv_heads: Option<usize>,

    /// Tokens whose embeddings a row starts with: its own, and those before it.
    #[arg(long, default_value = "4", value_parser = count)]
    recent: usize,

    /// Segment length of each branch [default: LongNet's for this length].
    #[arg(long, value_name = "W1,W2,...", value_delimiter = ',', value_parser = count)]
    #[arg(conflicts_with = "dense")]
    segment_lengths: Vec<usize>,

    /// Dilation rate of each branch; as many as segment lengths.
    #[arg(long, value_name = "R1,R2,...", value_delimiter = ',', value_parser = count)]
    #[arg(conflicts_with = "dense")]
    dilation_rates: Vec<usize>,

    /// Dense attention.
    #[arg(long)]
    dense: bool,
}

impl Options {
    /// The settings, or an error for options that do not fit together.
    pub fn settings(&self) -> Result<TrainingConfig> {
        let ModelOptions {
            layers,
            width,
            heads,
            recent,
            ..
        } = self.model;
        for (option, number) in [
            ("--tokens", self.tokens),
            ("--layers", layers),
            ("--width", width),
            ("--heads", heads),
            ("--recent", recent),
            ("--every", self.every),
            ("--steps", self.steps),
        ] {
            if number == 0 {
                bail!("{option} is 0; it must be at least 1");
            }
        }
        if !width.is_multiple_of(heads) {
            bail!("--width {width} is not a multiple of --heads {heads}");
        }
        let (segment_lengths, dilation_rates) = match (
            self.model.dense,
            self.model.segment_lengths.is_empty() && self.model.dilation_rates.is_empty(),
        ) {
            (true, _) => (Vec::new(), Vec::new()),
            (false, true) => TrainingConfig::longnet(self.tokens),
            (false, false) => (
                self.model.segment_lengths.clone(),
                self.model.dilation_rates.clone(),
            ),
        };
        let settings = TrainingConfig {
            sizes: ModelConfig {
                symbols: 256,
                width,
                layers,
                heads,
                kv_heads: self.model.kv_heads.unwrap_or(heads),
                head_dim: width / heads,
                recent,
            },
            tokens: self.tokens,
            segment_lengths,
            dilation_rates,
            rate: self.rate,
            steps: self.steps,
            seed: self.seed,
            bits: self.bits.unwrap_or_default().to_string(),
        };
        if !(self.rate > 0.0 && self.rate.is_finite()) {
            bail!(
                "--rate {} is not a learning rate; give a number above 0",
                self.rate
            );
        }
        settings.pattern()?;
        Ok(settings)
    }

    /// The number of ranks, if given.
    #[cfg(feature = "mpi")]
    pub fn ranks(&self) -> Option<usize> {
        self.ranks
    }

    /// Files and steps of the run.
    pub fn training_run(&self) -> TrainingRun<'_> {
        TrainingRun {
            text: &self.text,
            last: self.until.unwrap_or(self.steps).min(self.steps),
            every: self.every,
            checkpoint: self.checkpoint.as_deref(),
            resume: self.resume,
            record: self.record.as_deref(),
        }
    }
}

/// Runs the command in this process.
pub fn run(options: &Options) -> Result<Verdict> {
    let (settings, run) = (options.settings()?, options.training_run());
    match options.ranks.unwrap_or(1) {
        1 => train_alone(settings, &run)?,
        ranks => threads::train(&settings, &run, ranks)?,
    }
    Ok(Verdict::Fine)
}

fn train_alone(settings: TrainingConfig, run: &TrainingRun<'_>) -> Result<()> {
    let ring = encke::Attention::builder().pattern(settings.pattern()?);
    let ring = ring.bits(settings.bits()?);
    let RunInputs {
        text,
        resumed,
        record,
    } = run.prepare(&settings, true)?;
    let rows = ((0..settings.tokens).collect(), settings.blocks(None)?);
    let (attention, resumed) = (Attention::new(ring)?, resumed.as_ref());
    let mut trainer = Trainer::new(settings, text, attention, rows, None, resumed)?;
    let seconds = run.take_steps(&mut trainer, true)?;
    let ring = TrainingRing {
        ranks: 1,
        processes: false,
        rank_bytes: trainer.rank_bytes(),
    };
    run.finish(&trainer, seconds, &ring, record)
}
