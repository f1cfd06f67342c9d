//! What a device must provide to run ranks one after another.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use encke::explain::bytes;
use encke::{Kernel, RankMemory};
use encke_ring::RankReport;
use encke_ring::out_of_core::{Checksum, Generator, SampledRow, Samples, Stream};
use serde::Serialize;

/// Runs ranks on a device. A rank may still be computing when [`RankRunner::start`] returns; its
/// result is there when [`RankRunner::collect`] returns.
pub(super) trait RankRunner<K: Kernel> {
    /// Starts one rank.
    fn start(
        &mut self,
        stream: &mut Stream<'_, K>,
        rank: usize,
        generator: &Generator,
        samples: &mut Samples,
    ) -> Result<RankReport>;

    /// Waits for the result of the rank.
    fn collect(&mut self, done: &RankReport, samples: &mut Samples) -> Result<RankOutput>;

    /// The name of what computes.
    fn kernel(&self) -> String;

    /// The memory of a device that has its own, given that of the largest rank.
    fn memory(&self, largest: Option<&RankMemory>) -> Result<Option<DeviceMemory>>;
}

/// What is kept of a rank's output, and the time it took.
pub(super) struct RankOutput {
    pub checksum: Checksum,
    pub samples: BTreeMap<(usize, usize), SampledRow>,
    /// Time to generate the rows of its own inputs.
    pub load: Duration,
    /// Time of attention itself.
    pub compute: Duration,
}

/// Memory of a device, measured and planned.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct DeviceMemory {
    /// What the plan lists for the largest rank.
    pub(super) planned_bytes: usize,
    /// Allowed in addition: tables, sums and samples.
    pub(super) beside_bytes: usize,
    /// Peak of the allocated bytes.
    pub(super) peak_bytes: usize,
    /// Free bytes according to the driver before the first rank; the context is allocated by then.
    pub(super) free_before_bytes: usize,
    /// Free bytes after the last rank.
    pub(super) free_after_bytes: usize,
    /// Bytes of the device.
    pub(super) total_bytes: usize,
    /// Launches and copies that were enqueued.
    pub(super) launches: usize,
}

impl DeviceMemory {
    /// Whether no more was allocated than planned.
    pub fn is_within_plan(&self) -> bool {
        self.peak_bytes <= self.planned_bytes + self.beside_bytes
    }

    /// The memory as text.
    pub fn to_text(&self) -> String {
        let taken = self.free_before_bytes.saturating_sub(self.free_after_bytes);
        format!(
            "{} allocated at most, {} planned (+ {} for tables and sums), {} according to the \
             driver, of {}; {} launches",
            bytes(self.peak_bytes),
            bytes(self.planned_bytes),
            bytes(self.beside_bytes),
            bytes(taken),
            bytes(self.total_bytes),
            self.launches,
        )
    }
}
