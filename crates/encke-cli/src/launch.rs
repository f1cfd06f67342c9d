//! `encke launch`: starts the command as several processes with mpirun.
//!
//! A convenience: it prints the command line that it runs, which can be typed instead. The decision
//! here: mpirun replaces this process, so that signals reach it and its exit code is passed on.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use encke_lab::Verdict;
use encke_lab::arguments::shell_line;
use encke_lab::number::count;
use encke_lab::terminal::note;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke launch -n 4 attend qkv.safetensors -o out.safetensors --causal
      Four processes on this machine, each of them a rank.
  encke launch -n 4 verify --count 50
      Whether this MPI delivers messages correctly, and results have the bits of threads.
  encke launch -n 8 --option=--hostfile --option=hosts attend qkv.safetensors -o out.safetensors
      On the hosts of a file: every --option= is passed to mpirun.

The mpirun is that of --mpirun, of the variable MPIRUN, or the first one in PATH. The command line
is printed before it runs. Needs an encke built with --features mpi; docs/cluster.md has more.

mpirun takes the place of this command: signals reach it, and it ends all processes.

Exit codes: those of mpirun, which passes on the command's; 2 if it cannot be started.";

/// The most processes of one machine: a launcher starts as many as it is asked for, and a million
/// leave no time to anything else.
const MOST_HERE: usize = 1024;
/// The most processes on other hosts: the ranks of the largest ring.
const MOST: usize = 1 << 20;

/// Starts the command as several processes.
#[derive(Debug, Args)]
pub struct Options {
    /// Number of processes.
    #[arg(short, long, value_name = "P", value_parser = count)]
    number: usize,

    /// The mpirun to use.
    #[arg(long, value_name = "PATH")]
    mpirun: Option<PathBuf>,

    /// An option for mpirun; may be given several times.
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    option: Vec<String>,

    /// The command and its options.
    #[arg(
        value_name = "COMMAND",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    command: Vec<OsString>,
}

/// Implementations of mpirun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MpirunKind {
    /// Open MPI up to 4.
    OpenMpi4,
    /// Open MPI from 5 on, which supports fault tolerance (ULFM).
    OpenMpi5,
    /// MPICH and its derivatives.
    Hydra,
    /// Any other: called with the number of processes alone.
    Unknown,
}

impl MpirunKind {
    /// From the output of `mpirun --version`.
    fn of(version: &str) -> MpirunKind {
        let open_mpi = version.split("(Open MPI)").nth(1);
        let major = open_mpi.and_then(|rest| rest.trim().split('.').next()?.parse::<u32>().ok());
        match major {
            Some(0..=4) => MpirunKind::OpenMpi4,
            Some(_) => MpirunKind::OpenMpi5,
            None if version.contains("HYDRA") || version.contains("MPICH") => MpirunKind::Hydra,
            None => MpirunKind::Unknown,
        }
    }

    /// The options for `number` processes on a machine with `cores` cores.
    fn options(self, number: usize, cores: usize) -> Vec<&'static str> {
        let oversubscribed = number > cores;
        match self {
            MpirunKind::OpenMpi4 if oversubscribed => vec!["--oversubscribe", "--bind-to", "none"],
            MpirunKind::OpenMpi5 if oversubscribed => vec![
                "--with-ft",
                "ulfm",
                "--map-by",
                ":OVERSUBSCRIBE",
                "--bind-to",
                "none",
            ],
            MpirunKind::OpenMpi5 => vec!["--with-ft", "ulfm"],
            MpirunKind::Hydra if oversubscribed => vec!["-bind-to", "none"],
            _ => Vec::new(),
        }
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.number == 0 {
        bail!("-n 0 starts no process; give at least 1");
    }
    let (most, advice) = match options.option.is_empty() {
        true => (MOST_HERE, " on one machine; name hosts with --option"),
        false => (MOST, ""),
    };
    if options.number > most {
        bail!("-n {} is too many: at most {most}{advice}", options.number);
    }
    if cfg!(not(feature = "mpi")) && options.number > 1 {
        bail!(
            "this encke was built without MPI; build it with \
             cargo build --release -p encke-cli --features mpi"
        );
    }
    let mpirun = options.mpirun.clone().or_else(find_mpirun).ok_or_else(|| {
        anyhow!("no mpirun in PATH; install an MPI, or name it with --mpirun or MPIRUN")
    })?;
    let version = Command::new(&mpirun).arg("--version").output();
    let version = version.with_context(|| format!("cannot run {}", mpirun.display()))?;
    let kind = MpirunKind::of(&String::from_utf8_lossy(&version.stdout));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let own = std::env::current_exe().context("cannot find encke itself")?;
    if !own
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("encke"))
    {
        bail!(
            "launch starts the program encke again, but it runs inside {}; use the program",
            own.display()
        );
    }
    let mut command = Command::new(&mpirun);
    command.arg("-n").arg(options.number.to_string());
    // With options, the processes may run on other hosts, whose cores are unknown.
    if options.option.is_empty() {
        command.args(kind.options(options.number, cores));
    }
    command
        .args(&options.option)
        .arg(own)
        .args(&options.command);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    note(&shell_line(
        words.map(|word| word.to_string_lossy().into_owned()),
    ));
    Err(replace_by(&mut command)).with_context(|| format!("cannot run {}", mpirun.display()))
}

/// Runs a command in place of this process; returns only if it cannot be started.
#[cfg(unix)]
fn replace_by(command: &mut Command) -> io::Error {
    std::os::unix::process::CommandExt::exec(command)
}

/// The same where a process cannot be replaced.
#[cfg(not(unix))]
fn replace_by(command: &mut Command) -> io::Error {
    match command.status() {
        Ok(ended) => std::process::exit(ended.code().unwrap_or(2)),
        Err(error) => error,
    }
}

/// The mpirun of the environment.
fn find_mpirun() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("MPIRUN").filter(|name| !name.is_empty()) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let paths = std::env::split_paths(&path).map(|folder| folder.join("mpirun"));
    paths.into_iter().find(|path: &PathBuf| Path::is_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpirun_implementations_are_recognised_by_their_version() {
        assert_eq!(
            MpirunKind::of("mpirun (Open MPI) 4.1.4\n"),
            MpirunKind::OpenMpi4
        );
        assert_eq!(
            MpirunKind::of("mpirun (Open MPI) 5.0.11\n"),
            MpirunKind::OpenMpi5
        );
        assert_eq!(
            MpirunKind::of("HYDRA build details:\n  Version: 4.2"),
            MpirunKind::Hydra
        );
        assert_eq!(MpirunKind::of("something else"), MpirunKind::Unknown);
    }

    #[test]
    fn only_more_processes_than_cores_are_oversubscribed() {
        assert!(MpirunKind::OpenMpi4.options(2, 2).is_empty());
        assert!(
            MpirunKind::OpenMpi4
                .options(3, 2)
                .contains(&"--oversubscribe")
        );
        assert!(MpirunKind::OpenMpi5.options(2, 2).contains(&"ulfm"));
    }
}
