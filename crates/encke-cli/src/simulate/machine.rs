//! The machine of a prediction: from names, a file and options.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use encke::tune::{MachineId, MachineProfile};
use encke::{DType, Shape};
use encke_cost::{
    DeviceModel, HostProfile, Machine, ProbeSizes, RING_DEADLINE, Statistic, find_device, find_link,
};
use encke_cpu::CpuKernel;
use encke_lab::number::count;
use encke_lab::tensors::check_measured;
use encke_lab::terminal::spinner;
use encke_ring::ThreadRing;

use crate::shape_options::ShapeOptions;

/// Rows of the largest job with which the CPU kernel is measured.
const ROWS: usize = 2048;
/// How often it is measured; medians are taken.
const READINGS: usize = 3;

/// The most bytes of a machine file.
const LIMIT: u64 = 1 << 20;

/// The machine of a prediction.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineOptions {
    /// The device of each rank: a name of --list; `here`, the CPU kernel as measured now; or
    /// `tuned`, the GPU of this machine as encke tune measured it [default: h200].
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,

    /// Ranks in a node [default: 8].
    #[arg(long, value_name = "G", value_parser = count)]
    pub node: Option<usize>,

    /// The link inside a node and the link between nodes, names of --list [default: nvlink,ib400].
    #[arg(long, value_name = "INSIDE,BETWEEN", value_delimiter = ',')]
    pub link: Vec<String>,

    /// Network cards in a node; its ranks are assigned to them in order [default: one for each rank
    /// of a node].
    #[arg(long, value_name = "C", value_parser = count)]
    pub nics: Option<usize>,

    /// Operations per second of a device, forward and backward, instead of its own figures: 5e14 or
    /// 6e14,5e14.
    #[arg(long, value_name = "F[,B]", value_delimiter = ',')]
    pub flops: Vec<f64>,

    /// A rank that is slower by a factor, as in 17:1.5; may be repeated.
    #[arg(long, value_name = "RANK:FACTOR", value_parser = straggler)]
    pub straggler: Vec<(usize, f64)>,

    /// A machine as --describe prints it, instead of names.
    #[arg(
        long = "machine",
        value_name = "M.json",
        conflicts_with_all = ["gpu", "node", "link", "nics"]
    )]
    pub file: Option<PathBuf>,
}

impl MachineOptions {
    /// The machine.
    pub fn machine(&self, sizes: &ShapeOptions, dtype: DType) -> Result<Machine> {
        let mut machine = match &self.file {
            Some(path) => {
                let shown = path.display();
                let text = encke_files::read(path, LIMIT);
                let text = text.with_context(|| format!("cannot read {shown}"))?;
                let machine: Machine = encke_files::json::from_slice(&text)
                    .with_context(|| format!("{shown} is not a description of a machine"))?;
                machine.check_values().with_context(|| shown.to_string())?;
                machine
            }
            None => named(self, sizes, dtype)?,
        };
        match self.flops[..] {
            [] => {}
            [both] => set_flops(&mut machine.device, both, both)?,
            [forward, backward] => set_flops(&mut machine.device, forward, backward)?,
            _ => bail!("--flops takes one number, or two: forward and backward"),
        }
        machine.stragglers.extend(self.straggler.iter().copied());
        Ok(machine)
    }

    /// Whether any option was given.
    pub fn any_given(&self) -> bool {
        let MachineOptions {
            gpu,
            node,
            link,
            nics,
            flops,
            straggler,
            file,
        } = self;
        let named = gpu.is_some() || node.is_some() || nics.is_some() || file.is_some();
        named || !link.is_empty() || !flops.is_empty() || !straggler.is_empty()
    }
}

fn named(options: &MachineOptions, sizes: &ShapeOptions, dtype: DType) -> Result<Machine> {
    let device = match options.gpu.as_deref() {
        Some("here") => here(sizes, dtype)?,
        Some("tuned") => tuned()?,
        name => find_device(name.unwrap_or("h200")).map_err(|error| {
            anyhow!(
                "{error}, here: the CPU kernel as measured now, and tuned: this machine's GPU as \
                 encke tune measured it"
            )
        })?,
    };
    let link = |at: usize, default: &str| {
        let name = options.link.get(at).map_or(default, String::as_str);
        find_link(name)
    };
    if options.link.len() > 2 {
        bail!("--link takes two names, inside a node and between nodes, as in nvlink,ib400");
    }
    let node = options.node.unwrap_or(8);
    Ok(Machine {
        device,
        ranks_per_node: node,
        intra_node: link(0, "nvlink")?,
        inter_node: link(1, "ib400")?,
        nics: options.nics.unwrap_or(node),
        stragglers: Default::default(),
    })
}

/// The CPU kernel of this machine as a device; each rank has such a machine to itself.
fn here(sizes: &ShapeOptions, dtype: DType) -> Result<DeviceModel> {
    let (heads, dim) = (sizes.heads, sizes.dim);
    check_measured(&Shape::new(1, ROWS, heads, heads, dim)?)?;
    let progress = spinner("measuring the kernel");
    let kernel = CpuKernel::new()?;
    let mut profile = HostProfile::new(
        &kernel,
        ProbeSizes {
            rows: ROWS,
            heads,
            dim,
            dtype,
        },
    )?;
    let ring = ThreadRing::new(kernel, RING_DEADLINE);
    for _ in 0..READINGS {
        profile.measure(&ring)?;
    }
    progress.finish_and_clear();
    let mut device = profile.machine(Statistic::Median)?.device;
    for rate in &mut device.rates {
        rate.forward.ring_slowdown = 0.0;
        rate.backward.ring_slowdown = 0.0;
    }
    device.shared_cores = None;
    device.load_bytes_per_s = None;
    device.allocate_bytes_per_s = None;
    Ok(device)
}

/// The GPU of this machine, from its profile.
fn tuned() -> Result<DeviceModel> {
    let profile = MachineProfile::load(&MachineId::current())?;
    let gpu = profile.and_then(|profile| profile.gpu);
    let gpu = gpu.context(
        "no GPU was measured on this machine with this version; encke tune measures it, if there \
         is one",
    )?;
    Ok(gpu.device)
}

fn set_flops(device: &mut DeviceModel, forward: f64, backward: f64) -> Result<()> {
    for flops in [forward, backward] {
        if !(flops > 0.0 && flops.is_finite()) {
            bail!("--flops {flops} is not a speed; give operations per second, such as 5e14");
        }
    }
    let Some(first) = device.rates.first().cloned() else {
        bail!("the machine's device has no rates; add one for the type of the tensors");
    };
    // A given speed applies to every type, with the other figures of the first rate.
    device.rates = DType::ALL
        .into_iter()
        .map(|dtype| {
            let mut rate = first.clone();
            rate.dtype = dtype;
            rate.forward.flops = forward;
            rate.backward.flops = backward;
            rate.source = "given".to_string();
            rate
        })
        .collect();
    Ok(())
}

/// Parses a rank and its slowdown.
fn straggler(text: &str) -> Result<(usize, f64), String> {
    let error = || "write a rank and a factor, as in 17:1.5".to_string();
    let (rank, factor) = text.split_once(':').ok_or_else(error)?;
    let factor = factor.parse::<f64>().map_err(|_| error())?;
    match factor.is_finite() && factor > 0.0 {
        true => Ok((count(rank)?, factor)),
        false => Err(error()),
    }
}
