//! `encke simulate --scale`: the page or the table of predicted scale.

use std::path::Path;

use anyhow::{Result, bail};
use encke::DType;
use encke_lab::Verdict;
use encke_lab::output::OutputFile;
use encke_lab::scale::{document, markdown, predict};
use encke_lab::terminal::{Paint, note, spinner};

use super::options::Options;

/// Predicts every point and writes the file.
pub fn run(options: &Options, path: &Path) -> Result<Verdict> {
    let ending = path.extension().and_then(|ending| ending.to_str());
    let page = match ending {
        Some("html") => true,
        Some("md") => false,
        _ => bail!(
            "--scale {} is neither a page nor a table; name a file that ends with .html or .md",
            path.display()
        ),
    };
    if options.scale_ranks < 8 {
        let ranks = options.scale_ranks;
        bail!("--scale-ranks {ranks} leaves no ring; the smallest has 8 devices");
    }
    let machine = options.machine.machine(&options.sizes, DType::Bf16)?;
    let mut output = OutputFile::create(path, &[])?;
    let progress = spinner("predicting");
    let findings = predict(&machine, options.scale_ranks, &mut |what| {
        progress.set_message(what.to_string());
    })?;
    progress.finish_and_clear();
    let text = match page {
        true => document(&findings)?,
        false => markdown(&findings),
    };
    output.write(|to| to.write_all(text.as_bytes()))?;
    output.keep()?;
    note(&format!(
        "{} {}",
        Paint::stderr().bold("wrote"),
        path.display()
    ));
    Ok(Verdict::Fine)
}
