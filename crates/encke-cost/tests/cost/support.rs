//! Machines with round numbers, and plans for them.

use encke_core::plan::{Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape};
use encke_cost::{DeviceModel, Link, Machine, Rate, Speed, TransferMode};
use std::collections::BTreeMap;

/// A device with `flops` FLOP/s on which everything else takes no time.
pub fn device(flops: f64) -> DeviceModel {
    let speed = Speed::new(flops, f64::INFINITY);
    DeviceModel {
        name: "test".to_string(),
        source: String::new(),
        rates: vec![Rate {
            dtype: DType::F32,
            dim: 4,
            forward: speed,
            backward: speed,
            source: String::new(),
        }],
        job_overhead_s: 0.0,
        task_overhead_s: 0.0,
        bytes_per_s: f64::INFINITY,
        add_bytes_per_s: None,
        strided_bytes_per_s: None,
        cell_bytes_per_s: f64::INFINITY,
        load_bytes_per_s: None,
        allocate_bytes_per_s: None,
        shared_cores: None,
    }
}

/// A link whose transfers overlap computation.
pub fn link(latency_s: f64, bytes_per_s: f64) -> Link {
    Link {
        name: "test".to_string(),
        source: String::new(),
        latency_s,
        bytes_per_s,
        mode: TransferMode::Offloaded,
    }
}

/// One node, with more ranks than any test has.
pub fn machine(flops: f64, intra_node: Link) -> Machine {
    Machine {
        device: device(flops),
        ranks_per_node: 1 << 20,
        inter_node: intra_node.clone(),
        intra_node,
        nics: 1,
        stragglers: BTreeMap::new(),
    }
}

/// Dense attention, not causal: `tokens` x 1 head x 4 channels in f32.
pub fn dense(tokens: usize, ranks: usize) -> Plan {
    plan(tokens, 1, ranks, Pattern::dense(), Cut::Contiguous)
}

/// A forward plan in f32 with head dimension 4.
pub fn plan(tokens: usize, heads: usize, ranks: usize, pattern: Pattern, cut: Cut) -> Plan {
    let shape = Shape::new(1, tokens, heads, heads, 4).unwrap();
    let sharding = Sharding::new(ranks, cut).unwrap();
    Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap()
}
