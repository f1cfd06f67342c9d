//! Index sets as affine rows: which rows of a shard belong to which segments of a lane.
//!
//! The decision here: an index set is never a list of tokens. For a lane and a run it is the
//! solution of two congruences, solved once for a whole family of segments, so a plan does not grow
//! with n.

use std::ops::Range;

use serde::Serialize;

use crate::congruence::{congruence, gcd};
use crate::documents::Documents;
use crate::mask::Window;
use crate::pattern::{Lane, Pattern};
use crate::sharding::{Cut, Run, Sharding};

/// Segments that begin at tokens `start, start + step, …`, `count` of them. A shard selects the
/// same relative rows in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Segments {
    /// The first token of the first segment.
    pub start: usize,
    /// Tokens from one segment to the next.
    pub step: usize,
    /// How many.
    pub count: usize,
    /// Tokens of each.
    pub length: usize,
    /// How many positions at the start of each belong to the prefix of the document.
    pub prefix: usize,
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

    /// How many rows have a position below `position`.
    pub fn rows_before(&self, position: usize) -> usize {
        let above = position.saturating_sub(self.position);
        above.div_ceil(self.position_step).min(self.count)
    }

    /// The rows with these indices; None if there are none.
    pub fn part(&self, rows: Range<usize>) -> Option<Rows> {
        (!rows.is_empty()).then(|| Rows {
            count: rows.len(),
            row: self.row + rows.start * self.row_step,
            position: self.position + rows.start * self.position_step,
            ..*self
        })
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

/// What the queries `q` see of the keys `k` within a window; both are rows of the same segments.
pub fn visibility(window: Window, q: &Rows, k: &Rows) -> Visibility {
    let (some, all) = (
        window.reach(q.position, q.last_position()),
        window.reach(q.last_position(), q.position),
    );
    let (first, last) = (k.position, k.last_position());
    if all.start <= first && last < all.end {
        Visibility::All
    } else if last < some.start || some.end <= first {
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
pub fn rows(lane: &Lane, run: &Run, base: usize, segments: Segments) -> Option<Rows> {
    let start = segments.start;
    let low = run.first.saturating_sub(start);
    let high = segments.length.min(run.end().saturating_sub(start));
    let residue = (run.first as i128 - start as i128).rem_euclid(run.stride as i128) as usize;
    let (solution, step) = congruence(lane.offset, lane.dilation, residue, run.stride)?;
    let first = solution + step * low.saturating_sub(solution).div_ceil(step);
    if first >= high {
        return None;
    }
    debug_assert!(segments.count == 1 || segments.step.is_multiple_of(run.stride));
    Some(Rows {
        count: (high - first).div_ceil(step),
        row: base + (start + first - run.first) / run.stride,
        row_step: step / run.stride,
        segment_step: segments.step / run.stride,
        position: first,
        position_step: step,
    })
}

/// Segments of a lane that the same ranks share, each rank with the same relative rows in all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The segments.
    pub segments: Segments,
    /// The ranks with rows in them, ascending. A group of one member exchanges nothing.
    pub members: Vec<usize>,
}

/// Runs, each with its first row in a shard.
fn with_bases(runs: impl Iterator<Item = Run>) -> Vec<(Run, usize)> {
    let mut base = 0;
    let with_base = |run: Run| {
        base += run.count;
        (run, base - run.count)
    };
    runs.map(with_base).collect()
}

/// The rows of each run that `lane` selects in `segments`, with the index of the run among those
/// that overlap them.
fn select(
    runs: &[(Run, usize)],
    lane: &Lane,
    segments: Segments,
) -> impl Iterator<Item = (usize, Rows)> {
    // Runs are in ascending order: those before the segments and after them are skipped.
    let first = runs.partition_point(|(run, _)| run.end() <= segments.start);
    let end = segments.start + (segments.count - 1) * segments.step + segments.length;
    let near = runs[first..].iter().enumerate();
    near.take_while(move |(_, (run, _))| run.first < end)
        .filter_map(move |(i, (run, base))| rows(lane, run, *base, segments).map(|rows| (i, rows)))
}

/// All shards of a sequence, indexed by rank and by token.
#[derive(Debug, Clone)]
pub struct Shards {
    tokens: usize,
    documents: Option<Documents>,
    /// Tokens of each document's prefix.
    prefix: usize,
    /// The positions of the queries.
    queries: Range<usize>,
    /// (run, its first row) of each rank's keys.
    by_rank: Vec<Vec<(Run, usize)>>,
    /// (run, its first row) of each rank's queries: those at the positions of its keys.
    queries_by_rank: Vec<Vec<(Run, usize)>>,
    /// (run, rank) in order of the first token.
    by_token: Vec<(Run, usize)>,
    striped: bool,
}

impl Shards {
    /// The shards of a sequence of `tokens` tokens, each with a query, whose segments are those of
    /// `pattern`'s documents.
    pub fn new(sharding: &Sharding, tokens: usize, pattern: &Pattern) -> Shards {
        let by_rank: Vec<Vec<(Run, usize)>> = (0..sharding.ranks())
            .map(|rank| with_bases(sharding.runs(tokens, rank).into_iter()))
            .collect();
        let mut by_token: Vec<(Run, usize)> = by_rank
            .iter()
            .enumerate()
            .flat_map(|(rank, runs)| runs.iter().map(move |&(run, _)| (run, rank)))
            .collect();
        by_token.sort_by_key(|(run, _)| run.first);
        Shards {
            tokens,
            documents: pattern.document_list().cloned(),
            prefix: pattern.effective_prefix(),
            queries: 0..tokens,
            queries_by_rank: by_rank.clone(),
            by_rank,
            by_token,
            striped: matches!(sharding.cut(), Cut::Striped),
        }
    }

    /// The same with queries at these positions only, each on the rank that owns the token at its
    /// position.
    pub fn with_queries(mut self, queries: Range<usize>) -> Shards {
        let of = |runs: &Vec<(Run, usize)>| {
            with_bases(runs.iter().filter_map(|(run, _)| run.within(&queries)))
        };
        self.queries_by_rank = self.by_rank.iter().map(of).collect();
        self.queries = queries;
        self
    }

    /// Tokens of the whole sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The keys of `rank`, by token, each run with its first row.
    pub fn runs(&self, rank: usize) -> &[(Run, usize)] {
        &self.by_rank[rank]
    }

    /// Keys of `rank`.
    pub fn rows(&self, rank: usize) -> usize {
        self.by_rank[rank].iter().map(|(run, _)| run.count).sum()
    }

    /// Queries of `rank`.
    pub fn query_rows(&self, rank: usize) -> usize {
        let runs = self.queries_by_rank[rank].iter();
        runs.map(|(run, _)| run.count).sum()
    }

    /// The rows of each run of queries of `rank` that `lane` selects in `segments`, with the index
    /// of the run. Runs without such rows are left out.
    pub fn select_queries(
        &self,
        lane: &Lane,
        rank: usize,
        segments: Segments,
    ) -> impl Iterator<Item = (usize, Rows)> {
        select(&self.queries_by_rank[rank], lane, segments)
    }

    /// The same for keys: rows of the prefix, which are visible outside the window, are apart from
    /// the others.
    pub fn select_keys(
        &self,
        lane: &Lane,
        rank: usize,
        segments: Segments,
    ) -> impl Iterator<Item = (usize, Rows)> {
        let selected = select(&self.by_rank[rank], lane, segments);
        selected.flat_map(move |(run, rows)| {
            let cut = rows.rows_before(segments.prefix);
            let parts = [rows.part(0..cut), rows.part(cut..rows.count)];
            parts.into_iter().flatten().map(move |rows| (run, rows))
        })
    }

    /// All segments of `lane` that have queries, grouped by the ranks that share them.
    pub fn groups(&self, lane: &Lane) -> Vec<Group> {
        let mut families = Vec::new();
        match &self.documents {
            None => self.families(lane, 0..self.tokens, &mut families),
            Some(documents) => {
                for document in documents.ranges() {
                    self.families(lane, document, &mut families);
                }
            }
        }
        let (first, end) = (self.queries.start, self.queries.end);
        let has_queries = |of: &Segments| {
            of.start < end && first < of.start + (of.count - 1) * of.step + of.length
        };
        families
            .into_iter()
            .filter(|(segments, _)| has_queries(segments))
            .filter_map(|(segments, mut members)| {
                let has_rows = |rank: usize| select(&self.by_rank[rank], lane, segments).next();
                members.retain(|&rank| has_rows(rank).is_some());
                (!members.is_empty()).then_some(Group { segments, members })
            })
            .collect()
    }

    /// The segments of one document and the ranks that share them.
    fn families(&self, lane: &Lane, document: Range<usize>, to: &mut Vec<(Segments, Vec<usize>)>) {
        match self.striped {
            true => self.striped_families(lane, document, to),
            false => self.contiguous_families(lane, document, to),
        }
    }

    /// The segment of a document that begins at `start`.
    fn segment(&self, lane: &Lane, document: &Range<usize>, start: usize) -> Segments {
        let length = lane.segment.min(document.end - start);
        Segments {
            start,
            step: lane.segment,
            count: 1,
            length,
            prefix: (document.start + self.prefix)
                .saturating_sub(start)
                .min(length),
        }
    }

    /// Adds `count` whole segments, `step` tokens apart, without those that have no queries. Those
    /// that begin in the document's prefix and those with queries in only a part of them are
    /// families of their own: a family has one prefix, and each rank the same rows in all of it.
    fn whole_segments(
        &self,
        (lane, document): (&Lane, &Range<usize>),
        (start, step, count): (usize, usize, usize),
        members: &[usize],
        to: &mut Vec<(Segments, Vec<usize>)>,
    ) {
        // The first segment that begins at or after a token, and the first that ends after it.
        let beginning = |token: usize| token.saturating_sub(start).div_ceil(step).min(count);
        let ending = |token: usize| beginning((token + 1).saturating_sub(lane.segment));
        let Range { start: first, end } = self.queries;
        let with_queries = ending(first)..beginning(end);
        let prefix_end = document.start + self.prefix;
        let uniform = beginning(first).max(beginning(prefix_end))..ending(end);
        let mut index = with_queries.start;
        while index < with_queries.end {
            let here = start + index * step;
            let alike = match uniform.contains(&index) {
                true => uniform.end - index,
                false => 1,
            };
            let family = Segments {
                step,
                count: alike,
                ..self.segment(lane, document, here)
            };
            to.push((family, members.to_vec()));
            index += alike;
        }
    }

    /// Contiguous runs: the segments inside a run are one family of that rank alone; a segment
    /// across a shard boundary is a family of its own, shared by the ranks it spans.
    fn contiguous_families(
        &self,
        lane: &Lane,
        document: Range<usize>,
        to: &mut Vec<(Segments, Vec<usize>)>,
    ) {
        let (w, origin) = (lane.segment, document.start);
        let mut cut = None;
        let first = self.first_run_after(document.start);
        let runs = self.by_token[first..].iter();
        for &(run, rank) in runs.take_while(|(run, _)| run.first < document.end) {
            let start = run.first.max(document.start) - origin;
            let end = run.end().min(document.end) - origin;
            let (first, last) = (start.div_ceil(w), end / w);
            if first < last {
                let whole = (origin + first * w, w, last - first);
                self.whole_segments((lane, &document), whole, &[rank], to);
            }
            let ragged = !end.is_multiple_of(w);
            if ragged && cut != Some(last) {
                cut = Some(last);
                let segment = self.segment(lane, &document, origin + last * w);
                let segment_end = segment.start + segment.length;
                to.push((segment, self.ranks_between(segment.start, segment_end)));
            }
        }
    }

    /// Striped runs: a rank's rows in a segment depend on the segment's start modulo the stride,
    /// so there is one family per residue; a short last segment is a family of its own.
    fn striped_families(
        &self,
        lane: &Lane,
        document: Range<usize>,
        to: &mut Vec<(Segments, Vec<usize>)>,
    ) {
        let (w, p, tokens) = (lane.segment, self.by_rank.len(), document.len());
        let whole = tokens / w;
        let classes = p / gcd(w, p);
        let ranks = |start: usize, length: usize| {
            let mut ranks: Vec<usize> = (start..start + length.min(p)).map(|t| t % p).collect();
            ranks.sort_unstable();
            ranks
        };
        for class in 0..classes.min(whole) {
            let start = document.start + class * w;
            let segments = (start, classes * w, (whole - class).div_ceil(classes));
            self.whole_segments((lane, &document), segments, &ranks(start, w), to);
        }
        if !tokens.is_multiple_of(w) {
            let segment = self.segment(lane, &document, document.start + whole * w);
            to.push((segment, ranks(segment.start, segment.length)));
        }
    }

    /// The index of the first contiguous run that ends after `token`.
    fn first_run_after(&self, token: usize) -> usize {
        self.by_token.partition_point(|(run, _)| run.end() <= token)
    }

    /// Ranks with a contiguous run that overlaps tokens `start..end`, ascending.
    fn ranks_between(&self, start: usize, end: usize) -> Vec<usize> {
        let first = self.first_run_after(start);
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
