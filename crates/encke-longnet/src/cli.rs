//! The command line: its commands and their help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use encke_lab::number::count;

use crate::{report, retrieval, sample, train};

const ABOUT: &str = "Trains a LongNet: a byte-level language model with dilated ring attention.

An example of Encke in a model, in Rust, with candle. Losses do not depend on the number of ranks;
the retrieval task shows that only the dilated branches reach distant tokens.";

const EXAMPLES: &str = "\
Examples:
  longnet text story.txt --bytes 1M
      A text to train on.
  longnet train story.txt --checkpoint model.safetensors --record p1.json
  longnet train story.txt --ranks 4 --record p4.json
      The same training on one rank and on a ring of four.
  longnet sample model.safetensors --prompt 'In the year '
      Text sampled from the model.
  longnet retrieval --record retrieval.json
      A task that only a model with long range solves.
  longnet report report.html p1.json p4.json retrieval.json
      All runs on one page.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.
Exit codes: 0 success, 1 a check failed, 2 bad input or any other error.";

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "longnet", version, about = ABOUT, after_help = EXAMPLES)]
pub struct LongnetCli {
    /// The command.
    #[command(subcommand)]
    pub command: LongnetCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum LongnetCommand {
    /// Generate a text to train on
    #[command(after_help = TEXT_EXAMPLES)]
    Text(TextOptions),
    /// Train a model on a text
    #[command(after_help = train::EXAMPLES, allow_negative_numbers = true)]
    Train(train::Options),
    /// Sample text from a trained model
    #[command(after_help = sample::EXAMPLES, allow_negative_numbers = true)]
    Sample(sample::Options),
    /// Show that the dilated pattern solves a task that local segments cannot
    #[command(after_help = retrieval::EXAMPLES, allow_negative_numbers = true)]
    Retrieval(retrieval::Options),
    /// Draw recorded runs on one page
    #[command(after_help = report::EXAMPLES)]
    Report(report::Options),
}

const TEXT_EXAMPLES: &str = "\
Examples:
  longnet text story.txt --bytes 1M
  longnet text other.txt --bytes 64k --seed 2";

/// Options of `longnet text`.
#[derive(Debug, Args)]
pub struct TextOptions {
    /// The output file.
    pub output: PathBuf,

    /// Length of the text, at least.
    #[arg(long, default_value = "1M", value_parser = count)]
    pub bytes: usize,

    /// Seed of the text.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}
