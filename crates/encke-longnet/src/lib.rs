//! `longnet`: an example of Encke in a model.
//!
//! Nothing of attention is here: it is `encke-candle`'s. What is here is a model around it, its training,
//! and a task that shows what the pattern is good for. The decision that shaped it: a loss is a function of
//! settings, text and step, so that rings, processes and resumed runs can be held against one another.
#![forbid(unsafe_code)]

mod adamw;
mod checkpoint;
mod cli;
mod course;
mod cross_entropy;
mod gradients;
mod model;
#[cfg(feature = "mpi")]
mod processes;
mod rank;
mod record;
mod report;
mod retrieval;
mod sample;
mod settings;
mod text;
mod threads;
mod train;
mod training;
mod weights;

use std::ffi::OsString;

use anyhow::Result;
use encke_lab::Verdict;
use encke_lab::output::OutputFile;
use encke_mpi::launcher::LaunchedProcess;

use cli::{Cli, Command, TextOptions};

/// Does what the words of a command line say, and returns its exit code.
pub fn command(words: impl IntoIterator<Item = OsString>) -> u8 {
    encke_lab::program("longnet", words, run, run_together)
}

fn run(cli: Cli) -> Result<Verdict> {
    match cli.command {
        Command::Text(options) => text(&options),
        Command::Train(options) => train::run(&options),
        Command::Sample(options) => sample::run(&options),
        Command::Retrieval(options) => retrieval::run(&options),
        Command::Report(options) => report::run(&options),
    }
}

/// The command as one of several processes.
#[cfg(feature = "mpi")]
fn run_together(cli: Cli, place: &LaunchedProcess) -> Result<Verdict> {
    processes::run(cli, place)
}

/// Without MPI, each of them would do all of the work, and write the same file.
#[cfg(not(feature = "mpi"))]
fn run_together(_: Cli, place: &LaunchedProcess) -> Result<Verdict> {
    encke_lab::without_mpi("longnet", place)
}

fn text(options: &TextOptions) -> Result<Verdict> {
    let mut output = OutputFile::create(&options.output, &[])?;
    let text = text::chronicle(options.bytes, options.seed);
    output.write(|to| to.write_all(text.as_bytes()))?;
    output.keep()?;
    Ok(Verdict::Fine)
}
