//! Invalid machine descriptions, and names that are not in the catalogue.

use encke_core::plan::{Plan, Request};
use encke_core::sharding::Sharding;
use encke_core::{DType, Pattern, Shape};
use encke_cost::{CostError, Machine, devices, find_device, find_link, links, simulate};

use crate::support::{dense, link, machine};

fn refused(change: impl Fn(&mut Machine), message: &str) {
    let mut machine = machine(1.0, link(0.0, 1.0));
    change(&mut machine);
    let error = simulate(&dense(8, 2), &machine, 0..0).unwrap_err();
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    refused(
        |m| m.intra_node.bytes_per_s = 0.0,
        "bytes_per_s of a link is 0",
    );
    refused(
        |m| m.inter_node.latency_s = -1.0,
        "latency_s of a link is -1",
    );
    refused(
        |m| m.device.rates[0].forward.flops = f64::NAN,
        "flops is NaN",
    );
    refused(|m| m.device.bytes_per_s = -3.0, "bytes_per_s is -3");
    refused(|m| m.device.shared_cores = Some(0), "shared_cores is 0");
    refused(
        |m| m.device.rates[0].forward.task_share = 0.0,
        "task_share is 0",
    );
    refused(
        |m| m.device.rates[0].backward.task_share = 1.5,
        "task_share is 1.5 in the description of the machine; it must be more than 0, at most 1",
    );
    refused(
        |m| m.device.allocate_bytes_per_s = Some(0.0),
        "allocate_bytes_per_s is 0",
    );
    refused(|m| m.ranks_per_node = 0, "ranks_per_node is 0");
    refused(|m| m.nics = 0, "nics is 0");
    refused(
        |m| m.stragglers = [(2, 2.0)].into(),
        "rank 2 is to be slow, but there are 2 ranks",
    );
    refused(
        |m| m.stragglers = [(1, 0.0)].into(),
        "factor of a straggler is 0",
    );
}

#[test]
fn a_dtype_without_rates_is_refused_with_those_that_have_some() {
    let shape = Shape::new(1, 8, 1, 1, 64).unwrap();
    let sharding = Sharding::contiguous(2).unwrap();
    let plan = Plan::new(Request::new(shape, Pattern::dense(), sharding, DType::F64)).unwrap();
    let mut machine = machine(1.0, link(0.0, 1.0));
    machine.device = find_device("h200").unwrap();
    let error = simulate(&plan, &machine, 0..0).unwrap_err();
    assert!(matches!(
        &error,
        CostError::NoRate {
            dtype: DType::F64,
            ..
        }
    ));
    assert!(error.to_string().contains("bf16, f16"), "{error}");
}

#[test]
fn unknown_names_are_refused_with_the_known_ones() {
    assert_eq!(find_device("H200").unwrap().name, "h200");
    assert_eq!(find_link("ib400").unwrap().bytes_per_s, 50e9);
    let error = find_device("h900").unwrap_err().to_string();
    assert!(
        error.contains("h900") && error.contains("h200, h100"),
        "{error}"
    );
    let error = find_link("string").unwrap_err().to_string();
    assert!(
        error.contains("nvlink") && error.contains("ib400"),
        "{error}"
    );
}

#[test]
fn every_figure_of_the_catalogue_names_its_source() {
    let check = |source: &str| {
        let kinds = ["measured", "published", "data sheet", "assumed"];
        assert!(kinds.iter().any(|kind| source.contains(kind)), "{source:?}");
    };
    devices().iter().for_each(|device| check(&device.source));
    devices()
        .iter()
        .flat_map(|device| &device.rates)
        .for_each(|rate| check(&rate.source));
    links().iter().for_each(|link| check(&link.source));
}
