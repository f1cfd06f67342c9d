//! Predicted scale: dense causal attention and LongNet, short to very long, on few to many devices
//! of a described machine, and which schedule wins where.
//!
//! Nothing is run: every figure comes from plans, the device's figures and the links of the
//! machine. The decision here: rings that are larger than needed are not simulated. In a dense
//! zigzag ring every further rank adds a round like the others, so times of more than
//! [`DENSE_RANKS`] ranks continue the line through two smaller rings with the same shards. The
//! rings of LongNet span no more ranks than its longest segment and repeat along the sequence, so
//! more than [`LONGNET_RANKS`] ranks take the time of so many with the same shards.

mod chart;
mod markdown;
mod page;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use anyhow::Result;
use encke::{Cut, DType, Pattern, Request, Shape, Sharding};
use encke_cost::Machine;
use serde::Serialize;

use crate::longnet;
use crate::schedules::{self, ScheduleTimes};
pub use markdown::markdown;
pub use page::document;

/// The largest dense ring that is simulated; half of it is the other point of the line, which is
/// straight from 8 members on: shorter rings do not wait in the backward pass. Where 8 ranks divide
/// the heads, half of this is 8 groups.
pub const DENSE_RANKS: usize = 128;
/// The largest LongNet ring that is simulated.
pub const LONGNET_RANKS: usize = 256;
/// Tokens of the smallest shard: shorter ones are left out.
pub const LEAST_SHARD: usize = 4096;
/// Lengths of the sequences.
pub const TOKENS: [usize; 5] = [1 << 17, 1 << 20, 1 << 23, 1 << 26, 1 << 30];
/// Segments of LongNet, with dilations 1, 8, 64 and 512.
const SEGMENTS: [usize; 4] = [1 << 11, 1 << 14, 1 << 17, 1 << 20];
const DILATIONS: [usize; 4] = [1, 8, 64, 512];
/// Memory of an H200, of its data sheet.
pub const DEVICE_BYTES: usize = 141_000_000_000;
/// Devices of the comparison of schedules.
pub const COMPARED_RANKS: usize = 128;

/// The pattern of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScalePattern {
    /// Every earlier token, in a zigzag sharding.
    Dense,
    /// Four branches up to 1M tokens, in a contiguous sharding.
    Longnet,
}

impl ScalePattern {
    /// Both.
    pub const ALL: [ScalePattern; 2] = [ScalePattern::Dense, ScalePattern::Longnet];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            ScalePattern::Dense => "dense causal",
            ScalePattern::Longnet => "LongNet",
        }
    }
}

/// Heads of a prediction, each of dimension 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ScaleHeads {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
}

/// Heads of the grid of lengths and devices: four query heads for each key head.
pub const GROUPED: ScaleHeads = ScaleHeads {
    heads: 32,
    kv_heads: 8,
};
/// As many key heads as query heads.
const UNGROUPED: ScaleHeads = ScaleHeads {
    heads: 32,
    kv_heads: 32,
};

/// One length on one number of devices, with every schedule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScalePoint {
    /// The pattern.
    pub pattern: ScalePattern,
    /// The heads.
    pub heads: ScaleHeads,
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Devices.
    pub ranks: usize,
    /// Forward and backward pass with each schedule.
    pub schedules: Vec<ScheduleTimes>,
    /// Index of the fastest of those that fit.
    pub best: usize,
    /// Ranks of the ring that was simulated, where it was smaller.
    pub simulated: Option<usize>,
}

impl ScalePoint {
    /// The fastest schedule.
    pub fn fastest(&self) -> &ScheduleTimes {
        &self.schedules[self.best]
    }

    /// Whether its buffers are within the memory of an H200.
    pub fn fits(&self) -> bool {
        self.fastest().memory_bytes <= DEVICE_BYTES
    }
}

/// All predictions of a page.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScaleFindings {
    /// The machine.
    pub machine: Machine,
    /// Every length on every number of devices.
    pub grid: Vec<ScalePoint>,
    /// Six shapes on 128 devices.
    pub compared: Vec<ScalePoint>,
}

impl ScaleFindings {
    /// The points of a pattern.
    pub fn of(&self, pattern: ScalePattern) -> impl Iterator<Item = &ScalePoint> {
        self.grid.iter().filter(move |of| of.pattern == pattern)
    }

    /// What the predictions were made from.
    pub fn sources(&self) -> String {
        let Machine {
            device,
            ranks_per_node,
            intra_node,
            inter_node,
            nics,
            ..
        } = &self.machine;
        format!(
            "Predicted, not measured: from the plan of every ring, the figures of the device {} \
             ({}), and two described links. Nodes of {ranks_per_node}, {} inside ({}), {} between \
             ({}), network cards in a node: {nics}. Forward and backward, bf16, heads of \
             dimension 128.",
            device.name,
            device.source,
            intra_node.name,
            intra_node.source,
            inter_node.name,
            inter_node.source,
        )
    }

    /// What was not simulated.
    pub fn omissions(&self) -> String {
        format!(
            "Dense rings of more than {DENSE_RANKS} ranks continue the line through rings of {} \
             and {DENSE_RANKS} ranks with the same shards, because every further rank adds a round \
             like the others (heads x sequence: from about 8 nodes on; through rings of 4 and 8 \
             nodes the line was 8 % short). LongNet's rings repeat along the sequence, so more \
             than {LONGNET_RANKS} ranks have the time of {LONGNET_RANKS} with the same shards. \
             Memory is that of the fullest of six ranks; the fastest schedule is one that fits \
             141 GB, where one does. Shards of less than {LEAST_SHARD} tokens are left out. \
             Congestion beyond the ports of the cards, and the time to read inputs, are \
             not part of the model.",
            DENSE_RANKS / 2
        )
    }
}

/// Predicts every point, on at most `most` devices; calls `progress` with the name of the next one.
pub fn predict(
    machine: &Machine,
    most: usize,
    progress: &mut dyn FnMut(&str),
) -> Result<ScaleFindings> {
    let mut predictor = Predictor {
        machine,
        known: BTreeMap::new(),
    };
    let mut grid = Vec::new();
    let sizes = (3..=10).map(|power| 1 << power);
    let sizes: Vec<usize> = sizes.filter(|ranks| *ranks <= most).collect();
    for pattern in ScalePattern::ALL {
        for tokens in TOKENS {
            for &ranks in sizes.iter().filter(|ranks| tokens / **ranks >= LEAST_SHARD) {
                progress(&format!("{}: {tokens} tokens, {ranks}", pattern.name()));
                grid.push(predictor.point(pattern, GROUPED, tokens, ranks)?);
            }
        }
    }
    let shapes = [
        (ScalePattern::Dense, GROUPED, 1 << 19),
        (ScalePattern::Dense, UNGROUPED, 1 << 19),
        (ScalePattern::Dense, GROUPED, 1 << 20),
        (ScalePattern::Dense, UNGROUPED, 1 << 23),
        (ScalePattern::Longnet, UNGROUPED, 1 << 19),
        (ScalePattern::Longnet, UNGROUPED, 1 << 23),
    ];
    let mut compared = Vec::new();
    if COMPARED_RANKS <= most {
        for (pattern, heads, tokens) in shapes {
            progress(&format!(
                "{}: {tokens} tokens, {COMPARED_RANKS}",
                pattern.name()
            ));
            compared.push(predictor.point(pattern, heads, tokens, COMPARED_RANKS)?);
        }
    }
    Ok(ScaleFindings {
        machine: machine.clone(),
        grid,
        compared,
    })
}

/// Predicts points on one machine; rings of the same shards are simulated once.
struct Predictor<'a> {
    machine: &'a Machine,
    /// By pattern, heads, schedule, tokens of a shard and ranks.
    known: BTreeMap<(bool, usize, &'static str, usize, usize), ScheduleTimes>,
}

impl Predictor<'_> {
    /// One point.
    fn point(
        &mut self,
        pattern: ScalePattern,
        heads: ScaleHeads,
        tokens: usize,
        ranks: usize,
    ) -> Result<ScalePoint> {
        let (dense, most) = match pattern {
            ScalePattern::Dense => (true, DENSE_RANKS),
            ScalePattern::Longnet => (false, LONGNET_RANKS),
        };
        let shard = tokens / ranks;
        let whole = request(pattern, heads, tokens, ranks)?;
        let mut all = Vec::new();
        for schedule in schedules::compared(&whole, self.machine.ranks_per_node.min(ranks)) {
            if schedule.1.node >= ranks {
                continue; // one node
            }
            let mut times = |ranks: usize| -> Result<ScheduleTimes> {
                let key = (dense, heads.kv_heads, schedule.0, shard, ranks);
                if let Some(known) = self.known.get(&key) {
                    return Ok(known.clone());
                }
                let request = request(pattern, heads, shard * ranks, ranks)?;
                let times = schedules::times(&request, schedule, self.machine, true)?;
                self.known.insert(key, times.clone());
                Ok(times)
            };
            all.push(match (ranks <= most, dense) {
                (true, _) => times(ranks)?,
                (false, true) => continued([times(most / 2)?, times(most)?], most, ranks),
                (false, false) => repeated(times(most)?, most, ranks),
            });
        }
        Ok(ScalePoint {
            pattern,
            heads,
            tokens,
            ranks,
            best: schedules::fastest(&all, Some(DEVICE_BYTES)),
            schedules: all,
            simulated: (ranks > most).then_some(most),
        })
    }
}

/// The request of a point.
fn request(
    pattern: ScalePattern,
    ScaleHeads { heads, kv_heads }: ScaleHeads,
    tokens: usize,
    ranks: usize,
) -> Result<Request> {
    let (pattern, cut) = match pattern {
        ScalePattern::Dense => (Pattern::dense().causal(true), Cut::Zigzag),
        ScalePattern::Longnet => (longnet::pattern(&SEGMENTS, &DILATIONS)?, Cut::Contiguous),
    };
    Ok(Request::new(
        Shape::new(1, tokens, heads, kv_heads, 128)?,
        pattern,
        Sharding::new(ranks, cut)?,
        DType::Bf16,
    ))
}

/// LongNet on `ranks` ranks, from `most` ranks with the same shards: its rings repeat.
fn repeated(full: ScheduleTimes, most: usize, ranks: usize) -> ScheduleTimes {
    let all = |bytes: u64| (bytes as f64 * ranks as f64 / most as f64) as u64;
    ScheduleTimes {
        inside_bytes: all(full.inside_bytes),
        between_bytes: all(full.between_bytes),
        ..full
    }
}

/// A dense ring of `ranks` ranks, from rings of `most / 2` and of `most` ranks with the same
/// shards.
fn continued([half, full]: [ScheduleTimes; 2], most: usize, ranks: usize) -> ScheduleTimes {
    let times = ranks as f64 / most as f64;
    // Along the line through the two: at `most` 0 steps of `most / 2` ranks beyond it.
    let steps = (ranks - most) as f64 / (most / 2) as f64;
    let line = |half: f64, full: f64| full + steps * (full - half);
    let each = |half: u64, full: u64| {
        let (half, full) = (half as f64 / (most / 2) as f64, full as f64 / most as f64);
        (line(half, full) * ranks as f64) as u64
    };
    let backward_s = half.backward_s.zip(full.backward_s);
    let backward_s = backward_s.map(|(half, full)| line(half, full));
    let forward_s = line(half.forward_s, full.forward_s);
    // The arithmetic of all devices grows with the square, that of each one in proportion.
    let seconds = forward_s + backward_s.unwrap_or(0.0);
    ScheduleTimes {
        forward_s,
        backward_s,
        efficiency: full.efficiency * times * full.seconds() / seconds,
        inside_bytes: each(half.inside_bytes, full.inside_bytes),
        between_bytes: each(half.between_bytes, full.between_bytes),
        busiest_port_s: line(half.busiest_port_s, full.busiest_port_s),
        ..full
    }
}
