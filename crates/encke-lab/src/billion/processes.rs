//! A run as an MPI job: process i of p runs ranks i, i + p, i + 2p and so on.
//!
//! Ranks of a streamed forward pass are independent, so the processes communicate only at the end,
//! when their results are summed. Each has a state file of its own.

use std::path::PathBuf;

use anyhow::Result;
use encke::plan::Plan;
use encke::{CpuKernel, RankMemory};
use serde::{Deserialize, Serialize};

use super::host::HostRunner;
use super::settings::BillionSettings;
use super::state::{OwnRanks, RunState, remove_state};
use super::{BillionRecord, BillionRun, ProgressLog, attend};
use crate::cluster::Cluster;
use crate::process::peak_resident_bytes;

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
    kernel: CpuKernel,
    plan: Plan,
}

/// The record of all processes, and their peak resident bytes.
pub struct JobRecord {
    /// The record, with the times of the slowest process.
    pub record: BillionRecord,
    /// Peak resident memory of each process.
    pub resident_bytes: Vec<Option<usize>>,
}

/// Everything that can fail before the first rank.
pub fn prepare(cluster: &Cluster, run: &BillionRun) -> Result<BillionShare> {
    let mut settings = run.settings.clone();
    if run.choose_ranks {
        settings.ranks = settings.cpu_ranks();
    }
    // The number of processes is part of the name: with another one, a process has other ranks.
    let mut path = run.state.clone().into_os_string();
    path.push(format!(".{}-of-{}", cluster.rank(), cluster.ranks()));
    let path = PathBuf::from(path);
    let plan = Plan::new(settings.request()?)?;
    let ranks = own_ranks(cluster, &settings);
    Ok(BillionShare {
        state: RunState::open(&path, &settings, (&plan, ranks), run.fresh)?,
        plan,
        path,
        kernel: CpuKernel::new()?,
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
        let mut runner = HostRunner::new(kernel);
        let largest = attend((kernel, &mut runner), plan, (state, path), ranks, progress)?;
        let result = ProcessResult {
            state: state.clone(),
            largest,
            resident_bytes: peak_resident_bytes(),
        };
        let all = cluster.gather(&result)?;
        Ok(all.map(|all| self.sum(all)))
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
        let kernel = self.kernel.instruction_set().to_string();
        JobRecord {
            record: BillionRecord::new(&self.plan, sum, largest, kernel, None),
            resident_bytes,
        }
    }
}
