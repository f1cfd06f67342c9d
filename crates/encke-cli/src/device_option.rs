//! The option that selects the device, shared by all commands that compute attention.

use clap::Args;
use encke_lab::device::ComputeDevice;

/// The device that computes.
#[derive(Debug, Args)]
pub struct DeviceOption {
    /// Where to compute: cpu, cuda (the first GPU) or cuda:N (the GPU with index N).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: ComputeDevice,
}

impl DeviceOption {
    /// Refuses a GPU where each rank is a process.
    #[cfg(feature = "mpi")]
    pub fn refuse_in_processes(&self) -> anyhow::Result<()> {
        match self.device {
            ComputeDevice::Cpu => Ok(()),
            device => anyhow::bail!(
                "--device {device} is for one process: several compute on the CPU; leave --device \
                 out, or start one process"
            ),
        }
    }
}
