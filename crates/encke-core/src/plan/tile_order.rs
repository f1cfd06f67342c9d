//! Programs whose sums have the order of the grid (`bits.rs`): the same bits on every ring.
//!
//! Branch after branch, a rank's queries first meet its own keys up to their own tiles, then the
//! keys of the member one place before it, two places, …, around the ring, and last its own later
//! keys. The carry stays with the rank that owns the queries; sums of gradients are the subject of
//! `tile_gradients.rs`. There is one sum of each row, and no sum of sums.
//!
//! The decision here: parcels go directly from their owner to each reader, and have exactly the
//! tiles that the reader needs. The bytes are those of the ring, and the order is free.

use std::collections::BTreeMap;

use super::backward::own_queries;
use super::builder::ProgramBuilder;
use super::forward::{self, ForwardBuffers};
use super::jobs::QueryRows;
use super::position::{ROTATE_TAG, TAGS};
use super::program::{BufferId, Component, RankPlan, Role, Task};
use super::request::Pass;
use super::rings::{Parcel, Rotating, Section};
use super::tile_gradients;
use super::topology::Plan;
use super::width::Width;
use crate::dtype::DType;
use crate::job::{Job, JobTiles, TilePart};
use crate::rows::{Rows, Segments};
use crate::transport::Address;

/// Keys and values, or their gradients.
pub(super) const WIDTHS: [Width; 2] = [Width::Key, Width::Value];
const KV_ROLES: [Role; 2] = [Role::K, Role::V];

/// The program of one shard; in the first epoch with the replicas that its rank holds.
pub(super) fn program(plan: &Plan, rank: usize, first_epoch: bool) -> RankPlan {
    match plan.request.pass {
        Pass::Forward => forward(plan, rank, first_epoch),
        Pass::Backward { dlse } => match plan.request.schedule.backward {
            Rotating::Keys => tile_gradients::travelling(plan, rank, dlse, first_epoch),
            Rotating::Queries => tile_gradients::at_home(plan, rank, dlse),
        },
        Pass::BackwardByBranch => unreachable!("a request on a grid is given no deltas"),
    }
}

/// Parcels, each with the rank at its other end.
pub(super) type ParcelList = Vec<(usize, Parcel)>;

/// What one rank exchanges for a branch: parcels by distance, each with the other rank.
pub(super) struct Stage {
    pub branch: usize,
    pub incoming: Vec<ParcelList>,
    pub outgoing: Vec<ParcelList>,
}

impl Stage {
    /// The largest distance of the branch, the same on all ranks.
    pub fn distances(&self) -> usize {
        self.incoming.len() - 1
    }
}

impl Plan {
    /// Rows of a tile.
    pub(super) fn tile(&self) -> usize {
        let tile = self.request.bits.tile();
        tile.expect("the programs of this file are on a grid")
    }

    /// Rows of their lane before the first of some rows, in a segment.
    pub(super) fn on_grid(&self, lane: usize, rows: &Rows) -> usize {
        let lane = &self.lanes[lane];
        (rows.position - lane.offset) / lane.dilation
    }

    /// The keys of a rank in some segments, the last first. Each part begins with a tile or is in
    /// one: only a prefix divides tiles.
    pub(super) fn key_parts(&self, lane: usize, rank: usize, segments: Segments) -> Vec<Rows> {
        let selected = (self.shards).select_keys(&self.lanes[lane], rank, segments);
        let mut parts = Vec::new();
        for (_, rows) in selected {
            let before = self.on_grid(lane, &rows);
            let tile_end = before.next_multiple_of(self.tile()) - before;
            let cut = tile_end.min(rows.count);
            parts.extend(rows.part(0..cut));
            parts.extend(rows.part(cut..rows.count));
        }
        parts.reverse();
        parts
    }

    /// The tiles of `owner` that the queries of `reader` need.
    fn needed_tiles(
        &self,
        (lane, segments): (usize, Segments),
        owner: usize,
        reader: usize,
    ) -> Vec<Section> {
        let queries = (self.shards).select_queries(&self.lanes[lane], reader, segments);
        let queries: Vec<Rows> = queries.map(|(_, rows)| rows).collect();
        let (Some(first), Some(last)) = (queries.first(), queries.last()) else {
            return Vec::new();
        };
        let (first, last) = (first.position, last.last_position());
        let section = |rows: Rows| {
            let window = (self.request.pattern).window_of(&rows, segments.prefix);
            let reach = window.reach(first, last);
            let needed = rows.rows_before(reach.start)..rows.rows_before(reach.end);
            let (before, tile) = (self.on_grid(lane, &rows), self.tile());
            let start = (before + needed.start) / tile * tile;
            let end = (before + needed.end).next_multiple_of(tile);
            let whole = start.saturating_sub(before)..(end - before).min(rows.count);
            let rows = rows.part(whole).filter(|_| !needed.is_empty())?;
            Some(Section {
                lane,
                segments,
                rows,
            })
        };
        let parts = self.key_parts(lane, owner, segments);
        parts.into_iter().filter_map(section).collect()
    }

    /// The parcels of a branch that `rank` sends to the members `distance` places after it, or
    /// receives from those before it.
    fn parcels(&self, branch: usize, distance: usize, rank: usize, sends: bool) -> ParcelList {
        let mut by_rank: BTreeMap<usize, Vec<Section>> = BTreeMap::new();
        for &(lane, group) in &self.groups_of[rank] {
            let group = &self.groups[lane][group];
            let k = group.members.len();
            if self.lanes[lane].branch != branch || distance >= k {
                continue;
            }
            let member = group.members.binary_search(&rank);
            let member = member.expect("a rank is a member of its groups");
            let away = if sends { distance } else { k - distance };
            let other = group.members[(member + away) % k];
            let (owner, reader) = if sends { (rank, other) } else { (other, rank) };
            let sections = self.needed_tiles((lane, group.segments), owner, reader);
            by_rank.entry(other).or_default().extend(sections);
        }
        let parcel = |sections: Vec<Section>| Parcel {
            sections,
            first: distance,
            last: distance,
        };
        by_rank.retain(|_, sections| !sections.is_empty());
        let parcels = by_rank.into_iter();
        parcels.map(|(rank, of)| (rank, parcel(of))).collect()
    }

    /// The reader at `distance` from `owner` that needs exactly the rows of a parcel, if any.
    pub(super) fn reader_of(
        &self,
        branch: usize,
        distance: usize,
        owner: usize,
        of: &Parcel,
    ) -> Option<usize> {
        if distance == 0 {
            return None;
        }
        let parcels = self.parcels(branch, distance, owner, true).into_iter();
        let mut same = parcels.filter(|(_, parcel)| parcel.sections == of.sections);
        same.next().map(|(reader, _)| reader)
    }

    /// What a rank exchanges, branch after branch.
    pub(super) fn stages(&self, rank: usize) -> Vec<Stage> {
        let branches = self.lanes.iter().map(|lane| lane.branch + 1).max();
        let stage = |branch: usize| {
            let lanes = self.lanes.iter().zip(&self.groups);
            let groups = lanes
                .filter(|(lane, _)| lane.branch == branch)
                .flat_map(|(_, groups)| groups);
            let most = groups.map(|group| group.members.len()).max().unwrap_or(1);
            let parcels = |sends| {
                let of = |distance| match distance {
                    0 => Vec::new(),
                    _ => self.parcels(branch, distance, rank, sends),
                };
                (0..most).map(of).collect()
            };
            Stage {
                branch,
                incoming: parcels(false),
                outgoing: parcels(true),
            }
        };
        (0..branches.unwrap_or(0)).map(stage).collect()
    }
}

/// One end of a message about the rows of `owner`.
pub(super) fn address(peer: usize, owner: usize, tag: usize) -> Address {
    Address {
        peer,
        tag: (owner * TAGS + tag) as u64,
        elements: 0,
    }
}

/// Pairs of buffers, for keys and values: as many as the longest of some lists has parcels, each as
/// large as the largest parcel at its place.
pub(super) fn pairs<'p>(
    b: &mut ProgramBuilder<'_>,
    (names, component, dtype): ([&'static str; 2], Component, DType),
    lists: impl Iterator<Item = &'p ParcelList>,
) -> Vec<[BufferId; 2]> {
    let lists: Vec<_> = lists.collect();
    let count = lists.iter().map(|list| list.len()).max().unwrap_or(0);
    let mut buffers = Vec::new();
    for place in 0..count {
        let pair = [0, 1].map(|side| {
            let parcels = lists.iter().filter_map(|list| list.get(place));
            let elements = b.largest(parcels.map(|(_, parcel)| parcel), WIDTHS[side]);
            b.buffer(names[side], component, dtype, elements)
        });
        buffers.push(pair);
    }
    buffers
}

/// Lists of parcels of every stage, those of an even or odd distance or all.
pub(super) fn lists(
    stages: &[Stage],
    of: fn(&Stage) -> &Vec<ParcelList>,
    parity: Option<usize>,
) -> impl Iterator<Item = &ParcelList> {
    let each = stages
        .iter()
        .flat_map(move |stage| of(stage).iter().enumerate());
    each.filter(move |(distance, _)| parity.is_none_or(|parity| distance % 2 == parity))
        .map(|(_, list)| list)
}

/// Buffers that parcels arrive in, by parity of the distance, and are sent from.
pub(super) struct TravelBuffers {
    pub incoming: [Vec<[BufferId; 2]>; 2],
    pub outgoing: Vec<[BufferId; 2]>,
    /// What the buffers that are sent from hold.
    packed: Vec<Option<Parcel>>,
}

impl TravelBuffers {
    pub fn new(
        b: &mut ProgramBuilder<'_>,
        stages: &[Stage],
        kind: ([&'static str; 2], Component, DType),
    ) -> TravelBuffers {
        let incoming = [0, 1].map(|parity| {
            let lists = lists(stages, |stage| &stage.incoming, Some(parity));
            pairs(b, kind, lists)
        });
        let outgoing = pairs(b, kind, lists(stages, |stage| &stage.outgoing, None));
        TravelBuffers {
            incoming,
            packed: vec![None; outgoing.len()],
            outgoing,
        }
    }

    pub fn keys(b: &mut ProgramBuilder<'_>, stages: &[Stage]) -> TravelBuffers {
        let (names, dtype) = (["travelling k", "travelling v"], b.plan.request.dtype);
        TravelBuffers::new(b, stages, (names, Component::TravellingKv, dtype))
    }

    /// Sends this rank's keys and values of a distance, and receives those of other ranks.
    pub fn exchange_keys(
        &mut self,
        b: &mut ProgramBuilder<'_>,
        (stage, distance): (&Stage, usize),
        round: usize,
        own: [BufferId; 2],
    ) {
        let (plan, rank) = (b.plan, b.rank);
        for (place, (reader, parcel)) in stage.outgoing[distance].iter().enumerate() {
            let held = self.packed[place].as_ref();
            let packed = held.is_some_and(|held| held.sections == parcel.sections);
            for side in 0..2 {
                let (to, width) = (self.outgoing[place][side], WIDTHS[side]);
                if !packed {
                    let blocks = plan.packing(parcel, b.own(width), width);
                    b.pack(round, blocks, own[side], to);
                }
                let at = address(*reader, rank, ROTATE_TAG + side);
                let rows = (Some(KV_ROLES[side]), width);
                b.send(round, plan.parcel_message(at, to, rows, parcel));
            }
            self.packed[place] = Some(parcel.clone());
        }
        for (place, (owner, parcel)) in stage.incoming[distance].iter().enumerate() {
            let buffers = self.incoming[distance % 2][place];
            for side in 0..2 {
                let at = address(*owner, *owner, ROTATE_TAG + side);
                let rows = (Some(KV_ROLES[side]), WIDTHS[side]);
                b.receive(round, plan.parcel_message(at, buffers[side], rows, parcel));
            }
        }
    }
}

impl ProgramBuilder<'_> {
    /// A job with its place on the grid; None if none of its queries sees a key.
    pub fn on_tiles(
        &self,
        lane: usize,
        (q_rows, k_rows): (&Rows, &Rows),
        part: TilePart,
        job: Option<Job>,
    ) -> Option<Job> {
        let job = Job {
            tiles: Some(JobTiles {
                tile: self.plan.tile(),
                query: self.plan.on_grid(lane, q_rows),
                key: self.plan.on_grid(lane, k_rows),
                part,
            }),
            ..job?
        };
        (part == TilePart::All || job.pairs() > 0).then_some(job)
    }

    /// The jobs of this rank's queries with its own keys of a branch.
    pub fn own_tiles(&self, branch: usize, at: QueryRows, part: TilePart) -> Vec<Job> {
        let (plan, rank) = (self.plan, self.rank);
        let mut jobs = Vec::new();
        for &(lane, group) in &plan.groups_of[rank] {
            if plan.lanes[lane].branch != branch {
                continue;
            }
            let segments = plan.groups[lane][group].segments;
            let queries = (plan.shards).select_queries(&plan.lanes[lane], rank, segments);
            for (_, q_rows) in queries {
                for k_rows in plan.key_parts(lane, rank, segments) {
                    let k = plan.resident(lane, &k_rows, self.own(Width::Key), Width::Key);
                    let job = self.resident_job(lane, segments, (&q_rows, at), (&k_rows, k));
                    jobs.extend(self.on_tiles(lane, (&q_rows, &k_rows), part, job));
                }
            }
        }
        jobs
    }

    /// Whether every cell of this rank is in one of these jobs of its own keys, the first branch's,
    /// so that they may start the softmax. A query always meets its own tile; without a prefix,
    /// which divides keys, the jobs of a branch have no cell in common.
    fn start_all_cells(&self, jobs: &[Job]) -> bool {
        let cells = |job: &Job| job.segments * job.queries * job.heads;
        let all = self.query_rows * self.plan.slots;
        let divided = self.plan.request.pattern.effective_prefix() > 0;
        !divided && jobs.iter().map(cells).sum::<usize>() == all
    }

    /// The jobs of this rank's queries with a parcel.
    pub fn parcel_tiles(&self, parcel: &Parcel, at: QueryRows) -> Vec<Job> {
        let plan = self.plan;
        let mut jobs = Vec::new();
        for (location, section) in plan.sections(parcel, Width::Key) {
            let (lane, segments) = (section.lane, section.segments);
            let queries = (plan.shards).select_queries(&plan.lanes[lane], self.rank, segments);
            for (_, q_rows) in queries {
                let keys = (&section.rows, plan.packed(location, section, Width::Key));
                let job = self.resident_job(lane, segments, (&q_rows, at), keys);
                let rows = (&q_rows, &section.rows);
                jobs.extend(self.on_tiles(lane, rows, TilePart::All, job));
            }
        }
        jobs
    }
}

/// Forward: a round for each distance, as on the ring.
fn forward(plan: &Plan, rank: usize, first_epoch: bool) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let rows = b.query_rows;
    let ForwardBuffers { q, k, v } = forward::buffers(&mut b, rows);
    b.input(Role::Q, q, b.query_runs_of(rank));
    let at = own_queries(&b);
    let carry = b.carry(Component::Carry, rows);
    let task_that = |starts: bool, job: Job, [k, v]: [BufferId; 2]| Task::Forward {
        job,
        q,
        k,
        v,
        starts,
        carry,
    };
    let task = |job: Job, kv: [BufferId; 2]| task_that(false, job, kv);
    let stages = plan.stages(rank);
    let mut travelling = TravelBuffers::keys(&mut b, &stages);
    let mut first = 0;
    for stage in &stages {
        let own = b.own_tiles(stage.branch, at, TilePart::UpToOwn);
        let starts = first == 0 && b.start_all_cells(&own);
        if first == 0 && !starts {
            b.clear_carry(0, carry);
        }
        let own = own.into_iter().map(|job| task_that(starts, job, [k, v]));
        b.round(first).meanwhile.extend(own);
        for distance in 1..=stage.distances() {
            let round = first + distance;
            travelling.exchange_keys(&mut b, (stage, distance), round - 1, [k, v]);
            let parcels = stage.incoming[distance].iter();
            for ((_, parcel), &kv) in parcels.zip(&travelling.incoming[distance % 2]) {
                let jobs = b.parcel_tiles(parcel, at);
                let jobs = jobs.into_iter().map(|job| task(job, kv));
                b.round(round).meanwhile.extend(jobs);
            }
        }
        first += stage.distances() + 1;
        let later = b.own_tiles(stage.branch, at, TilePart::AfterOwn);
        let later = later.into_iter().map(|job| task(job, [k, v]));
        b.round(first).meanwhile.extend(later);
        first += 1;
    }
    let (out, lse) = forward::outputs(&mut b);
    forward::finish_softmax(&mut b, carry, out, lse);
    forward::with_outputs(b, out, lse, first_epoch)
}
