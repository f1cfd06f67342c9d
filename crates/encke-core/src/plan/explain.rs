//! A plan summarised: the pattern, the rings, and the pairs, traffic and memory of each rank.
//!
//! Nothing is estimated: figures of ranks are counted in their programs, totals are computed from
//! the pattern and the rings, and a test compares the two. Of many ranks only the first and the
//! last are shown. Two figures serve as a comparison: the bytes a dense ring would send, and the
//! bytes each rank would hold after an all-gather.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::membership::{Agreement, Epoch, RankProgress};
use super::nodes::NodeLayout;
use super::program::{Component, RankPlan};
use super::request::{Pass, Queries, Request};
use super::rings::Rotating;
use super::topology::Plan;
use super::work::PatternWork;
use crate::error::Result;
use crate::pattern::{Lane, Mode};
use crate::sharding::Cut;

/// A plan, summarised.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The request.
    pub request: Request,
    /// The resolved pattern.
    pub lanes: Vec<Lane>,
    /// The rings in which parcels rotate.
    pub rings: Vec<RingSummary>,
    /// All ranks; of more than 64, the first and the last 8.
    pub ranks: Vec<RankSummary>,
    /// (query, key) pairs computed by all ranks.
    pub pairs: u128,
    /// Pairs of dense attention with the same mask.
    pub dense_pairs: u128,
    /// Bytes sent by all ranks.
    pub sent_bytes: usize,
    /// Bytes that a dense ring would send: every shard's k and v all the way round.
    pub dense_ring_bytes: usize,
    /// Bytes of keys and values that each rank would hold after an all-gather.
    pub all_gather_bytes: usize,
    /// The memory needed after a death, if the plan has redundancy.
    pub adoption: Option<Adoption>,
}

/// The memory of the rank with the largest buffers after it adopts the neighbour whose inputs it
/// replicates, if that neighbour dies in the first round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Adoption {
    /// The rank that adopts.
    pub rank: usize,
    /// The rank that died.
    pub dead: usize,
    /// Bytes of the adopting rank's buffers after that.
    pub memory_bytes: usize,
}

/// A ring of ranks that share segments.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingSummary {
    /// The ranks.
    pub members: Vec<usize>,
    /// Whether parcels move from lower to higher ranks.
    pub rising: bool,
    /// The number of parcels.
    pub parcels: usize,
    /// The largest number of hops of any of them.
    pub hops: usize,
    /// How many distances a round takes.
    pub width: usize,
    /// The number of rounds until every parcel has reached all its readers.
    pub rounds: usize,
    /// How its ranks lie in nodes.
    pub layout: NodeLayout,
}

/// Work, traffic and memory of one rank.
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
    /// Bytes it sends, by destination.
    pub sends: BTreeMap<usize, usize>,
    /// Bytes it sends.
    pub sent_bytes: usize,
    /// Bytes it receives.
    pub received_bytes: usize,
    /// Bytes of its buffers, by component.
    pub memory: BTreeMap<Component, usize>,
    /// Bytes of all its buffers.
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
    /// Summarises the plan; the result can be displayed as text or serialised.
    pub fn explain(&self) -> Result<Explanation> {
        let request = &self.request;
        let shape = &request.shape;
        let (all, edge) = (self.ranks(), SHOWN / 2);
        let ranks = (0..all)
            .filter(|rank| all <= RESOLVED || *rank < edge || *rank >= all - edge)
            .map(|rank| Ok(RankSummary::new(&self.rank(rank)?)))
            .collect::<Result<Vec<RankSummary>>>()?;
        let group = request.schedule.heads;
        let plans = self.shares.iter().map(|share| &share.plan).enumerate();
        let whole = self.shares.is_empty().then_some((0, self));
        let all = whole.into_iter().chain(plans).flat_map(|(index, plan)| {
            let rings = plan.rings.iter().zip(&plan.layouts);
            rings.map(move |(ring, layout)| (index, ring, layout))
        });
        let rings = all.map(|(index, ring, layout)| {
            let width = ring.width(request.schedule.width);
            RingSummary {
                layout: *layout,
                members: (ring.members.iter())
                    .map(|member| member * group + index)
                    .collect(),
                rising: ring.rising,
                parcels: ring.parcels.iter().flatten().count(),
                hops: ring.max_distance(),
                width,
                rounds: match layout.node_ring() {
                    None => ring.rounds(width),
                    // Round 0 is the rank's own parcel.
                    Some(nodes) => nodes.turns(ring) * nodes.members - 1,
                },
            }
        });
        let (n, positions) = (shape.tokens as u128, request.positions());
        let below = |x: usize| x as u128 * (x as u128 + 1) / 2;
        let seen = if request.pattern.is_causal() {
            below(positions.end) - below(positions.start)
        } else {
            n * shape.queries as u128
        };
        let kv_rows = shape.batch * shape.tokens * shape.kv_heads;
        let kv_elements = kv_rows * (shape.dim + shape.value_dim);
        let hops = self.ranks() - 1;
        let gradients = match request.pass {
            Pass::Forward => 0,
            // Gradients go round too, with one more hop back to their owner.
            Pass::Backward { .. } | Pass::BackwardByBranch => self.ranks() * usize::from(hops > 0),
        };
        Ok(Explanation {
            lanes: self.lanes.clone(),
            rings: rings.collect(),
            pairs: shape.batch as u128 * self.work().all(),
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

    /// The memory of the rank with the largest buffers after its neighbour dies.
    fn adoption(&self, ranks: &[RankSummary]) -> Result<Option<Adoption>> {
        let largest = ranks.iter().max_by_key(|rank| rank.memory_bytes);
        let Some((rank, dead)) = largest.and_then(|of| Some((of.rank, self.kept(of.rank).next()?)))
        else {
            return Ok(None);
        };
        let alive = RankProgress {
            done: 1,
            finished: false,
        };
        let progress = (0..self.ranks()).map(|rank| (rank != dead).then_some(alive));
        let agreement = Agreement {
            progress: progress.collect(),
        };
        let epoch = Epoch::first(&Arc::new(self.clone())).next(&agreement)?;
        let memory_bytes = epoch.program(rank)?.memory().values().sum();
        Ok(Some(Adoption {
            rank,
            dead,
            memory_bytes,
        }))
    }

    /// The pattern's work, computed from the definition of its index sets.
    fn work(&self) -> PatternWork<'_> {
        let request = &self.request;
        PatternWork::new(&request.pattern, &self.lanes, &request.shape)
    }
}

/// An integer with thousands separators.
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

/// A byte count in binary units.
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

/// Ranks shown in the text before the middle is left out.
const SHOWN: usize = 16;
/// The largest number of ranks whose programs are all built.
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
        let direction = pass.name();
        let held = match queries {
            Queries::Sharded => "sharded queries",
            Queries::Replicated => "replicated queries",
        };
        let cut = match sharding.cut() {
            Cut::Contiguous => "contiguous",
            Cut::Firsts(_) => "contiguous, explicit",
            Cut::Zigzag => "zigzag",
            Cut::Striped => "striped",
            Cut::Ranges(_) => "ranges of tokens",
        };
        writeln!(
            f,
            "{direction}: {} tokens, {} heads ({} key heads) of dim {}, batch {}, {dtype}{}",
            count_of(shape.tokens),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.batch,
            self.shape_text(),
        )?;
        let causal = pattern.mask_text();
        let kept = match redundancy {
            0 => String::new(),
            1 => ", a replica of the inputs of 1 neighbour".to_string(),
            more => format!(", replicas of the inputs of {more} neighbours"),
        };
        writeln!(
            f,
            "{} ranks ({cut}), {held}{kept}; {} mode{causal}",
            self.request.sharding.ranks(),
            pattern.mode().name(),
        )
    }

    /// What differs from a query for each token and values as wide as keys.
    fn shape_text(&self) -> String {
        let shape = &self.request.shape;
        let mut text = String::new();
        if shape.queries < shape.tokens {
            let (queries, first) = (shape.queries, self.request.positions().start);
            text += &format!(
                "; {} queries from token {} on",
                count_of(queries),
                count_of(first)
            );
        }
        if shape.value_dim != shape.dim {
            text += &format!("; values of dim {}", shape.value_dim);
        }
        text
    }

    /// The pairs of the busiest rank, divided by the mean; None if not all ranks are known.
    pub fn imbalance(&self) -> Option<f64> {
        let all = self.request.sharding.ranks();
        let most = self.ranks.iter().map(|rank| rank.pairs).max()?;
        let mean = self.pairs as f64 / all as f64;
        (self.ranks.len() == all && self.pairs > 0).then(|| most as f64 / mean)
    }

    fn write_lanes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nPattern")?;
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
                "  (outputs divided by their sum over the sequence: for compatibility only)"
            )?;
        }
        Ok(())
    }

    fn write_rings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nRings")?;
        if let group @ 2.. = self.request.schedule.heads {
            writeln!(
                f,
                "  groups of {group} ranks exchange heads, before the rings and after: each rank \
                 has all tokens of its group for its share of the heads"
            )?;
        }
        if self.rings.is_empty() {
            return writeln!(f, "  none: every segment is within one rank's tokens");
        }
        let shown = self.rings.iter().take(SHOWN);
        for ring in shown {
            let way = match ring.rising {
                true => "towards higher ranks",
                false => "towards lower ranks",
            };
            let how = match (ring.layout, (ring.width, ring.rounds)) {
                (NodeLayout::TwoLevels(nodes), _) => {
                    let (count, members) = (nodes.nodes, nodes.members);
                    format!(
                        "rotate inside {count} nodes of {members}, and cross to the next node \
                         in {members} pieces during each turn"
                    )
                }
                (_, (1, _)) => format!("forwarded {way}, at most {} hops", ring.hops),
                (_, (_, 1)) => "sent directly to every reader, in 1 round".to_string(),
                (_, (width, rounds)) => {
                    format!("forwarded {way} in batches of {width}, {rounds} rounds")
                }
            };
            let why = ring.layout.reason();
            let why = why.map_or(String::new(), |why| format!(" ({why})"));
            let (members, parcels) = (ranges(&ring.members), ring.parcels);
            let rotating = match (self.request.queries, self.request.rotating()) {
                (Queries::Sharded, Rotating::Queries) => " of queries",
                _ => "",
            };
            writeln!(
                f,
                "  ring of ranks {members}: {parcels} parcels{rotating}, {how}{why}"
            )?;
        }
        match self.rings.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => writeln!(f, "  and {} more rings", count_of(more)),
        }
    }

    fn write_ranks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nRanks")?;
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
        let of = if all > RESOLVED {
            " of the ranks shown"
        } else {
            ""
        };
        if let Some(rank) = largest {
            writeln!(f, "\nMemory of rank {}, the largest{of}", rank.rank)?;
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
                "  if rank {} dies, rank {} adopts its tokens and holds {}",
                adoption.dead,
                adoption.rank,
                bytes(adoption.memory_bytes)
            )?;
        }
        Ok(())
    }

    fn write_totals(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nTotal")?;
        writeln!(
            f,
            "  {} (query, key) pairs, {:.4} % of the {} of dense attention",
            grouped(self.pairs),
            100.0 * self.pairs as f64 / self.dense_pairs as f64,
            grouped(self.dense_pairs)
        )?;
        if let Some(imbalance) = self.imbalance().filter(|_| self.ranks.len() > 1) {
            writeln!(
                f,
                "  the busiest rank has {imbalance:.3} of the mean's pairs"
            )?;
        }
        writeln!(
            f,
            "  {} sent; a dense ring sends {}; after an all-gather each rank holds {} of K/V",
            bytes(self.sent_bytes),
            bytes(self.dense_ring_bytes),
            bytes(self.all_gather_bytes)
        )
    }
}

/// Ascending numbers with consecutive ones joined: `0-3, 5, 8-9`.
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
    let mut parts: Vec<String> = runs.iter().map(text).collect();
    if parts.len() > SHOWN {
        let left_out = parts.len() - SHOWN;
        parts.truncate(SHOWN);
        parts.push(format!("and {left_out} more"));
    }
    parts.join(", ")
}
