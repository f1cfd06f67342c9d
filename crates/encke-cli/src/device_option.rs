//! The option that says on which device attention is computed, shared by all commands that do it.
//!
//! The decision here: whoever asks for a GPU gets that GPU or an error that says what is missing,
//! never the CPU instead.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use encke::CudaKernel;
use serde::{Deserialize, Serialize};

/// Where the work is done.
#[derive(Debug, Args)]
pub struct DeviceOption {
    /// Where to compute: cpu, cuda (the first GPU) or cuda:N (the GPU with that number).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
}

impl DeviceOption {
    /// Refuses a GPU where each rank is a process.
    #[cfg(feature = "mpi")]
    pub fn refuse_in_processes(&self) -> Result<()> {
        match self.device {
            Device::Cpu => Ok(()),
            device => anyhow::bail!(
                "--device {device} is for one process: several compute on the CPU; leave --device \
                 out, or start one process"
            ),
        }
    }
}

/// A device, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this number.
    Cuda(usize),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        let number = |digits: &str| digits.parse().ok().map(Device::Cuda);
        let device = match text {
            "cpu" => Some(Device::Cpu),
            "cuda" => Some(Device::Cuda(0)),
            other => other.strip_prefix("cuda:").and_then(number),
        };
        device.ok_or_else(|| "write cpu, cuda, or cuda:N for the GPU with number N".to_string())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl From<Device> for String {
    fn from(device: Device) -> String {
        device.to_string()
    }
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Device, String> {
        text.parse()
    }
}

/// The kernel of the GPU with this number, or why there is none.
pub fn cuda(number: usize) -> Result<CudaKernel> {
    CudaKernel::new(number).with_context(|| format!("--device cuda:{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names_and_nothing_else_is_one() {
        for (text, device) in [
            ("cpu", Device::Cpu),
            ("cuda", Device::Cuda(0)),
            ("cuda:0", Device::Cuda(0)),
            ("cuda:11", Device::Cuda(11)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for text in ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda0"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
