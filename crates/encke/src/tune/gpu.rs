//! Measures this machine's first GPU, if it has one.
//!
//! The decision here: a missing or unusable GPU is no error; the profile then has no GPU.

use std::time::Instant;

use encke_core::DType;
use encke_core::Tensor;
use encke_core::kernel::KernelError;
use encke_core::memory::Memory;
use encke_core::sharding::Run as Tokens;
use encke_cost::{DeviceModel, DeviceProfile, Link, Machine, ProbeSizes, TimedWork, TransferMode};
use encke_cuda::{Buffer, CudaKernel, Summation};

use super::profile::TuneError;

/// Rows of the largest job: long enough that a GPU is full for milliseconds.
const ROWS: usize = 8192;
/// Heads of every job.
const HEADS: usize = 16;
/// How often everything is measured.
const READINGS: usize = 3;
/// Approximate seconds of one measurement.
const READING_S: f64 = 5e-3;

/// Types and head dimensions of the tensor-core kernels.
const KINDS: [(DType, usize); 4] = [
    (DType::Bf16, 64),
    (DType::Bf16, 128),
    (DType::F16, 64),
    (DType::F16, 128),
];

/// The first GPU as the device of a rank; `None` without a usable GPU.
pub fn measure() -> Result<Option<Machine>, TuneError> {
    let Ok(kernel) = CudaKernel::new(0) else {
        return Ok(None);
    };
    let kernel = kernel.summation(Summation::Fast);
    let name = kernel.device().name().to_string();
    let mut found: Option<DeviceModel> = None;
    for (dtype, dim) in KINDS {
        let sizes = ProbeSizes {
            rows: ROWS,
            heads: HEADS,
            dim,
            dtype,
        };
        let mut profile: DeviceProfile<Buffer> = DeviceProfile::new(&kernel, sizes)?;
        for _ in 0..READINGS {
            profile.measure(&kernel, &mut |work| seconds(&kernel, work))?;
        }
        let device = profile.device(&name);
        match &mut found {
            None => found = Some(device),
            Some(found) => found.rates.extend(device.rates),
        }
    }
    let Some(device) = found else {
        return Ok(None);
    };
    let machine = Machine {
        ranks_per_node: 1,
        intra_node: Link {
            name: "its own memory".to_string(),
            source: device.source.clone(),
            latency_s: device.task_overhead_s,
            bytes_per_s: device.bytes_per_s / 2.0,
            mode: TransferMode::Offloaded,
        },
        inter_node: host_link(&kernel)?,
        nics: 1,
        stragglers: Default::default(),
        device,
    };
    machine.check(1)?;
    Ok(Some(machine))
}

/// Mean seconds of `work`, from GPU events, after a first call that may compile kernels.
fn seconds(kernel: &CudaKernel, work: &mut TimedWork<'_>) -> Result<f64, KernelError> {
    let device = kernel.device();
    let mut timed = |first: usize, times: usize| {
        let begin = device.instant()?;
        for time in first..first + times {
            work(time)?;
            device.flush_deferred()?; // one at a time, as on a GPU that belongs to one rank
        }
        let end = device.instant()?;
        device.synchronize()?;
        let milliseconds = end.since(&begin)?;
        Ok::<f64, KernelError>(1e-3 * milliseconds / times as f64)
    };
    timed(0, 1)?;
    let once = timed(1, 2)?;
    let times = (READING_S / once.max(1e-7)).clamp(2.0, 200.0) as usize;
    timed(3, times)
}

/// The link through the host, measured by uploads.
fn host_link(kernel: &CudaKernel) -> Result<Link, TuneError> {
    let dims = [1, ROWS, HEADS, 64];
    let tensor = Tensor::zeros(DType::Bf16, dims);
    let all = [Tokens {
        first: 0,
        stride: 1,
        count: ROWS,
    }];
    let elements: usize = dims.iter().product();
    let mut buffer = kernel.allocate(DType::Bf16, elements)?;
    let mut upload = |times: u32| {
        let begin = Instant::now();
        for _ in 0..times {
            kernel.upload(&tensor.view(), &all, &mut buffer)?;
        }
        kernel.device().synchronize().map_err(KernelError::from)?;
        Ok::<f64, KernelError>(begin.elapsed().as_secs_f64() / f64::from(times))
    };
    upload(2)?;
    let whole_s = upload(10)?;
    let mut little = kernel.allocate(DType::Bf16, 1)?;
    let one = Tensor::zeros(DType::Bf16, [1, 1, 1, 1]);
    let begin = Instant::now();
    for _ in 0..10 {
        kernel.upload(&one.view(), &[Tokens { count: 1, ..all[0] }], &mut little)?;
    }
    kernel.device().synchronize().map_err(KernelError::from)?;
    let latency_s = begin.elapsed().as_secs_f64() / 10.0;
    let moved_s = (whole_s - latency_s).max(1e-9);
    Ok(Link {
        name: "through the host".to_string(),
        source: "measured here: uploads from memory that is not page-locked".to_string(),
        latency_s,
        bytes_per_s: (elements * DType::Bf16.bytes()) as f64 / moved_s,
        mode: TransferMode::Offloaded,
    })
}
