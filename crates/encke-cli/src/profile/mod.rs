//! `encke profile`: output of memory profiles. What is measured is [`encke_lab::profile`]'s.

mod options;
mod text;

use anyhow::Result;
use encke_lab::output::OutputFile;
use encke_lab::profile::{
    PassProfile, measure, measure_caches, measure_policies, write_csv, write_json,
};
use encke_lab::terminal::{Paint, say};
use encke_lab::{Verdict, format};

pub use options::{EXAMPLES, Options};

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    options.device.check_wire(1)?;
    let settings = options.settings()?;
    let csv_path = options.csv.as_deref();
    let csv = OutputFile::create_optional(csv_path, &[])?;
    let others: Vec<_> = csv_path
        .iter()
        .map(|path| ("the CSV file", *path))
        .collect();
    let json = OutputFile::create_optional(options.json.as_deref(), &others)?;
    let passes = measure(&settings)?;

    let first = settings.run.first().or(settings.planned.first());
    if let Some(mut csv) = csv {
        csv.write(|to| write_csv(to, &passes))?;
        csv.keep()?;
    }
    if let (Some(mut json), Some(request)) = (json, first) {
        json.write(|to| write_json(to, request, &passes))?;
        json.keep()?;
    }
    let paint = Paint::stdout();
    if let Some(request) = first {
        say(&format::request(request))?;
    }
    for pass in &passes {
        say(&text::pass(paint, pass))?;
    }
    say(&text::summary(paint, &passes))?;
    if let Some(request) = settings.run.last() {
        if options.policies {
            let policies = measure_policies(request, settings.device)?;
            say(&text::policies(paint, &policies))?;
        }
        if options.caches {
            say(&text::caches(
                paint,
                &measure_caches(request, settings.device)?,
            ))?;
        }
    }
    Ok(Verdict::of(passes.iter().all(PassProfile::is_within_plan)))
}

/// Runs the command as one rank of an MPI job.
#[cfg(feature = "mpi")]
pub fn run_as_rank(
    cluster: &mut encke_lab::cluster::Cluster,
    options: &Options,
) -> Result<Verdict> {
    use encke::CpuKernel;
    use encke_lab::device::ComputeDevice;
    use encke_lab::profile::processes;

    let ready = (|| {
        if options.csv.is_some() {
            anyhow::bail!("--csv is not written by several processes; use --json");
        }
        options.device.check_wire(cluster.ranks())?;
        let path = options.json.as_deref().filter(|_| cluster.is_root());
        let json = OutputFile::create_optional(path, &[])?;
        Ok((json, options.request(cluster.ranks())?))
    })();
    let (json, request) = cluster.agree(ready)?;
    let (grad, seed) = (options.grad, options.seed);
    let profile = match options.device.device {
        ComputeDevice::Cpu => {
            // A kernel keeps its workspace, so that the one which warms up is not measured.
            let two = || Ok([CpuKernel::new()?, CpuKernel::new()?]);
            let [warm, kernel] = cluster.agree(two())?;
            processes::measure(cluster, [&warm, &kernel], &request, grad, seed)?
        }
        ComputeDevice::Cuda(index) => {
            let kernel = cluster.open_gpu(index, options.device.wire, false)?;
            processes::measure(cluster, [&kernel, &kernel], &request, grad, seed)?
        }
    };
    let shown = profile.map_or(Ok(true), |profile| {
        OutputFile::write_json(json, &profile)?;
        say(&text::job(Paint::stdout(), &profile))?;
        Ok(profile.is_within_plan())
    });
    let within_plan = cluster.agree(shown)?;
    let within_plan = cluster.broadcast(cluster.is_root().then_some(within_plan))?;
    Ok(Verdict::of(within_plan))
}
