//! The `encke` command: a thin shell around the `encke` crate.
//!
//! It reads options and files and writes tables and files; what is computed, and whether a request
//! can be met, is the library's. The decision here is what a caller can rely on: exit code 0 for
//! success, 1 for a check that failed, 2 for everything that could not be done, and then exactly
//! one line on standard error that begins with `encke: `.
#![deny(unsafe_code)]

mod attend;
mod billion;
mod chrome;
mod cli;
mod demo;
mod device_option;
mod finite;
mod generate;
mod input;
mod memory;
mod number;
mod output;
mod pattern_options;
mod plan;
mod process;
mod profile;
mod program;
mod report;
mod ring_options;
mod shape_options;
mod simulate;
mod table;
mod tensors;
mod terminal;
mod verify;

use std::io;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};
use terminal::note;

/// What a command found, if it could do its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All is well.
    Fine,
    /// A number was not what it should have been.
    CheckFailed,
}

fn main() -> ExitCode {
    cli::report_panics();
    let ended = std::panic::catch_unwind(|| match Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(refused) => cli::usage(&refused),
    });
    match ended {
        Ok(Ok(Verdict::Fine)) => ExitCode::SUCCESS,
        Ok(Ok(Verdict::CheckFailed)) => ExitCode::from(1),
        Ok(Err(error)) if reader_left(&error) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            note(&format!("encke: {}", cli::one_line(&error)));
            ExitCode::from(2)
        }
        // The panic has already been reported, in one line.
        Err(_) => ExitCode::from(2),
    }
}

fn run(cli: Cli) -> anyhow::Result<Verdict> {
    match cli.command {
        None => demo::run(),
        Some(Command::Attend(options)) => attend::run(&options),
        Some(Command::Billion(options)) => billion::run(&options),
        Some(Command::Generate(options)) => generate::run(&options),
        Some(Command::Plan(options)) => plan::run(&options),
        Some(Command::Report(options)) => report::run(&options),
        Some(Command::Simulate(options)) => simulate::run(&options),
        Some(Command::Profile(options)) => profile::run(&options),
        Some(Command::Verify(options)) => verify::run(&options),
    }
}

/// Whether whoever read our output has read enough, as `head` does.
fn reader_left(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
