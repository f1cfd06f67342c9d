//! `encke launch`: the command as several processes, with the mpirun that is found.
//!
//! A convenience and nothing more: it says which line it runs, and that line can be typed instead.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use crate::number::count;
use crate::terminal::note;
use crate::{Told, Verdict};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke launch -n 4 attend qkv.safetensors -o out.safetensors --causal
      Four processes on this machine, each of them a rank.
  encke launch -n 4 verify --count 50
      Whether this MPI moves messages as it should, and results have the bits of threads.
  encke launch -n 8 --option=--hostfile --option=hosts attend qkv.safetensors -o out.safetensors
      On the hosts of a file: whatever follows --option= goes to mpirun.

The mpirun is that of --mpirun, of the variable MPIRUN, or the first one in PATH. The line that is
run is printed first. Needs an encke built with --features mpi; docs/cluster.md has more.

Exit codes: those of the command, or of mpirun.";

/// The command as several processes.
#[derive(Debug, Args)]
pub struct Options {
    /// How many processes.
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

/// Whose mpirun it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Open MPI up to 4.
    OpenMpi4,
    /// Open MPI from 5 on, which can tell the living of the dead.
    OpenMpi5,
    /// MPICH and its relatives.
    Hydra,
    /// Anything else: given nothing but the number.
    Unknown,
}

impl Kind {
    /// From what `mpirun --version` says.
    fn of(said: &str) -> Kind {
        let open_mpi = said.split("(Open MPI)").nth(1);
        let major = open_mpi.and_then(|rest| rest.trim().split('.').next()?.parse::<u32>().ok());
        match major {
            Some(0..=4) => Kind::OpenMpi4,
            Some(_) => Kind::OpenMpi5,
            None if said.contains("HYDRA") || said.contains("MPICH") => Kind::Hydra,
            None => Kind::Unknown,
        }
    }

    /// The options for `number` processes on a machine with `cores` cores.
    fn options(self, number: usize, cores: usize) -> Vec<&'static str> {
        let crowded = number > cores;
        match self {
            Kind::OpenMpi4 if crowded => vec!["--oversubscribe", "--bind-to", "none"],
            Kind::OpenMpi5 if crowded => vec![
                "--with-ft",
                "ulfm",
                "--map-by",
                ":OVERSUBSCRIBE",
                "--bind-to",
                "none",
            ],
            Kind::OpenMpi5 => vec!["--with-ft", "ulfm"],
            Kind::Hydra if crowded => vec!["-bind-to", "none"],
            _ => Vec::new(),
        }
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    if options.number == 0 {
        bail!("-n 0 starts nothing; give at least 1");
    }
    if cfg!(not(feature = "mpi")) && options.number > 1 {
        bail!(
            "this encke was built without MPI; build it with \
             cargo build --release -p encke-cli --features mpi"
        );
    }
    let mpirun = options.mpirun.clone().or_else(found).ok_or_else(|| {
        anyhow!("no mpirun in PATH; install an MPI, or name it with --mpirun or MPIRUN")
    })?;
    let version = Command::new(&mpirun).arg("--version").output();
    let version = version.with_context(|| format!("cannot run {}", mpirun.display()))?;
    let kind = Kind::of(&String::from_utf8_lossy(&version.stdout));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let own = std::env::current_exe().context("cannot find encke itself")?;
    if !own
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("encke"))
    {
        bail!(
            "launch starts the program encke again, but this is a part of {}; use the program",
            own.display()
        );
    }
    let mut command = Command::new(&mpirun);
    command.arg("-n").arg(options.number.to_string());
    // Hosts of the user's choosing have cores that are not counted here.
    if options.option.is_empty() {
        command.args(kind.options(options.number, cores));
    }
    command
        .args(&options.option)
        .arg(own)
        .args(&options.command);
    note(&shown(&command));
    let ended = command.status();
    let ended = ended.with_context(|| format!("cannot run {}", mpirun.display()))?;
    match ended.code() {
        Some(0) => Ok(Verdict::Fine),
        Some(1) => Ok(Verdict::CheckFailed),
        // The processes, or mpirun, have said what is wrong.
        Some(_) => Err(Told.into()),
        None => bail!("{} was ended by a signal", mpirun.display()),
    }
}

/// The mpirun of the environment.
fn found() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("MPIRUN").filter(|name| !name.is_empty()) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH")?;
    let places = std::env::split_paths(&path).map(|folder| folder.join("mpirun"));
    places
        .into_iter()
        .find(|place: &PathBuf| Path::is_file(place))
}

/// A command as one could type it.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| {
        let word = word.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
        match !word.is_empty() && word.chars().all(plain) {
            true => word.into_owned(),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_told_apart() {
        assert_eq!(Kind::of("mpirun (Open MPI) 4.1.4\n"), Kind::OpenMpi4);
        assert_eq!(Kind::of("mpirun (Open MPI) 5.0.11\n"), Kind::OpenMpi5);
        assert_eq!(
            Kind::of("HYDRA build details:\n  Version: 4.2"),
            Kind::Hydra
        );
        assert_eq!(Kind::of("something else"), Kind::Unknown);
    }

    #[test]
    fn only_a_crowd_is_told_to_share_cores() {
        assert!(Kind::OpenMpi4.options(2, 2).is_empty());
        assert!(Kind::OpenMpi4.options(3, 2).contains(&"--oversubscribe"));
        assert!(Kind::OpenMpi5.options(2, 2).contains(&"ulfm"));
    }

    #[test]
    fn a_line_can_be_typed_again() {
        let mut command = Command::new("mpirun");
        command.args(["-n", "4", "a b", "it's", ""]);
        assert_eq!(shown(&command), "mpirun -n 4 'a b' 'it'\\''s' ''");
    }
}
