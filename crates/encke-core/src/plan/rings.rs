//! Rings: the groups of ranks that share segments, and the parcels they exchange.
//!
//! Ranks that share the same segments form a ring of their own, whichever branch the segments come
//! from; ranks that share none never exchange a byte. Each member has at most one parcel in a ring:
//! the rows of its shard that other members need. A parcel moves along the members in ring order
//! and goes no further than the last member that needs it.

use serde::Serialize;
use std::collections::BTreeMap;

use crate::pattern::Lane;
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
    causal: bool,
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
        rings.extend(rings_of(shards, lanes, members, &shared, causal, rotating));
    }
    rings
}

/// Segments that the members of a ring share. Under a causal mask `extremes` decides which member
/// needs which parcel: the position of its last query or of its first key in these segments.
struct SharedSegments<'a> {
    lane: usize,
    lane_rows: &'a Lane,
    segments: Segments,
    extremes: Vec<usize>,
}

/// A section that an owner could send, and the distances at which it is needed.
struct CandidateSection {
    owner: usize,
    section: Section,
    /// (nearest, farthest) if parcels move up, and if they move down.
    needed: [(usize, usize); 2],
}

/// The rings of one set of members: one for each run of a shard and each range of distances,
/// because a parcel has one range.
fn rings_of(
    shards: &Shards,
    lanes: &[Lane],
    members: &[usize],
    shared: &[(usize, Segments)],
    causal: bool,
    rotating: Rotating,
) -> Vec<Ring> {
    let shared = shared.iter().map(|&(lane, segments)| {
        let lane_rows = &lanes[lane];
        let extreme = |&rank: &usize| {
            let rows = shards.select(lane_rows, rank, segments);
            match rotating {
                Rotating::Keys => rows.map(|(_, rows)| rows.last_position()).max(),
                Rotating::Queries => rows.map(|(_, rows)| rows.position).min(),
            }
            .expect("a member of a group has rows in its segments")
        };
        SharedSegments {
            lane,
            lane_rows,
            segments,
            extremes: members.iter().map(extreme).collect(),
        }
    });
    let mut by_run: BTreeMap<usize, Vec<CandidateSection>> = BTreeMap::new();
    for shared in shared {
        for (owner, &rank) in members.iter().enumerate() {
            for (run, rows) in shards.select(shared.lane_rows, rank, shared.segments) {
                let needs = |member: usize| {
                    !causal
                        || match rotating {
                            Rotating::Keys => shared.extremes[member] >= rows.position,
                            Rotating::Queries => shared.extremes[member] <= rows.last_position(),
                        }
                };
                let Some(needed) = distances(members.len(), owner, needs) else {
                    continue;
                };
                let section = Section {
                    lane: shared.lane,
                    segments: shared.segments,
                    rows,
                };
                by_run.entry(run).or_default().push(CandidateSection {
                    owner,
                    section,
                    needed,
                });
            }
        }
    }
    let runs = by_run.into_values();
    runs.flat_map(|candidates| rings_of_run(members, candidates))
        .collect()
}

/// The distances of the nearest and the farthest member that needs something of `owner`, in both
/// directions.
fn distances(k: usize, owner: usize, needs: impl Fn(usize) -> bool) -> Option<[(usize, usize); 2]> {
    let needed = |distance: &usize| needs((owner + distance) % k);
    let first = (1..k).find(needed)?;
    let last = (1..k).rev().find(needed).unwrap_or(first);
    Some([(first, last), (k - last, k - first)])
}

/// Chooses the direction that moves fewer rows, and assigns the sections to parcels.
fn rings_of_run(members: &[usize], candidates: Vec<CandidateSection>) -> Vec<Ring> {
    let moved = |direction: usize| -> usize {
        let rows = candidates.iter();
        rows.map(|of| of.section.total_rows() * of.needed[direction].1)
            .sum()
    };
    let direction = usize::from(moved(1) < moved(0));
    let mut by_range: BTreeMap<(usize, usize, usize), Vec<Section>> = BTreeMap::new();
    for candidate in candidates {
        let (first, last) = candidate.needed[direction];
        let range = by_range.entry((candidate.owner, first, last)).or_default();
        range.push(candidate.section);
    }
    let empty = Ring {
        members: members.to_vec(),
        parcels: vec![None; members.len()],
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
