//! Measures this machine in under a minute: the kernel in every type, memory, hops between threads.
//!
//! [`HostProfile`] measures and fits; this file decides which types and sizes are worth the time.
//! They take turns, so that other load on the machine affects all of them alike, until the time
//! limit.

use std::time::{Duration, Instant};

use encke_core::DType;
use encke_cost::{
    CostError, HostProfile, Machine, ProbeSizes, RING_DEADLINE, Rate, RingCalibration, Speed,
    Statistic, median,
};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;

use super::gpu;
use super::machine_id::MachineId;
use super::profile::{FORMAT, MachineProfile, TuneError};

/// Default time limit. At least one turn is always completed.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(50);

/// Rows of the largest job.
const ROWS: usize = 2048;
/// Heads of every job.
const HEADS: usize = 4;

/// Types and head dimensions, the most common first.
const KINDS: [(DType, usize); 6] = [
    (DType::F32, 64),
    (DType::Bf16, 64),
    (DType::F32, 128),
    (DType::Bf16, 128),
    (DType::F16, 64),
    (DType::F64, 64),
];

fn sizes(dtype: DType, dim: usize) -> ProbeSizes {
    ProbeSizes {
        rows: ROWS,
        heads: HEADS,
        dim,
        dtype,
    }
}

/// The ring whose time is stored in the profile, and compared later to see whether the machine's
/// speed has changed: that of the first type and head dimension.
pub(super) fn calibration_ring() -> Result<RingCalibration, CostError> {
    let (dtype, dim) = KINDS[0];
    RingCalibration::new(sizes(dtype, dim))
}

/// Measures this machine. `progress` gets the name of the next measurement and the fraction of the
/// time used.
pub fn measure(
    here: MachineId,
    limit: Duration,
    progress: &mut dyn FnMut(&str, f64),
) -> Result<MachineProfile, TuneError> {
    let begin = Instant::now();
    let kernel = CpuKernel::new()?;
    // The GPU first: compiling its kernels takes an unknown time, and the CPU gets the remainder.
    progress("the GPU", 0.0);
    let gpu = gpu::measure()?;
    let mut profiles: Vec<(String, HostProfile)> = Vec::new();
    for (dtype, dim) in KINDS {
        let sizes = sizes(dtype, dim);
        let name = format!("{dtype}, head dimension {dim}");
        profiles.push((name, HostProfile::new(&kernel, sizes)?));
    }
    let ring = ThreadRing::new(kernel, RING_DEADLINE);
    let mut turn_took = Duration::ZERO;
    loop {
        let turn = Instant::now();
        for (name, profile) in &mut profiles {
            let passed = begin.elapsed().as_secs_f64() / limit.as_secs_f64().max(1e-9);
            progress(name, passed.min(1.0));
            profile.measure(&ring)?;
        }
        turn_took = turn_took.max(turn.elapsed());
        if begin.elapsed() + turn_took > limit {
            break;
        }
    }
    let profiles: Vec<HostProfile> = profiles.into_iter().map(|(_, profile)| profile).collect();
    let misfits: Vec<f64> = profiles.iter().map(HostProfile::misfit).collect();
    let machine = merge(&profiles)?;
    machine.check(1)?;
    Ok(MachineProfile {
        format: FORMAT,
        here,
        measured_s: begin.elapsed().as_secs_f64(),
        misfit: median(&misfits),
        yardstick_s: profiles.first().map(HostProfile::calibration_s),
        machine,
        gpu,
    })
}

/// One machine with the rates of all profiles; everything else is from the first.
fn merge(profiles: &[HostProfile]) -> Result<Machine, CostError> {
    let mut machines = profiles
        .iter()
        .map(|profile| profile.machine(Statistic::Median));
    let mut machine = machines.next().expect("at least one type was measured")?;
    for other in machines {
        machine.device.rates.extend(other?.device.rates);
    }
    pool(&mut machine.device.rates);
    Ok(machine)
}

/// Replaces the overheads of rings and branches by their median over all types. They are waits for
/// memory, which do not depend on the type, and each type's measurement is short and noisy. The
/// median is taken in seconds per operation: for tiles five times as fast the same wait is a
/// fraction five times as large.
fn pool(rates: &mut [Rate]) {
    for pass in [
        (|rate: &mut Rate| &mut rate.forward) as fn(&mut Rate) -> &mut Speed,
        |rate| &mut rate.backward,
    ] {
        for figure in [
            (|speed: &mut Speed| &mut speed.ring_slowdown) as fn(&mut Speed) -> &mut f64,
            |speed| &mut speed.strided_slowdown,
        ] {
            let each = rates.iter_mut().map(pass);
            let all: Vec<f64> = each.map(|speed| *figure(speed) / speed.flops).collect();
            for speed in rates.iter_mut().map(pass) {
                *figure(speed) = median(&all) * speed.flops;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_overhead_is_the_median_over_all_types() {
        let speed = |flops: f64, ring_slowdown: f64, strided_slowdown: f64| Speed {
            flops,
            diagonal_keys: 0.0,
            row_bytes_per_s: 1e9,
            few_instances_slowdown: 0.0,
            strided_slowdown,
            ring_slowdown,
            tile: [1, 1],
            instance_s: 0.0,
            task_rows: 0.0,
            task_share: 1.0,
        };
        let mut rates: Vec<Rate> = [(1e9, 0.25, 0.5), (1e9, 0.5, 0.25), (4e9, 0.5, 1.5)]
            .into_iter()
            .map(|(flops, ring, apart)| Rate {
                dtype: DType::F32,
                dim: 64,
                source: String::new(),
                forward: speed(flops, ring, apart),
                backward: speed(flops, 2.0 * ring, apart),
            })
            .collect();
        pool(&mut rates);
        // Per operation: 250, 500 and 125 ps in rings, 500, 250 and 375 ps with gaps.
        for (rate, times) in rates.iter().zip([1.0, 1.0, 4.0]) {
            let close = |speed: &Speed, ring: f64, apart: f64| {
                assert!((speed.ring_slowdown / times - ring).abs() < 1e-12);
                assert!((speed.strided_slowdown / times - apart).abs() < 1e-12);
            };
            close(&rate.forward, 0.25, 0.375);
            close(&rate.backward, 0.5, 0.375);
        }
    }
}
