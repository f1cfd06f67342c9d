//! Ranks on the CPU: a rank is finished when it returns.

use std::time::Duration;

use anyhow::Result;
use encke::trace::Activity;
use encke::{CpuKernel, Data, RankMemory};
use encke_ring::RankReport;
use encke_ring::out_of_core::{
    Checksum, Generator, RowRange, Samples, Stream, StreamError, TensorSink,
};

use super::rank_runner::{DeviceMemory, RankOutput, RankRunner};

/// Runs ranks on the CPU.
pub(super) struct HostRunner<'k> {
    kernel: &'k CpuKernel,
    checksum: Checksum,
}

impl<'k> HostRunner<'k> {
    pub fn new(kernel: &'k CpuKernel) -> HostRunner<'k> {
        HostRunner {
            kernel,
            checksum: Checksum::default(),
        }
    }
}

/// Adds output rows to the checksum and keeps the sampled ones.
struct ChecksumSink<'a> {
    checksum: &'a mut Checksum,
    samples: &'a mut Samples,
}

impl TensorSink for ChecksumSink<'_> {
    fn write(&mut self, rows: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        self.checksum.write(rows, from)?;
        self.samples.write(rows, from)
    }
}

impl RankRunner<CpuKernel> for HostRunner<'_> {
    fn start(
        &mut self,
        stream: &mut Stream<'_, CpuKernel>,
        rank: usize,
        generator: &Generator,
        samples: &mut Samples,
    ) -> Result<RankReport> {
        let mut output = ChecksumSink {
            checksum: &mut self.checksum,
            samples,
        };
        Ok(stream.rank(rank, generator, &mut output, None)?)
    }

    fn collect(&mut self, done: &RankReport, samples: &mut Samples) -> Result<RankOutput> {
        let time = |of: Activity| -> Duration {
            let events = done.events.iter().filter(|event| event.activity == of);
            events.map(|event| event.duration).sum()
        };
        Ok(RankOutput {
            checksum: std::mem::take(&mut self.checksum),
            samples: samples.take(),
            load: time(Activity::Load),
            compute: time(Activity::Compute),
        })
    }

    fn kernel(&self) -> String {
        self.kernel.instruction_set().to_string()
    }

    fn memory(&self, _: Option<&RankMemory>) -> Result<Option<DeviceMemory>> {
        Ok(None)
    }
}
