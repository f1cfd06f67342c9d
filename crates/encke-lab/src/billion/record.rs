//! The record of a run: machine, command, settings, times, memory and checks.

use encke::RankMemory;
use encke::plan::Plan;
use serde::Serialize;

use super::rank_runner::DeviceMemory;
use super::settings::BillionSettings;
use super::state::RunState;
use crate::arguments;
use crate::format;
use crate::process::{MachineInfo, peak_resident_bytes};
use crate::row_check::{RowCheck, RowTolerance};

/// Everything that a run measured. Serialised, it is the record.
#[derive(Debug, Serialize)]
pub struct BillionRecord {
    version: &'static str,
    command: String,
    machine: MachineInfo,
    /// The name of what computed.
    pub kernel: String,
    /// The pattern as text.
    pub pattern: String,
    /// The settings of the run.
    pub settings: BillionSettings,
    /// Time of all ranks.
    pub seconds: f64,
    /// Of that, the time to generate the ranks' own inputs.
    pub load_seconds: f64,
    /// Of that, the time of attention itself.
    pub compute_seconds: f64,
    /// How often the run was interrupted.
    pub interruptions: usize,
    /// (query, key) pairs computed.
    pub pairs: u64,
    /// Two products for each pair, with a multiplication and an addition for each element of a row.
    pub flop: f64,
    /// Operations per second.
    pub flop_per_second: f64,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Bytes that ranks read of the rows of other ranks.
    pub received_bytes: u64,
    /// Memory of the largest rank.
    pub memory: Option<RankMemory>,
    /// Memory of a device that has its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<DeviceMemory>,
    /// Peak resident memory of this process.
    pub peak_resident_bytes: Option<usize>,
    /// The sampled rows, compared with the reference.
    pub checked: RowCheck,
    /// Their tolerance.
    pub tolerance: RowTolerance,
    /// The checksum of the output.
    pub checksum: f64,
    /// The largest difference of two checksums of right outputs.
    pub checksum_tolerance: f64,
    /// Rows in the checksum.
    pub checksum_rows: u64,
}

impl BillionRecord {
    pub(super) fn new(
        plan: &Plan,
        state: RunState,
        memory: Option<RankMemory>,
        kernel: String,
        device_memory: Option<DeviceMemory>,
    ) -> BillionRecord {
        let settings = state.settings;
        let flop = state.pairs as f64 * 4.0 * settings.dim as f64;
        BillionRecord {
            version: env!("CARGO_PKG_VERSION"),
            command: arguments::command_line("encke"),
            machine: MachineInfo::here(),
            kernel,
            pattern: format::pattern(&plan.request().pattern),
            seconds: state.seconds,
            load_seconds: state.load_seconds,
            compute_seconds: state.compute_seconds,
            interruptions: state.interruptions,
            pairs: state.pairs,
            flop,
            flop_per_second: flop / state.seconds,
            tokens_per_second: settings.tokens as f64 / state.seconds,
            received_bytes: state.received_bytes,
            memory,
            device_memory,
            peak_resident_bytes: peak_resident_bytes(),
            checked: state.checked,
            tolerance: RowTolerance::of(settings.dtype, settings.dim),
            checksum: state.checksum.value(),
            checksum_tolerance: state.checksum.tolerance(settings.dtype),
            checksum_rows: state.checksum.rows(),
            settings,
        }
    }

    /// Whether all sampled rows are within tolerance, and a device held no more than planned.
    pub fn is_right(&self) -> bool {
        let memory = self.device_memory;
        self.checked.wrong == 0 && memory.is_none_or(|memory| memory.is_within_plan())
    }
}
