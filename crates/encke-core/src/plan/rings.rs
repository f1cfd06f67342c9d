//! Who passes what to whom: the sub-rings of ranks that share segments.
//!
//! Ranks that share the same segments form a ring of their own, whatever branch the segments came
//! from; ranks that share none never exchange a byte. Each member has at most one parcel in a ring:
//! the rows of its shard that others need. A parcel visits the members in ring order and goes no
//! further than the last one that needs it.

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
    /// The rows, of the shard of the parcel's home.
    pub rows: Rows,
}

impl Section {
    /// Rows over all segments.
    pub fn total_rows(&self) -> usize {
        self.segments.count * self.rows.count
    }
}

/// What one member has for the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parcel {
    /// The rows.
    pub sections: Vec<Section>,
    /// Distance of the nearest member that needs any of them.
    pub first: usize,
    /// Distance of the farthest one.
    pub last: usize,
}

impl Parcel {
    /// The nearest place that needs it, of those that it comes to `distance` places from home and
    /// every `width` places from there. None where none does, and it need not go that way.
    pub fn needed_from(&self, distance: usize, width: usize) -> Option<usize> {
        let start = (distance - 1) % width + 1;
        let from = start + self.first.saturating_sub(start).div_ceil(width) * width;
        (from <= self.last).then_some(from)
    }

    /// How often it is sent when it goes `width` places at a time.
    pub fn hops(&self, width: usize) -> usize {
        let comes = |distance: &usize| self.needed_from(*distance, width).is_some();
        match self.first <= 1 {
            true => self.last,
            false => (1..=self.last).filter(comes).count(),
        }
    }

    /// The farthest places that need it, one for each way it goes `width` places at a time: sums
    /// that were added up on the way come home from these.
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
    /// The ranks, rising.
    pub members: Vec<usize>,
    /// The parcel of each member, where it has one.
    pub parcels: Vec<Option<Parcel>>,
    /// Whether parcels go from lower to higher members (and from the last to the first): the way
    /// that moves fewer rows.
    pub rising: bool,
}

impl Ring {
    /// The member whose parcel is with `index` after `distance` hops.
    pub fn home_index(&self, index: usize, distance: usize) -> usize {
        self.home(index, distance, self.rising)
    }

    /// The member that has the parcel of `index` after `distance` hops.
    pub fn away(&self, index: usize, distance: usize) -> usize {
        self.home(index, distance, !self.rising)
    }

    fn home(&self, index: usize, distance: usize, rising: bool) -> usize {
        let k = self.members.len();
        let back = distance % k;
        (if rising {
            index + k - back
        } else {
            index + back
        }) % k
    }

    /// The parcel that is with `index` after `distance` hops, if it came that far.
    pub fn parcel_at(&self, index: usize, distance: usize) -> Option<&Parcel> {
        self.parcels[self.home_index(index, distance)]
            .as_ref()
            .filter(|parcel| distance <= parcel.last)
    }

    /// How many distances a round really takes, where `width` are asked for.
    pub fn width(&self, width: usize) -> usize {
        width.clamp(1, self.last().max(1))
    }

    /// How many rounds it takes until every parcel has been everywhere.
    pub fn rounds(&self, width: usize) -> usize {
        self.last().div_ceil(width)
    }

    /// The farthest any parcel goes.
    pub fn last(&self) -> usize {
        self.parcels
            .iter()
            .flatten()
            .map(|parcel| parcel.last)
            .max()
            .unwrap_or(0)
    }
}

/// What the parcels hold, and so who needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rotating {
    /// Keys that visit the queries: a member needs those its queries see.
    Keys,
    /// Queries (their carry or gradient) that visit the keys: a member is needed where it has keys
    /// that they see.
    Queries,
}

/// The rings of all lanes, in a fixed order that every rank agrees on.
pub fn rings(
    shards: &Shards,
    lanes: &[Lane],
    groups: &[Vec<Group>],
    causal: bool,
    freight: Rotating,
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
        rings.extend(rings_of(shards, lanes, members, &shared, causal, freight));
    }
    rings
}

/// A family of segments that the members of a ring share, and for each member the position that
/// decides who needs whom under a causal mask: its last query or its first key there.
struct Shared<'a> {
    lane: usize,
    lane_rows: &'a Lane,
    segments: Segments,
    extremes: Vec<usize>,
}

/// Everything a home rank could send: a section, and the distances at which it is needed when
/// parcels rise, and when they fall.
struct Candidate {
    home: usize,
    section: Section,
    /// (nearest, farthest) rising, and falling.
    needed: [(usize, usize); 2],
}

/// The rings of one set of members: one for each run of a shard and each stretch of members that
/// needs it, since a parcel has one stretch.
fn rings_of(
    shards: &Shards,
    lanes: &[Lane],
    members: &[usize],
    shared: &[(usize, Segments)],
    causal: bool,
    freight: Rotating,
) -> Vec<Ring> {
    let shared = shared.iter().map(|&(lane, segments)| {
        let lane_rows = &lanes[lane];
        let extreme = |&rank: &usize| {
            let rows = shards.select(lane_rows, rank, segments);
            match freight {
                Rotating::Keys => rows.map(|(_, rows)| rows.last_position()).max(),
                Rotating::Queries => rows.map(|(_, rows)| rows.position).min(),
            }
            .expect("a member of a group has rows in its segments")
        };
        Shared {
            lane,
            lane_rows,
            segments,
            extremes: members.iter().map(extreme).collect(),
        }
    });
    let mut by_run: BTreeMap<usize, Vec<Candidate>> = BTreeMap::new();
    for shared in shared {
        for (home, &rank) in members.iter().enumerate() {
            for (run, rows) in shards.select(shared.lane_rows, rank, shared.segments) {
                let needs = |member: usize| {
                    !causal
                        || match freight {
                            Rotating::Keys => shared.extremes[member] >= rows.position,
                            Rotating::Queries => shared.extremes[member] <= rows.last_position(),
                        }
                };
                let Some(needed) = distances(members.len(), home, needs) else {
                    continue;
                };
                let section = Section {
                    lane: shared.lane,
                    segments: shared.segments,
                    rows,
                };
                by_run.entry(run).or_default().push(Candidate {
                    home,
                    section,
                    needed,
                });
            }
        }
    }
    let tracks = by_run.into_values();
    tracks
        .flat_map(|candidates| rings_of_run(members, candidates))
        .collect()
}

/// The nearest and the farthest member that needs something of `home`, both ways round.
fn distances(k: usize, home: usize, needs: impl Fn(usize) -> bool) -> Option<[(usize, usize); 2]> {
    let rising = |distance: &usize| needs((home + distance) % k);
    let first = (1..k).find(rising)?;
    let last = (1..k).rev().find(rising).unwrap_or(first);
    Some([(first, last), (k - last, k - first)])
}

/// Chooses the way round that moves fewer rows, and lays the sections out into parcels.
fn rings_of_run(members: &[usize], candidates: Vec<Candidate>) -> Vec<Ring> {
    let moved = |way: usize| -> usize {
        let rows = candidates.iter();
        rows.map(|of| of.section.total_rows() * of.needed[way].1)
            .sum()
    };
    let way = usize::from(moved(1) < moved(0));
    let mut classes: BTreeMap<(usize, usize, usize), Vec<Section>> = BTreeMap::new();
    for candidate in candidates {
        let (first, last) = candidate.needed[way];
        let class = classes.entry((candidate.home, first, last)).or_default();
        class.push(candidate.section);
    }
    let empty = Ring {
        members: members.to_vec(),
        parcels: vec![None; members.len()],
        rising: way == 0,
    };
    let mut rings: Vec<Ring> = Vec::new();
    for ((home, first, last), sections) in classes {
        let free = rings.iter().position(|ring| ring.parcels[home].is_none());
        let at = free.unwrap_or_else(|| {
            rings.push(empty.clone());
            rings.len() - 1
        });
        rings[at].parcels[home] = Some(Parcel {
            sections,
            first,
            last,
        });
    }
    rings
}
