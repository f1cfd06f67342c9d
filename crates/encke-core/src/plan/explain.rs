//! A plan in words and in numbers: who computes what, who sends what to whom, and what it takes.
//!
//! Nothing is estimated: ranks are read off their programs, totals off the pattern and the rings
//! (a test holds the one against the other). Of many ranks the first and the last are shown. Two
//! figures are given to compare with: what a dense ring would have sent, and what each rank would
//! hold after an all-gather.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::membership::{Agreement, Epoch, RankProgress};
use super::program::{Component, RankPlan};
use super::rings::Rotating;
use super::{Pass, Plan, Queries, Request};
use crate::error::Result;
use crate::pattern::{Lane, Mode};
use crate::sharding::Cut;

/// A plan, summed up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// What was asked for.
    pub request: Request,
    /// The pattern, resolved.
    pub lanes: Vec<Lane>,
    /// Each ring in which parcels travel.
    pub rings: Vec<RingSummary>,
    /// Each rank; of more than 64, the first and the last 8.
    pub ranks: Vec<RankSummary>,
    /// (query, key) pairs computed by all ranks.
    pub pairs: u128,
    /// Pairs that plain attention would compute.
    pub dense_pairs: u128,
    /// Bytes sent by all ranks.
    pub sent_bytes: usize,
    /// Bytes that a dense ring would send: every chunk all the way round.
    pub dense_ring_bytes: usize,
    /// Bytes of keys and values that each rank would hold after an all-gather.
    pub all_gather_bytes: usize,
    /// What it would take to survive a death, where the plan can.
    pub adoption: Option<Adoption>,
}

/// What the fullest rank would hold if the rank whose inputs it keeps died at the beginning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Adoption {
    /// The rank that adopts.
    pub rank: usize,
    /// The one that died.
    pub dead: usize,
    /// Bytes of its buffers from then on.
    pub memory_bytes: usize,
}

/// A ring of ranks that share segments.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingSummary {
    /// The ranks.
    pub members: Vec<usize>,
    /// Whether parcels go from lower to higher ranks.
    pub rising: bool,
    /// Ranks whose rows travel.
    pub parcels: usize,
    /// How far from home any of them comes at most.
    pub hops: usize,
    /// How many distances a round takes.
    pub width: usize,
    /// In how many rounds everything has been everywhere.
    pub rounds: usize,
}

/// What one rank does, holds and moves.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: usize,
    /// Tokens it owns.
    pub tokens: usize,
    /// Rounds of its program.
    pub rounds: usize,
    /// (query, key) pairs it computes.
    pub pairs: u128,
    /// Bytes it sends to each other rank.
    pub sends: BTreeMap<usize, usize>,
    /// Bytes it sends.
    pub sent_bytes: usize,
    /// Bytes it receives.
    pub received_bytes: usize,
    /// Bytes of its buffers, by what they are for.
    pub memory: BTreeMap<Component, usize>,
    /// All of them.
    pub memory_bytes: usize,
}

impl RankSummary {
    fn new(program: &RankPlan) -> RankSummary {
        let (sends, memory) = (program.sent_bytes(), program.memory());
        RankSummary {
            rank: program.rank,
            tokens: program.rows,
            rounds: program.rounds.len(),
            pairs: program.pairs(),
            sent_bytes: sends.values().sum(),
            sends,
            received_bytes: program.received_bytes(),
            memory_bytes: memory.values().sum(),
            memory,
        }
    }
}

impl Plan {
    /// The plan, summed up; display it for words, serialise it for numbers.
    pub fn explain(&self) -> Result<Explanation> {
        let request = &self.request;
        let shape = &request.shape;
        let (all, edge) = (self.ranks(), SHOWN / 2);
        let ranks = (0..all)
            .filter(|rank| all <= RESOLVED || *rank < edge || *rank >= all - edge)
            .map(|rank| Ok(RankSummary::new(&self.rank(rank)?)))
            .collect::<Result<Vec<RankSummary>>>()?;
        let rings = self.rings.iter().map(|ring| {
            let width = ring.width(request.schedule.width);
            RingSummary {
                members: ring.members.clone(),
                rising: ring.rising,
                parcels: ring.parcels.iter().flatten().count(),
                hops: ring.last(),
                width,
                rounds: ring.rounds(width),
            }
        });
        let n = shape.tokens as u128;
        let seen = if request.pattern.is_causal() {
            n * (n + 1) / 2
        } else {
            n * n
        };
        let kv_elements = 2 * shape.batch * shape.tokens * shape.kv_heads * shape.dim;
        let hops = self.ranks() - 1;
        let gradients = match request.pass {
            Pass::Forward => 0,
            // Gradients go round as well, and one hop further: home.
            Pass::Backward { .. } => self.ranks() * usize::from(hops > 0),
        };
        Ok(Explanation {
            lanes: self.lanes.clone(),
            rings: rings.collect(),
            pairs: self.lanes.iter().map(|lane| self.lane_pairs(lane)).sum(),
            dense_pairs: seen * (shape.batch * shape.heads) as u128,
            sent_bytes: self.sent_bytes(),
            dense_ring_bytes: kv_elements * hops * request.dtype.bytes()
                + kv_elements * gradients * request.dtype.sum().bytes(),
            all_gather_bytes: kv_elements * request.dtype.bytes(),
            adoption: self.adoption(&ranks)?,
            ranks,
            request: request.clone(),
        })
    }
}

impl Plan {
    /// What the fullest of some ranks would hold if its neighbour died.
    fn adoption(&self, ranks: &[RankSummary]) -> Result<Option<Adoption>> {
        let fullest = ranks.iter().max_by_key(|rank| rank.memory_bytes);
        let Some((rank, dead)) = fullest.and_then(|of| Some((of.rank, self.kept(of.rank).next()?)))
        else {
            return Ok(None);
        };
        let standing = RankProgress {
            done: 1,
            finished: false,
        };
        let standings = (0..self.ranks()).map(|rank| (rank != dead).then_some(standing));
        let agreement = Agreement {
            standings: standings.collect(),
        };
        let epoch = Epoch::first(&Arc::new(self.clone())).next(&agreement)?;
        let memory_bytes = epoch.program(rank)?.memory().values().sum();
        Ok(Some(Adoption {
            rank,
            dead,
            memory_bytes,
        }))
    }

    /// (query, key) pairs of a lane, by the definition of its index sets.
    fn lane_pairs(&self, lane: &Lane) -> u128 {
        let shape = &self.request.shape;
        let in_segment = |tokens: usize| {
            let rows = tokens.saturating_sub(lane.offset).div_ceil(lane.dilation) as u128;
            match self.request.pattern.is_causal() {
                true => rows * (rows + 1) / 2,
                false => rows * rows,
            }
        };
        let whole = (shape.tokens / lane.segment) as u128;
        let pairs = whole * in_segment(lane.segment) + in_segment(shape.tokens % lane.segment);
        pairs * (shape.batch * lane.heads.len()) as u128
    }
}

/// A whole number with its thousands set apart.
pub fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn count_of(number: usize) -> String {
    grouped(number as u128)
}

/// Bytes as people read them.
pub fn bytes(count: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    match unit {
        0 => format!("{count} B"),
        _ if value < 10.0 => format!("{value:.2} {}", units[unit]),
        _ => format!("{value:.1} {}", units[unit]),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_request(f)?;
        self.write_lanes(f)?;
        self.write_rings(f)?;
        self.write_ranks(f)?;
        self.write_totals(f)
    }
}

/// Ranks shown in words before the middle is left out.
const SHOWN: usize = 16;
/// Ranks whose programs are all made.
const RESOLVED: usize = 64;

impl Explanation {
    fn write_request(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request {
            shape,
            pattern,
            sharding,
            queries,
            dtype,
            pass,
            redundancy,
            ..
        } = &self.request;
        let direction = match pass {
            Pass::Forward => "forward",
            Pass::Backward { .. } => "backward",
        };
        let held = match queries {
            Queries::Sharded => "each holding its own queries",
            Queries::Replicated => "each holding all queries",
        };
        let cut = match sharding.cut() {
            Cut::Contiguous => "contiguous",
            Cut::Firsts(_) => "contiguous, as given",
            Cut::Zigzag => "zigzag",
            Cut::Striped => "striped",
        };
        writeln!(
            f,
            "{direction}: {} tokens x {} heads ({} key heads) x {} numbers, batch {}, {dtype}",
            count_of(shape.tokens),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.batch,
        )?;
        let causal = if pattern.is_causal() { ", causal" } else { "" };
        let kept = match redundancy {
            0 => String::new(),
            1 => ", and the inputs of its neighbour".to_string(),
            more => format!(", and the inputs of {more} neighbours"),
        };
        writeln!(
            f,
            "{} ranks ({cut}), {held}{kept}; {} mode{causal}",
            self.request.sharding.ranks(),
            pattern.mode().name(),
        )
    }

    fn write_lanes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nWho sees whom")?;
        let mut lanes = &self.lanes[..];
        while let Some(lane) = lanes.first() {
            let count = lanes.iter().take_while(|l| l.branch == lane.branch).count();
            let (branch, rest) = lanes.split_at(count);
            lanes = rest;
            let heads = branch.iter().flat_map(|lane| &lane.heads);
            let mut heads: Vec<usize> = heads.map(|head| head.head).collect();
            heads.sort_unstable();
            let every = match (lane.dilation, branch) {
                (1, _) => "every token".to_string(),
                (r, [_]) => format!("one token in {} (phase {})", count_of(r), lane.offset),
                (r, _) => {
                    let phases: Vec<usize> = branch.iter().map(|lane| lane.offset).collect();
                    let phases = ranges(&phases);
                    format!("one token in {} (phases {phases}, by head)", count_of(r))
                }
            };
            let (heads, segment) = (ranges(&heads), count_of(lane.segment));
            writeln!(f, "  heads {heads}: segments of {segment} tokens, {every}")?;
        }
        if let Mode::Fkodom = self.request.pattern.mode() {
            writeln!(
                f,
                "  (outputs divided by their sum over the sequence: compatibility only)"
            )?;
        }
        Ok(())
    }

    fn write_rings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nWho sends to whom")?;
        if self.rings.is_empty() {
            return writeln!(f, "  nobody: every segment lies inside one rank's tokens");
        }
        let shown = self.rings.iter().take(SHOWN);
        for ring in shown {
            let way = if ring.rising { "upwards" } else { "downwards" };
            let how = match (ring.width, ring.rounds) {
                (1, _) => format!("passed {way}, at most {} hops", ring.hops),
                (_, 1) => format!("sent {way} to all who need them at once"),
                (width, rounds) => {
                    format!("passed {way}, {width} together, in {rounds} rounds")
                }
            };
            let (members, parcels) = (ranges(&ring.members), ring.parcels);
            let rotating = match (self.request.queries, self.request.freight()) {
                (Queries::Sharded, Rotating::Queries) => " of queries",
                _ => "",
            };
            writeln!(
                f,
                "  ring of ranks {members}: {parcels} parcels{rotating}, {how}"
            )?;
        }
        match self.rings.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => writeln!(f, "  and {} more rings", count_of(more)),
        }
    }

    fn write_ranks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nEach rank")?;
        writeln!(
            f,
            "  {:>6} {:>15} {:>22} {:>11} {:>11} {:>11} {:>7}",
            "rank", "tokens", "pairs", "sends", "receives", "memory", "rounds"
        )?;
        let (all, edge) = (self.request.sharding.ranks(), SHOWN / 2);
        for rank in &self.ranks {
            let number = rank.rank;
            if all > SHOWN && number == all - edge {
                writeln!(f, "  {:>6}", "...")?;
            }
            if all > SHOWN && number >= edge && number < all - edge {
                continue;
            }
            writeln!(
                f,
                "  {:>6} {:>15} {:>22} {:>11} {:>11} {:>11} {:>7}",
                rank.rank,
                count_of(rank.tokens),
                grouped(rank.pairs),
                bytes(rank.sent_bytes),
                bytes(rank.received_bytes),
                bytes(rank.memory_bytes),
                rank.rounds
            )?;
        }
        let largest = self.ranks.iter().max_by_key(|rank| rank.memory_bytes);
        let of = if all > RESOLVED { " of these" } else { "" };
        if let Some(rank) = largest {
            writeln!(f, "\nMemory of the fullest rank{of} ({})", rank.rank)?;
            for (component, held) in &rank.memory {
                writeln!(f, "  {:<22} {:>11}", component.name(), bytes(*held))?;
            }
            writeln!(
                f,
                "  {:<22} {:>11}",
                "all buffers",
                bytes(rank.memory_bytes)
            )?;
        }
        if let Some(adoption) = &self.adoption {
            writeln!(
                f,
                "  if rank {} died, rank {} would adopt its tokens and hold {}",
                adoption.dead,
                adoption.rank,
                bytes(adoption.memory_bytes)
            )?;
        }
        Ok(())
    }

    fn write_totals(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nAll ranks")?;
        writeln!(
            f,
            "  {} pairs computed, {:.4} % of plain attention's {}",
            grouped(self.pairs),
            100.0 * self.pairs as f64 / self.dense_pairs as f64,
            grouped(self.dense_pairs)
        )?;
        writeln!(
            f,
            "  {} sent; a dense ring would send {}, after an all-gather each rank would hold {}",
            bytes(self.sent_bytes),
            bytes(self.dense_ring_bytes),
            bytes(self.all_gather_bytes)
        )
    }
}

/// Rising numbers, with runs of them drawn together: `0-3, 5, 8-9`.
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let text = |(first, last): &(usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    let mut words: Vec<String> = runs.iter().map(text).collect();
    if words.len() > SHOWN {
        let left_out = words.len() - SHOWN;
        words.truncate(SHOWN);
        words.push(format!("and {left_out} more"));
    }
    words.join(", ")
}
