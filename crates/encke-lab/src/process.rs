//! Resident memory of this process and a description of this machine, both from `/proc`, for
//! records.

use std::fs;

use anyhow::{Result, bail};
use encke::explain::bytes;
use serde::Serialize;

/// Peak resident memory of this process, in bytes; `None` where there is no `/proc`.
pub fn peak_resident_bytes() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    kibibytes(&status, "VmHWM:")
}

/// Resident memory of this process now, in bytes; `None` where there is no `/proc`.
pub fn resident_bytes() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    kibibytes(&status, "VmRSS:")
}

/// Refuses tensors that this machine has no memory for, before they are allocated: a process that
/// touches more memory than there is is killed without a message.
pub fn check_memory(what: &str, needed: usize) -> Result<()> {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match kibibytes(&memory, "MemAvailable:") {
        Some(available) if needed > available => bail!(
            "{what} would take {}, and this machine has {} available; use smaller sizes",
            bytes(needed),
            bytes(available)
        ),
        _ => Ok(()),
    }
}

/// The machine, as records describe it.
#[derive(Debug, Serialize)]
pub struct MachineInfo {
    /// The processor's model name.
    pub processor: String,
    /// Hardware threads.
    pub threads: usize,
    /// Bytes of memory.
    pub memory_bytes: Option<usize>,
    /// The operating system.
    pub system: &'static str,
}

impl MachineInfo {
    /// This machine.
    pub fn here() -> MachineInfo {
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        MachineInfo {
            processor: processor_name().unwrap_or_else(|| "unknown".to_string()),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kibibytes(&memory, "MemTotal:"),
            system: std::env::consts::OS,
        }
    }
}

/// The processor's model name; `None` where there is no `/proc`.
pub fn processor_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// The bytes of a line of the form `name 123 kB`.
fn kibibytes(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    let number = line.split_whitespace().nth(1)?;
    Some(number.parse::<usize>().ok()? * 1024)
}
