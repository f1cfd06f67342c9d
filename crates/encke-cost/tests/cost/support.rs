//! Machines with round numbers, and plans for them.

use encke_core::plan::{Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape};
use encke_cost::{Carrier, Device, Link, Machine, Rate, Speed};
use std::collections::BTreeMap;

/// A device that does `flops` operations a second and everything else in no time.
pub fn device(flops: f64) -> Device {
    let speed = Speed {
        flops,
        diagonal_keys: 0.0,
        row_bytes_per_s: f64::INFINITY,
        few_slower: 0.0,
        apart_slower: 0.0,
        ring_slower: 0.0,
        tile: [1, 1],
        single_s: 0.0,
        task_rows: 0.0,
        task_share: 1.0,
    };
    Device {
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
        apart_bytes_per_s: None,
        cell_bytes_per_s: f64::INFINITY,
        load_bytes_per_s: None,
        fresh_bytes_per_s: None,
        shared_cores: None,
    }
}

/// A link of its own hardware.
pub fn link(latency_s: f64, bytes_per_s: f64) -> Link {
    Link {
        name: "test".to_string(),
        source: String::new(),
        latency_s,
        bytes_per_s,
        carrier: Carrier::Wire,
    }
}

/// One node with so many ranks.
pub fn machine(flops: f64, inside: Link) -> Machine {
    Machine {
        device: device(flops),
        node: 1 << 20,
        between: inside.clone(),
        inside,
        nics: 1,
        stragglers: BTreeMap::new(),
    }
}

/// Dense attention, not causal: `tokens` x 1 head x 4 numbers in f32.
pub fn dense(tokens: usize, ranks: usize) -> Plan {
    plan(tokens, 1, ranks, Pattern::dense(), Cut::Contiguous)
}

/// A forward plan in f32 with 4 numbers a head.
pub fn plan(tokens: usize, heads: usize, ranks: usize, pattern: Pattern, cut: Cut) -> Plan {
    let shape = Shape::new(1, tokens, heads, heads, 4).unwrap();
    let sharding = Sharding::new(ranks, cut).unwrap();
    Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap()
}
