//! Ranks on the processor: everything is there as soon as it is asked for.

use std::time::Duration;

use anyhow::Result;
use encke::trace::Activity;
use encke::{CpuKernel, Data, RankMemory};
use encke_ring::RankReport;
use encke_ring::out_of_core::{Checksum, Generator, RowRange, Samples, Sink, Stream, StreamError};

use super::gpu::DeviceMemory;
use super::{Harvest, Works};

/// The processor.
pub(super) struct Host<'k> {
    kernel: &'k CpuKernel,
    checksum: Checksum,
}

impl<'k> Host<'k> {
    pub fn new(kernel: &'k CpuKernel) -> Host<'k> {
        Host {
            kernel,
            checksum: Checksum::default(),
        }
    }
}

/// Where the output goes.
struct Output<'a> {
    checksum: &'a mut Checksum,
    samples: &'a mut Samples,
}

impl Sink for Output<'_> {
    fn write(&mut self, stretch: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        self.checksum.write(stretch, from)?;
        self.samples.write(stretch, from)
    }
}

impl Works<CpuKernel> for Host<'_> {
    fn rank(
        &mut self,
        stream: &mut Stream<'_, CpuKernel>,
        number: usize,
        generator: &Generator,
        samples: &mut Samples,
    ) -> Result<RankReport> {
        let mut output = Output {
            checksum: &mut self.checksum,
            samples,
        };
        Ok(stream.rank(number, generator, &mut output, None)?)
    }

    fn collect(&mut self, done: &RankReport, samples: &mut Samples) -> Result<Harvest> {
        let time = |of: Activity| -> Duration {
            let events = done.events.iter().filter(|event| event.activity == of);
            events.map(|event| event.duration).sum()
        };
        Ok(Harvest {
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
