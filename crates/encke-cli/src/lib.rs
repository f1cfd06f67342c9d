//! The `encke` command: options in, text and files out.
//!
//! It computes nothing itself: attention is the `encke` crate's, measurements and checks are
//! `encke-lab`'s. The decision here: the command is a library, so that the program and the Python
//! package run the same code with the same exit codes ([`encke_lab::program()`]).
#![deny(unsafe_code)]

mod attend;
mod bench;
mod billion;
mod cli;
mod demo;
mod device_option;
mod draw;
mod explain;
mod finite;
mod generate;
mod input;
mod launch;
mod pattern_options;
mod plan;
mod profile;
mod rank_program;
mod report;
mod ring_options;
mod ring_sizes_options;
mod shape_options;
mod simulate;
mod tune;
mod verify;

use std::ffi::OsString;

use anyhow::Result;
use encke_lab::Verdict;
use encke_mpi::launcher::LaunchedProcess;

use cli::{EnckeCli, EnckeCommand};

/// Runs the command with these arguments, of which the first is its name, and returns its exit
/// code. Output goes to the process's standard output and standard error.
pub fn command(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    encke_lab::program("encke", arguments, run, run_as_rank)
}

fn run(cli: EnckeCli) -> Result<Verdict> {
    match cli.command {
        None => demo::run(),
        Some(EnckeCommand::Attend(options)) => attend::run(&options),
        Some(EnckeCommand::Bench(options)) => bench::run(&options),
        Some(EnckeCommand::Billion(options)) => billion::run(&options),
        Some(EnckeCommand::Generate(options)) => generate::run(&options),
        Some(EnckeCommand::Launch(options)) => launch::run(&options),
        Some(EnckeCommand::Plan(options)) => plan::run(&options),
        Some(EnckeCommand::Report(options)) => report::run(&options),
        Some(EnckeCommand::Simulate(options)) => simulate::run(&options),
        Some(EnckeCommand::Profile(options)) => profile::run(&options),
        Some(EnckeCommand::Tune(options)) => tune::run(&options),
        Some(EnckeCommand::Verify(options)) => verify::run(&options),
    }
}

/// The command as one rank of an MPI job.
#[cfg(feature = "mpi")]
fn run_as_rank(cli: Result<EnckeCli>, place: &LaunchedProcess) -> Result<Verdict> {
    let deadline = match cli.as_ref().map(|cli| &cli.command) {
        Ok(Some(EnckeCommand::Attend(options))) => options.deadline,
        _ => None,
    };
    encke_lab::cluster::run(("encke", place), cli, deadline, |cli, shared| {
        let cluster = &mut *encke_lab::cluster::locked(shared);
        match &cli.command {
            Some(EnckeCommand::Attend(options)) => attend::processes::run(cluster, options),
            Some(EnckeCommand::Bench(options)) => bench::run_as_rank(cluster, options),
            Some(EnckeCommand::Billion(options)) => billion::run_as_rank(cluster, options),
            Some(EnckeCommand::Profile(options)) => profile::run_as_rank(cluster, options),
            Some(EnckeCommand::Verify(options)) => verify::run_as_rank(cluster, options),
            _ if cluster.ranks() == 1 => run(cli),
            _ => cluster.agree(Err(anyhow::anyhow!(
                "this command runs alone; start it without a launcher (attend, bench, billion, \
                 profile and verify run as several processes)"
            ))),
        }
    })
}

#[cfg(not(feature = "mpi"))]
fn run_as_rank(_: Result<EnckeCli>, place: &LaunchedProcess) -> Result<Verdict> {
    encke_lab::without_mpi("encke", place)
}
