//! Built-in figures for a machine without a profile, of the order of magnitude of current
//! processors.
//!
//! They can decide between one rank and a ring of threads, and nothing finer; a choice made with
//! them is marked [`MachineSource::BuiltIn`](super::MachineSource::BuiltIn).

use std::collections::BTreeMap;

use encke_core::DType;
use encke_cost::{DeviceModel, Link, Machine, Rate, Speed, TransferMode};

use super::machine_id::MachineId;

const SOURCE: &str = "built in: assumed, not measured";

/// Operations per second and core in f32, by instruction set.
fn flops_of_core(instructions: &str) -> f64 {
    match instructions {
        "amx" | "avx512" => 50e9,
        "avx2" => 25e9,
        _ => 5e9,
    }
}

/// Threads of a machine as ranks, with built-in figures.
pub fn builtin_machine(here: &MachineId) -> Machine {
    let cores = here.cores.max(1);
    let rate = |dtype: DType| {
        let faster = match dtype {
            DType::F64 => 0.5,
            DType::Bf16 if here.instructions == "amx" => 4.0,
            DType::F32 | DType::Bf16 | DType::F16 => 1.0,
        };
        let speed = Speed {
            flops: flops_of_core(&here.instructions) * cores as f64 * faster,
            diagonal_keys: 32.0,
            row_bytes_per_s: 10e9 * cores as f64,
            few_instances_slowdown: 0.1,
            strided_slowdown: 0.1,
            ring_slowdown: 0.1,
            tile: [1, 1],
            instance_s: 1e-6,
            task_rows: 0.0,
            task_share: 1.0 / cores as f64,
        };
        Rate {
            dtype,
            dim: 64,
            forward: speed,
            backward: speed,
            source: SOURCE.to_string(),
        }
    };
    let threads = Link {
        name: "threads".to_string(),
        source: SOURCE.to_string(),
        latency_s: 10e-6,
        bytes_per_s: 5e9,
        mode: TransferMode::SenderThread,
    };
    Machine {
        device: DeviceModel {
            name: "here".to_string(),
            source: SOURCE.to_string(),
            rates: DType::ALL.into_iter().map(rate).collect(),
            job_overhead_s: 10e-6,
            task_overhead_s: 1e-6,
            bytes_per_s: 10e9,
            add_bytes_per_s: Some(5e9),
            strided_bytes_per_s: Some(5e9),
            cell_bytes_per_s: 10e9,
            load_bytes_per_s: Some(5e9),
            allocate_bytes_per_s: Some(5e9),
            shared_cores: Some(cores),
        },
        ranks_per_node: usize::MAX,
        intra_node: threads.clone(),
        inter_node: threads,
        nics: 1,
        stragglers: BTreeMap::new(),
    }
}
