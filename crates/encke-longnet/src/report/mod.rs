//! `longnet report`: recorded runs on one page.
//!
//! The page, its axes and its tables are those of `encke report`; here are the curves over steps
//! and the sentences that summarise them.

mod curves;
mod page;

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use encke_lab::Verdict;
use encke_lab::output::OutputFile;
use encke_lab::terminal::{Paint, note};

use crate::record::RunRecord;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  longnet train story.txt --record p1.json
  longnet train story.txt --record p2.json --ranks 2
  longnet train story.txt --record p4.json --ranks 4
  longnet train story.txt --record dense.json --dense
  longnet retrieval --record retrieval.json
  longnet report report.html p1.json p2.json p4.json dense.json retrieval.json
      Runs with equal settings are compared with the one on the smallest ring.";

/// Options of the command.
#[derive(Debug, Args)]
pub struct Options {
    /// The HTML file to write.
    output: PathBuf,

    /// Files written by `--record`.
    #[arg(required = true)]
    records: Vec<PathBuf>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let read = options.records.iter().map(|path| RunRecord::read(path));
    let records = read.collect::<Result<Vec<RunRecord>>>()?;
    let others: Vec<(&str, &std::path::Path)> = options
        .records
        .iter()
        .map(|path| ("a record", path.as_path()))
        .collect();
    let mut output = OutputFile::create(&options.output, &others)?;
    let page = page::document(&records)?;
    output.write(|to| to.write_all(page.as_bytes()))?;
    output.keep()?;
    let wrote = Paint::stderr().bold("wrote");
    note(&format!("{wrote} {}", options.output.display()));
    Ok(Verdict::Fine)
}
