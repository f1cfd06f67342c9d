//! `encke` without a command: a demonstration of exactness, memory and traffic in three tables.
//!
//! The decision here: every number comes from a run or a plan made by this call, and a wrong one
//! makes the command fail.

mod exactness;
mod memory;
mod traffic;

use anyhow::Result;
use encke_lab::Verdict;
use encke_lab::terminal::{Paint, say};

/// Ring sizes shown.
const RINGS: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Seed of the random tensors.
const SEED: u64 = 2024;

const OPENING: &str = "\
Attention over a sequence that is sharded over p ranks. Each rank holds 1/p of the
tokens; keys and values rotate from rank to rank, and every query attends to exactly
the keys of its pattern. In this demonstration a rank is a thread.
";

const CLOSING: &str = "  \
  encke verify
      a few hundred random configurations, also in f64, bf16 and f16
  encke plan --tokens 1e9 --heads 32 --kv-heads 8 --dim 128 --ranks 1000 --causal
      the plan for a billion tokens, in no time
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
    Ok(Verdict::of(exact && counted))
}

/// Prints the question that a section answers, and an introduction.
fn print_question(paint: Paint, question: &str, introduction: &str) -> Result<()> {
    Ok(say(&format!(
        "\n{}\n\n{introduction}",
        paint.bold(question)
    ))?)
}

/// The answer to a yes-or-no question.
fn answer(paint: Paint, yes: bool) -> String {
    match yes {
        true => paint.green("yes"),
        false => paint.red("no"),
    }
}
