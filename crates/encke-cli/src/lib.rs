//! The `encke` command: a thin shell around the `encke` crate.
//!
//! It reads options and files and writes tables and files; what is computed, and whether a request
//! can be met, is the library's. The decision here is what a caller can rely on: exit code 0 for
//! success, 1 for a check that failed, 2 for everything that could not be done, and then exactly
//! one line on standard error that begins with `encke: `. It is a library, so that a program and
//! the Python package are the same command, and so that other commands of this house ([`program`])
//! speak, count, draw and write files as this one does.
#![deny(unsafe_code)]

mod attend;
mod bench;
mod billion;
mod check;
mod chrome;
mod cli;
#[cfg(feature = "mpi")]
pub mod cluster;
mod demo;
mod device_option;
mod draw;
mod explain;
mod finite;
mod generate;
mod input;
mod launch;
mod memory;
pub mod number;
pub mod output;
mod pattern_options;
mod plan;
pub mod process;
mod profile;
mod program;
pub mod report;
mod ring_options;
mod rings_options;
mod shape_options;
mod simulate;
pub mod table;
mod tensors;
pub mod terminal;
mod tune;
mod verify;

use std::ffi::OsString;
use std::io;
use std::time::Duration;

use clap::Parser;

use cli::{Cli, Command};
use encke_mpi::launcher::{self, LaunchedProcess};
use terminal::note;

/// What a command found, if it could do its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All is well.
    Fine,
    /// A number was not what it should have been.
    CheckFailed,
}

/// An error that has been reported already, by this process or by another one of its launch.
#[derive(Debug)]
pub struct Told;

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the error has been reported")
    }
}

impl std::error::Error for Told {}

/// How long a process stays when another one of its launch says what is wrong.
pub const PAUSE: Duration = Duration::from_millis(300);

/// Does what the words of a command line say, the first of which is the command's name, and returns
/// its exit code. What is said goes to the process's own standard output and error.
pub fn command(words: impl IntoIterator<Item = OsString>) -> u8 {
    program("encke", words, run, run_together)
}

/// The same for any command: it is parsed, and run alone or as one of several processes.
pub fn program<C: Parser>(
    name: &'static str,
    words: impl IntoIterator<Item = OsString>,
    alone: fn(C) -> anyhow::Result<Verdict>,
    together: fn(C, &LaunchedProcess) -> anyhow::Result<Verdict>,
) -> u8 {
    cli::report_panics(name);
    let words: Vec<OsString> = words.into_iter().collect();
    cli::note_words(&words);
    let others =
        launcher::launched_process().filter(|place| place.ranks > 1 || cfg!(feature = "mpi"));
    let ended = std::panic::catch_unwind(|| match (C::try_parse_from(words), &others) {
        (Ok(cli), None) => alone(cli),
        (Ok(cli), Some(place)) => together(cli, place),
        // Everyone was given the same words: one of them says what is wrong with them.
        (Err(refused), Some(place)) if place.rank > 0 => match refused.use_stderr() {
            // Not before it has been said: launchers end all processes when the first one fails.
            true => {
                std::thread::sleep(PAUSE);
                Err(Told.into())
            }
            false => Ok(Verdict::Fine),
        },
        (Err(refused), _) => cli::usage(&refused, &C::command()),
    });
    match ended {
        Ok(Ok(Verdict::Fine)) => 0,
        Ok(Ok(Verdict::CheckFailed)) => 1,
        Ok(Err(error)) if reader_left(&error) => 0,
        Ok(Err(error)) if error.is::<Told>() => 2,
        Ok(Err(error)) => {
            note(&format!("{name}: {}", cli::one_line(&error)));
            2
        }
        // The panic has already been reported, in one line.
        Err(_) => 2,
    }
}

fn run(cli: Cli) -> anyhow::Result<Verdict> {
    match cli.command {
        None => demo::run(),
        Some(Command::Attend(options)) => attend::run(&options),
        Some(Command::Bench(options)) => bench::run(&options),
        Some(Command::Billion(options)) => billion::run(&options),
        Some(Command::Generate(options)) => generate::run(&options),
        Some(Command::Launch(options)) => launch::run(&options),
        Some(Command::Plan(options)) => plan::run(&options),
        Some(Command::Report(options)) => report::run(&options),
        Some(Command::Simulate(options)) => simulate::run(&options),
        Some(Command::Profile(options)) => profile::run(&options),
        Some(Command::Tune(options)) => tune::run(&options),
        Some(Command::Verify(options)) => verify::run(&options),
    }
}

/// The command as one of several processes.
#[cfg(feature = "mpi")]
fn run_together(cli: Cli, place: &LaunchedProcess) -> anyhow::Result<Verdict> {
    cluster::run("encke", place, |cluster| cluster::command(cluster, cli))
}

/// Without MPI, each of them would do all of the work, and write the same file.
#[cfg(not(feature = "mpi"))]
fn run_together(_: Cli, place: &LaunchedProcess) -> anyhow::Result<Verdict> {
    without_mpi("encke", place)
}

/// What a command that cannot run as several processes says when it is started so.
pub fn without_mpi(name: &str, place: &LaunchedProcess) -> anyhow::Result<Verdict> {
    if place.rank > 0 {
        std::thread::sleep(PAUSE);
        return Err(Told.into());
    }
    anyhow::bail!(
        "a launcher started {} processes ({} says so), but this {name} was built without MPI, and \
         each of them would do all of the work; build it with --features mpi, or start one",
        place.ranks,
        place.variable
    )
}

/// Whether whoever read our output has read enough, as `head` does.
fn reader_left(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
