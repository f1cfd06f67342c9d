//! A machine in numbers: devices, links, nodes and stragglers.
//!
//! Everything is in seconds, bytes and operations per second, and serialises as it stands, so that
//! a machine is a file that can be edited. The decision here: the speed of a device is a rate plus
//! what the rate does not cover (an overhead for each job, rows read and written once, partial
//! blocks on the diagonal of a causal mask), so that one description fits long and short jobs.

use encke_core::DType;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

use crate::error::CostError;

/// The speed of attention in one direction (forward or backward). An *instance* is one attention of
/// one head in one segment of one batch entry.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Floating-point operations per second: 4 for each pair and channel forward, 10 backward.
    pub flops: f64,
    /// Keys that each query of a causal job costs beyond those it sees: half a block, or more where
    /// uneven blocks leave part of a device idle.
    #[serde(default)]
    pub diagonal_keys: f64,
    /// Bytes per second at which a job's rows are read, and its accumulators read and written,
    /// once.
    pub row_bytes_per_s: f64,
    /// By what fraction operations take longer in a job of less than [`MANY_INSTANCES`] instances,
    /// which leaves part of a device idle.
    #[serde(default, alias = "few_instances_slowdown")]
    pub few_instances_slowdown: f64,
    /// By what fraction operations take longer where rows of keys or queries are strided, as those
    /// of a dilated branch are.
    #[serde(default, alias = "strided_slowdown")]
    pub strided_slowdown: f64,
    /// By what fraction jobs take longer in a ring of several ranks than alone: rows come from
    /// other ranks' caches, and transfers run beside them.
    #[serde(default, alias = "ring_slowdown")]
    pub ring_slowdown: f64,
    /// Queries and keys of a tile; a partial tile costs as much as a full one.
    #[serde(default = "unit_tile")]
    pub tile: [usize; 2],
    /// The cost of each instance beside its pairs and rows.
    #[serde(default, alias = "instance_s")]
    pub instance_s: f64,
    /// Queries of an instance that are one task on one core; 0 where tasks can be arbitrarily
    /// short. Cores without a task are left to other ranks while the longest task of a job runs.
    #[serde(default)]
    pub task_rows: f64,
    /// The share of a device that one task occupies: one core.
    #[serde(default = "whole_device")]
    pub task_share: f64,
}

fn unit_tile() -> [usize; 2] {
    [1, 1]
}

fn whole_device() -> f64 {
    1.0
}

impl Speed {
    /// A speed without any of the slowdowns and fixed costs.
    pub fn new(flops: f64, row_bytes_per_s: f64) -> Speed {
        Speed {
            flops,
            diagonal_keys: 0.0,
            row_bytes_per_s,
            few_instances_slowdown: 0.0,
            strided_slowdown: 0.0,
            ring_slowdown: 0.0,
            tile: unit_tile(),
            instance_s: 0.0,
            task_rows: 0.0,
            task_share: whole_device(),
        }
    }

    /// The share of a device that a job occupies, given the share of the job that its longest task
    /// is.
    pub fn worker_share(&self, longest_task: f64) -> f64 {
        (self.task_share / longest_task.max(1e-18)).min(1.0)
    }
}

/// The instances from which on [`Speed::few_instances_slowdown`] does not apply.
pub const MANY_INSTANCES: usize = 4;

/// The most cores, cards, or rows of a tile.
const MOST_OF_ANYTHING: usize = 1 << 20;

/// The speed of attention in one dtype.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// The storage type.
    pub dtype: DType,
    /// The head dimension it was measured at; a job uses the rate of the nearest.
    pub dim: usize,
    /// The forward pass.
    pub forward: Speed,
    /// The backward pass.
    pub backward: Speed,
    /// Where the figures come from.
    #[serde(default)]
    pub source: String,
}

/// The speed of what one rank computes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceModel {
    /// Its name.
    pub name: String,
    /// Where the figures come from.
    #[serde(default)]
    pub source: String,
    /// Its speeds.
    pub rates: Vec<Rate>,
    /// Launch latency of a job; other ranks may compute meanwhile.
    pub job_overhead_s: f64,
    /// Fixed cost of every other task (a fill, a copy, a merge).
    pub task_overhead_s: f64,
    /// Bytes per second of copies; bytes read and bytes written both count.
    pub bytes_per_s: f64,
    /// Bytes per second of copies that add to their target; `None`: as `bytes_per_s`.
    #[serde(default)]
    pub add_bytes_per_s: Option<f64>,
    /// Bytes per second of copies from or to strided rows; `None`: as `bytes_per_s`.
    #[serde(default, alias = "strided_bytes_per_s")]
    pub strided_bytes_per_s: Option<f64>,
    /// Bytes per second of fill, merge, finish and delta tasks.
    pub cell_bytes_per_s: f64,
    /// Bytes per second at which inputs are copied in if a rank's rows are not contiguous; `None`
    /// where the inputs are already there.
    #[serde(default)]
    pub load_bytes_per_s: Option<f64>,
    /// Bytes per second at which memory is allocated for outputs that are handed to the caller with
    /// their buffer, which are those that one rank holds whole; `None` where that costs nothing.
    #[serde(default, alias = "allocate_bytes_per_s")]
    pub allocate_bytes_per_s: Option<f64>,
    /// Cores that all ranks of a node share: jobs run on as many workers, every rank's other tasks
    /// on a thread of its own. `None` where each rank has a device to itself. All speeds above are
    /// those of one rank alone: of a job on all cores, of a copy on one.
    #[serde(default)]
    pub shared_cores: Option<usize>,
}

/// What moves the bytes of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransferMode {
    /// Hardware of its own (a NIC, a copy engine): transfers overlap computation.
    #[serde(alias = "wire")]
    Offloaded,
    /// The sender's thread, as between threads of one process: before its jobs if the receiver has
    /// posted by then, after them otherwise.
    #[serde(alias = "sender")]
    SenderThread,
}

/// A kind of link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Where the figures come from.
    #[serde(default)]
    pub source: String,
    /// Time before the first byte of a transfer moves.
    pub latency_s: f64,
    /// Bytes per second of one port in one direction.
    pub bytes_per_s: f64,
    /// What moves the bytes.
    #[serde(alias = "carrier")]
    pub mode: TransferMode,
}

/// Devices in nodes, and the links inside and between nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What each rank computes on.
    pub device: DeviceModel,
    /// Ranks of a node.
    #[serde(alias = "node")]
    pub ranks_per_node: usize,
    /// Between ranks of a node: each rank has a port out and a port in.
    #[serde(alias = "inside")]
    pub intra_node: Link,
    /// Between nodes: each network card has a port out and a port in.
    #[serde(alias = "between")]
    pub inter_node: Link,
    /// Network cards of a node; its ranks are assigned to them in contiguous groups.
    pub nics: usize,
    /// Slow ranks, and the factor by which each of their tasks takes longer.
    #[serde(default)]
    pub stragglers: BTreeMap<usize, f64>,
}

impl Machine {
    /// Checks every value, and that the stragglers are among `ranks` ranks.
    pub fn check(&self, ranks: usize) -> Result<(), CostError> {
        self.check_values()?;
        match self.stragglers.keys().find(|rank| **rank >= ranks) {
            Some(&rank) => Err(CostError::Straggler { rank, ranks }),
            None => Ok(()),
        }
    }

    /// Checks every value: a description may come from a file. The limits are far beyond any
    /// machine, and keep predictions finite.
    pub fn check_values(&self) -> Result<(), CostError> {
        let require = |met: bool, what: &'static str, got: f64, expected: &'static str| match met {
            true => Ok(()),
            false => Err(CostError::Number {
                what,
                got,
                expected,
            }),
        };
        let speed = |what, got: f64| require(got >= 1e-9, what, got, "more than 0, at least 1e-9");
        let extra = |what, got: f64| require((0.0..=1e15).contains(&got), what, got, "0 to 1e15");
        let count = |what, got: usize| {
            let met = (1..=MOST_OF_ANYTHING).contains(&got);
            require(met, what, got as f64, "1 to 1048576")
        };
        let device = &self.device;
        for rate in &device.rates {
            count("dim", rate.dim)?;
            for of in [rate.forward, rate.backward] {
                speed("flops", of.flops)?;
                speed("row_bytes_per_s", of.row_bytes_per_s)?;
                extra("diagonal_keys", of.diagonal_keys)?;
                extra("task_rows", of.task_rows)?;
                extra("few_instances_slowdown", of.few_instances_slowdown)?;
                extra("strided_slowdown", of.strided_slowdown)?;
                extra("ring_slowdown", of.ring_slowdown)?;
                extra("instance_s", of.instance_s)?;
                count("tile", of.tile[0])?;
                count("tile", of.tile[1])?;
                let share = of.task_share;
                let is_share = (1e-9..=1.0).contains(&share);
                require(is_share, "task_share", share, "more than 0, at most 1")?;
            }
        }
        for (what, got) in [
            ("bytes_per_s", Some(device.bytes_per_s)),
            ("cell_bytes_per_s", Some(device.cell_bytes_per_s)),
            ("add_bytes_per_s", device.add_bytes_per_s),
            ("strided_bytes_per_s", device.strided_bytes_per_s),
            ("load_bytes_per_s", device.load_bytes_per_s),
            ("allocate_bytes_per_s", device.allocate_bytes_per_s),
            ("bytes_per_s of a link", Some(self.intra_node.bytes_per_s)),
            ("bytes_per_s of a link", Some(self.inter_node.bytes_per_s)),
        ] {
            speed(what, got.unwrap_or(1.0))?;
        }
        count("shared_cores", device.shared_cores.unwrap_or(1))?;
        // A machine without a network is one node of any number of ranks.
        let ranks = self.ranks_per_node;
        require(ranks > 0, "ranks_per_node", ranks as f64, "1 or more")?;
        count("nics", self.nics)?;
        extra("job_overhead_s", device.job_overhead_s)?;
        extra("task_overhead_s", device.task_overhead_s)?;
        extra("latency_s of a link", self.intra_node.latency_s)?;
        extra("latency_s of a link", self.inter_node.latency_s)?;
        for &factor in self.stragglers.values() {
            let is_factor = (1e-9..=1e9).contains(&factor);
            let expected = "more than 0, at most 1e9";
            require(is_factor, "the factor of a straggler", factor, expected)?;
        }
        Ok(())
    }

    /// The node of a rank.
    pub fn node_of(&self, rank: usize) -> usize {
        rank / self.ranks_per_node
    }

    /// The link between two ranks, and whether it joins nodes.
    pub fn link(&self, from: usize, to: usize) -> (&Link, bool) {
        match self.node_of(from) == self.node_of(to) {
            true => (&self.intra_node, false),
            false => (&self.inter_node, true),
        }
    }

    /// The network card of a rank, numbered over all nodes.
    pub fn nic_of(&self, rank: usize) -> usize {
        let (ranks, nics) = (self.ranks_per_node, self.nics.min(self.ranks_per_node));
        self.node_of(rank) * nics + rank % ranks * nics / ranks
    }

    /// The devices that `ranks` ranks occupy: one for each node where ranks share cores.
    pub fn devices(&self, ranks: usize) -> usize {
        match self.device.shared_cores {
            Some(_) => ranks.div_ceil(self.ranks_per_node),
            None => ranks,
        }
    }
}

impl DeviceModel {
    /// The rate for a dtype at the nearest head dimension.
    pub fn rate(&self, dtype: DType, dim: usize) -> Result<&Rate, CostError> {
        let of_type = self.rates.iter().filter(|rate| rate.dtype == dtype);
        let nearest = of_type.min_by_key(|rate| rate.dim.abs_diff(dim));
        nearest.ok_or_else(|| {
            let known: BTreeSet<String> = self
                .rates
                .iter()
                .map(|rate| rate.dtype.to_string())
                .collect();
            CostError::NoRate {
                device: self.name.clone(),
                dtype,
                known: known.into_iter().collect::<Vec<_>>().join(", "),
            }
        })
    }
}
