//! A machine put together from names, a file and options.

use anyhow::{Context, Result, anyhow, bail};
use encke::DType;
use encke::tune::{MachineId, MachineProfile};
use encke_cost::{
    DeviceModel, HostProfile, Machine, ProbeSizes, RING_DEADLINE, Statistic, find_device, find_link,
};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;

use super::options::MachineOptions;
use crate::shape_options::ShapeOptions;
use crate::terminal::spinner;

/// Rows of the largest job that the CPU kernel is measured with.
const ROWS: usize = 2048;
/// How often it is measured; medians count.
const READINGS: usize = 3;

/// The machine that the options ask for.
pub fn machine(options: &MachineOptions, sizes: &ShapeOptions, dtype: DType) -> Result<Machine> {
    let mut machine = match &options.file {
        Some(path) => {
            let shown = path.display();
            let text = std::fs::read_to_string(path);
            let text = text.with_context(|| format!("cannot read {shown}"))?;
            serde_json::from_str(&text)
                .with_context(|| format!("{shown} is no description of a machine"))?
        }
        None => named(options, sizes, dtype)?,
    };
    match options.flops[..] {
        [] => {}
        [both] => set_flops(&mut machine.device, both, both)?,
        [forward, backward] => set_flops(&mut machine.device, forward, backward)?,
        _ => bail!("--flops takes one number, or two: forward and backward"),
    }
    machine.stragglers.extend(options.straggler.iter().copied());
    Ok(machine)
}

/// Whether the options name any machine at all.
pub fn names_one(options: &MachineOptions) -> bool {
    let MachineOptions {
        gpu,
        node,
        link,
        nics,
        flops,
        straggler,
        file,
    } = options;
    let named = gpu.is_some() || node.is_some() || nics.is_some() || file.is_some();
    named || !link.is_empty() || !flops.is_empty() || !straggler.is_empty()
}

fn named(options: &MachineOptions, sizes: &ShapeOptions, dtype: DType) -> Result<Machine> {
    let device = match options.gpu.as_deref() {
        Some("here") => here(sizes, dtype)?,
        Some("tuned") => tuned()?,
        name => find_device(name.unwrap_or("h200"))
            .map_err(|error| anyhow!("{error}, here: the CPU kernel as measured now, and tuned: this machine's GPU as encke tune measured it"))?,
    };
    let link = |at: usize, usual: &str| {
        let name = options.link.get(at).map_or(usual, String::as_str);
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

/// The CPU kernel of this machine as a device: each rank has a machine like it to itself.
fn here(sizes: &ShapeOptions, dtype: DType) -> Result<DeviceModel> {
    let progress = spinner("measuring the kernel");
    let kernel = CpuKernel::new()?;
    let mut profile = HostProfile::new(
        &kernel,
        ProbeSizes {
            rows: ROWS,
            heads: sizes.heads,
            dim: sizes.dim,
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
        "no GPU was measured here with this version; encke tune does, where there is one",
    )?;
    Ok(gpu.device)
}

fn set_flops(device: &mut DeviceModel, forward: f64, backward: f64) -> Result<()> {
    for flops in [forward, backward] {
        if !(flops > 0.0 && flops.is_finite()) {
            bail!("--flops {flops} is no speed; give operations per second, such as 5e14");
        }
    }
    let told = device.rates.first().cloned();
    let Some(told) = told else {
        bail!("the machine's device has no rates; give it one for the type in question");
    };
    // A speed that was given holds for every type, with the first one's other figures.
    device.rates = DType::ALL
        .into_iter()
        .map(|dtype| {
            let mut rate = told.clone();
            rate.dtype = dtype;
            rate.forward.flops = forward;
            rate.backward.flops = backward;
            rate.source = "given".to_string();
            rate
        })
        .collect();
    Ok(())
}
