//! The command line: its commands and their help.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use encke_lab::number::count;

use crate::{report, retrieval, sample, train};

const ABOUT: &str = "A LongNet that learns: bytes, dilated attention, a ring of any size.

An example of Encke in a model, in Rust, with candle. Losses do not depend on how many ranks the
attention ran on; what is far away is found by dilation alone.";

const EXAMPLES: &str = "\
Examples:
  longnet text story.txt --bytes 1M
      A text to learn from.
  longnet train story.txt --checkpoint model.safetensors --record p1.json
  longnet train story.txt --ranks 4 --record p4.json
      The same training on one rank and on a ring of four.
  longnet sample model.safetensors --prompt 'In the year '
      What it has learned to write.
  longnet retrieval --record retrieval.json
      A task that only a model with long range solves.
  longnet report report.html p1.json p4.json retrieval.json
      All of it on one page.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.
Exit codes: 0 success, 1 a check failed, 2 bad input or any other error.";

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "longnet", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write a text to learn from
    #[command(after_help = TEXT_EXAMPLES)]
    Text(TextOptions),
    /// Train a model on a text
    #[command(after_help = train::EXAMPLES, allow_negative_numbers = true)]
    Train(train::Options),
    /// Let a trained model write
    #[command(after_help = sample::EXAMPLES, allow_negative_numbers = true)]
    Sample(sample::Options),
    /// Show that the dilated pattern carries what local segments cannot
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
    /// Where the text goes.
    pub output: PathBuf,

    /// How long it is, at least.
    #[arg(long, default_value = "1M", value_parser = count)]
    pub bytes: usize,

    /// Which text.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}
