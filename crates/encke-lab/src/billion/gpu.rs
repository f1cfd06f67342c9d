//! Ranks on a GPU: rows are generated and summed on the device; only a few thousand sums and the
//! sampled rows cross the bus.
//!
//! The decision here: launches are only enqueued, and the host synchronises once for each rank,
//! when it reads the sums. The GPU runs through the rounds of a rank without the host.

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
    BufferSlot, Checksum, GatheredSamples, Generator, RowIo, RowRange, Samples, Stream, StreamError,
};
use encke_ring::{RankReport, RingError};

use super::rank_runner::{DeviceMemory, RankOutput, RankRunner};
use super::settings::BillionSettings;

/// Device bytes allowed beyond the plan: tables of heads, sums of blocks and sampled rows.
const EXTRA_BYTES: usize = 64 << 20;

/// Elements from which on the generation of rows is timed: two events take longer than fewer
/// elements.
const TIMED: usize = 1 << 20;

/// The first power of two with which every rank fits into seven eighths of the GPU's memory.
pub(super) fn ranks(kernel: &CudaKernel, settings: &BillionSettings) -> Result<usize> {
    let (_, total) = kernel.device().memory()?;
    let limit = total / 8 * 7;
    let mut ranks = 1;
    loop {
        let request = BillionSettings {
            ranks,
            ..settings.clone()
        };
        let plan = Plan::new(request.request()?)?;
        let mut most = EXTRA_BYTES;
        for rank in 0..ranks {
            let planned = planned(kernel, &plan.rank(rank)?, 1, plan.request());
            most = most.max(planned.values().sum::<usize>() + EXTRA_BYTES);
            if most > limit {
                break;
            }
        }
        if most <= limit {
            return Ok(ranks);
        }
        if ranks >= settings.tokens {
            bail!(
                "with {ranks} ranks of one token each, a rank takes {} of the GPU's {}; use \
                 fewer heads",
                bytes(most),
                bytes(total)
            );
        }
        ranks = (2 * ranks).min(settings.tokens);
    }
}

/// Results of the current rank that are still on the device.
#[derive(Default)]
struct Pending {
    sums: Vec<RowSums>,
    gathered: Vec<GatheredSamples<Buffer>>,
    /// Events before and after rows of inputs were generated.
    loads: Vec<(Instant, Instant)>,
    /// Events before the rank and after its last job.
    span: Option<(Instant, Instant)>,
}

/// Runs ranks on a GPU.
pub(super) struct GpuRunner<'k> {
    kernel: &'k CudaKernel,
    free_before: usize,
    pending: Pending,
}

impl<'k> GpuRunner<'k> {
    pub fn new(kernel: &'k CudaKernel) -> Result<GpuRunner<'k>> {
        let (free_before, _) = kernel.device().memory()?;
        Ok(GpuRunner {
            kernel,
            free_before,
            pending: Pending::default(),
        })
    }

    fn device(&self) -> &Arc<Device> {
        self.kernel.device()
    }
}

impl RankRunner<CudaKernel> for GpuRunner<'_> {
    fn start(
        &mut self,
        stream: &mut Stream<'_, CudaKernel>,
        rank: usize,
        generator: &Generator,
        samples: &mut Samples,
    ) -> Result<RankReport> {
        self.pending = Pending::default();
        let begin = self.device().instant()?;
        let mut io = DeviceRowIo {
            kernel: self.kernel,
            generator,
            samples,
            rank,
            computed: None,
            pending: &mut self.pending,
        };
        let done = stream.rank_at(rank, &mut io)?;
        self.pending.span = io.computed.take().map(|end| (begin, end));
        Ok(done)
    }

    fn collect(&mut self, _: &RankReport, samples: &mut Samples) -> Result<RankOutput> {
        let pending = std::mem::take(&mut self.pending);
        let mut checksum = Checksum::default();
        for sums in &pending.sums {
            let (signed, squares, rows) = sums.read()?;
            checksum = checksum + Checksum::of_units(signed, squares, rows);
        }
        for gathered in pending.gathered {
            samples.accept(self.kernel, gathered)?;
        }
        let elapsed = |(begin, end): &(Instant, Instant)| -> Result<Duration> {
            Ok(Duration::from_secs_f64(end.since(begin)?.max(0.0) / 1e3))
        };
        let loads: Result<Duration> = pending.loads.iter().map(elapsed).sum();
        let (load, span) = (loads?, pending.span.as_ref().map(elapsed).transpose()?);
        Ok(RankOutput {
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
            beside_bytes: EXTRA_BYTES,
            peak_bytes: self.device().allocated_bytes().1,
            free_before_bytes: self.free_before,
            free_after_bytes,
            total_bytes,
            launches: self.device().enqueued(),
        }))
    }
}

/// Generates input rows on the device, and sums output rows there.
struct DeviceRowIo<'a> {
    kernel: &'a CudaKernel,
    generator: &'a Generator,
    samples: &'a Samples,
    rank: usize,
    /// An event after the last job of the rank.
    computed: Option<Instant>,
    pending: &'a mut Pending,
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
        rows: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut Buffer>,
    ) -> Result<(), StreamError> {
        let key = |&head: &usize| self.generator.head_key(rows.role, rows.batch, head);
        let keys: Vec<u64> = rows.heads.iter().map(key).collect();
        let timed = rows.tokens.count * keys.len() * width >= TIMED;
        let begin = timed.then(|| self.instant()).transpose()?;
        let place = (to.buffer, to.at);
        self.done(generated_rows::generate(
            self.kernel,
            rows.tokens,
            &keys,
            width,
            place,
        ))?;
        if let Some(begin) = begin {
            let end = self.instant()?;
            self.pending.loads.push((begin, end));
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        from: BufferSlot<&Buffer>,
        rows: &RowRange<'_>,
        width: usize,
        _: DType,
    ) -> Result<(), StreamError> {
        if self.computed.is_none() {
            self.computed = Some(self.instant()?);
        }
        if rows.role == Role::Out {
            let RowRange {
                batch,
                tokens,
                heads,
                ..
            } = *rows;
            let place = (from.buffer, from.at);
            let sums = generated_rows::checksum(self.kernel, batch, tokens, heads, width, place);
            let sums = self.done(sums)?;
            self.pending.sums.push(sums);
        }
        let gathered = self.samples.gather(self.kernel, &from, rows, width);
        let gathered = gathered.map_err(|source| self.failed(source))?;
        self.pending.gathered.extend(gathered);
        Ok(())
    }
}
