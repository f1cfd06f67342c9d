//! `longnet train`: a model, a text, a ring.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke_candle::Attention;
use encke_lab::Verdict;
use encke_lab::number::count;

use crate::course::{Course, Ready, Ring};
use crate::model::Sizes;
use crate::settings::Settings;
use crate::threads;
use crate::training::Training;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet text story.txt --bytes 1M
  longnet train story.txt --checkpoint model.safetensors
      Four layers over 16384 bytes at a time, 300 steps; the model is kept.
  longnet train story.txt --ranks 4 --record p4.json
      A ring of four threads, each with a quarter of the rows: the same losses, to rounding.
  longnet train story.txt --checkpoint model.safetensors --resume --ranks 2
      Go on where a run ended, on any ring.
  longnet train story.txt --dense --record dense.json
      Every byte sees all before it, to compare with.
  mpirun -n 4 longnet train story.txt --checkpoint model.safetensors
      The ring as four processes: the bits of four threads. Needs --features mpi to build.";

/// Options of the command.
#[derive(Debug, Args)]
pub struct Options {
    /// Any file; its bytes are the tokens.
    text: PathBuf,

    /// Tokens of a sequence; a step is one sequence.
    #[arg(long, default_value = "16k", value_parser = count)]
    tokens: usize,

    /// Steps in all.
    #[arg(long, default_value = "300", value_parser = count)]
    steps: usize,

    /// Stop after this step, though the schedule goes on to --steps.
    #[arg(long, value_name = "STEP", value_parser = count)]
    until: Option<usize>,

    /// Ranks of the ring, as threads [default: 1; under mpirun each process is a rank].
    #[arg(long, value_parser = count)]
    ranks: Option<usize>,

    #[command(flatten)]
    model: ModelOptions,

    /// The highest rate of learning.
    #[arg(long, default_value_t = 3e-3)]
    rate: f64,

    /// Where randomness begins.
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Where the model is kept.
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,

    /// Steps between two checkpoints; the last step always has one.
    #[arg(long, default_value = "100", value_name = "STEPS", value_parser = count)]
    every: usize,

    /// Go on where the checkpoint ends.
    #[arg(long, requires = "checkpoint")]
    resume: bool,

    /// Where losses and times are written down, for `longnet report`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// The model.
#[derive(Debug, Args)]
struct ModelOptions {
    /// Layers.
    #[arg(long, default_value = "4", value_parser = count)]
    layers: usize,

    /// Numbers of a row.
    #[arg(long, default_value = "64", value_parser = count)]
    width: usize,

    /// Heads.
    #[arg(long, default_value = "4", value_parser = count)]
    heads: usize,

    /// Heads of keys and values [default: as many as heads].
    #[arg(long, value_parser = count)]
    kv_heads: Option<usize>,

    /// Bytes that a row begins with: its own, and those before it.
    #[arg(long, default_value = "4", value_parser = count)]
    recent: usize,

    /// Segment length of each branch [default: LongNet's for this length].
    #[arg(long, value_name = "W1,W2,...", value_delimiter = ',', value_parser = count, conflicts_with = "dense")]
    segment_lengths: Vec<usize>,

    /// Dilation rate of each branch; as many as segment lengths.
    #[arg(long, value_name = "R1,R2,...", value_delimiter = ',', value_parser = count, conflicts_with = "dense")]
    dilation_rates: Vec<usize>,

    /// Dense attention instead.
    #[arg(long)]
    dense: bool,
}

impl Options {
    /// Everything that the losses depend on, or what does not go together.
    pub fn settings(&self) -> Result<Settings> {
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
            bail!("--width {width} cannot be shared by --heads {heads}; the heads must divide it");
        }
        let (segment_lengths, dilation_rates) = match (
            self.model.dense,
            self.model.segment_lengths.is_empty() && self.model.dilation_rates.is_empty(),
        ) {
            (true, _) => (Vec::new(), Vec::new()),
            (false, true) => Settings::longnet(self.tokens),
            (false, false) => (
                self.model.segment_lengths.clone(),
                self.model.dilation_rates.clone(),
            ),
        };
        let settings = Settings {
            sizes: Sizes {
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
        };
        if !(self.rate > 0.0 && self.rate.is_finite()) {
            bail!("--rate {} is no rate; give a number above 0", self.rate);
        }
        settings.pattern()?;
        Ok(settings)
    }

    /// The ranks that were asked for, if any number was.
    #[cfg(feature = "mpi")]
    pub fn ranks(&self) -> Option<usize> {
        self.ranks
    }

    /// What the steps are, and what becomes of them.
    pub fn course(&self) -> Course<'_> {
        Course {
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
    let (settings, course) = (options.settings()?, options.course());
    match options.ranks.unwrap_or(1) {
        1 => alone(settings, &course)?,
        ranks => threads::train(&settings, &course, ranks)?,
    }
    Ok(Verdict::Fine)
}

fn alone(settings: Settings, course: &Course<'_>) -> Result<()> {
    let ring = encke::Attention::builder().pattern(settings.pattern()?);
    let Ready {
        text,
        resumed,
        record,
    } = course.prepare(&settings, true)?;
    let rows = (0..settings.tokens).collect();
    let mut training = Training::new(settings, text, Attention::new(ring)?, rows, None)?;
    if let Some(from) = &resumed {
        training.resume(from)?;
    }
    let seconds = course.take(&mut training, true)?;
    let ring = Ring {
        ranks: 1,
        processes: false,
        rank_bytes: training.rank_bytes(),
    };
    course.conclude(&training, seconds, &ring, record)
}
