//! Devices and links by name, each with the source of its figures.
//!
//! Every source says which kind a figure is: *measured* on the device by this project, *published*
//! measurements of others, or *data sheet*, which is a bound that programs do not reach. Latencies
//! are *assumed*: they have not been measured here.

use encke_core::DType;

use crate::error::CostError;
use crate::machine::{DeviceModel, Link, Rate, Speed, TransferMode};

/// Seconds of a kernel launch and its gap on the stream.
const LAUNCH_S: f64 = 5e-6;

/// A GPU whose tensor cores run bf16 and f16 at the same speed. `rates` has the head dimension, the
/// forward and backward TFLOP/s and the diagonal keys of each rate.
fn gpu(
    name: &str,
    source: &str,
    memory_bytes_per_s: f64,
    rates: [(usize, f64, f64, f64); 2],
    rate_source: impl Fn(usize) -> String,
) -> DeviceModel {
    let speed = |teraflops: f64, diagonal_keys: f64| Speed {
        diagonal_keys,
        ..Speed::new(teraflops * 1e12, memory_bytes_per_s)
    };
    let rate = |dtype, (dim, forward, backward, diagonal_keys)| Rate {
        dtype,
        dim,
        forward: speed(forward, diagonal_keys),
        backward: speed(backward, diagonal_keys),
        source: rate_source(dim),
    };
    let dtypes = [DType::Bf16, DType::F16].into_iter();
    DeviceModel {
        name: name.to_string(),
        source: source.to_string(),
        rates: dtypes
            .flat_map(|dtype| rates.map(|figures| rate(dtype, figures)))
            .collect(),
        job_overhead_s: LAUNCH_S,
        task_overhead_s: LAUNCH_S,
        bytes_per_s: memory_bytes_per_s,
        add_bytes_per_s: None,
        strided_bytes_per_s: None,
        cell_bytes_per_s: memory_bytes_per_s,
        load_bytes_per_s: None,
        allocate_bytes_per_s: None,
        shared_cores: None,
    }
}

/// All devices of the catalogue.
pub fn devices() -> Vec<DeviceModel> {
    vec![
        gpu(
            "h200",
            "FLOP/s measured on one H200 (CUDA 13.0) with prototype kernels, bf16, f16 taken as \
             equal; 4.5 TB/s measured reads of strided rows (data sheet 4.8); 5 us a launch \
             assumed",
            4.5e12,
            // The diagonal was derived from causal and full runs of the same kernel at 4k to 64k
            // rows: 600 to 1500 keys at head dimension 128, 600 to 900 at 64.
            [(64, 516.0, 481.0, 800.0), (128, 645.0, 531.0, 1000.0)],
            |dim| {
                let heads = 2048 / dim;
                format!("measured: forward 67,584 rows x 16 heads, backward 16,384 x {heads}, full")
            },
        ),
        gpu(
            "h100",
            "FLOP/s published for H100 SXM5, fp16, bf16 taken as equal; 3.35 TB/s data sheet; \
             5 us a launch assumed",
            3.35e12,
            [(64, 497.0, 474.0, 400.0), (128, 648.0, 561.0, 425.0)],
            |_| {
                "published: FlashAttention-3, fp16, 16k rows; diagonal from its causal runs"
                    .to_string()
            },
        ),
    ]
}

/// Name, latency in microseconds, GB/s, and the source of the bandwidth.
const LINKS: [(&str, f64, f64, &str); 6] = [
    (
        "nvlink",
        3.0,
        450.0,
        "NVLink 4, data sheet: 900 GB/s a device, both ways together",
    ),
    (
        "nvlink3",
        3.0,
        300.0,
        "NVLink 3, data sheet: 600 GB/s a device, both ways together",
    ),
    (
        "pcie5",
        5.0,
        55.0,
        "PCIe 5 x16, measured: pinned host copies of an H200 each way",
    ),
    (
        "ib400",
        5.0,
        50.0,
        "InfiniBand NDR, data sheet: 400 Gbit/s a port each way",
    ),
    (
        "ib200",
        5.0,
        25.0,
        "InfiniBand HDR, data sheet: 200 Gbit/s a port each way",
    ),
    ("eth100", 20.0, 12.5, "100 Gbit/s Ethernet, data sheet"),
];

/// All links of the catalogue.
pub fn links() -> Vec<Link> {
    let link = |(name, latency_us, gigabytes, source): (&str, f64, f64, &str)| Link {
        name: name.to_string(),
        source: format!("{source}; latency assumed"),
        latency_s: latency_us * 1e-6,
        bytes_per_s: gigabytes * 1e9,
        mode: TransferMode::Offloaded,
    };
    LINKS.map(link).to_vec()
}

/// A device by its name, in any case.
pub fn find_device(name: &str) -> Result<DeviceModel, CostError> {
    find("device", name, devices(), |device| &device.name)
}

/// A link by its name, in any case.
pub fn find_link(name: &str) -> Result<Link, CostError> {
    find("link", name, links(), |link| &link.name)
}

fn find<T>(
    kind: &'static str,
    name: &str,
    all: Vec<T>,
    named: impl Fn(&T) -> &String,
) -> Result<T, CostError> {
    let known: Vec<String> = all.iter().map(|item| named(item).clone()).collect();
    let found = all
        .into_iter()
        .find(|item| named(item).eq_ignore_ascii_case(name));
    found.ok_or_else(|| CostError::Unknown {
        kind,
        name: name.to_string(),
        known: known.join(", "),
    })
}
