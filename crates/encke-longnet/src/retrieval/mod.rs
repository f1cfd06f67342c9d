//! `longnet retrieval`: evidence that the dilated pattern carries what local segments cannot.
//!
//! Two models learn the same task from the same sequences. They differ in one thing: whether a branch
//! that spans the sequence stands beside the local one.

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

use learn::Lessons;
pub use learn::{Learned, Reach};
use task::VALUES;

use crate::record::{Record, Retrieval};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet retrieval
      A fact early in 32768 tokens, questions at their end; minutes on two cores.
  longnet retrieval --tokens 64k --ranks 2 --record retrieval.json
      Twice as far, on a ring of two, for `longnet report`.

Exit code 1 where the dilated model answers 95 % or fewer, or the local one more than twice as many
as by guessing.";

/// Options of the command.
#[derive(Debug, Args)]
pub struct Options {
    /// Tokens of the longest sequences.
    #[arg(long, default_value = "32k", value_parser = count)]
    tokens: usize,

    /// Tokens of a local segment.
    #[arg(long, default_value = "32", value_parser = count)]
    local: usize,

    /// Dilation of the branch that spans the sequence; there are as many heads.
    #[arg(long, default_value = "8", value_parser = count)]
    dilation: usize,

    /// Facts of a sequence. With more than one, keys have to be matched as well, which takes a small
    /// model many more --steps.
    #[arg(long, default_value = "1", value_parser = count)]
    facts: usize,

    /// Steps at most for each length.
    #[arg(long, default_value = "400", value_parser = count)]
    steps: usize,

    /// Numbers of a row.
    #[arg(long, default_value = "64", value_parser = count)]
    width: usize,

    /// Questions of the examination at least.
    #[arg(long, default_value = "512", value_parser = count)]
    questions: usize,

    /// Ranks that the attention is spread over, as threads.
    #[arg(long, default_value = "1", value_parser = count)]
    ranks: usize,

    /// The highest rate of learning.
    #[arg(long, default_value_t = 3e-3)]
    rate: f64,

    /// Where randomness begins.
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Where the result is written down, for `longnet report`.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

impl Options {
    fn lessons(&self) -> Result<Lessons> {
        let least = 2 * self.facts * self.local;
        if self.facts == 0 || self.facts > task::KEYS {
            bail!("--facts {} is not between 1 and {}", self.facts, task::KEYS);
        }
        if self.dilation == 0 || self.local == 0 {
            bail!("--dilation and --local must be at least 1");
        }
        if self.tokens < least || !self.tokens.is_multiple_of(self.local) {
            bail!(
                "--tokens {} is no multiple of --local {} that has room for {} facts and as many \
                 questions; use {least} or more",
                self.tokens,
                self.local,
                self.facts
            );
        }
        let lessons = Lessons {
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
        if lessons.passage() > self.local {
            bail!(
                "--dilation {} needs local segments of at least {} tokens, not {}: a fact is said once \
                 for each phase",
                self.dilation,
                lessons.passage(),
                self.local
            );
        }
        Ok(lessons)
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let lessons = options.lessons()?;
    let record = options.record.as_ref();
    let record = record
        .map(|path| OutputFile::create(path, &[]))
        .transpose()?;
    let mut models: Vec<Learned> = Vec::new();
    let mut table = TextTable::new(
        0,
        ["model", "right", "of", "share", "nearest fact", "steps"],
    );
    for reach in [Reach::Dilated, Reach::Local] {
        let begin = Instant::now();
        let given = models.first().map(|first| first.steps.clone());
        let most = lessons.stages().len() * options.steps;
        let bar = long_bar(given.as_ref().map_or(most, |given| given.iter().sum()));
        let learned = lessons.learn(reach, given.as_deref(), &bar)?;
        bar.finish_and_clear();
        let name = match reach {
            Reach::Dilated => "local + dilated",
            Reach::Local => "local only",
        };
        note(&format!(
            "{name}: {:.1} % after {} steps, {:.0} s",
            100.0 * learned.share(),
            learned.steps.iter().sum::<usize>(),
            begin.elapsed().as_secs_f64()
        ));
        table.row([
            name.to_string(),
            learned.right.to_string(),
            learned.asked.to_string(),
            format!("{:.1} %", 100.0 * learned.share()),
            format!("{} tokens before", learned.shortest),
            learned.steps.iter().sum::<usize>().to_string(),
        ]);
        models.push(learned);
    }
    let chance = 1.0 / VALUES as f64;
    say(&format!(
        "{} tokens, local segments of {}, dilation {}; by guessing: {:.1} %\n{table}",
        options.tokens,
        options.local,
        options.dilation,
        100.0 * chance
    ))?;
    let shown = models.iter().all(|learned| match learned.reach {
        Reach::Dilated => learned.share() > 0.95,
        Reach::Local => learned.share() < 2.0 * chance,
    });
    if let Some(output) = record {
        let retrieval = Retrieval {
            tokens: options.tokens,
            local: options.local,
            dilation: options.dilation,
            chance,
            models,
        };
        Record::Retrieval(retrieval).write(output)?;
    }
    match shown {
        true => Ok(Verdict::Fine),
        false => {
            note(
                "longnet: the models do not differ as they should; more --steps, or another --seed?",
            );
            Ok(Verdict::CheckFailed)
        }
    }
}
