//! Index sets as affine rows: which rows of a shard belong to which segments of a lane.
//!
//! The decision here: an index set is never a list of tokens. For a lane and a run it is the
//! solution of two congruences, solved once for a whole family of segments, so a plan does not grow
//! with n.

use serde::Serialize;

use crate::pattern::Lane;
use crate::sharding::{Cut, Run, Sharding};

/// Segments `first, first + step, …`, `count` of them. A shard selects the same relative rows in
/// each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Segments {
    /// The first segment.
    pub first: usize,
    /// The distance between segments.
    pub step: usize,
    /// How many.
    pub count: usize,
}

impl Segments {
    fn one(segment: usize) -> Segments {
        Segments {
            first: segment,
            step: 1,
            count: 1,
        }
    }
}

/// The rows of a run that a lane selects in each of some [`Segments`]. Positions are relative to
/// the start of the segment, so they are the same in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Rows {
    /// Rows in one segment; at least 1.
    pub count: usize,
    /// The first one in the first segment, as a row of the shard.
    pub row: usize,
    /// Shard rows from one selected row to the next.
    pub row_step: usize,
    /// Shard rows from one segment to the next.
    pub segment_step: usize,
    /// Position of the first one.
    pub position: usize,
    /// Positions from one to the next.
    pub position_step: usize,
}

impl Rows {
    /// Position of the last row.
    pub fn last_position(&self) -> usize {
        self.position + (self.count - 1) * self.position_step
    }
}

/// How many of a job's (query, key) pairs the mask leaves visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// No query sees any key: there is no job.
    None,
    /// Some pairs are visible; positions decide which.
    Partial,
    /// Every query sees every key.
    All,
}

/// What the queries `q` see of the keys `k`; both are rows of the same segments.
pub fn visibility(causal: bool, q: &Rows, k: &Rows) -> Visibility {
    if !causal || k.last_position() <= q.position {
        Visibility::All
    } else if k.position > q.last_position() {
        Visibility::None
    } else {
        Visibility::Partial
    }
}

/// The rows of `run` (whose first token is row `base` of its shard) that `lane` selects in
/// `segments`; None if there are none.
///
/// A token `segment_start + u` belongs to the lane when `u = offset (mod dilation)`, and to the run
/// when `u = run.first - segment_start (mod run.stride)`. All `segments` must have the same start
/// modulo the stride, as [`Shards::groups`] returns them.
pub fn rows(
    lane: &Lane,
    tokens: usize,
    run: &Run,
    base: usize,
    segments: Segments,
) -> Option<Rows> {
    let start = segments.first * lane.segment;
    let low = run.first.saturating_sub(start);
    let high = lane
        .segment
        .min(tokens - start)
        .min(run.end().saturating_sub(start));
    let residue = (run.first as i128 - start as i128).rem_euclid(run.stride as i128) as usize;
    let (solution, step) = congruence(lane.offset, lane.dilation, residue, run.stride)?;
    let first = solution + step * low.saturating_sub(solution).div_ceil(step);
    if first >= high {
        return None;
    }
    let segment_tokens = segments.step * lane.segment;
    debug_assert!(segments.count == 1 || segment_tokens.is_multiple_of(run.stride));
    Some(Rows {
        count: (high - first).div_ceil(step),
        row: base + (start + first - run.first) / run.stride,
        row_step: step / run.stride,
        segment_step: segment_tokens / run.stride,
        position: first,
        position_step: step,
    })
}

/// The smallest u >= 0 with u = a (mod m) and u = b (mod n), and the step between solutions.
pub(crate) fn congruence(a: usize, m: usize, b: usize, n: usize) -> Option<(usize, usize)> {
    if n == 1 {
        return Some((a % m, m));
    }
    let (gcd, inverse) = extended_gcd(m as i128, n as i128);
    let difference = b as i128 - (a % m) as i128;
    if difference % gcd != 0 {
        return None;
    }
    let period = n as i128 / gcd;
    let times = (difference / gcd * inverse).rem_euclid(period);
    Some(((a % m) + m * times as usize, m * period as usize))
}

/// The greatest common divisor.
pub(crate) fn gcd(m: usize, n: usize) -> usize {
    extended_gcd(m as i128, n as i128).0 as usize
}

/// gcd(m, n) and an x with m·x = gcd (mod n).
fn extended_gcd(m: i128, n: i128) -> (i128, i128) {
    let (mut old, mut new) = ((m, 1), (n, 0));
    while new.0 != 0 {
        let quotient = old.0 / new.0;
        (old, new) = (new, (old.0 - quotient * new.0, old.1 - quotient * new.1));
    }
    old
}

/// Segments of a lane that the same ranks share, each rank with the same relative rows in all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The segments.
    pub segments: Segments,
    /// The ranks with rows in them, ascending. A group of one member exchanges nothing.
    pub members: Vec<usize>,
}

/// All shards of a sequence, indexed by rank and by token.
#[derive(Debug, Clone)]
pub struct Shards {
    tokens: usize,
    /// (run, its first row) of each rank.
    by_rank: Vec<Vec<(Run, usize)>>,
    /// (run, rank) in order of the first token.
    by_token: Vec<(Run, usize)>,
    striped: bool,
}

impl Shards {
    /// The shards of a sequence of `tokens` tokens.
    pub fn new(sharding: &Sharding, tokens: usize) -> Shards {
        let by_rank: Vec<Vec<(Run, usize)>> = (0..sharding.ranks())
            .map(|rank| {
                let mut base = 0;
                let with_base = |run: Run| {
                    base += run.count;
                    (run, base - run.count)
                };
                sharding
                    .runs(tokens, rank)
                    .into_iter()
                    .map(with_base)
                    .collect()
            })
            .collect();
        let mut by_token: Vec<(Run, usize)> = by_rank
            .iter()
            .enumerate()
            .flat_map(|(rank, runs)| runs.iter().map(move |&(run, _)| (run, rank)))
            .collect();
        by_token.sort_by_key(|(run, _)| run.first);
        Shards {
            tokens,
            by_rank,
            by_token,
            striped: matches!(sharding.cut(), Cut::Striped),
        }
    }

    /// Tokens of the whole sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The runs of `rank`, each with its first row.
    pub fn runs(&self, rank: usize) -> &[(Run, usize)] {
        &self.by_rank[rank]
    }

    /// Rows of `rank`.
    pub fn rows(&self, rank: usize) -> usize {
        self.by_rank[rank].iter().map(|(run, _)| run.count).sum()
    }

    /// The rows of each run of `rank` that `lane` selects in `segments`, with the index of the run.
    /// Runs without such rows are left out.
    pub fn select(
        &self,
        lane: &Lane,
        rank: usize,
        segments: Segments,
    ) -> impl Iterator<Item = (usize, Rows)> {
        self.by_rank[rank]
            .iter()
            .enumerate()
            .filter_map(move |(i, (run, base))| {
                rows(lane, self.tokens, run, *base, segments).map(|rows| (i, rows))
            })
    }

    /// All segments of `lane`, grouped by the ranks that share them.
    pub fn groups(&self, lane: &Lane) -> Vec<Group> {
        let families = if self.striped {
            self.striped_families(lane)
        } else {
            self.contiguous_families(lane)
        };
        families
            .into_iter()
            .filter_map(|(segments, mut members)| {
                members.retain(|&rank| self.select(lane, rank, segments).next().is_some());
                (!members.is_empty()).then_some(Group { segments, members })
            })
            .collect()
    }

    /// Contiguous runs: the segments inside a run are one family of that rank alone; a segment
    /// across a shard boundary is a family of its own, shared by the ranks it spans.
    fn contiguous_families(&self, lane: &Lane) -> Vec<(Segments, Vec<usize>)> {
        let w = lane.segment;
        let mut families = Vec::new();
        let mut cut = None;
        for &(run, rank) in &self.by_token {
            let (start, end) = (run.first, run.end());
            let (first, last) = (start.div_ceil(w), end / w);
            if first < last {
                let inside = Segments {
                    first,
                    step: 1,
                    count: last - first,
                };
                families.push((inside, vec![rank]));
            }
            let ragged = !end.is_multiple_of(w);
            if ragged && cut != Some(last) {
                let segment_end = ((last + 1) * w).min(self.tokens);
                cut = Some(last);
                families.push((
                    Segments::one(last),
                    self.ranks_between(last * w, segment_end),
                ));
            }
        }
        families
    }

    /// Striped runs: a rank's rows in a segment depend on the segment's start modulo the stride,
    /// so there is one family per residue; a short last segment is a family of its own.
    fn striped_families(&self, lane: &Lane) -> Vec<(Segments, Vec<usize>)> {
        let (w, p) = (lane.segment, self.by_rank.len());
        let whole = self.tokens / w;
        let classes = p / gcd(w, p);
        let mut families: Vec<(Segments, Vec<usize>)> = (0..classes.min(whole))
            .map(|class| Segments {
                first: class,
                step: classes,
                count: (whole - class).div_ceil(classes),
            })
            .chain((!self.tokens.is_multiple_of(w)).then_some(Segments::one(whole)))
            .map(|segments| {
                let start = segments.first * w;
                let reach = w.min(self.tokens - start).min(p);
                let mut ranks: Vec<usize> = (start..start + reach).map(|t| t % p).collect();
                ranks.sort_unstable();
                (segments, ranks)
            })
            .collect();
        families.sort_by_key(|(segments, _)| *segments);
        families
    }

    /// Ranks with a contiguous run that overlaps tokens `start..end`, ascending.
    fn ranks_between(&self, start: usize, end: usize) -> Vec<usize> {
        let first = self.by_token.partition_point(|(run, _)| run.end() <= start);
        let mut ranks: Vec<usize> = self.by_token[first..]
            .iter()
            .take_while(|(run, _)| run.first < end)
            .map(|&(_, rank)| rank)
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
