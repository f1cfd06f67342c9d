//! The options that select the device, shared by all commands that compute attention.

use clap::Args;
use encke_lab::device::ComputeDevice;
use encke_lab::wire_choice::WireChoice;

/// The device that computes.
#[derive(Debug, Args)]
pub struct DeviceOption {
    /// Where to compute: cpu, cuda (the first GPU; with several processes, the GPUs of a machine in
    /// turn) or cuda:N (the GPU with index N).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: ComputeDevice,

    /// How parcels go between GPUs of several processes: auto (the fastest that connects two
    /// ranks), ipc (GPU memory that both read), nccl, or host (pinned memory and MPI).
    #[arg(long, value_name = "WIRE", default_value_t)]
    pub wire: WireChoice,
}

impl DeviceOption {
    /// Refuses a wire where no parcels go between GPUs.
    pub fn check_wire(&self, processes: usize) -> anyhow::Result<()> {
        let wire = self.wire;
        match (wire, self.device) {
            (WireChoice::Auto, _) => Ok(()),
            (_, ComputeDevice::Cpu) => anyhow::bail!(
                "--wire {wire} is for GPUs, and --device is cpu; leave --wire out or add --device \
                 cuda"
            ),
            _ if processes == 1 => anyhow::bail!(
                "--wire {wire} is for several processes, and this is one; leave it out, or start \
                 the command with mpirun or encke launch"
            ),
            _ => Ok(()),
        }
    }
}
