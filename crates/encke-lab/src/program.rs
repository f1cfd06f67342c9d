//! Runs a program: parses its arguments, runs it alone or as one rank of an MPI job, reports
//! errors.
//!
//! The decision here is what a caller can rely on: exit code 0 for success, 1 for a check that
//! failed, 2 for any other error, and for an error exactly one line on standard error, which begins
//! with the program's name. A usage error is one such line too, not clap's five.

use std::ffi::OsString;
use std::fmt;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use clap::Parser;
use clap::error::ErrorKind;
use encke_mpi::launcher::{self, LaunchedProcess};

use crate::arguments;
use crate::terminal::{note, say};

/// The result of a command that ran without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Every check passed, or the command checks nothing.
    Fine,
    /// A check failed: a result was wrong, or a measurement exceeded its plan.
    CheckFailed,
}

impl Verdict {
    /// `Fine` if every check passed.
    pub fn of(passed: bool) -> Verdict {
        match passed {
            true => Verdict::Fine,
            false => Verdict::CheckFailed,
        }
    }
}

/// An error that was printed already, by this process or by another rank of its job.
#[derive(Debug)]
pub struct AlreadyReported;

impl fmt::Display for AlreadyReported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the error has been reported")
    }
}

impl std::error::Error for AlreadyReported {}

/// How long a rank stays alive after an error that another rank prints: launchers kill all
/// processes of a job when the first one fails, and the line must be out by then.
pub(crate) const PAUSE: Duration = Duration::from_millis(300);

/// Parses the arguments (the first is the program's name), runs the program, and returns its exit
/// code. `run` is called for a process that was started alone, `run_as_rank` for one of an MPI job,
/// also if the arguments are invalid: those of the other ranks may not be.
pub fn program<C: Parser>(
    name: &'static str,
    arguments: impl IntoIterator<Item = OsString>,
    run: fn(C) -> Result<Verdict>,
    run_as_rank: fn(Result<C>, &LaunchedProcess) -> Result<Verdict>,
) -> u8 {
    report_panics(name);
    encke_files::remove_temporaries_on_signals();
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    arguments::store(&arguments);
    let job = launcher::launched_process().filter(|place| place.ranks > 1 || cfg!(feature = "mpi"));
    let ended = std::panic::catch_unwind(|| match (C::try_parse_from(arguments), &job) {
        (Ok(cli), None) => run(cli),
        (Ok(cli), Some(place)) => run_as_rank(Ok(cli), place),
        (Err(error), Some(place)) if is_wrong(&error) => {
            run_as_rank(Err(usage_error(&error, &C::command())), place)
        }
        (Err(error), None) if is_wrong(&error) => Err(usage_error(&error, &C::command())),
        // Help is printed once.
        (Err(_), Some(place)) if place.rank > 0 => Ok(Verdict::Fine),
        (Err(help), _) => print_help(&help),
    });
    match ended {
        Ok(Ok(Verdict::Fine)) => 0,
        Ok(Ok(Verdict::CheckFailed)) => 1,
        Ok(Err(error)) if error.is::<AlreadyReported>() => 2,
        Ok(Err(error)) => {
            note(&format!("{name}: {}", one_line(&error)));
            2
        }
        // The panic hook has printed its line.
        Err(_) => 2,
    }
}

/// The error of a program without MPI that a launcher started as several processes: each of them
/// would do all of the work, and write the same file.
pub fn without_mpi(name: &str, place: &LaunchedProcess) -> Result<Verdict> {
    if place.rank > 0 {
        std::thread::sleep(PAUSE);
        return Err(AlreadyReported.into());
    }
    bail!(
        "a launcher started {} processes (according to {}), but this {name} was built without MPI, \
         and each of them would do all of the work; build it with --features mpi, or start one",
        place.ranks,
        place.variable
    )
}

/// Whether the arguments are wrong, and not a request for help.
fn is_wrong(error: &clap::Error) -> bool {
    error.use_stderr() && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// Prints help.
fn print_help(help: &clap::Error) -> Result<Verdict> {
    match help.use_stderr() {
        true => say(&help.to_string())?,
        // Clap decides about colour here. An error of printing help has no consequence.
        false => drop(help.print()),
    }
    Ok(Verdict::Fine)
}

/// Clap's usage error in one line.
fn usage_error(error: &clap::Error, program: &clap::Command) -> anyhow::Error {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let paragraphs: Vec<String> = text
        .split("\n\n")
        .take_while(|text| !text.starts_with("Usage:") && !text.starts_with("For more"))
        .map(joined)
        // Clap's tip to pass an unknown option as a value after `--`: no option here takes one so.
        .filter(|text| !text.starts_with("tip: to pass"))
        .collect();
    let name = program.get_name();
    let command = arguments::stored().nth(1).unwrap_or_default();
    let help = match program.find_subcommand(&command) {
        Some(command) => format!("{name} {} --help", command.get_name()),
        None => format!("{name} --help"),
    };
    anyhow!("{}; see {help}", paragraphs.join("; "))
}

/// The most characters of an error: it begins with what is wrong and ends with what to do, and an
/// option's value may be anything in between.
const MOST_CHARACTERS: usize = 2000;

/// An error with its causes, in one line of bounded length; a cause whose text is contained already
/// is left out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(|cause| joined(&cause.to_string())) {
        if !line.contains(&cause) {
            let colon = if line.is_empty() { "" } else { ": " };
            line += &format!("{colon}{cause}");
        }
    }
    shortened(line)
}

/// A line without its middle, if it is longer than [`MOST_CHARACTERS`].
fn shortened(line: String) -> String {
    let count = line.chars().count();
    let Some(left_out) = count.checked_sub(MOST_CHARACTERS).filter(|more| *more > 0) else {
        return line;
    };
    let head: String = line.chars().take(MOST_CHARACTERS / 2).collect();
    let tail: String = line.chars().skip(count - MOST_CHARACTERS / 2).collect();
    format!("{head} ... ({left_out} characters left out) ... {tail}")
}

/// A text without line breaks or indentation.
fn joined(text: &str) -> String {
    let lines = text.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join(" ")
}

/// Installs a panic hook that reports a panic as a bug, in one line. It ignores threads that are
/// ranks, because the ring returns their panics as errors. With RUST_BACKTRACE set, the standard
/// hook stays.
fn report_panics(name: &'static str) {
    if std::env::var_os("RUST_BACKTRACE").is_some() {
        return;
    }
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let is_rank = |name: &str| name.starts_with("encke-rank-");
        if thread.name().is_some_and(is_rank) {
            return;
        }
        let message = joined(&panic.to_string());
        note(&format!(
            "{name}: this is a bug in {name}, please report it: {message}"
        ));
    }));
}
