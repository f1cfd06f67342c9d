//! `longnet retrieval`: shows that the dilated pattern retrieves distant tokens and local segments
//! do not.
//!
//! Two models are trained on the same task with the same sequences. They differ in one thing: one
//! has a dilated branch over the sequence beside the local one.

mod learn;
mod task;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use encke_lab::Verdict;
use encke_lab::number::count;
use encke_lab::output::OutputFile;
use encke_lab::table::TextTable;
use encke_lab::terminal::{long_bar, note, say};

use learn::Curriculum;
pub use learn::{RetrievalPattern, RetrievalResult};
use task::VALUES;

use crate::record::{RetrievalRecord, RunRecord};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet retrieval
      A fact early in 32768 tokens, questions at their end; takes minutes on two cores.
  longnet retrieval --tokens 64k --ranks 2 --record retrieval.json
      Twice as far, on a ring of two, for `longnet report`.

Exit code 1 if the dilated model answers at most 95 % correctly, or the local one at least twice as
many as guessing.";

/// Options of the command.
#[derive(Debug, Args)]
pub struct Options {
    /// Tokens of the longest sequences.
    #[arg(long, default_value = "32k", value_parser = count)]
    tokens: usize,

    /// Tokens of a local segment.
    #[arg(long, default_value = "32", value_parser = count)]
    local: usize,

    /// Dilation of the branch that spans the sequence; also the number of heads.
    #[arg(long, default_value = "8", value_parser = count)]
    dilation: usize,

    /// Facts of a sequence. With more than one, keys must be matched, which takes a small model
    /// many more --steps.
    #[arg(long, default_value = "1", value_parser = count)]
    facts: usize,

    /// Most steps of each stage.
    #[arg(long, default_value = "400", value_parser = count)]
    steps: usize,

    /// Model width.
    #[arg(long, default_value = "64", value_parser = count)]
    width: usize,

    /// Questions of the test, at least.
    #[arg(long, default_value = "512", value_parser = count)]
    questions: usize,

    /// Ranks of the ring, as threads.
    #[arg(long, default_value = "1", value_parser = count)]
    ranks: usize,

    /// Peak learning rate.
    #[arg(long, default_value_t = 3e-3)]
    rate: f64,

    /// Seed of weights and sequences.
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// File for the result, for `longnet report`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

impl Options {
    fn curriculum(&self) -> Result<Curriculum> {
        let least = 2 * self.facts * self.local;
        if self.facts == 0 || self.facts > task::KEYS {
            bail!("--facts {} is not between 1 and {}", self.facts, task::KEYS);
        }
        if self.dilation == 0 || self.local == 0 {
            bail!("--dilation and --local must be at least 1");
        }
        if self.tokens < least || !self.tokens.is_multiple_of(self.local) {
            bail!(
                "--tokens {} is not a multiple of --local {} with room for {} facts and as many \
                 questions; use {least} or more",
                self.tokens,
                self.local,
                self.facts
            );
        }
        let curriculum = Curriculum {
            tokens: self.tokens,
            local: self.local,
            dilation: self.dilation,
            head_dim: 16,
            width: self.width,
            layers: 2,
            facts: self.facts,
            steps: self.steps,
            batch_tokens: 4096,
            rate: self.rate,
            seed: self.seed,
            ranks: self.ranks,
            examined: self.questions,
        };
        if curriculum.passage() > self.local {
            bail!(
                "--dilation {} needs local segments of at least {} tokens, not {}: a fact is \
                 repeated once for each phase",
                self.dilation,
                curriculum.passage(),
                self.local
            );
        }
        Ok(curriculum)
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let curriculum = options.curriculum()?;
    let record = options.record.as_ref();
    let record = record
        .map(|path| OutputFile::create(path, &[]))
        .transpose()?;
    let mut models: Vec<RetrievalResult> = Vec::new();
    let mut table = TextTable::new(
        0,
        ["model", "right", "of", "share", "nearest fact", "steps"],
    );
    for reach in [RetrievalPattern::Dilated, RetrievalPattern::Local] {
        let begin = Instant::now();
        let fixed_steps = models.first().map(|first| first.steps.clone());
        let most = curriculum.stages().len() * options.steps;
        let bar = long_bar(
            fixed_steps
                .as_ref()
                .map_or(most, |steps| steps.iter().sum()),
        );
        let result = curriculum.train(reach, fixed_steps.as_deref(), &bar)?;
        bar.finish_and_clear();
        let name = match reach {
            RetrievalPattern::Dilated => "local + dilated",
            RetrievalPattern::Local => "local only",
        };
        note(&format!(
            "{name}: {:.1} % after {} steps, {:.0} s",
            100.0 * result.share(),
            result.steps.iter().sum::<usize>(),
            begin.elapsed().as_secs_f64()
        ));
        table.row([
            name.to_string(),
            result.right.to_string(),
            result.asked.to_string(),
            format!("{:.1} %", 100.0 * result.share()),
            format!("{} tokens before", result.shortest),
            result.steps.iter().sum::<usize>().to_string(),
        ]);
        models.push(result);
    }
    let chance = 1.0 / VALUES as f64;
    let shown = models.iter().all(|result| match result.reach {
        RetrievalPattern::Dilated => result.share() > 0.95,
        RetrievalPattern::Local => result.share() < 2.0 * chance,
    });
    if let Some(output) = record {
        let retrieval = RetrievalRecord {
            tokens: options.tokens,
            local: options.local,
            dilation: options.dilation,
            chance,
            models,
        };
        RunRecord::Retrieval(retrieval).write(output)?;
    }
    say(&format!(
        "{} tokens, local segments of {}, dilation {}; by guessing: {:.1} %\n{table}",
        options.tokens,
        options.local,
        options.dilation,
        100.0 * chance
    ))?;
    match shown {
        true => Ok(Verdict::Fine),
        false => {
            note(
                "longnet: the models do not differ as expected; try more --steps or another --seed",
            );
            Ok(Verdict::CheckFailed)
        }
    }
}
