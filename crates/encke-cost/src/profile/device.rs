//! A device that a rank has to itself, such as a GPU.
//!
//! The same jobs and the same fit as for the host, without the measurements of ranks that share
//! cores. The decision here: the caller supplies the timer, because launches are asynchronous and
//! the host's clock does not show the time of work on the device.

use encke_core::kernel::{Kernel, KernelError};
use encke_core::transport::WireBuffer;

use super::buffers::ProbeBuffers;
use super::copies::{all_rows, measure_copies};
use super::fit::{Features, TimeModel, features, misfit};
use super::probes::{Probe, probes};
use super::readings::{Reading, Readings};
use super::timing::TimedWork;
use crate::error::CostError;
use crate::machine::{DeviceModel, Rate};
use crate::probe_sizes::ProbeSizes;
use crate::statistics::Statistic;

/// Measurements of a device, which can be repeated.
#[derive(Debug)]
pub struct DeviceProfile<B> {
    sizes: ProbeSizes,
    tile: [usize; 2],
    probes: Vec<Probe>,
    buffers: ProbeBuffers<B>,
    copied: B,
    readings: Readings,
}

impl<B: WireBuffer + Sync> DeviceProfile<B> {
    /// A profile without measurements.
    pub fn new<K: Kernel<Buffer = B>>(
        kernel: &K,
        sizes: ProbeSizes,
    ) -> Result<DeviceProfile<B>, CostError> {
        Ok(DeviceProfile {
            sizes,
            tile: kernel.tile(sizes.dtype),
            probes: probes(sizes, (sizes.rows / 4).max(1)),
            buffers: ProbeBuffers::new(kernel, sizes, sizes.rows)?,
            copied: kernel.allocate(sizes.dtype, sizes.elements())?,
            readings: Readings::default(),
        })
    }

    /// Times everything once. `seconds` is the device's timer: the mean seconds of repeated work.
    pub fn measure<K: Kernel<Buffer = B>>(
        &mut self,
        kernel: &K,
        seconds: &mut dyn FnMut(&mut TimedWork<'_>) -> Result<f64, KernelError>,
    ) -> Result<(), CostError> {
        let mut taken = Vec::new();
        for (probe, of) in self.probes.iter().enumerate() {
            for backward in [false, true] {
                let buffers = &mut self.buffers;
                let alone = seconds(&mut |times| {
                    let job = &of.jobs[times % of.jobs.len()];
                    buffers.run(kernel, job, backward)
                })?;
                taken.push((Reading::Alone { probe, backward }, alone));
            }
        }
        let (sizes, copied) = (self.sizes, &mut self.copied);
        taken.extend(measure_copies(
            kernel,
            sizes,
            &mut self.buffers,
            copied,
            seconds,
        )?);
        // A copy of one row costs about as much as the overhead of any task.
        let mut one_row = all_rows(sizes);
        one_row.rows = 1;
        let inputs = &self.buffers.inputs;
        let task = seconds(&mut |times| {
            let from = kernel.input(&inputs[times % 4]);
            kernel.copy(&one_row, false, from, copied)
        })?;
        taken.push((Reading::Latency, task));
        self.readings.add(taken);
        Ok(())
    }

    fn samples(&self, backward: bool) -> Vec<(Features, f64)> {
        let sample = |(probe, of): (usize, &Probe)| {
            let features = features(of.job(), self.sizes.dtype, self.tile, backward);
            (features, self.seconds(Reading::Alone { probe, backward }))
        };
        self.probes.iter().enumerate().map(sample).collect()
    }

    fn seconds(&self, reading: Reading) -> f64 {
        self.readings.seconds(reading, Statistic::Median)
    }

    /// The device fitted to the measurements.
    pub fn device(&self, name: &str) -> DeviceModel {
        let ProbeSizes { rows, heads, .. } = self.sizes;
        let (dim, dtype) = (self.sizes.dim, self.sizes.dtype);
        let [forward, backward] =
            [false, true].map(|backward| TimeModel::fit(&self.samples(backward)));
        let (elements, cells) = (self.sizes.elements(), rows * heads);
        let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
        let per_s = |bytes: usize, seconds: f64| bytes as f64 / seconds.max(1e-9);
        let source = format!("measured here: {rows} rows x {heads} heads x {dim}");
        let finished = cells * (dim * (sum + stored) + 3 * sum);
        DeviceModel {
            name: name.to_string(),
            source: source.clone(),
            rates: vec![Rate {
                dtype,
                dim,
                forward: forward.speed(self.tile, 1.0),
                backward: backward.speed(self.tile, 1.0),
                source,
            }],
            job_overhead_s: forward.job_s(),
            task_overhead_s: self.seconds(Reading::Latency),
            bytes_per_s: per_s(2 * elements * stored, self.seconds(Reading::Copy)),
            add_bytes_per_s: None,
            strided_bytes_per_s: Some(per_s(
                2 * elements * stored,
                self.seconds(Reading::StridedCopy),
            )),
            cell_bytes_per_s: per_s(finished, self.seconds(Reading::Finish)),
            load_bytes_per_s: None,
            allocate_bytes_per_s: None,
            shared_cores: None,
        }
    }

    /// The median relative error of the fitted model on the measurements it is fitted to.
    pub fn misfit(&self) -> f64 {
        misfit(|backward| self.samples(backward))
    }
}
