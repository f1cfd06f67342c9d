//! A run as an MPI job: process i of p runs ranks i, i + p, i + 2p and so on.
//!
//! Ranks of a streamed forward pass are independent, so the processes communicate only at the end,
//! when their results are summed. Each has a state file of its own.

use std::path::PathBuf;

use anyhow::Result;
use encke::plan::Plan;
use encke::{CpuKernel, CudaKernel, RankMemory};
use serde::{Deserialize, Serialize};

use super::gpu::{self, GpuRunner};
use super::host::HostRunner;
use super::settings::BillionSettings;
use super::state::{OwnRanks, RunState, remove_state};
use super::{BillionRecord, BillionRun, ProgressLog, attend};
use crate::cluster::Cluster;
use crate::device::ComputeDevice;
use crate::process::peak_resident_bytes;
use crate::wire_choice::WireChoice;

/// The result of one process.
#[derive(Serialize, Deserialize)]
struct ProcessResult {
    state: RunState,
    largest: Option<RankMemory>,
    resident_bytes: Option<usize>,
}

/// What this process needs to run its ranks.
pub struct BillionShare {
    state: RunState,
    path: PathBuf,
    kernel: ShareKernel,
    plan: Plan,
}

/// What the ranks of this process run on.
pub enum ShareKernel {
    /// The processor.
    Cpu(CpuKernel),
    /// A GPU.
    Gpu(Box<CudaKernel>),
}

impl ShareKernel {
    /// Opens the device of this process. All ranks call it together.
    pub fn open(cluster: &mut Cluster, device: ComputeDevice) -> Result<ShareKernel> {
        match device {
            ComputeDevice::Cpu => {
                let kernel = CpuKernel::new().map_err(anyhow::Error::from);
                Ok(ShareKernel::Cpu(cluster.agree(kernel)?))
            }
            // No parcels travel: the ranks of a streamed pass are independent.
            ComputeDevice::Cuda(index) => {
                let kernel = cluster.open_gpu(index, WireChoice::Host, false)?;
                Ok(ShareKernel::Gpu(Box::new(kernel)))
            }
        }
    }

    /// The number of ranks, if the caller gives none: on GPUs so many that one process could run
    /// them, for each process, because processes may share a GPU.
    fn ranks(&self, processes: usize, settings: &BillionSettings) -> Result<usize> {
        match self {
            ShareKernel::Cpu(_) => Ok(settings.cpu_ranks()),
            ShareKernel::Gpu(kernel) => {
                let ranks = gpu::ranks(kernel, settings)?.saturating_mul(processes);
                Ok(ranks.min(settings.tokens))
            }
        }
    }

    /// Its name.
    fn name(&self) -> String {
        match self {
            ShareKernel::Cpu(kernel) => kernel.instruction_set().to_string(),
            ShareKernel::Gpu(kernel) => kernel.device().name().to_string(),
        }
    }
}

/// The record of all processes, and their peak resident bytes.
pub struct JobRecord {
    /// The record, with the times of the slowest process.
    pub record: BillionRecord,
    /// Peak resident memory of each process.
    pub resident_bytes: Vec<Option<usize>>,
}

/// Everything that can fail before the first rank.
pub fn prepare(cluster: &Cluster, run: &BillionRun, kernel: ShareKernel) -> Result<BillionShare> {
    let mut settings = run.settings.clone();
    if run.choose_ranks {
        settings.ranks = kernel.ranks(cluster.ranks(), &settings)?;
    }
    // The number of processes is part of the name: with another one, a process has other ranks.
    let mut path = run.state.clone().into_os_string();
    path.push(format!(".{}-of-{}", cluster.rank(), cluster.ranks()));
    let path = PathBuf::from(path);
    let plan = Plan::new(settings.request()?)?;
    let ranks = own_ranks(cluster, &settings);
    Ok(BillionShare {
        state: RunState::open(&path, &settings, (&plan, ranks), run.fresh)?,
        kernel,
        plan,
        path,
    })
}

/// The ranks of this process.
fn own_ranks(cluster: &Cluster, settings: &BillionSettings) -> OwnRanks {
    (cluster.rank()..settings.ranks).step_by(cluster.ranks())
}

impl BillionShare {
    /// Runs the ranks of this process; the record of all processes on the root.
    pub fn run(&mut self, cluster: &mut Cluster) -> Result<Option<JobRecord>> {
        let BillionShare {
            state,
            path,
            kernel,
            plan,
        } = self;
        let (ranks, tokens) = (state.settings.ranks, state.settings.tokens);
        let share = ranks.div_ceil(cluster.ranks());
        let progress = cluster
            .is_root()
            .then(|| ProgressLog::new(share, state.finished, tokens));
        let ranks = own_ranks(cluster, &state.settings).skip(state.finished);
        let kept = (&mut *state, path.as_path());
        let largest = match kernel {
            ShareKernel::Cpu(kernel) => {
                let mut runner = HostRunner::new(kernel);
                attend((kernel, &mut runner), plan, kept, ranks, progress)?
            }
            ShareKernel::Gpu(kernel) => {
                let mut runner = GpuRunner::new(kernel)?;
                attend((&**kernel, &mut runner), plan, kept, ranks, progress)?
            }
        };
        let result = ProcessResult {
            state: state.clone(),
            largest,
            resident_bytes: peak_resident_bytes(),
        };
        let all = cluster.gather(&result)?;
        Ok(all.map(|all| self.sum(all)))
    }

    /// The number of ranks of the run, over all processes.
    pub fn ranks(&self) -> usize {
        self.state.settings.ranks
    }

    /// Removes the state file of this process.
    pub fn remove_state(&self) -> Result<()> {
        remove_state(&self.path)
    }

    fn sum(&self, all: Vec<ProcessResult>) -> JobRecord {
        let mut sum = RunState::new(self.state.settings.clone());
        let mut largest: Option<RankMemory> = None;
        let mut resident_bytes = Vec::new();
        for result in all {
            let state = result.state;
            sum.finished += state.finished;
            sum.checksum = sum.checksum + state.checksum;
            sum.checked = sum.checked.with(state.checked);
            sum.pairs += state.pairs;
            sum.received_bytes += state.received_bytes;
            // Processes run side by side.
            sum.seconds = sum.seconds.max(state.seconds);
            sum.load_seconds = sum.load_seconds.max(state.load_seconds);
            sum.compute_seconds = sum.compute_seconds.max(state.compute_seconds);
            sum.interruptions = sum.interruptions.max(state.interruptions);
            let before = largest.as_ref().map_or(0, RankMemory::planned_bytes);
            largest = result
                .largest
                .filter(|m| m.planned_bytes() > before)
                .or(largest);
            resident_bytes.push(result.resident_bytes);
        }
        let kernel = self.kernel.name();
        JobRecord {
            record: BillionRecord::new(&self.plan, sum, largest, kernel, None),
            resident_bytes,
        }
    }
}
