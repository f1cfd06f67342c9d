//! `longnet train`: a model, a text, a ring.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use encke::Cut;
use encke::explain::bytes;
use encke_candle::Attention;
use encke_cli::Verdict;
use encke_cli::number::count;
use encke_cli::output::OutputFile;
use encke_cli::terminal::{long_bar, note, say};

use crate::checkpoint::Read;
use crate::model::Sizes;
use crate::record::{self, Record};
use crate::settings::Settings;
use crate::text::Text;
use crate::training::Training;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet text story.txt --bytes 1M
  longnet train story.txt --checkpoint model.safetensors
      Four layers over 16384 bytes at a time, 300 steps; the model is kept.
  longnet train story.txt --ranks 4 --record p4.json
      The attention on a ring of four threads: the same losses, to rounding.
  longnet train story.txt --checkpoint model.safetensors --resume --ranks 2
      Go on where a run ended, on any ring.
  longnet train story.txt --dense --record dense.json
      Every byte sees all before it, to compare with.";

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

    /// Ranks that the attention is spread over, as threads.
    #[arg(long, default_value = "1", value_parser = count)]
    ranks: usize,

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

    /// What to go on from, if that was asked for and is the same run.
    pub fn resumed(&self, settings: &Settings) -> Result<Option<Read>> {
        let Some(path) = self.checkpoint.as_ref().filter(|_| self.resume) else {
            return Ok(None);
        };
        let read = Read::open(path)?;
        if read.told.settings != *settings {
            bail!(
                "{} was trained with other settings: {}; give the same ones (the ring may differ)",
                path.display(),
                serde_json::to_string(&read.told.settings)?
            );
        }
        Ok(Some(read))
    }

    /// The text.
    pub fn read_text(&self) -> Result<Text> {
        Text::read(&self.text, self.tokens)
    }

    /// The ring's cut: even work for every rank, since attention is causal.
    pub fn cut() -> Cut {
        Cut::Zigzag
    }

    /// Takes the steps that are left. Only one of several processes writes and speaks.
    pub fn carry_out(
        &self,
        mut training: Training<'_>,
        (ranks, processes): (usize, bool),
        speaks: bool,
    ) -> Result<()> {
        let record = match (&self.record, speaks) {
            (Some(path), true) => Some(OutputFile::create(path, &[("the text", &self.text)])?),
            _ => None,
        };
        let last = self.until.unwrap_or(self.steps).min(self.steps);
        let first = training.losses().len();
        let bar = match speaks {
            true => long_bar(last.saturating_sub(first)),
            false => indicatif::ProgressBar::hidden(),
        };
        let mut seconds = Vec::new();
        for step in first..last {
            let begin = Instant::now();
            let loss = training.step()?;
            let took = begin.elapsed().as_secs_f64();
            seconds.push(took);
            bar.inc(1);
            bar.set_message(format!(
                "loss {loss:.4}, {:.0} tokens/s, {} a rank",
                self.tokens as f64 / took,
                bytes(training.rank_bytes())
            ));
            if let (Some(path), true) = (&self.checkpoint, speaks)
                && ((step + 1) % self.every == 0 || step + 1 == last)
            {
                training.save(path)?;
            }
        }
        bar.finish_and_clear();
        if !speaks {
            return Ok(());
        }
        self.conclude(&training, &seconds, (ranks, processes))?;
        if let Some(output) = record {
            let record = Record::Training(record::Training {
                settings: self.settings()?,
                ranks,
                processes,
                weights: training.weights(),
                losses: training.losses().to_vec(),
                rank_bytes: training.rank_bytes(),
                seconds,
            });
            record.write(output)?;
        }
        Ok(())
    }

    /// Says what came of it.
    fn conclude(
        &self,
        training: &Training<'_>,
        seconds: &[f64],
        (ranks, processes): (usize, bool),
    ) -> Result<()> {
        let losses = training.losses();
        let (Some(first), Some(last)) = (losses.first(), losses.last()) else {
            return Ok(());
        };
        let who = match (ranks, processes) {
            (1, _) => "1 rank".to_string(),
            (ranks, false) => format!("{ranks} ranks"),
            (ranks, true) => format!("{ranks} processes"),
        };
        say(&format!(
            "{} weights, {} tokens, {who}: loss {first:.4} in step 1, {last:.6} in step {}\n",
            training.weights(),
            self.tokens,
            losses.len()
        ))?;
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        if let Some(median) = sorted.get(sorted.len() / 2) {
            note(&format!(
                "{median:.3} s a step, {:.0} tokens/s, {} a rank in attention",
                self.tokens as f64 / median,
                bytes(training.rank_bytes())
            ));
        }
        Ok(())
    }
}

/// Runs the command in this process.
pub fn run(options: &Options) -> Result<Verdict> {
    let settings = options.settings()?;
    let text = options.read_text()?;
    let resumed = options.resumed(&settings)?;
    let ring = encke::Attention::builder().pattern(settings.pattern()?);
    let attention = Attention::new(ring.ranks(options.ranks).sharding(Options::cut()))?;
    let rows = (0..settings.tokens).collect();
    let mut training = Training::new(settings, text, attention, rows, None)?;
    if let Some(from) = &resumed {
        training.resume(from)?;
    }
    options.carry_out(training, (options.ranks, false), true)?;
    Ok(Verdict::Fine)
}
