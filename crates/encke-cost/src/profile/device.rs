//! A device that a rank has to itself, as a GPU is: read through its own clock.
//!
//! The same jobs and the same fit as for threads, without the readings that are about ranks sharing
//! cores. The decision here: whoever knows the device brings the clock, because work on it is only
//! enqueued, and the host's time says nothing of it.

use std::collections::BTreeMap;

use encke_core::kernel::{Kernel, KernelError};
use encke_core::transport::WireBuffer;

use super::moves::{apart, block};
use super::operands::Operands;
use super::probes::{Probe, probes};
use super::{ClockError, Costs, Pick, Reading, Sizes, costs, fit, misfit, speed_of};
use crate::machine::{Device, Rate};

/// Something that is done again and again; it is told how often it has been done.
pub type Work<'a> = dyn FnMut(usize) -> Result<(), KernelError> + 'a;

/// Readings of a device, taken as often as one likes.
#[derive(Debug)]
pub struct DeviceProfile<B> {
    sizes: Sizes,
    tile: [usize; 2],
    probes: Vec<Probe>,
    operands: Operands<B>,
    copied: B,
    readings: BTreeMap<Reading, Vec<f64>>,
}

impl<B: WireBuffer + Sync> DeviceProfile<B> {
    /// A profile without readings.
    pub fn new<K: Kernel<Buffer = B>>(
        kernel: &K,
        sizes: Sizes,
    ) -> Result<DeviceProfile<B>, ClockError> {
        let elements = sizes.rows * sizes.heads * sizes.dim;
        Ok(DeviceProfile {
            sizes,
            tile: kernel.tile(sizes.dtype),
            probes: probes(sizes, (sizes.rows / 4).max(1)),
            operands: Operands::new(kernel, sizes, sizes.rows)?,
            copied: kernel.allocate(sizes.dtype, elements)?,
            readings: BTreeMap::new(),
        })
    }

    /// Times everything once. `seconds` is the device's clock: the mean of some work.
    pub fn read<K: Kernel<Buffer = B>>(
        &mut self,
        kernel: &K,
        seconds: &mut dyn FnMut(&mut Work<'_>) -> Result<f64, KernelError>,
    ) -> Result<(), ClockError> {
        let mut taken = Vec::new();
        for (i, probe) in self.probes.iter().enumerate() {
            for backward in [false, true] {
                let operands = &mut self.operands;
                let alone = seconds(&mut |times| {
                    let job = &probe.jobs[times % probe.jobs.len()];
                    operands.run(kernel, job, backward)
                })?;
                taken.push((Reading::Alone { probe: i, backward }, alone));
            }
        }
        taken.extend(self.moves(kernel, seconds)?);
        for (reading, seconds) in taken {
            self.readings.entry(reading).or_default().push(seconds);
        }
        Ok(())
    }

    fn moves<K: Kernel<Buffer = B>>(
        &mut self,
        kernel: &K,
        seconds: &mut dyn FnMut(&mut Work<'_>) -> Result<f64, KernelError>,
    ) -> Result<[(Reading, f64); 4], KernelError> {
        let Sizes {
            rows, heads, dim, ..
        } = self.sizes;
        let Operands {
            inputs, carry, lse, ..
        } = &mut self.operands;
        let copied = &mut self.copied;
        let (whole, apart) = (block(self.sizes), apart(self.sizes));
        let copy = seconds(&mut |times| {
            let from = kernel.input(&inputs[times % 4]);
            kernel.copy(&whole, false, from, copied)
        })?;
        let apart = seconds(&mut |times| {
            let from = kernel.input(&inputs[times % 4]);
            let mut apart = apart.iter();
            apart.try_for_each(|block| kernel.copy(block, false, from, copied))
        })?;
        let finish = seconds(&mut |_| kernel.finish(rows * heads, dim, 1.0, carry, copied, lse))?;
        // A copy of next to nothing is what any task costs.
        let mut little = whole.clone();
        little.rows = 1;
        let task = seconds(&mut |times| {
            let from = kernel.input(&inputs[times % 4]);
            kernel.copy(&little, false, from, copied)
        })?;
        // Any finite lse will do for the jobs that are timed next.
        kernel.fill(lse, 10.0)?;
        Ok([
            (Reading::Copy, copy),
            (Reading::Apart, apart),
            (Reading::Finish, finish),
            (Reading::Hop, task),
        ])
    }

    fn lines(&self, backward: bool) -> Vec<(Costs, f64)> {
        let line = |(probe, shape): (usize, &Probe)| {
            let costs = costs(shape.job(), self.sizes.dtype, self.tile, backward);
            (costs, self.seconds(Reading::Alone { probe, backward }))
        };
        self.probes.iter().enumerate().map(line).collect()
    }

    fn seconds(&self, reading: Reading) -> f64 {
        let readings = self.readings.get(&reading).map_or(&[][..], Vec::as_slice);
        Pick::Median.of(readings)
    }

    /// The device that the readings amount to.
    pub fn device(&self, name: &str) -> Device {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = self.sizes;
        let [forward, backward] = [false, true].map(|backward| fit(&self.lines(backward)));
        let (elements, cells) = (rows * heads * dim, rows * heads);
        let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
        let per_s = |bytes: usize, seconds: f64| bytes as f64 / seconds.max(1e-9);
        let source = format!("measured here: {rows} rows x {heads} heads x {dim}");
        let finished = cells * (dim * (sum + stored) + 3 * sum);
        Device {
            name: name.to_string(),
            source: source.clone(),
            rates: vec![Rate {
                dtype,
                dim,
                forward: speed_of(&forward, self.tile, 1.0),
                backward: speed_of(&backward, self.tile, 1.0),
                source,
            }],
            job_overhead_s: forward[3],
            task_overhead_s: self.seconds(Reading::Hop),
            bytes_per_s: per_s(2 * elements * stored, self.seconds(Reading::Copy)),
            add_bytes_per_s: None,
            apart_bytes_per_s: Some(per_s(2 * elements * stored, self.seconds(Reading::Apart))),
            cell_bytes_per_s: per_s(finished, self.seconds(Reading::Finish)),
            load_bytes_per_s: None,
            fresh_bytes_per_s: None,
            shared_cores: None,
        }
    }

    /// How far the description is from the readings it was made of: the median over all jobs.
    pub fn misfit(&self) -> f64 {
        misfit(|backward| self.lines(backward))
    }
}
