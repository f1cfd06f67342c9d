//! What the system knows of this process and this machine. Nothing here is computed with.

use std::fs;

use serde::Serialize;

/// The most memory this process has had resident, in bytes, where the system tells.
pub fn peak_resident_bytes() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    kibibytes(&status, "VmHWM:")
}

/// The memory this process has resident at the moment, in bytes, where the system tells.
#[cfg(feature = "mpi")]
pub fn resident_bytes() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    kibibytes(&status, "VmRSS:")
}

/// The machine, as a record names it.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// How many threads it runs at a time.
    pub threads: usize,
    /// Its memory.
    pub memory_bytes: Option<usize>,
    /// The operating system.
    pub system: &'static str,
}

impl Machine {
    /// This machine.
    pub fn here() -> Machine {
        let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = about.lines().find(|line| line.starts_with("model name"));
        let name = name.and_then(|line| line.split_once(':'));
        let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Machine {
            processor: name.map_or("unknown", |(_, name)| name.trim()).to_string(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kibibytes(&memory, "MemTotal:"),
            system: std::env::consts::OS,
        }
    }
}

/// A line of the form `name 123 kB`.
fn kibibytes(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    let number = line.split_whitespace().nth(1)?;
    Some(number.parse::<usize>().ok()? * 1024)
}
