//! This host as a machine: ranks are threads that share its cores.
//!
//! The decision here: a job is timed alone and concurrently with its like, because shared cores
//! have two answers. Concurrent jobs show how much core time a job costs; jobs alone show how much
//! of the cores it can use.

use std::collections::BTreeMap;

use encke_core::Data;
use encke_core::job::Job;
use encke_core::kernel::Kernel;
use encke_ring::ThreadRing;
use serde::Serialize;

use super::buffers::ProbeBuffers;
use super::copies::CopyBuffers;
use super::fit::{Features, TimeModel, features, fit_alone, misfit};
use super::probes::{Probe, probes};
use super::readings::{Reading, Readings};
use super::timing::{alone, concurrent};
use crate::error::CostError;
use crate::job_costs::{is_strided, longest_task};
use crate::machine::{DeviceModel, Link, Machine, Rate, Speed, TransferMode};
use crate::probe_sizes::ProbeSizes;
use crate::ring_calibration::{CalibrationPattern, RingCalibration};
use crate::statistics::Statistic;

/// Measurements of a kernel on this host, which can be repeated.
#[derive(Debug)]
pub struct HostProfile {
    sizes: ProbeSizes,
    /// The kernel's tile.
    tile: [usize; 2],
    cores: usize,
    probes: Vec<Probe>,
    /// The rows of the whole sequence.
    whole: ProbeBuffers,
    /// A quarter of the rows each, for twice as many ranks as there are cores.
    ranks: Vec<ProbeBuffers>,
    copies: CopyBuffers,
    calibration: RingCalibration,
    readings: Readings,
}

/// A measured job, and its time by the fitted model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobFit {
    /// The pass.
    pub backward: bool,
    /// Whether it has a causal mask.
    pub causal: bool,
    /// Its segments.
    pub segments: usize,
    /// Queries, and keys, of each segment.
    pub rows: usize,
    /// Its heads.
    pub heads: usize,
    /// Whether its rows are strided.
    pub strided: bool,
    /// Seconds with all cores to itself.
    pub alone_s: f64,
    /// The same by the model.
    pub predicted_alone_s: f64,
    /// Seconds from the end of one job to the end of the next while several ranks run the same, if
    /// that was measured.
    pub concurrent_s: Option<f64>,
    /// The same by the model.
    pub predicted_concurrent_s: f64,
}

impl HostProfile {
    /// A profile without measurements.
    pub fn new<K: Kernel<Buffer = Data>>(
        kernel: &K,
        sizes: ProbeSizes,
    ) -> Result<HostProfile, CostError> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let part = (sizes.rows / 4).max(1);
        let ranks = (2 * cores).clamp(4, 16);
        let of_rank = |_| ProbeBuffers::new(kernel, sizes, part);
        Ok(HostProfile {
            sizes,
            tile: kernel.tile(sizes.dtype),
            cores,
            probes: probes(sizes, part),
            whole: ProbeBuffers::new(kernel, sizes, sizes.rows)?,
            ranks: (0..ranks).map(of_rank).collect::<Result<_, _>>()?,
            copies: CopyBuffers::new(sizes),
            calibration: RingCalibration::new(sizes)?,
            readings: Readings::default(),
        })
    }

    /// Times everything once.
    pub fn measure<K: Kernel<Buffer = Data>>(
        &mut self,
        ring: &ThreadRing<K>,
    ) -> Result<(), CostError> {
        let (kernel, mut taken) = (ring.kernel(), Vec::new());
        for (probe, of) in self.probes.iter().enumerate() {
            for backward in [false, true] {
                let sets = match of.whole {
                    true => std::slice::from_mut(&mut self.whole),
                    false => &mut self.ranks,
                };
                let seconds = alone(kernel, of, sets, backward)?;
                taken.push((Reading::Alone { probe, backward }, seconds));
                if !of.whole {
                    let seconds = concurrent(kernel, of, sets, backward)?;
                    taken.push((Reading::Concurrent { probe, backward }, seconds));
                }
            }
        }
        taken.extend(self.copies.measure(kernel, self.sizes, &mut self.whole)?);
        for pattern in [CalibrationPattern::Dense, CalibrationPattern::Dilated] {
            for backward in [false, true] {
                let seconds = self.calibration.seconds(ring, pattern, backward)?;
                taken.push((Reading::Ring { pattern, backward }, seconds));
            }
        }
        self.readings.add(taken);
        Ok(())
    }

    /// Median seconds of the dense forward calibration ring.
    pub fn calibration_s(&self) -> f64 {
        let reading = Reading::Ring {
            pattern: CalibrationPattern::Dense,
            backward: false,
        };
        self.readings.seconds(reading, Statistic::Median)
    }

    /// The machine fitted to the measurements: ranks are threads that share the cores.
    pub fn machine(&self, statistic: Statistic) -> Result<Machine, CostError> {
        let mut machine = self.machine_of_jobs(statistic);
        for backward in [false, true] {
            let patterns = [CalibrationPattern::Dense, CalibrationPattern::Dilated];
            let measured_s = patterns.map(|pattern| {
                let ring = Reading::Ring { pattern, backward };
                self.readings.seconds(ring, statistic)
            });
            self.calibration
                .set_slowdowns(&mut machine, backward, measured_s)?;
        }
        Ok(machine)
    }

    /// The same from single jobs alone.
    fn machine_of_jobs(&self, statistic: Statistic) -> Machine {
        let ProbeSizes { rows, heads, .. } = self.sizes;
        let (dim, dtype) = (self.sizes.dim, self.sizes.dtype);
        let (elements, cells) = (self.sizes.elements(), rows * heads);
        let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
        let per_s = |bytes: usize, seconds: f64| bytes as f64 / seconds.max(1e-9);
        let taken = |reading: Reading| self.readings.seconds(reading, statistic);
        let (forward, overhead_s) = self.speed(false, statistic);
        let (backward, _) = self.speed(true, statistic);
        let cores = self.cores;
        let source = format!("measured here: {rows} rows x {heads} heads x {dim}, {cores} cores");
        let threads = Link {
            name: "threads".to_string(),
            source: source.clone(),
            latency_s: taken(Reading::Latency),
            bytes_per_s: per_s(elements * stored, taken(Reading::ThreadCopy)),
            mode: TransferMode::SenderThread,
        };
        let cell_bytes = elements * sum + cells * (dim * (sum + stored) + 3 * sum);
        let cells_s = taken(Reading::Fill) + taken(Reading::Finish);
        let fill_s = taken(Reading::Fill) * stored as f64 / sum as f64;
        // The reading allocates and fills.
        let allocation_s = taken(Reading::Allocation) - fill_s;
        let rate = Rate {
            dtype,
            dim,
            forward,
            backward,
            source: source.clone(),
        };
        Machine {
            device: DeviceModel {
                name: "here".to_string(),
                source,
                rates: vec![rate],
                job_overhead_s: overhead_s,
                task_overhead_s: 0.0,
                bytes_per_s: per_s(2 * elements * stored, taken(Reading::Copy)),
                add_bytes_per_s: Some(per_s(3 * elements * sum, taken(Reading::AddingCopy))),
                strided_bytes_per_s: Some(per_s(
                    2 * elements * stored,
                    taken(Reading::StridedCopy),
                )),
                cell_bytes_per_s: per_s(cell_bytes, cells_s),
                load_bytes_per_s: Some(per_s(elements * stored, taken(Reading::Load))),
                allocate_bytes_per_s: Some(per_s(elements * stored, allocation_s)),
                shared_cores: Some(cores),
            },
            // All ranks are threads of one process.
            ranks_per_node: usize::MAX,
            intra_node: threads.clone(),
            inter_node: threads,
            nics: 1,
            stragglers: BTreeMap::new(),
        }
    }

    fn features(&self, probe: &Probe, backward: bool) -> Features {
        features(probe.job(), self.sizes.dtype, self.tile, backward)
    }

    /// The jobs of which it was measured how long they keep all cores busy: those that fill the
    /// cores alone, and concurrent ones.
    fn samples(&self, backward: bool, statistic: Statistic) -> Vec<(Features, f64)> {
        let sample = |(probe, of): (usize, &Probe)| {
            let reading = match of.fills_cores() {
                true => Reading::Alone { probe, backward },
                false if of.whole => return None,
                false => Reading::Concurrent { probe, backward },
            };
            let seconds = self.readings.seconds(reading, statistic);
            Some((self.features(of, backward), seconds))
        };
        self.probes.iter().enumerate().filter_map(sample).collect()
    }

    fn model(&self, backward: bool, statistic: Statistic) -> TimeModel {
        TimeModel::fit(&self.samples(backward, statistic))
    }

    /// The speed and the overhead of a job that fit the measurements best.
    fn speed(&self, backward: bool, statistic: Statistic) -> (Speed, f64) {
        let model = self.model(backward, statistic);
        let speed = model.speed(self.tile, 1.0 / self.cores as f64);
        let alone: Vec<(&Job, f64, f64)> = self
            .probes
            .iter()
            .enumerate()
            .map(|(probe, of)| {
                let all_cores_s = model.seconds(&self.features(of, backward));
                let reading = Reading::Alone { probe, backward };
                let alone_s = self.readings.seconds(reading, statistic);
                (of.job(), all_cores_s, alone_s)
            })
            .collect();
        let (speed, latency_s) = fit_alone(speed, &alone);
        (speed, model.job_s() + latency_s)
    }

    /// Every measured job beside its time by the fitted model.
    pub fn fits(&self) -> Vec<JobFit> {
        let median = Statistic::Median;
        let models = [false, true].map(|backward| {
            let (speed, overhead_s) = self.speed(backward, median);
            (self.model(backward, median), speed, overhead_s)
        });
        let probes = self.probes.iter().enumerate();
        let both = probes.flat_map(|probe| [(probe, false), (probe, true)]);
        both.map(|((probe, of), backward)| {
            let (model, speed, overhead_s) = &models[usize::from(backward)];
            let all_cores_s = model.seconds(&self.features(of, backward));
            let job = of.job();
            let share = speed.worker_share(longest_task(job, speed.task_rows));
            let alone = Reading::Alone { probe, backward };
            let concurrent = Reading::Concurrent { probe, backward };
            JobFit {
                backward,
                causal: job.mask.is_some(),
                segments: job.segments,
                rows: job.queries,
                heads: job.heads,
                strided: is_strided(job),
                alone_s: self.readings.seconds(alone, median),
                predicted_alone_s: overhead_s + all_cores_s / share,
                concurrent_s: self.readings.get(concurrent, median),
                predicted_concurrent_s: all_cores_s,
            }
        })
        .collect()
    }

    /// The median relative error of the fitted model on the measurements it is fitted to.
    pub fn misfit(&self) -> f64 {
        misfit(|backward| self.samples(backward, Statistic::Median))
    }
}
