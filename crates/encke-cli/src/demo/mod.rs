//! `encke` without a command: what it does, shown in three tables that were just computed.
//!
//! The decision here: nothing is quoted. Every number in the demonstration comes from a run or a
//! plan made while the reader waits, and a wrong one makes the command fail.

mod exactness;
mod memory;
mod traffic;

use anyhow::Result;

use crate::Verdict;
use crate::terminal::{Paint, say};

/// Ring sizes shown.
const RINGS: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Where random numbers begin.
const SEED: u64 = 2024;

const OPENING: &str = "\
Attention over a sequence that is spread over p ranks. Each rank holds 1/p of the
tokens; keys and values travel from rank to rank, and every query ends up having
seen exactly the keys its pattern allows. In this demonstration a rank is a
thread.
";

const CLOSING: &str = "  \
  encke verify
      a few hundred random configurations, also in f64, bf16 and f16
  encke plan --tokens 1e9 --heads 32 --kv-heads 8 --dim 128 --ranks 1000 --causal
      who would do what for a billion tokens, at once
  encke attend --help
      attention of your own tensors, from a safetensors file
";

/// Runs the demonstration.
pub fn run() -> Result<Verdict> {
    let paint = Paint::stdout();
    let title = paint.bold("Encke: exact ring and dilated attention");
    say(&format!("{title}\n\n{OPENING}"))?;
    let exact = exactness::show(paint)?;
    memory::show(paint)?;
    let counted = traffic::show(paint)?;
    say(&format!("\n{}\n{CLOSING}", paint.bold("What to try next")))?;
    Ok(match exact && counted {
        true => Verdict::Fine,
        false => Verdict::CheckFailed,
    })
}

/// A question that a section answers, and how to read the answer.
fn open(paint: Paint, question: &str, words: &str) -> Result<()> {
    Ok(say(&format!("\n{}\n\n{words}", paint.bold(question)))?)
}

/// The answer to a yes-or-no question.
fn answer(paint: Paint, yes: bool) -> String {
    match yes {
        true => paint.green("yes"),
        false => paint.red("no"),
    }
}
