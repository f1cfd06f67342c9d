//! Which machine this is: what a profile depends on, and nothing that changes from day to day.

use encke_cpu::CpuKernel;
use encke_cuda::CudaKernel;
use serde::{Deserialize, Serialize};

/// This machine, and this version on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Here {
    /// The processor's name.
    pub processor: String,
    /// Threads it runs at a time for this process.
    pub cores: usize,
    /// The instruction set that the CPU kernel uses.
    pub instructions: String,
    /// The first GPU's name, if there is one.
    pub gpu: Option<String>,
    /// The version of Encke.
    pub version: String,
}

impl Here {
    /// This machine.
    pub fn now() -> Here {
        let about = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = about.lines().find(|line| line.starts_with("model name"));
        let name = name.and_then(|line| line.split_once(':'));
        let arm = CpuKernel::new().map(|kernel| format!("{:?}", kernel.instruction_set()));
        let gpu = CudaKernel::new(0).ok();
        Here {
            processor: name.map_or("unknown", |(_, name)| name.trim()).to_string(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            instructions: arm.unwrap_or_else(|_| "none".to_string()).to_lowercase(),
            gpu: gpu.map(|kernel| kernel.device().name().to_string()),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }

    /// All of it in one line.
    pub fn words(&self) -> String {
        let gpu = self.gpu.as_deref().unwrap_or("no GPU");
        format!(
            "{}, {} cores, {}, {gpu}, encke {}",
            self.processor, self.cores, self.instructions, self.version
        )
    }
}
