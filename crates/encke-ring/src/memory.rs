//! The memory of a rank: the plan's bytes beside the ledger's.

use encke_core::kernel::Kernel;
use encke_core::plan::Request;
use encke_core::plan::program::{Component, RankPlan};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::ledger::Ledger;
use crate::rank::Rank;

/// Memory of one rank: planned, and as it was really allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankMemory {
    /// The rank.
    pub rank: usize,
    /// Planned bytes by what they are for, including the kernel's workspace.
    pub planned: BTreeMap<Component, usize>,
    /// Planned bytes that were not allocated, because the caller's inputs are read in place.
    pub borrowed_bytes: usize,
    /// Bytes that its buffers occupy.
    pub allocated_bytes: usize,
    /// Everything it allocated and freed, including the kernel's workspace.
    pub ledger: Ledger,
}

impl RankMemory {
    /// All planned bytes.
    pub fn planned_bytes(&self) -> usize {
        self.planned.values().sum()
    }
}

/// Memory of a rank whose program has no jobs and therefore no workspace.
pub fn of_buffers<K: Kernel>(rank: &Rank<K>) -> RankMemory {
    RankMemory {
        rank: rank.plan().rank,
        planned: rank.plan().memory(),
        borrowed_bytes: rank.borrowed_bytes(),
        allocated_bytes: rank.allocated_bytes(),
        ledger: rank.ledger().clone(),
    }
}

/// Memory of ranks that share a kernel and its workspace.
pub fn of_ranks<K: Kernel>(kernel: &K, ranks: &[Rank<K>], request: &Request) -> Vec<RankMemory> {
    let share = kernel.scratch_bytes().div_ceil(ranks.len().max(1));
    let of_rank = |rank: &Rank<K>| {
        let mut ledger = rank.ledger().clone();
        ledger.set(rank.plan().rounds.len(), Component::Workspace, share);
        RankMemory {
            planned: planned(kernel, rank.plan(), ranks.len(), request),
            ledger,
            ..of_buffers(rank)
        }
    };
    let mut memory: Vec<RankMemory> = ranks.iter().map(of_rank).collect();
    share_workspace(memory.iter_mut().map(|memory| &mut memory.planned));
    memory
}

/// Planned bytes by what they are for, with one rank's share of the workspace of a kernel that
/// `sharing` ranks use.
pub fn planned<K: Kernel>(
    kernel: &K,
    plan: &RankPlan,
    sharing: usize,
    request: &Request,
) -> BTreeMap<Component, usize> {
    let mut planned = plan.memory();
    let workspace = plan
        .jobs()
        .map(|job| kernel.workspace_bytes(job, request.pass, request.dtype));
    let workspace = workspace.max().unwrap_or(0).div_ceil(sharing);
    planned.insert(Component::Workspace, workspace);
    planned
}

/// Sets the workspace of ranks that share a kernel to the largest that any of them needs: the
/// kernel keeps it for all of them.
pub fn share_workspace<'a>(planned: impl Iterator<Item = &'a mut BTreeMap<Component, usize>>) {
    let mut planned: Vec<_> = planned.collect();
    let of =
        |planned: &&mut BTreeMap<Component, usize>| planned.get(&Component::Workspace).copied();
    let Some(most) = planned.iter().filter_map(of).max() else {
        return;
    };
    for planned in &mut planned {
        planned.insert(Component::Workspace, most);
    }
}
