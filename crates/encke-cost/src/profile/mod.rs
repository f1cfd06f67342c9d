//! A described machine made from readings of a real kernel: this one, with threads as ranks.
//!
//! (and, in `device.rs`, a device that a rank has to itself).
//!
//! Jobs of a few shapes are timed, alone and as ranks have them side by side, and what a device's
//! description has (an overhead, a rate, the diagonal, the rows) is fitted to them. Two small rings
//! are run besides ([`RingCalibration`]), for what no job alone can tell; all others are what the result
//! is held against.

mod device;
mod moves;
mod operands;
mod probes;
mod timing;

use std::collections::BTreeMap;

use encke_core::job::Job;
use encke_core::kernel::Kernel;
use encke_core::{DType, Data};
use encke_ring::ThreadRing;
use serde::Serialize;

use super::cost::{is_apart, is_few, longest, query_rows, row_bytes, singles, tiled_pairs};
use super::error::ClockError;
use super::fit::fit;
use super::machine::{Carrier, Device, Link, Machine, Rate, Speed};
use super::median;
use super::ring_calibration::{Kind, RingCalibration};
pub use device::{DeviceProfile, Work as DeviceWork};
use moves::Places;
use operands::Operands;
use probes::{Probe, probes};

/// What is measured: jobs of these heads and types, up to so many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of the largest job.
    pub rows: usize,
    /// Heads, each with keys of its own.
    pub heads: usize,
    /// Numbers a head.
    pub dim: usize,
    /// The storage type.
    pub dtype: DType,
}

/// Which of several readings, or runs, is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pick {
    /// The one in the middle: what to expect of the machine as it is.
    Median,
    /// The shortest: what to expect of it when it has nothing else to do.
    Fastest,
}

impl Pick {
    /// The one of these; 0 of none.
    pub fn of(self, numbers: &[f64]) -> f64 {
        match self {
            Pick::Median => median(numbers),
            Pick::Fastest => numbers.iter().copied().reduce(f64::min).unwrap_or(0.0),
        }
    }
}

/// Readings of a kernel, taken as often as one likes.
#[derive(Debug)]
pub struct Profile {
    sizes: Sizes,
    /// What the kernel computes together.
    tile: [usize; 2],
    cores: usize,
    probes: Vec<Probe>,
    /// The rows of the whole sequence.
    whole: Operands,
    /// A quarter of the rows each, for twice as many ranks as there are cores.
    ranks: Vec<Operands>,
    places: Places,
    yardstick: RingCalibration,
    readings: BTreeMap<Reading, Vec<f64>>,
}

/// Something that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reading {
    /// A job that has the device to itself.
    Alone {
        probe: usize,
        backward: bool,
    },
    /// A job among others like it.
    Among {
        probe: usize,
        backward: bool,
    },
    /// A ring of the yardstick.
    Ring {
        kind: Kind,
        backward: bool,
    },
    Fill,
    Copy,
    Add,
    Apart,
    Finish,
    Load,
    Carry,
    Fresh,
    Hop,
}

/// A job that was read, and what the description makes of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Told {
    /// The pass.
    pub backward: bool,
    /// Whether it has a causal mask.
    pub causal: bool,
    /// Its segments.
    pub segments: usize,
    /// Queries, and keys, of each.
    pub rows: usize,
    /// Its heads.
    pub heads: usize,
    /// Whether its rows lie apart.
    pub apart: bool,
    /// Seconds with the device to itself.
    pub alone_s: f64,
    /// The same by the description.
    pub told_alone_s: f64,
    /// Seconds from one to the next among others like it, where that was read.
    pub among_s: Option<f64>,
    /// The same by the description.
    pub told_among_s: f64,
}

/// What a job costs, in the order of a fit's columns.
type Costs = [f64; 7];

impl Profile {
    /// A profile without readings.
    pub fn new<K: Kernel<Buffer = Data>>(kernel: &K, sizes: Sizes) -> Result<Profile, ClockError> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let part = (sizes.rows / 4).max(1);
        let ranks = (2 * cores).clamp(4, 16);
        let of_rank = |_| Operands::new(kernel, sizes, part);
        Ok(Profile {
            sizes,
            tile: kernel.tile(sizes.dtype),
            cores,
            probes: probes(sizes, part),
            whole: Operands::new(kernel, sizes, sizes.rows)?,
            ranks: (0..ranks).map(of_rank).collect::<Result<_, _>>()?,
            places: Places::new(sizes),
            yardstick: RingCalibration::new(sizes)?,
            readings: BTreeMap::new(),
        })
    }

    /// Times everything once.
    pub fn read<K: Kernel<Buffer = Data>>(
        &mut self,
        ring: &ThreadRing<K>,
    ) -> Result<(), ClockError> {
        let (kernel, mut taken) = (ring.kernel(), Vec::new());
        for (i, probe) in self.probes.iter().enumerate() {
            for backward in [false, true] {
                let sets = match probe.whole {
                    true => std::slice::from_mut(&mut self.whole),
                    false => &mut self.ranks,
                };
                let alone = timing::alone(kernel, probe, sets, backward)?;
                taken.push((Reading::Alone { probe: i, backward }, alone));
                if !probe.whole {
                    let among = timing::side_by_side(kernel, probe, sets, backward)?;
                    taken.push((Reading::Among { probe: i, backward }, among));
                }
            }
        }
        taken.extend(self.places.read(kernel, self.sizes, &mut self.whole)?);
        for kind in [Kind::Dense, Kind::Dilated] {
            for backward in [false, true] {
                let seconds = self.yardstick.seconds(ring, kind, backward)?;
                taken.push((Reading::Ring { kind, backward }, seconds));
            }
        }
        for (reading, seconds) in taken {
            self.readings.entry(reading).or_default().push(seconds);
        }
        Ok(())
    }

    fn seconds(&self, reading: Reading, pick: Pick) -> f64 {
        let readings = self.readings.get(&reading).map_or(&[][..], Vec::as_slice);
        pick.of(readings)
    }

    /// Seconds of the yardstick's dense forward pass.
    pub fn yardstick_s(&self) -> f64 {
        let reading = Reading::Ring {
            kind: Kind::Dense,
            backward: false,
        };
        self.seconds(reading, Pick::Median)
    }

    /// The machine that the readings amount to: ranks as threads that share the cores.
    pub fn machine(&self, pick: Pick) -> Result<Machine, ClockError> {
        let mut machine = self.machine_of_jobs(pick);
        for backward in [false, true] {
            let both = [Kind::Dense, Kind::Dilated];
            let both = both.map(|kind| self.seconds(Reading::Ring { kind, backward }, pick));
            self.yardstick.complete(&mut machine, backward, both)?;
        }
        Ok(machine)
    }

    /// The same from single jobs alone.
    fn machine_of_jobs(&self, pick: Pick) -> Machine {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = self.sizes;
        let (elements, cells) = (rows * heads * dim, rows * heads);
        let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
        let per_s = |bytes: usize, seconds: f64| bytes as f64 / seconds.max(1e-9);
        let taken = |reading: Reading| self.seconds(reading, pick);
        let (forward, overhead_s) = self.speed(false, pick);
        let (backward, _) = self.speed(true, pick);
        let cores = self.cores;
        let source = format!("measured here: {rows} rows x {heads} heads x {dim}, {cores} cores");
        let threads = Link {
            name: "threads".to_string(),
            source: source.clone(),
            latency_s: taken(Reading::Hop),
            bytes_per_s: per_s(elements * stored, taken(Reading::Carry)),
            carrier: Carrier::Sender,
        };
        let cell_bytes = elements * sum + cells * (dim * (sum + stored) + 3 * sum);
        let cells_s = taken(Reading::Fill) + taken(Reading::Finish);
        let fill_s = taken(Reading::Fill) * stored as f64 / sum as f64;
        let rate = Rate {
            dtype,
            dim,
            forward,
            backward,
            source: source.clone(),
        };
        Machine {
            device: Device {
                name: "here".to_string(),
                source,
                rates: vec![rate],
                job_overhead_s: overhead_s,
                task_overhead_s: 0.0,
                bytes_per_s: per_s(2 * elements * stored, taken(Reading::Copy)),
                add_bytes_per_s: Some(per_s(3 * elements * sum, taken(Reading::Add))),
                apart_bytes_per_s: Some(per_s(2 * elements * stored, taken(Reading::Apart))),
                cell_bytes_per_s: per_s(cell_bytes, cells_s),
                load_bytes_per_s: Some(per_s(elements * stored, taken(Reading::Load))),
                // What is left when it is filled once more is the having.
                fresh_bytes_per_s: Some(per_s(elements * stored, taken(Reading::Fresh) - fill_s)),
                shared_cores: Some(cores),
            },
            // All ranks are threads of one process.
            node: usize::MAX,
            inside: threads.clone(),
            between: threads,
            nics: 1,
            stragglers: BTreeMap::new(),
        }
    }

    fn costs(&self, probe: &Probe, backward: bool) -> Costs {
        costs(probe.job(), self.sizes.dtype, self.tile, backward)
    }

    /// Every job of which it is known how long it keeps all cores busy: those among others.
    fn lines(&self, backward: bool, pick: Pick) -> Vec<(Costs, f64)> {
        let line = |(probe, shape): (usize, &Probe)| {
            let reading = match shape.fills_cores() {
                true => Reading::Alone { probe, backward },
                false if shape.whole => return None,
                false => Reading::Among { probe, backward },
            };
            Some((self.costs(shape, backward), self.seconds(reading, pick)))
        };
        self.probes.iter().enumerate().filter_map(line).collect()
    }

    /// A speed, and the overhead of a job, that explain the readings best.
    fn speed(&self, backward: bool, pick: Pick) -> (Speed, f64) {
        let found = fit(&self.lines(backward, pick));
        let speed = speed_of(&found, self.tile, 1.0 / self.cores as f64);
        let job_s = found[3];
        let told = |probe: &Probe| told(&self.costs(probe, backward), &found);
        let alone: Vec<(&Job, f64, f64)> = self
            .probes
            .iter()
            .enumerate()
            .map(|(probe, shape)| {
                let alone = self.seconds(Reading::Alone { probe, backward }, pick);
                (shape.job(), told(shape), alone)
            })
            .collect();
        let (speed, overhead_s) = alone_from(speed, &alone);
        (speed, job_s + overhead_s)
    }

    /// Every job that was read, as it was and as the description tells it.
    pub fn told(&self) -> Vec<Told> {
        let jobs = self.probes.iter().enumerate();
        let both = jobs.flat_map(|job| [(job, false), (job, true)]);
        both.map(|((probe, shape), backward)| {
            let found = fit(&self.lines(backward, Pick::Median));
            let (speed, overhead_s) = self.speed(backward, Pick::Median);
            let all_cores_s = told(&self.costs(shape, backward), &found);
            let job = shape.job();
            let taken = |reading: Reading| {
                let taken = self.readings.contains_key(&reading);
                taken.then(|| self.seconds(reading, Pick::Median))
            };
            Told {
                backward,
                causal: job.causal.is_some(),
                segments: job.segments,
                rows: job.queries,
                heads: job.heads,
                apart: is_apart(job),
                alone_s: taken(Reading::Alone { probe, backward }).unwrap_or(0.0),
                told_alone_s: overhead_s + all_cores_s / speed.share(longest(job, speed.task_rows)),
                among_s: taken(Reading::Among { probe, backward }),
                told_among_s: all_cores_s,
            }
        })
        .collect()
    }

    /// How far the description is from the readings it was made of: the median over all jobs.
    pub fn misfit(&self) -> f64 {
        misfit(|backward| self.lines(backward, Pick::Median))
    }
}

/// Operations, causal operations, bytes, jobs, operations of jobs of few, single attentions, and
/// operations on rows that lie apart.
fn costs(job: &Job, dtype: DType, tile: [usize; 2], backward: bool) -> Costs {
    let each = if backward { 10.0 } else { 4.0 } * job.dim as f64;
    let operations = tiled_pairs(job, tile) * each;
    let only = |condition: bool, cost: f64| if condition { cost } else { 0.0 };
    [
        operations,
        only(job.causal.is_some(), query_rows(job) as f64 * each),
        row_bytes(job, dtype, backward),
        1.0,
        only(is_few(job), operations),
        singles(job) as f64,
        only(is_apart(job), operations),
    ]
}

/// The speed that a fit's coefficients amount to.
fn speed_of(found: &Costs, tile: [usize; 2], task_share: f64) -> Speed {
    let [operation_s, diagonal_s, byte_s, _, few_s, single_s, apart_s] = *found;
    let by_operation = |seconds: f64| seconds / operation_s.max(1e-18);
    Speed {
        flops: 1.0 / operation_s.max(1e-18),
        diagonal_keys: by_operation(diagonal_s),
        // What the fit finds to cost nothing is as good as infinitely fast.
        row_bytes_per_s: 1.0 / byte_s.max(1e-18),
        few_slower: by_operation(few_s),
        apart_slower: by_operation(apart_s),
        ring_slower: 0.0,
        tile,
        single_s,
        task_rows: 0.0,
        task_share,
    }
}

/// How far fits are from the lines of the two passes: the median over all of them.
fn misfit(lines: impl Fn(bool) -> Vec<(Costs, f64)>) -> f64 {
    let misfits = [false, true].into_iter().flat_map(|backward| {
        let lines = lines(backward);
        let found = fit(&lines);
        let off =
            move |(costs, seconds): (Costs, f64)| (told(&costs, &found) / seconds - 1.0).abs();
        lines.into_iter().map(off)
    });
    median(&misfits.collect::<Vec<f64>>())
}

/// The seconds of some costs.
fn told(costs: &Costs, each: &Costs) -> f64 {
    costs.iter().zip(each).map(|(cost, each)| cost * each).sum()
}

/// What jobs take longer alone than among others, in two figures: an overhead before they begin,
/// and how many rows are one core's. `alone` has jobs, seconds of all cores, and seconds alone.
fn alone_from(speed: Speed, alone: &[(&Job, f64, f64)]) -> (Speed, f64) {
    let steps = (0..=32).map(|step| 2f64.powf(f64::from(step) / 2.0));
    let candidates = [0.0].into_iter().chain(steps);
    let tried = candidates.map(|task_rows| {
        let speed = Speed { task_rows, ..speed };
        let least =
            |job: &Job, all_cores_s: f64| all_cores_s / speed.share(longest(job, task_rows));
        let left = alone.iter().map(|&(job, all_cores_s, alone_s)| {
            let left = (alone_s - least(job, all_cores_s)) / alone_s;
            (left / alone_s, 1.0 / (alone_s * alone_s))
        });
        let (left, weight) = left.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
        let overhead_s = if weight > 0.0 {
            (left / weight).max(0.0)
        } else {
            0.0
        };
        let error: f64 = alone
            .iter()
            .map(|&(job, all_cores_s, alone_s)| {
                ((overhead_s + least(job, all_cores_s)) / alone_s)
                    .ln()
                    .powi(2)
            })
            .sum();
        (error, speed, overhead_s)
    });
    let best = tried.min_by(|(a, ..), (b, ..)| a.total_cmp(b));
    let (_, speed, overhead_s) = best.expect("there are candidates");
    (speed, overhead_s)
}
