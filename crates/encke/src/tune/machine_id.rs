//! What identifies a machine for its profile: everything the measured rates depend on.

use encke_cpu::CpuKernel;
use serde::{Deserialize, Serialize};

/// A machine and the version of Encke on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineId {
    /// The processor's name.
    pub processor: String,
    /// Hardware threads available to this process.
    pub cores: usize,
    /// The instruction set that the CPU kernel uses.
    pub instructions: String,
    /// The first GPU's name, if there is one.
    pub gpu: Option<String>,
    /// The version of Encke.
    pub version: String,
}

impl MachineId {
    /// This machine.
    pub fn current() -> MachineId {
        let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = about.lines().find(|line| line.starts_with("model name"));
        let name = name.and_then(|line| line.split_once(':'));
        let arm = CpuKernel::new().map(|kernel| format!("{:?}", kernel.instruction_set()));
        MachineId {
            processor: name.map_or("unknown", |(_, name)| name.trim()).to_string(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            instructions: arm.unwrap_or_else(|_| "none".to_string()).to_lowercase(),
            gpu: gpu_name(),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }

    /// One line with all fields.
    pub fn to_text(&self) -> String {
        let gpu = self.gpu.as_deref().unwrap_or("no GPU");
        format!(
            "{}, {} cores, {}, {gpu}, encke {}",
            self.processor, self.cores, self.instructions, self.version
        )
    }
}

/// The first GPU's name.
#[cfg(feature = "cuda")]
fn gpu_name() -> Option<String> {
    let kernel = encke_cuda::CudaKernel::new(0).ok()?;
    Some(kernel.device().name().to_string())
}

#[cfg(not(feature = "cuda"))]
fn gpu_name() -> Option<String> {
    None
}
