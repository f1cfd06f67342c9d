//! What `encke billion` found, in words and as a record.

use std::io::{self, Write};

use encke::RankMemory;
use encke::explain::{bytes, grouped};
use encke::plan::Plan;
use serde::Serialize;

use super::gpu::DeviceMemory;
use super::options::Settings;
use super::state::State;
use crate::check::{Checked, Tolerance};
use crate::cli;
use crate::memory;
use crate::pattern_options;
use crate::process::{Machine, peak_resident_bytes};
use crate::terminal::Paint;

/// Everything a run found. Serialised, it is the record.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    version: &'static str,
    command: String,
    machine: Machine,
    kernel: String,
    pattern: String,
    settings: &'a Settings,
    seconds: f64,
    load_seconds: f64,
    compute_seconds: f64,
    interruptions: usize,
    pairs: u64,
    /// Two products a pair, a multiplication and an addition for each number of a row.
    flop: f64,
    flop_per_second: f64,
    tokens_per_second: f64,
    received_bytes: u64,
    memory: Option<&'a RankMemory>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_memory: Option<DeviceMemory>,
    peak_resident_bytes: Option<usize>,
    checked: Checked,
    tolerance: Tolerance,
    checksum: f64,
    checksum_tolerance: f64,
    checksum_rows: u64,
}

impl<'a> Report<'a> {
    pub fn new(
        plan: &Plan,
        state: &'a State,
        memory: Option<&'a RankMemory>,
        kernel: String,
        device_memory: Option<DeviceMemory>,
    ) -> Report<'a> {
        let settings = &state.settings;
        let flop = state.pairs as f64 * 4.0 * settings.dim as f64;
        let arguments: Vec<String> = cli::words().skip(1).collect();
        Report {
            version: env!("CARGO_PKG_VERSION"),
            command: format!("encke {}", arguments.join(" ")),
            machine: Machine::here(),
            kernel,
            pattern: pattern_options::words(&plan.request().pattern),
            settings,
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
            tolerance: Tolerance::of(settings.dtype),
            checksum: state.checksum.value(),
            checksum_tolerance: state.checksum.tolerance(settings.dtype),
            checksum_rows: state.checksum.rows(),
        }
    }

    /// The record.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *to, self)?;
        writeln!(to)
    }

    /// The report.
    pub fn words(&self) -> String {
        let paint = Paint::stdout();
        let mut text = String::new();
        let mut line = |what: &str, words: String| {
            text += &format!("{} {words}\n", paint.bold(&format!("{what:<10}")));
        };
        let Settings {
            tokens,
            ranks,
            dtype,
            heads,
            dim,
            ..
        } = *self.settings;
        line(
            "sequence",
            format!(
                "{} tokens, heads {heads}, {dim} numbers a head, {dtype}",
                grouped(tokens as u128)
            ),
        );
        line("pattern", self.pattern.clone());
        line(
            "ranks",
            format!(
                "{ranks}, one after another; rows of others they read: {}",
                bytes(self.received_bytes as usize)
            ),
        );
        line(
            "computed",
            format!(
                "{} pairs, {:.3e} FLOP, on {}",
                grouped(self.pairs.into()),
                self.flop,
                self.kernel
            ),
        );
        line(
            "time",
            format!(
                "{:.1} s ({:.1} s attention, {:.1} s making inputs){}",
                self.seconds,
                self.compute_seconds,
                self.load_seconds,
                match self.interruptions {
                    0 => String::new(),
                    times => format!(", interrupted {times} times"),
                }
            ),
        );
        line(
            "speed",
            format!(
                "{} tokens/s, {:.1} GFLOP/s",
                grouped(self.tokens_per_second as u128),
                self.flop_per_second / 1e9
            ),
        );
        if let Some(device) = self.device_memory {
            let held = match device.as_planned() {
                true => paint.green("as planned"),
                false => paint.red("more than planned"),
            };
            line("device", format!("{}; {held}", device.words()));
        }
        if let Some(peak) = self.peak_resident_bytes {
            line(
                "resident",
                format!("{} at most, of the whole process", bytes(peak)),
            );
        }
        let verdict = match self.checked.wrong {
            0 => paint.green("all within tolerance"),
            wrong => paint.red(&format!("{wrong} outside of it")),
        };
        line(
            "checked",
            format!(
                "{} rows against f64, {} keys: out off by {:.1e} at most (tolerance {:.1e}), lse by \
                 {:.1e} ({:.1e}); {verdict}",
                grouped(self.checked.rows as u128),
                grouped(self.checked.keys.into()),
                self.checked.worst_out,
                self.tolerance.out,
                self.checked.worst_lse,
                self.tolerance.lse,
            ),
        );
        line(
            "checksum",
            format!(
                "{:.6} over {} rows; the same for any number of ranks within {:.1e}",
                self.checksum,
                grouped(self.checksum_rows.into()),
                self.checksum_tolerance
            ),
        );
        if let Some(largest) = self.memory {
            let name = format!("largest (rank {})", largest.rank);
            let table = memory::by_component(2, "memory of a rank", &[(name, largest)]);
            text += &format!("\n{table}");
        }
        text
    }
}
