//! `encke profile`: what ranks really hold, beside what was planned, by the size of the ring.
//!
//! Every figure called measured is read off the ledgers of a run in this process; nothing is scaled
//! up from another size.

mod caches;
mod files;
mod options;
mod policies;
#[cfg(feature = "mpi")]
pub mod processes;
mod report;

use std::path::Path;

use anyhow::Result;
use encke::{Attention, Pass, Request};
use encke_sim::profile::{Inputs, RingProfile};

use crate::Verdict;
use crate::output::OutputFile;
use crate::terminal::{Paint, bar, say};
pub use options::{EXAMPLES, Options};

/// One pass over all ring sizes.
pub struct PassProfile {
    /// Its name.
    pub pass: &'static str,
    /// Rings that were run, by rising size.
    pub run: Vec<RingProfile>,
    /// Rings that were only planned.
    pub planned: Vec<RingProfile>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let rings = options.rings()?;
    let work = &options.work;
    let csv = output(work.csv.as_deref(), None)?;
    let json = output(work.json.as_deref(), work.csv.as_deref())?;
    let passes = measure(options, &rings)?;

    let paint = Paint::stdout();
    let first = rings.run.first().or(rings.planned.first());
    if let Some(ring) = first {
        say(&report::heading(&ring.request))?;
    }
    for pass in &passes {
        say(&report::pass(paint, pass))?;
    }
    say(&report::summary(paint, &passes))?;
    if let Some(ring) = rings.run.last().filter(|_| work.policies) {
        say(&policies::words(paint, &ring.request)?)?;
    }
    if let Some(ring) = rings.run.last().filter(|_| work.caches) {
        say(&caches::words(paint, &ring.request)?)?;
    }
    if let Some(mut csv) = csv {
        csv.write(|to| files::csv(to, &passes))?;
        csv.keep()?;
    }
    if let (Some(mut json), Some(ring)) = (json, first) {
        json.write(|to| files::json(to, &ring.request, &passes))?;
        json.keep()?;
    }
    let kept = passes.iter().all(report::kept);
    Ok(if kept {
        Verdict::Fine
    } else {
        Verdict::CheckFailed
    })
}

/// Claims the place of a file, if one was asked for.
fn output(path: Option<&Path>, other: Option<&Path>) -> Result<Option<OutputFile>> {
    let others: Vec<(&str, &Path)> = other.iter().map(|path| ("the CSV file", *path)).collect();
    match path {
        Some(path) => Ok(Some(OutputFile::create(path, &others)?)),
        None => Ok(None),
    }
}

/// Runs, and plans, every ring of either pass.
fn measure(options: &Options, rings: &options::Rings) -> Result<Vec<PassProfile>> {
    let grad = options.work.grad;
    let names = if grad {
        vec!["forward", "backward"]
    } else {
        vec!["forward"]
    };
    let mut passes: Vec<PassProfile> = names
        .into_iter()
        .map(|pass| PassProfile {
            pass,
            run: Vec::new(),
            planned: Vec::new(),
        })
        .collect();
    let progress = bar(rings.run.len() + rings.planned.len());
    let inputs = rings.run.first();
    let inputs = inputs.map(|ring| Inputs::random(&ring.request, options.work.seed));
    for ring in &rings.run {
        progress.set_message(format!("ring of {}", ring.ranks));
        let Some(inputs) = &inputs else { break };
        // A kernel of its own: no scratch memory is left from another ring.
        let attention = Attention::builder().build()?;
        let measured = inputs.measure(attention.kernel(), &ring.request, grad)?;
        for (pass, profile) in passes.iter_mut().zip(measured) {
            pass.run.push(profile);
        }
        progress.inc(1);
    }
    let attention = Attention::builder().build()?;
    for ring in &rings.planned {
        progress.set_message(format!("plan for {}", ring.ranks));
        for pass in &mut passes {
            let request = Request {
                pass: match pass.pass {
                    "forward" => Pass::Forward,
                    _ => Pass::Backward { dlse: false },
                },
                ..ring.request.clone()
            };
            pass.planned
                .push(RingProfile::planned(attention.kernel(), &request)?);
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(passes)
}
