//! `encke report`: one page that shows what a configuration holds, sends and takes.
//!
//! The decision here: the page is finished when it is written. Charts are drawn here, as SVG, from
//! one value; a browser only shows them, so the page needs no network, no library and no luck, and
//! the same findings are the same bytes.

pub mod axis;
mod environment;
mod findings;
pub mod lines;
pub mod markup;
mod matrix;
mod measure;
mod memory;
mod options;
pub mod page;
mod panels;
mod picture;
mod prediction;
pub mod scale;
pub mod stack;
pub mod tables;
#[cfg(test)]
mod tests;
pub mod theme;
mod timeline;
mod traffic;

use anyhow::Result;

use crate::Verdict;
use crate::output::OutputFile;
use crate::terminal::{Paint, note};
pub use options::{EXAMPLES, Options};

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let work = options.work()?;
    let mut output = OutputFile::create(&options.output, &[])?;
    let others = [("the page", options.output.as_path())];
    let trace = options.view.trace.as_ref();
    let trace = trace
        .map(|path| OutputFile::create(path, &others))
        .transpose()?;
    let (findings, timeline) = measure::measure(&work, options.view.grad, options.view.seed)?;
    let document = page::document(&findings)?;
    output.write(|to| to.write_all(document.as_bytes()))?;
    if let Some(mut trace) = trace {
        trace.write(|to| timeline.write(to))?;
        trace.keep()?;
    }
    output.keep()?;
    let wrote = Paint::stderr().bold("wrote");
    note(&format!("{wrote} {}", options.output.display()));
    if let Some(path) = &options.view.trace {
        note(&format!("{wrote} {}", path.display()));
    }
    Ok(Verdict::Fine)
}
