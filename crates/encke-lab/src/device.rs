//! Devices by name: `cpu`, `cuda`, `cuda:N`.
//!
//! The decision here: a program that is asked for a GPU opens that GPU or fails with an error that
//! says what is missing. It never falls back to the CPU.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use encke::CudaKernel;
use serde::{Deserialize, Serialize};

/// The device that computes attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum ComputeDevice {
    /// The processor.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this index; without one the first, or in a job of several processes one
    /// for each process of a machine.
    Cuda(Option<usize>),
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<ComputeDevice, String> {
        let index = |digits: &str| {
            digits
                .parse()
                .ok()
                .map(|index| ComputeDevice::Cuda(Some(index)))
        };
        let device = match text {
            "cpu" => Some(ComputeDevice::Cpu),
            "cuda" => Some(ComputeDevice::Cuda(None)),
            other => other.strip_prefix("cuda:").and_then(index),
        };
        device.ok_or_else(|| "write cpu, cuda, or cuda:N for the GPU with index N".to_string())
    }
}

impl fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComputeDevice::Cpu => f.write_str("cpu"),
            ComputeDevice::Cuda(None) => f.write_str("cuda"),
            ComputeDevice::Cuda(Some(index)) => write!(f, "cuda:{index}"),
        }
    }
}

impl From<ComputeDevice> for String {
    fn from(device: ComputeDevice) -> String {
        device.to_string()
    }
}

impl TryFrom<String> for ComputeDevice {
    type Error = String;

    fn try_from(text: String) -> Result<ComputeDevice, String> {
        text.parse()
    }
}

/// The kernel of the GPU with this index, by default the first, or why there is none.
pub fn open_gpu(index: Option<usize>) -> Result<CudaKernel> {
    let index = index.unwrap_or(0);
    CudaKernel::new(index).with_context(|| format!("--device cuda:{index}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_parse_back_and_other_text_is_refused() {
        for (text, device) in [
            ("cpu", ComputeDevice::Cpu),
            ("cuda", ComputeDevice::Cuda(None)),
            ("cuda:0", ComputeDevice::Cuda(Some(0))),
            ("cuda:11", ComputeDevice::Cuda(Some(11))),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for text in ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda0"] {
            assert!(text.parse::<ComputeDevice>().is_err(), "{text}");
        }
    }
}
