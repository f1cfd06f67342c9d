//! A machine in numbers: devices, links, nodes, and who is slow.
//!
//! Everything is in seconds, bytes and operations per second, and serialises as it stands, so that a
//! machine is a file one can edit. The decision here: a device's speed is a rate and what the rate
//! does not cover (an overhead for each job, its rows read and written once, the half-empty blocks
//! on the diagonal of a causal mask), so that one description fits long and short jobs alike.

use encke_core::DType;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

use super::error::ClockError;

/// How fast a device attends, one way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// Operations per second: four for each pair and channel forward, ten backward.
    pub flops: f64,
    /// Keys that each query of a causal job costs beyond those it sees: half a block, or more where
    /// uneven blocks leave a device half idle.
    #[serde(default)]
    pub diagonal_keys: f64,
    /// Bytes per second at which a job's rows are read and its sums read and written, once each.
    pub row_bytes_per_s: f64,
    /// By what part operations take longer where a job is less than [`FEW`] single attentions
    /// (batch entries x segments x heads), which a device can do worse side by side.
    #[serde(default)]
    pub few_slower: f64,
    /// By what part operations take longer where keys or queries are rows with gaps between them, as
    /// those of a dilated branch are.
    #[serde(default)]
    pub apart_slower: f64,
    /// By what part jobs take longer in a ring of several ranks than the same jobs alone: rows come
    /// from other ranks' caches, and hops run beside them.
    #[serde(default)]
    pub ring_slower: f64,
    /// Queries, and keys, that are computed together, and cost the same where the last are empty.
    #[serde(default = "single")]
    pub tile: [usize; 2],
    /// What each single attention costs beside its pairs and rows.
    #[serde(default)]
    pub single_s: f64,
    /// Queries of a single attention that are one task, which one core does; 0 where tasks are as
    /// short as one likes. While the longest task of a job goes on, cores may be left to others.
    #[serde(default)]
    pub task_rows: f64,
    /// The part of a device that one task keeps busy: one core.
    #[serde(default = "whole")]
    pub task_share: f64,
}

fn single() -> [usize; 2] {
    [1, 1]
}

fn whole() -> f64 {
    1.0
}

impl Speed {
    /// The part of a device that a job keeps busy, given the part of it that is its longest task.
    pub fn share(&self, longest: f64) -> f64 {
        (self.task_share / longest.max(1e-18)).min(1.0)
    }
}

/// From so many single attentions on a job is not one of few.
pub const FEW: usize = 4;

/// How fast a device attends in one type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// The storage type.
    pub dtype: DType,
    /// The head dimension it was found at; a job takes the nearest.
    pub dim: usize,
    /// The forward pass.
    pub forward: Speed,
    /// The backward pass.
    pub backward: Speed,
    /// Where the figures are from.
    #[serde(default)]
    pub source: String,
}

/// What one rank computes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Where the figures are from.
    #[serde(default)]
    pub source: String,
    /// Its speeds.
    pub rates: Vec<Rate>,
    /// How long each job waits before it computes anything; others compute meanwhile.
    pub job_overhead_s: f64,
    /// What each other task (a fill, a copy, a merge) costs before it has moved anything.
    pub task_overhead_s: f64,
    /// Bytes per second of copies, read and written bytes counted alike.
    pub bytes_per_s: f64,
    /// Bytes per second of copies that add to what is there; none where they are as fast.
    #[serde(default)]
    pub add_bytes_per_s: Option<f64>,
    /// Bytes per second of copies from or to rows with gaps between them; none where they are as
    /// fast.
    #[serde(default)]
    pub apart_bytes_per_s: Option<f64>,
    /// Bytes per second of filling, merging, finishing and preparing cells.
    pub cell_bytes_per_s: f64,
    /// Bytes per second at which inputs are copied in first, if a rank's rows do not lie in one
    /// piece; none where they already are there.
    #[serde(default)]
    pub load_bytes_per_s: Option<f64>,
    /// Bytes per second at which memory is had for outputs that are given to the caller with their
    /// buffer, those that one rank has all of; none where that costs nothing.
    #[serde(default)]
    pub fresh_bytes_per_s: Option<f64>,
    /// Cores that all ranks of a node share: jobs run on as many workers, and every rank's other
    /// tasks on a thread of its own. None where each rank has a device to itself. All speeds above
    /// are those of one rank alone: of a job on all cores, of a copy on one.
    #[serde(default)]
    pub shared_cores: Option<usize>,
}

/// Who moves the bytes of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// Hardware of its own: hops fly while the device computes.
    Wire,
    /// The sender's own thread, as between the threads of one process: before its jobs where the
    /// receiver has posted already, after them where it has not.
    Sender,
}

/// A kind of link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Where the figures are from.
    #[serde(default)]
    pub source: String,
    /// Time before the first byte of a hop moves.
    pub latency_s: f64,
    /// Bytes per second of one port in one direction.
    pub bytes_per_s: f64,
    /// Who moves the bytes.
    pub carrier: Carrier,
}

/// Devices in nodes, links inside and between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// What each rank computes on.
    pub device: Device,
    /// Ranks in a node.
    pub node: usize,
    /// Between ranks of a node: each rank has a port out and a port in.
    pub inside: Link,
    /// Between nodes: each network card of a node has a port out and a port in.
    pub between: Link,
    /// Network cards in a node; its ranks are dealt out to them in order, and share them.
    pub nics: usize,
    /// Ranks that take so many times as long for every task.
    #[serde(default)]
    pub stragglers: BTreeMap<usize, f64>,
}

impl Machine {
    /// Whether a ring of `ranks` can be timed on it.
    pub fn check(&self, ranks: usize) -> Result<(), ClockError> {
        let Device { rates, .. } = &self.device;
        let positive = |what: &'static str, got: f64| match got > 0.0 {
            true => Ok(()),
            false => Err(ClockError::Number {
                what,
                got,
                wanted: "more than 0",
            }),
        };
        let not_negative = |what: &'static str, got: f64| match got >= 0.0 && got.is_finite() {
            true => Ok(()),
            false => Err(ClockError::Number {
                what,
                got,
                wanted: "0 or more",
            }),
        };
        for speed in rates.iter().flat_map(|rate| [rate.forward, rate.backward]) {
            positive("flops", speed.flops)?;
            positive("row_bytes_per_s", speed.row_bytes_per_s)?;
            not_negative("diagonal_keys", speed.diagonal_keys)?;
            not_negative("task_rows", speed.task_rows)?;
            not_negative("few_slower", speed.few_slower)?;
            not_negative("apart_slower", speed.apart_slower)?;
            not_negative("ring_slower", speed.ring_slower)?;
            not_negative("single_s", speed.single_s)?;
            if !(speed.task_share > 0.0 && speed.task_share <= 1.0) {
                return Err(ClockError::Number {
                    what: "task_share",
                    got: speed.task_share,
                    wanted: "more than 0, at most 1",
                });
            }
        }
        positive("bytes_per_s", self.device.bytes_per_s)?;
        positive("cell_bytes_per_s", self.device.cell_bytes_per_s)?;
        let optional = [
            ("add_bytes_per_s", self.device.add_bytes_per_s),
            ("apart_bytes_per_s", self.device.apart_bytes_per_s),
            ("load_bytes_per_s", self.device.load_bytes_per_s),
            ("fresh_bytes_per_s", self.device.fresh_bytes_per_s),
        ];
        for (what, given) in optional {
            positive(what, given.unwrap_or(1.0))?;
        }
        not_negative("job_overhead_s", self.device.job_overhead_s)?;
        not_negative("task_overhead_s", self.device.task_overhead_s)?;
        positive("shared_cores", self.device.shared_cores.unwrap_or(1) as f64)?;
        for link in [&self.inside, &self.between] {
            positive("bytes_per_s of a link", link.bytes_per_s)?;
            not_negative("latency_s of a link", link.latency_s)?;
        }
        positive("node", self.node as f64)?;
        positive("nics", self.nics as f64)?;
        for (&rank, &factor) in &self.stragglers {
            positive("the factor of a straggler", factor)?;
            if rank >= ranks {
                return Err(ClockError::Straggler { rank, ranks });
            }
        }
        Ok(())
    }

    /// The node of a rank.
    pub fn node_of(&self, rank: usize) -> usize {
        rank / self.node
    }

    /// The link between two ranks, and whether it leaves a node.
    pub fn link(&self, from: usize, to: usize) -> (&Link, bool) {
        match self.node_of(from) == self.node_of(to) {
            true => (&self.inside, false),
            false => (&self.between, true),
        }
    }

    /// The network card of a rank, counted over all nodes.
    pub fn nic_of(&self, rank: usize) -> usize {
        let nics = self.nics.min(self.node);
        self.node_of(rank) * nics + rank % self.node * nics / self.node
    }

    /// How many devices work side by side for `ranks` ranks: nodes, where ranks share their cores.
    pub fn devices(&self, ranks: usize) -> usize {
        match self.device.shared_cores {
            Some(_) => ranks.div_ceil(self.node),
            None => ranks,
        }
    }
}

impl Device {
    /// The figures for a type, at the nearest head dimension they are known for.
    pub fn rate(&self, dtype: DType, dim: usize) -> Result<&Rate, ClockError> {
        let of_type = self.rates.iter().filter(|rate| rate.dtype == dtype);
        let nearest = of_type.min_by_key(|rate| rate.dim.abs_diff(dim));
        nearest.ok_or_else(|| {
            let known: BTreeSet<String> = self
                .rates
                .iter()
                .map(|rate| rate.dtype.to_string())
                .collect();
            ClockError::NoRate {
                device: self.name.clone(),
                dtype,
                known: known.into_iter().collect::<Vec<_>>().join(", "),
            }
        })
    }
}
