//! The command line as a whole: its commands, its help, and how it says no.
//!
//! The decision here: a usage error is one line like every other error, not clap's five.

use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, anyhow};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::terminal::{note, say};
use crate::{
    Verdict, attend, bench, billion, generate, launch, plan, profile, report, simulate, tune,
    verify,
};

const ABOUT: &str = "Exact ring and dilated attention, forward and backward.

Keys and values rotate over a ring of ranks, each of which holds 1/p of the tokens; a pattern of
segments and dilation rates decides which rows are computed and which ever travel. What is computed
does not depend on the number of ranks.

Without a command, encke shows what it does: a ring against plain attention, memory and bytes.";

const EXAMPLES: &str = "\
Examples:
  encke
      The demonstration; it takes less than a minute.
  encke attend qkv.safetensors -o out.safetensors --causal --ranks 8 --grad
      Attention and gradients of the tensors in a file.
  encke plan --tokens 1e9 --heads 32 --kv-heads 8 --dim 128 --ranks 1000 --causal
      What that would compute, hold and send, without doing it.
  encke report out.html
      Memory, timeline, bytes and pattern of rings of 1 to 32 ranks, as one page.
  encke simulate --tokens 1e9 --ranks 1024 --node 8 --gpu h200 --link nvlink,ib400 --causal
      How long that would take, and where the time would go.
  encke profile --causal --sharding striped --grad
      What each rank really holds, by the size of the ring, beside what was planned.
  encke bench --causal --sharding zigzag --grad
      How long rings of several sizes take on this machine.
  encke tune
      Measure this machine in less than a minute, for --ranks auto and plan --explain.
  encke verify
      Random configurations against the f64 reference.
  encke billion --tokens 16M
      Attention over a generated sequence of any length, checked row by row; a billion by default.
  encke launch -n 4 attend qkv.safetensors -o out.safetensors --causal
      Four processes instead of threads; the same as mpirun -n 4 encke attend …

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.
Exit codes: 0 success, 1 a check failed, 2 bad input or any other error.";

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "encke", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compute attention, and its gradients, of tensors in a file
    #[command(after_help = attend::EXAMPLES, allow_negative_numbers = true)]
    Attend(attend::Options),
    /// Time rings of several sizes beside one another, after checking what they compute
    #[command(after_help = bench::EXAMPLES, allow_negative_numbers = true)]
    Bench(bench::Options),
    /// Attend a billion tokens, every pair of the pattern, on this machine
    #[command(after_help = billion::EXAMPLES)]
    Billion(billion::Options),
    /// Write a file of generated tensors, as large as one likes
    #[command(after_help = generate::EXAMPLES)]
    Generate(generate::Options),
    /// Start a command as several processes, with the mpirun that is found
    #[command(after_help = launch::EXAMPLES)]
    Launch(launch::Options),
    /// Say who would compute what, send what to whom, and hold how much
    #[command(after_help = plan::EXAMPLES, allow_negative_numbers = true)]
    Plan(plan::Options),
    /// Run rings of several sizes and show what they hold, send and take, on one page
    #[command(after_help = report::EXAMPLES, allow_negative_numbers = true)]
    Report(report::Options),
    /// Say how long that would take on a described machine
    #[command(after_help = simulate::EXAMPLES, allow_negative_numbers = true)]
    Simulate(simulate::Options),
    /// Measure what ranks hold, by the size of the ring, beside what was planned
    #[command(after_help = profile::EXAMPLES, allow_negative_numbers = true)]
    Profile(profile::Options),
    /// Measure this machine, so that what is left open is decided well
    #[command(after_help = tune::EXAMPLES)]
    Tune(tune::Options),
    /// Hold random configurations against the reference, or try calls under hardship
    #[command(after_help = verify::EXAMPLES, allow_negative_numbers = true)]
    Verify(verify::Options),
}

/// The words of the command: others than the process's own where it is part of another program.
static WORDS: Mutex<Vec<OsString>> = Mutex::new(Vec::new());

/// Keeps the words of the command for those who tell them later.
pub fn note_words(words: &[OsString]) {
    *WORDS.lock().unwrap_or_else(PoisonError::into_inner) = words.to_vec();
}

/// The words of the command, its name first.
pub fn words() -> impl Iterator<Item = String> {
    let words = WORDS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let text = |word: OsString| word.to_string_lossy().into_owned();
    words.into_iter().map(text)
}

/// Prints help that was asked for, or turns a usage error into one of ours.
pub fn usage(refused: &clap::Error, program: &clap::Command) -> Result<Verdict> {
    if !refused.use_stderr() {
        // Clap decides about colour here, and nothing can be done if nobody reads it.
        let _ = refused.print();
        return Ok(Verdict::Fine);
    }
    if refused.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        say(&refused.to_string())?;
        return Ok(Verdict::Fine);
    }
    let text = refused.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let said: Vec<String> = text
        .split("\n\n")
        .take_while(|said| !said.starts_with("Usage:") && !said.starts_with("For more"))
        .map(joined)
        // Clap's tip that an unknown option might be meant as a value: here none takes it so.
        .filter(|said| !said.starts_with("tip: to pass"))
        .collect();
    let name = program.get_name();
    let asked = words().nth(1).unwrap_or_default();
    let help = match program.find_subcommand(&asked) {
        Some(asked) => format!("{name} {} --help", asked.get_name()),
        None => format!("{name} --help"),
    };
    Err(anyhow!("{}; see {help}", said.join("; ")))
}

/// An error with its causes, in one line. A cause that was already told is not told again.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut told = String::new();
    for cause in error.chain().map(|cause| joined(&cause.to_string())) {
        if !told.contains(&cause) {
            let colon = if told.is_empty() { "" } else { ": " };
            told += &format!("{colon}{cause}");
        }
    }
    told
}

/// A text without line breaks or indentation.
fn joined(text: &str) -> String {
    let lines = text.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join(" ")
}

/// Reports a panic as what it is, a bug of ours, in one line. A rank's own panic is left to the
/// ring, which returns it as an error. With RUST_BACKTRACE set, panics are reported as usual.
pub fn report_panics(name: &'static str) {
    if std::env::var_os("RUST_BACKTRACE").is_some() {
        return;
    }
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        if thread
            .name()
            .is_some_and(|name| name.starts_with("encke-rank-"))
        {
            return;
        }
        let message = joined(&panic.to_string());
        note(&format!(
            "{name}: this is a bug in {name}, please report it: {message}"
        ));
    }));
}
