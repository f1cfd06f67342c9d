//! Ranks on a GPU: rows are made there and summed up there, and what crosses the bus is a few
//! thousand sums and the sampled rows.
//!
//! The decision here: work is only enqueued, and waited for once a rank, when what is left of its
//! output is read. The GPU runs through the rounds of a rank on its own.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use encke::explain::bytes;
use encke::plan::Plan;
use encke::plan::program::Role;
use encke::{CudaError, CudaKernel, DType, KernelError, RankError, RankMemory};
use encke_cuda::generated_rows::{self, RowSums};
use encke_cuda::{Buffer, Device, Instant};
use encke_ring::memory::planned;
use encke_ring::out_of_core::{
    BufferSlot, Checksum, Gathered, Generator, RowIo, RowRange, Samples, Stream, StreamError,
};
use encke_ring::{RankReport, RingError};
use serde::Serialize;

use super::options::Settings;
use super::{Harvest, Works};

/// What may be held on the device beside what the plan lists: tables of heads, sums of blocks and
/// sampled rows.
const BESIDE: usize = 64 << 20;

/// Numbers from which on making rows is timed: fewer take less time than asking for it.
const TIMED: usize = 1 << 20;

/// The first power of two with which every rank fits into seven eighths of the GPU's memory.
pub(super) fn ranks(kernel: &CudaKernel, settings: &Settings) -> Result<usize> {
    let (_, total) = kernel.device().memory()?;
    let limit = total / 8 * 7;
    let mut ranks = 1;
    loop {
        let request = Settings {
            ranks,
            ..settings.clone()
        };
        let plan = Plan::new(request.request()?)?;
        let mut most = BESIDE;
        for rank in 0..ranks {
            let planned = planned(kernel, &plan.rank(rank)?, 1, plan.request());
            most = most.max(planned.values().sum::<usize>() + BESIDE);
            if most > limit {
                break;
            }
        }
        if most <= limit {
            return Ok(ranks);
        }
        if ranks >= settings.tokens {
            bail!(
                "with {ranks} ranks, a token each, a rank takes {} of the GPU's {}; use fewer heads",
                bytes(most),
                bytes(total)
            );
        }
        ranks = (2 * ranks).min(settings.tokens);
    }
}

/// What was held on a device, beside what was planned.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct DeviceMemory {
    /// What the plan lists for the largest rank.
    planned_bytes: usize,
    /// What may come on top: tables, sums and samples.
    beside_bytes: usize,
    /// The most that was allocated at a time.
    peak_bytes: usize,
    /// What the driver called free before the first rank; what the process itself takes on a
    /// device is missing from it already.
    free_before_bytes: usize,
    /// What it called free after the last.
    free_after_bytes: usize,
    /// All there is.
    total_bytes: usize,
    /// Launches and copies that were enqueued.
    launches: usize,
}

impl DeviceMemory {
    /// Whether no more was held than the plan says.
    pub fn as_planned(&self) -> bool {
        self.peak_bytes <= self.planned_bytes + self.beside_bytes
    }

    /// In words.
    pub fn words(&self) -> String {
        let taken = self.free_before_bytes.saturating_sub(self.free_after_bytes);
        format!(
            "{} allocated at most, {} planned (+ {} for tables and sums), {} by the driver's count, \
             of {}; {} launches",
            bytes(self.peak_bytes),
            bytes(self.planned_bytes),
            bytes(self.beside_bytes),
            bytes(taken),
            bytes(self.total_bytes),
            self.launches,
        )
    }
}

/// What is still on the device of the rank at work.
#[derive(Default)]
struct Underway {
    sums: Vec<RowSums>,
    gathered: Vec<Gathered<Buffer>>,
    /// Moments before and after rows of inputs were made.
    loads: Vec<(Instant, Instant)>,
    /// Before the rank, and after its last job.
    span: Option<(Instant, Instant)>,
}

/// A GPU.
pub(super) struct Gpu<'k> {
    kernel: &'k CudaKernel,
    free_before: usize,
    underway: Underway,
}

impl<'k> Gpu<'k> {
    pub fn new(kernel: &'k CudaKernel) -> Result<Gpu<'k>> {
        let (free_before, _) = kernel.device().memory()?;
        Ok(Gpu {
            kernel,
            free_before,
            underway: Underway::default(),
        })
    }

    fn device(&self) -> &Arc<Device> {
        self.kernel.device()
    }
}

impl Works<CudaKernel> for Gpu<'_> {
    fn rank(
        &mut self,
        stream: &mut Stream<'_, CudaKernel>,
        number: usize,
        generator: &Generator,
        samples: &mut Samples,
    ) -> Result<RankReport> {
        self.underway = Underway::default();
        let begin = self.device().instant()?;
        let mut dock = DeviceRowIo {
            kernel: self.kernel,
            generator,
            samples,
            rank: number,
            computed: None,
            underway: &mut self.underway,
        };
        let done = stream.rank_at(number, &mut dock)?;
        self.underway.span = dock.computed.take().map(|end| (begin, end));
        Ok(done)
    }

    fn collect(&mut self, _: &RankReport, samples: &mut Samples) -> Result<Harvest> {
        let underway = std::mem::take(&mut self.underway);
        let mut checksum = Checksum::default();
        for sums in &underway.sums {
            let (signed, squares, rows) = sums.read()?;
            checksum = checksum + Checksum::of_units(signed, squares, rows);
        }
        for gathered in underway.gathered {
            samples.accept(self.kernel, gathered)?;
        }
        let passed = |(begin, end): &(Instant, Instant)| -> Result<Duration> {
            Ok(Duration::from_secs_f64(end.since(begin)?.max(0.0) / 1e3))
        };
        let loads: Result<Duration> = underway.loads.iter().map(passed).sum();
        let (load, span) = (loads?, underway.span.as_ref().map(passed).transpose()?);
        Ok(Harvest {
            checksum,
            samples: samples.take(),
            load,
            compute: span.unwrap_or_default().saturating_sub(load),
        })
    }

    fn kernel(&self) -> String {
        let (major, minor) = self.device().capability();
        let name = self.device().name();
        format!("{name} (compute capability {major}.{minor})")
    }

    fn memory(&self, largest: Option<&RankMemory>) -> Result<Option<DeviceMemory>> {
        let (free_after_bytes, total_bytes) = self.device().memory()?;
        Ok(Some(DeviceMemory {
            planned_bytes: largest.map_or(0, RankMemory::planned_bytes),
            beside_bytes: BESIDE,
            peak_bytes: self.device().allocated_bytes().1,
            free_before_bytes: self.free_before,
            free_after_bytes,
            total_bytes,
            launches: self.device().enqueued(),
        }))
    }
}

/// Makes rows on the device, and sums them up there.
struct DeviceRowIo<'a> {
    kernel: &'a CudaKernel,
    generator: &'a Generator,
    samples: &'a Samples,
    rank: usize,
    /// After the last job of the rank.
    computed: Option<Instant>,
    underway: &'a mut Underway,
}

impl DeviceRowIo<'_> {
    fn failed(&self, source: KernelError) -> StreamError {
        RingError::of_rank(self.rank, RankError::before_start(source)).into()
    }

    fn done<T>(&self, result: Result<T, CudaError>) -> Result<T, StreamError> {
        result.map_err(|error| self.failed(error.into()))
    }

    fn instant(&self) -> Result<Instant, StreamError> {
        self.done(self.kernel.device().instant())
    }
}

impl RowIo<CudaKernel> for DeviceRowIo<'_> {
    fn fetch(
        &mut self,
        stretch: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut Buffer>,
    ) -> Result<(), StreamError> {
        let key = |&head: &usize| self.generator.head_key(stretch.role, stretch.batch, head);
        let keys: Vec<u64> = stretch.heads.iter().map(key).collect();
        let timed = stretch.tokens.count * keys.len() * width >= TIMED;
        let begin = timed.then(|| self.instant()).transpose()?;
        let place = (to.buffer, to.at);
        self.done(generated_rows::generate(
            self.kernel,
            stretch.tokens,
            &keys,
            width,
            place,
        ))?;
        if let Some(begin) = begin {
            let end = self.instant()?;
            self.underway.loads.push((begin, end));
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        from: BufferSlot<&Buffer>,
        stretch: &RowRange<'_>,
        width: usize,
        _: DType,
    ) -> Result<(), StreamError> {
        if self.computed.is_none() {
            self.computed = Some(self.instant()?);
        }
        if stretch.role == Role::Out {
            let RowRange {
                batch,
                tokens,
                heads,
                ..
            } = *stretch;
            let place = (from.buffer, from.at);
            let sums = generated_rows::checksum(self.kernel, batch, tokens, heads, width, place);
            let sums = self.done(sums)?;
            self.underway.sums.push(sums);
        }
        let gathered = self.samples.gather(self.kernel, &from, stretch, width);
        let gathered = gathered.map_err(|source| self.failed(source))?;
        self.underway.gathered.extend(gathered);
        Ok(())
    }
}
