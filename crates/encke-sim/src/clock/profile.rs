//! A described machine made from readings of a real kernel: this one, with threads as ranks.
//!
//! Jobs of a few shapes are timed, and what a device's description has (an overhead, a rate, the
//! diagonal, the rows) is fitted to them. Nothing is fitted to a ring: that is what the result is
//! held against.

use std::hint::black_box;
use std::time::{Duration, Instant};

use encke_core::conformance::Random;
use encke_core::job::{Block, Causal, Job, Operand};
use encke_core::kernel::{Carry, Gradients, Kernel, KernelError, Upstream};
use encke_core::sharding::Run as Tokens;
use encke_core::transport::{Address, Incoming, Outgoing, Parcel, Transport};
use encke_core::{DType, Data, Tensor};
use encke_ring::threads::endpoints;
use std::collections::BTreeMap;

use super::cost::{is_few, row_bytes, singles};
use super::error::ClockError;
use super::fit::fit;
use super::machine::{Carrier, Device, Link, Machine, Rate, Speed};
use super::median;

/// A reading goes on for so long, so that short jobs are disturbed as much as long ones by
/// whatever else the machine does.
const READING: Duration = Duration::from_millis(40);

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
    jobs: Vec<Job>,
    operands: Operands,
    /// Seconds of each job forward and backward, of each other task, of a hop.
    readings: BTreeMap<Reading, Vec<f64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reading {
    Forward(usize),
    Backward(usize),
    Fill,
    Copy,
    Finish,
    Load,
    Carry,
    Hop,
}

/// Buffers that jobs are timed with.
#[derive(Debug)]
struct Operands {
    inputs: [Data; 4],
    carry: Carry<Data>,
    lse: Data,
    delta: Data,
    gradients: [Data; 3],
    copied: Data,
    tensor: Tensor,
}

impl Profile {
    /// A profile without readings.
    pub fn new(sizes: Sizes) -> Profile {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = sizes;
        let (cells, sum) = (rows * heads, dtype.sum());
        let mut random = Random::new(7);
        let mut numbers = || {
            let values: Vec<f64> = (0..cells * dim).map(|_| random.unit()).collect();
            Data::from_f64(dtype, &values)
        };
        let zeros = |elements: usize| Data::zeros(sum, elements);
        // As long as the sequence, as short as what a rank of a large ring has, and many at once.
        let part = |of: usize| (rows / of).max(1);
        let shapes = [
            (1, rows),
            (1, part(4)),
            (1, part(16)),
            (8, part(8)),
            (part(16), 16.min(rows)),
        ];
        let jobs = shapes.into_iter().flat_map(|(segments, rows)| {
            [false, true].map(|causal| job(sizes, segments, rows, causal))
        });
        // A dilated branch has few heads of one phase.
        let one = Sizes { heads: 1, ..sizes };
        let alone = [part(4), part(16)].into_iter();
        let alone = alone.flat_map(|rows| [false, true].map(|causal| job(one, 1, rows, causal)));
        let jobs = jobs.chain(alone);
        Profile {
            sizes,
            jobs: jobs.collect(),
            operands: Operands {
                inputs: [numbers(), numbers(), numbers(), numbers()],
                carry: Carry {
                    acc: zeros(cells * dim),
                    m: zeros(cells),
                    l: zeros(cells),
                },
                lse: zeros(cells),
                delta: zeros(cells),
                gradients: [0; 3].map(|_| zeros(cells * dim)),
                copied: Data::zeros(dtype, cells * dim),
                tensor: Tensor::zeros(dtype, [1, rows, heads, dim]),
            },
            readings: BTreeMap::new(),
        }
    }

    /// Times everything once.
    pub fn read<K: Kernel<Buffer = Data>>(&mut self, kernel: &K) -> Result<(), ClockError> {
        let mut taken = Vec::new();
        self.read_jobs(kernel, &mut taken)?;
        self.read_moves(kernel, &mut taken)?;
        taken.push((Reading::Hop, hop_s()));
        for (reading, seconds) in taken {
            self.readings.entry(reading).or_default().push(seconds);
        }
        Ok(())
    }

    fn read_jobs<K: Kernel<Buffer = Data>>(
        &mut self,
        kernel: &K,
        taken: &mut Vec<(Reading, f64)>,
    ) -> Result<(), ClockError> {
        let Operands {
            inputs,
            carry,
            lse,
            delta,
            gradients,
            ..
        } = &mut self.operands;
        let [q, k, v, dout] = inputs;
        kernel.fill(&mut carry.acc, 0.0)?;
        kernel.fill(&mut carry.m, f64::NEG_INFINITY)?;
        kernel.fill(&mut carry.l, 0.0)?;
        // Any finite lse will do, but one that is too small makes numbers no real pass has.
        kernel.fill(lse, 10.0)?;
        let [q, k, v, dout] = [&*q, &*k, &*v, &*dout].map(|data| kernel.input(data));
        for (i, job) in self.jobs.iter().enumerate() {
            let forward = seconds(|| kernel.forward(job, q, k, v, carry))?;
            taken.push((Reading::Forward(i), forward));
            let (lse, delta) = (kernel.input(lse), kernel.input(delta));
            let backward = seconds(|| {
                let [dq, dk, dv] = &mut *gradients;
                let upstream = Upstream { dout, lse, delta };
                kernel.backward(job, q, k, v, upstream, Gradients { dq, dk, dv })
            })?;
            taken.push((Reading::Backward(i), backward));
        }
        Ok(())
    }

    fn read_moves<K: Kernel<Buffer = Data>>(
        &mut self,
        kernel: &K,
        taken: &mut Vec<(Reading, f64)>,
    ) -> Result<(), ClockError> {
        let Sizes {
            rows, heads, dim, ..
        } = self.sizes;
        let Operands {
            inputs,
            carry,
            lse,
            gradients,
            copied,
            tensor,
            ..
        } = &mut self.operands;
        let operand = operand(heads, dim);
        let block = Block {
            batch: 1,
            segments: 1,
            rows,
            heads,
            width: dim,
            from: operand.clone(),
            to: operand,
        };
        let all = [Tokens {
            first: 0,
            stride: 1,
            count: rows,
        }];
        let fill = seconds(|| kernel.fill(&mut gradients[0], 0.0))?;
        let copy = seconds(|| kernel.copy(&block, false, kernel.input(&inputs[0]), copied))?;
        let finish = seconds(|| kernel.finish(rows * heads, dim, 1.0, carry, copied, lse))?;
        let load = seconds(|| kernel.upload(&tensor.view(), &all, copied))?;
        let carry = seconds(|| {
            copied.copy_from(black_box(&inputs[1]), rows * heads * dim);
            Ok(())
        })?;
        taken.extend([
            (Reading::Fill, fill),
            (Reading::Copy, copy),
            (Reading::Finish, finish),
            (Reading::Load, load),
            (Reading::Carry, carry),
        ]);
        Ok(())
    }

    fn seconds(&self, reading: Reading, pick: Pick) -> f64 {
        let readings = self.readings.get(&reading).map_or(&[][..], Vec::as_slice);
        pick.of(readings)
    }

    /// The machine that the readings amount to: ranks as threads on `cores` cores.
    pub fn machine(&self, cores: usize, pick: Pick) -> Machine {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = self.sizes;
        let (elements, cells) = (rows * heads * dim, rows * heads);
        let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
        let per_s =
            |bytes: usize, reading: Reading| bytes as f64 / self.seconds(reading, pick).max(1e-9);
        let (forward, overhead_s) = self.speed(false, pick);
        let (backward, _) = self.speed(true, pick);
        let source = format!("measured here: {rows} rows x {heads} heads x {dim}, {cores} cores");
        let moved = elements * sum + 2 * elements * stored;
        let moving_s = self.seconds(Reading::Fill, pick) + self.seconds(Reading::Copy, pick);
        let threads = Link {
            name: "threads".to_string(),
            source: source.clone(),
            latency_s: self.seconds(Reading::Hop, pick),
            bytes_per_s: per_s(elements * stored, Reading::Carry),
            carrier: Carrier::Sender,
        };
        let cell_bytes = cells * (dim * (sum + stored) + 3 * sum);
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
                bytes_per_s: moved as f64 / moving_s.max(1e-9),
                cell_bytes_per_s: per_s(cell_bytes, Reading::Finish),
                load_bytes_per_s: Some(per_s(elements * stored, Reading::Load)),
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

    /// Operations, causal operations, bytes, jobs, operations of jobs of few, and single attentions
    /// of every job that was read, and its seconds.
    fn lines(&self, backward: bool, pick: Pick) -> Vec<([f64; 6], f64)> {
        let each = if backward { 10.0 } else { 4.0 };
        let line = |(i, job): (usize, &Job)| {
            let operations = each * job.dim as f64;
            let queries = (job.segments * job.heads * job.queries) as f64;
            let diagonal = if job.causal.is_some() { queries } else { 0.0 };
            let costs = [
                job.pairs() as f64 * operations,
                diagonal * operations,
                row_bytes(job, self.sizes.dtype, backward),
                1.0,
                match is_few(job) {
                    true => (job.pairs() as f64) * operations,
                    false => 0.0,
                },
                singles(job) as f64,
            ];
            let reading = match backward {
                true => Reading::Backward(i),
                false => Reading::Forward(i),
            };
            (costs, self.seconds(reading, pick))
        };
        self.jobs.iter().enumerate().map(line).collect()
    }

    /// A speed, and the overhead of a job, that explain the readings best.
    fn speed(&self, backward: bool, pick: Pick) -> (Speed, f64) {
        let found = fit(&self.lines(backward, pick));
        let [operation_s, diagonal_s, byte_s, overhead_s, few_s, single_s] = found;
        let speed = Speed {
            flops: 1.0 / operation_s.max(1e-18),
            diagonal_keys: diagonal_s / operation_s.max(1e-18),
            // What the fit finds to cost nothing is as good as infinitely fast.
            row_bytes_per_s: 1.0 / byte_s.max(1e-18),
            few_slower: few_s / operation_s.max(1e-18),
            single_s,
        };
        (speed, overhead_s)
    }

    /// How far the description is from the readings it was made of: the median over all jobs.
    pub fn misfit(&self) -> f64 {
        let misfits = [false, true].into_iter().flat_map(|backward| {
            let lines = self.lines(backward, Pick::Median);
            let found = fit(&lines);
            lines.into_iter().map(move |(costs, seconds)| {
                let told: f64 = costs
                    .iter()
                    .zip(found)
                    .map(|(cost, each)| cost * each)
                    .sum();
                (told / seconds - 1.0).abs()
            })
        });
        median(&misfits.collect::<Vec<f64>>())
    }
}

/// Mean seconds of something that is done again and again for the length of a reading.
fn seconds(mut work: impl FnMut() -> Result<(), KernelError>) -> Result<f64, KernelError> {
    let begin = Instant::now();
    let mut times = 0;
    loop {
        work()?;
        times += 1;
        let passed = begin.elapsed();
        if passed >= READING {
            return Ok(passed.as_secs_f64() / f64::from(times));
        }
    }
}

/// Rows that lie as a rank's do: heads side by side, token after token.
fn operand(heads: usize, unit: usize) -> Operand {
    Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: heads * unit,
        heads: (0..heads).map(|head| head * unit).collect(),
    }
}

fn job(sizes: Sizes, segments: usize, rows: usize, causal: bool) -> Job {
    let Sizes { heads, dim, .. } = sizes;
    let place = |unit: usize| Operand {
        segment: rows * heads * unit,
        ..operand(heads, unit)
    };
    let mask = Causal {
        query: 0,
        query_step: 1,
        key: 0,
        key_step: 1,
    };
    Job {
        batch: 1,
        segments,
        queries: rows,
        keys: rows,
        heads,
        dim,
        q: place(dim),
        k: place(dim),
        cells: place(1),
        dq: None,
        causal: causal.then_some(mask),
        scale: 1.0 / (dim as f64).sqrt(),
        gain: 1.0,
    }
}

/// Seconds of a hop without bytes to speak of, between two threads of this process.
fn hop_s() -> f64 {
    const HOPS: usize = 64;
    let ends = endpoints::<Vec<u8>>(2, Duration::from_secs(60));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for (rank, mut end) in ends.into_iter().enumerate() {
            scope.spawn(move || {
                let address = Address {
                    peer: 1 - rank,
                    tag: 0,
                    elements: 1,
                };
                let (sent, mut received) = (vec![0u8], vec![0u8]);
                for round in 0..HOPS {
                    let outgoing = [Outgoing {
                        to: address,
                        parcel: &sent,
                    }];
                    let mut incoming = [Incoming {
                        from: address,
                        parcel: &mut received,
                    }];
                    // Both ends do the same, so nothing can fail but a thread that is not run.
                    if end
                        .exchange(round, &outgoing, &mut incoming, &mut || {})
                        .is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    begin.elapsed().as_secs_f64() / HOPS as f64
}
