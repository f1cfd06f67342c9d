//! Rings: the groups of ranks that share segments, and the parcels they exchange.
//!
//! Ranks that share the same segments form a ring of their own, whichever branch the segments come
//! from; ranks that share none never exchange a byte. Each member has at most one parcel in a ring:
//! the rows of its shard that other members need. A parcel moves along the members in ring order
//! and goes no further than the last member that needs it.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Serialize;

use crate::mask::Window;
use crate::pattern::{Lane, Pattern};
use crate::rows::{Group, Rows, Segments, Shards};

/// Some rows of one run of a shard: those that one lane selects in some segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Section {
    /// The lane.
    pub lane: usize,
    /// The segments.
    pub segments: Segments,
    /// The rows, in the shard of the parcel's owner.
    pub rows: Rows,
}

impl Section {
    /// Rows over all segments.
    pub fn total_rows(&self) -> usize {
        self.segments.count * self.rows.count
    }
}

/// The rows that one member of a ring sends to the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parcel {
    /// The rows.
    pub sections: Vec<Section>,
    /// Ring steps to the nearest member that needs any of them.
    pub first: usize,
    /// Ring steps to the farthest one.
    pub last: usize,
}

impl Parcel {
    /// A parcel that moves `width` members at a time and passes the member at `distance` also
    /// passes every `width`-th member before and after it. Returns the distance of the first of
    /// these members that needs it; None if none does, and the parcel need not take that route.
    pub fn needed_from(&self, distance: usize, width: usize) -> Option<usize> {
        let start = (distance - 1) % width + 1;
        let from = start + self.first.saturating_sub(start).div_ceil(width) * width;
        (from <= self.last).then_some(from)
    }

    /// How often it is sent when it moves `width` members at a time.
    pub fn hops(&self, width: usize) -> usize {
        let passes = |distance: &usize| self.needed_from(*distance, width).is_some();
        match self.first <= 1 {
            true => self.last,
            false => (1..=self.last).filter(passes).count(),
        }
    }

    /// The farthest members that need it, one for each of the routes it takes when it moves
    /// `width` members at a time: these return the reduced sums to the owner.
    pub fn ends(&self, width: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, last) = (self.first, self.last);
        let end = move |start: usize| last - (last - start) % width;
        (1..=width.min(last))
            .map(end)
            .filter(move |end| *end >= first)
    }
}

/// Ranks that share segments, and their parcels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ring {
    /// The ranks, in ascending order.
    pub members: Vec<usize>,
    /// The parcel of each member, where it has one.
    pub parcels: Vec<Option<Parcel>>,
    /// Whether parcels move from lower to higher members (and from the last to the first): the
    /// direction that moves fewer rows.
    pub rising: bool,
}

impl Ring {
    /// The member whose parcel is at member `index` after `distance` hops.
    pub fn owner_index(&self, index: usize, distance: usize) -> usize {
        self.step(index, distance, !self.rising)
    }

    /// The member that has the parcel of member `index` after `distance` hops.
    pub fn member_at(&self, index: usize, distance: usize) -> usize {
        self.step(index, distance, self.rising)
    }

    fn step(&self, index: usize, distance: usize, up: bool) -> usize {
        let k = self.members.len();
        let steps = distance % k;
        (if up { index + steps } else { index + k - steps }) % k
    }

    /// The parcel that is at member `index` after `distance` hops, if it goes that far.
    pub fn parcel_at(&self, index: usize, distance: usize) -> Option<&Parcel> {
        self.parcels[self.owner_index(index, distance)]
            .as_ref()
            .filter(|parcel| distance <= parcel.last)
    }

    /// The width in effect where the schedule asks for `width`: at most the largest distance.
    pub fn width(&self, width: usize) -> usize {
        width.clamp(1, self.max_distance().max(1))
    }

    /// The number of rounds until every parcel has reached all its readers.
    pub fn rounds(&self, width: usize) -> usize {
        self.max_distance().div_ceil(width)
    }

    /// The farthest any parcel goes.
    pub fn max_distance(&self) -> usize {
        let parcels = self.parcels.iter().flatten();
        parcels.map(|parcel| parcel.last).max().unwrap_or(0)
    }
}

/// Which tensors rotate, and so which members need a parcel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rotating {
    /// Keys and values: a member needs the keys that its queries see.
    Keys,
    /// Queries, or their carry or gradient: a member needs the queries that see its keys.
    Queries,
}

/// The rings of all lanes, in the same order on every rank.
pub fn rings(
    shards: &Shards,
    lanes: &[Lane],
    groups: &[Vec<Group>],
    pattern: &Pattern,
    rotating: Rotating,
) -> Vec<Ring> {
    let mut shared: BTreeMap<&[usize], Vec<(usize, Segments)>> = BTreeMap::new();
    for (lane, groups) in groups.iter().enumerate() {
        for group in groups.iter().filter(|group| group.members.len() > 1) {
            shared
                .entry(&group.members)
                .or_default()
                .push((lane, group.segments));
        }
    }
    let mut rings = Vec::new();
    for (members, shared) in shared {
        let candidates = Candidates {
            shards,
            lanes,
            pattern,
            rotating,
            members,
        };
        rings.extend(candidates.rings(&shared));
    }
    rings
}

/// Finds the sections that the members of a ring could send, and who needs them.
struct Candidates<'a> {
    shards: &'a Shards,
    lanes: &'a [Lane],
    pattern: &'a Pattern,
    rotating: Rotating,
    members: &'a [usize],
}

/// A section that an owner could send, and the distances at which it is needed.
struct CandidateSection {
    owner: usize,
    section: Section,
    /// (nearest, farthest) if parcels move up, and if they move down.
    needed: [Option<(usize, usize)>; 2],
}

impl Candidates<'_> {
    /// The rings of one set of members: one for each run of a shard and each range of distances,
    /// because a parcel has one range.
    fn rings(&self, shared: &[(usize, Segments)]) -> Vec<Ring> {
        // A window limits how far a row is needed, so rows are sent in both directions, each no
        // further than that. Without one, rows go once around, in the direction that moves fewer.
        let whole = !self.pattern.has_bounded_window();
        let mut by_run: BTreeMap<usize, Vec<CandidateSection>> = BTreeMap::new();
        for &(lane, segments) in shared {
            let rows = |rank: usize| -> Vec<(usize, Rows)> { self.rows(lane, rank, segments) };
            let readers: Vec<Vec<Rows>> = (self.members.iter())
                .map(|&rank| self.reader_rows(lane, rank, segments))
                .collect();
            for (owner, &rank) in self.members.iter().enumerate() {
                for (run, rows) in rows(rank) {
                    let candidates = by_run.entry(run).or_default();
                    let section = |rows: Rows| Section {
                        lane,
                        segments,
                        rows,
                    };
                    match whole {
                        true => candidates.extend(self.whole(owner, section(rows), &readers)),
                        false => candidates.extend(self.parts(owner, section(rows), &readers)),
                    }
                }
            }
        }
        let runs = by_run.into_values();
        match whole {
            true => runs
                .flat_map(|candidates| {
                    let direction = better_direction(&candidates);
                    self.rings_of_run(candidates, direction)
                })
                .collect(),
            false => runs
                .flat_map(|candidates| {
                    let (up, down): (Vec<_>, Vec<_>) = candidates
                        .into_iter()
                        .partition(|candidate| candidate.needed[0].is_some());
                    let mut rings = self.rings_of_run(up, 0);
                    rings.extend(self.rings_of_run(down, 1));
                    rings
                })
                .collect(),
        }
    }

    /// The rows of a member that travel: keys or queries.
    fn rows(&self, lane: usize, rank: usize, segments: Segments) -> Vec<(usize, Rows)> {
        let lane = &self.lanes[lane];
        match self.rotating {
            Rotating::Keys => self.shards.select_keys(lane, rank, segments).collect(),
            Rotating::Queries => self.shards.select_queries(lane, rank, segments).collect(),
        }
    }

    /// The rows of a member that meet them: queries or keys.
    fn reader_rows(&self, lane: usize, rank: usize, segments: Segments) -> Vec<Rows> {
        let lane = &self.lanes[lane];
        let rows = |(_, rows)| rows;
        match self.rotating {
            Rotating::Keys => {
                let queries = self.shards.select_queries(lane, rank, segments);
                queries.map(rows).collect()
            }
            Rotating::Queries => {
                let keys = self.shards.select_keys(lane, rank, segments);
                keys.map(rows).collect()
            }
        }
    }

    /// The section as a whole, with the members that need any of it.
    fn whole(
        &self,
        owner: usize,
        section: Section,
        readers: &[Vec<Rows>],
    ) -> Option<CandidateSection> {
        let needs = |member: usize| {
            let mut readers = readers[member].iter();
            readers.any(|reader| !self.needed_rows(&section, reader).is_empty())
        };
        let k = self.members.len();
        let needed = |distance: &usize| needs((owner + distance) % k);
        let first = (1..k).find(needed)?;
        let last = (1..k).rev().find(needed).unwrap_or(first);
        Some(CandidateSection {
            owner,
            section,
            needed: [Some((first, last)), Some((k - last, k - first))],
        })
    }

    /// The parts of the section that the same members need, each once for the members above the
    /// owner and once for those below.
    fn parts(
        &self,
        owner: usize,
        section: Section,
        readers: &[Vec<Rows>],
    ) -> Vec<CandidateSection> {
        let mut needed: Vec<(usize, Range<usize>)> = Vec::new();
        for (member, readers) in readers.iter().enumerate().filter(|of| of.0 != owner) {
            let rows = readers.iter().map(|of| self.needed_rows(&section, of));
            needed.extend(rows.filter(|rows| !rows.is_empty()).map(|of| (member, of)));
        }
        let mut parts: Vec<(Range<usize>, CandidateSection)> = Vec::new();
        for up in [true, false] {
            let of_side = || needed.iter().filter(|(member, _)| (*member > owner) == up);
            let mut cuts: Vec<usize> = of_side()
                .flat_map(|(_, rows)| [rows.start, rows.end])
                .collect();
            cuts.sort_unstable();
            cuts.dedup();
            let side = parts.len();
            for rows in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
                let distances = of_side()
                    .filter(|(_, of)| of.start <= rows.start && rows.end <= of.end)
                    .map(|(member, _)| member.abs_diff(owner));
                let Some(last) = distances.clone().max() else {
                    continue;
                };
                let range = Some((distances.min().unwrap_or(last), last));
                let needed = if up { [range, None] } else { [None, range] };
                match parts[side..].last_mut() {
                    Some((before, part)) if before.end == rows.start && part.needed == needed => {
                        before.end = rows.end;
                    }
                    _ => parts.push((
                        rows,
                        CandidateSection {
                            owner,
                            section,
                            needed,
                        },
                    )),
                }
            }
        }
        let part = |(rows, mut part): (Range<usize>, CandidateSection)| {
            part.section.rows = section.rows.part(rows)?;
            Some(part)
        };
        parts.into_iter().filter_map(part).collect()
    }

    /// The rows of a section that `reader` needs, by index: the keys that its queries see, or the
    /// queries that see its keys.
    fn needed_rows(&self, section: &Section, reader: &Rows) -> Range<usize> {
        let rows = &section.rows;
        let keys = match self.rotating {
            Rotating::Keys => rows,
            Rotating::Queries => reader,
        };
        let window = self.pattern.window_of(keys, section.segments.prefix);
        let window = match self.rotating {
            Rotating::Keys => window,
            Rotating::Queries => Window {
                left: window.right,
                right: window.left,
            },
        };
        let reach = window.reach(reader.position, reader.last_position());
        rows.rows_before(reach.start)..rows.rows_before(reach.end)
    }

    /// Assigns the sections to parcels that move in one direction.
    fn rings_of_run(&self, candidates: Vec<CandidateSection>, direction: usize) -> Vec<Ring> {
        let mut by_range: BTreeMap<(usize, usize, usize), Vec<Section>> = BTreeMap::new();
        for candidate in candidates {
            let Some((first, last)) = candidate.needed[direction] else {
                continue;
            };
            let range = by_range.entry((candidate.owner, first, last)).or_default();
            range.push(candidate.section);
        }
        let empty = Ring {
            members: self.members.to_vec(),
            parcels: vec![None; self.members.len()],
            rising: direction == 0,
        };
        let mut rings: Vec<Ring> = Vec::new();
        for ((owner, first, last), sections) in by_range {
            let free = rings.iter().position(|ring| ring.parcels[owner].is_none());
            let index = free.unwrap_or_else(|| {
                rings.push(empty.clone());
                rings.len() - 1
            });
            rings[index].parcels[owner] = Some(Parcel {
                sections,
                first,
                last,
            });
        }
        rings
    }
}

/// The direction that moves fewer rows: 0 is up.
fn better_direction(candidates: &[CandidateSection]) -> usize {
    let moved = |direction: usize| -> usize {
        let hops = |of: &CandidateSection| of.needed[direction].map_or(0, |(_, last)| last);
        let rows = candidates.iter();
        rows.map(|of| of.section.total_rows() * hops(of)).sum()
    };
    usize::from(moved(1) < moved(0))
}
