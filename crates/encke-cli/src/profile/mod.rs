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
use encke::{Attention, Builder, Kernel, Pass, Request};
use encke_sim::profile::{ProfileInputs, RingProfile};

use crate::Verdict;
use crate::device_option::{Device, cuda};
use crate::output::OutputFile;
use crate::terminal::{Paint, bar, say};
pub use options::{EXAMPLES, Options};
pub use report::heading;

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
    if let Some(ring) = rings.run.last() {
        match options.device.device {
            Device::Cpu => further(work, &ring.request, |of| Ok(of.build()?))?,
            Device::Cuda(number) => {
                further(work, &ring.request, |of| Ok(of.build_on(cuda(number)?)?))?;
            }
        }
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

/// What else was asked for, on the largest ring.
fn further<K: Kernel>(
    work: &options::WorkOptions,
    request: &Request,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<()> {
    let paint = Paint::stdout();
    if work.policies {
        say(&policies::words(paint, request, &build)?)?;
    }
    if work.caches {
        say(&caches::words(paint, request, &build)?)?;
    }
    Ok(())
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
    let inputs = inputs.map(|ring| ProfileInputs::random(&ring.request, options.work.seed));
    for ring in &rings.run {
        progress.set_message(format!("ring of {}", ring.ranks));
        let Some(inputs) = &inputs else { break };
        // A kernel of its own: no scratch memory is left from another ring.
        let measured = match options.device.device {
            Device::Cpu => {
                let attention = Attention::builder().build()?;
                inputs.measure(attention.kernel(), &ring.request, grad)?
            }
            Device::Cuda(number) => inputs.measure(&cuda(number)?, &ring.request, grad)?,
        };
        for (pass, profile) in passes.iter_mut().zip(measured) {
            pass.run.push(profile);
        }
        progress.inc(1);
    }
    match options.device.device {
        Device::Cpu => {
            let attention = Attention::builder().build()?;
            plan_all(attention.kernel(), rings, &mut passes, &progress)?;
        }
        Device::Cuda(number) => plan_all(&cuda(number)?, rings, &mut passes, &progress)?,
    }
    progress.finish_and_clear();
    Ok(passes)
}

/// The rings that are only planned, for a kernel's workspace.
fn plan_all<K: Kernel>(
    kernel: &K,
    rings: &options::Rings,
    passes: &mut [PassProfile],
    progress: &indicatif::ProgressBar,
) -> Result<()> {
    for ring in &rings.planned {
        progress.set_message(format!("plan for {}", ring.ranks));
        for pass in passes.iter_mut() {
            let request = Request {
                pass: match pass.pass {
                    "forward" => Pass::Forward,
                    _ => Pass::Backward { dlse: false },
                },
                ..ring.request.clone()
            };
            pass.planned.push(RingProfile::planned(kernel, &request)?);
        }
        progress.inc(1);
    }
    Ok(())
}
