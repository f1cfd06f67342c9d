//! `longnet`: an example of Encke in a model.
//!
//! A model around `encke-candle`'s attention, its training, and a task that needs the dilated
//! pattern. The decision that shaped it: a loss is a function of settings, text and step, so that
//! rings, processes and resumed runs can be compared with one another.
#![forbid(unsafe_code)]

mod adamw;
mod checkpoint;
mod cli;
mod cross_entropy;
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
mod trainer;
mod training_run;
mod weights;

use std::ffi::OsString;

use anyhow::Result;
use encke_lab::Verdict;
use encke_lab::output::OutputFile;
use encke_mpi::launcher::LaunchedProcess;

use cli::{LongnetCli, LongnetCommand, TextOptions};

/// Runs a command line, and returns its exit code.
pub fn command(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    encke_lab::program("longnet", arguments, run, run_together)
}

fn run(cli: LongnetCli) -> Result<Verdict> {
    match cli.command {
        LongnetCommand::Text(options) => text(&options),
        LongnetCommand::Train(options) => train::run(&options),
        LongnetCommand::Sample(options) => sample::run(&options),
        LongnetCommand::Retrieval(options) => retrieval::run(&options),
        LongnetCommand::Report(options) => report::run(&options),
    }
}

/// The command as one of several processes.
#[cfg(feature = "mpi")]
fn run_together(cli: Result<LongnetCli>, place: &LaunchedProcess) -> Result<Verdict> {
    processes::run(cli, place)
}

/// Without MPI each process would do all of the work and write the same file, so this is an error.
#[cfg(not(feature = "mpi"))]
fn run_together(_: Result<LongnetCli>, place: &LaunchedProcess) -> Result<Verdict> {
    encke_lab::without_mpi("longnet", place)
}

fn text(options: &TextOptions) -> Result<Verdict> {
    let mut output = OutputFile::create(&options.output, &[])?;
    let text = text::chronicle(options.bytes, options.seed);
    output.write(|to| to.write_all(text.as_bytes()))?;
    output.keep()?;
    Ok(Verdict::Fine)
}
