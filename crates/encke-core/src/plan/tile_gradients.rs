//! Backward programs whose sums have the order of the grid (`tile_order.rs`).
//!
//! dq stays with its rank, as the carry does. dk and dv of a key have an order too, that of the
//! queries around the ring, and there are two ways to keep it. Either the sums travel: from reader
//! to reader and back to their owner, each reader adding to what the one before it sent. Or they
//! stay, and queries travel to them: then keys and queries meet twice, once for dq and once for dk
//! and dv, but only inputs travel, so that ranks may run one after another (out of core).

use super::backward::{BackwardBuffers, own_queries};
use super::builder::ProgramBuilder;
use super::layout::reversed;
use super::position::{PASS_TAG, RETURN_TAG};
use super::program::{BufferId, Component, RankPlan, Role, Task};
use super::rings::{Parcel, Section};
use super::tile_order::{ParcelList, Stage, TravelBuffers, WIDTHS, address, lists, pairs};
use super::topology::Plan;
use super::width::Width;
use crate::dtype::DType;
use crate::job::{Job, TilePart};
use crate::mask::Window;
use crate::rows::Rows;

/// The travelling sums of dk and dv.
struct TravellingSums {
    buffers: TravelBuffers,
    /// Sums that have returned.
    returned: Vec<[BufferId; 2]>,
}

/// The rounds of a distance in a backward pass: sums go to its readers, are added to, and return
/// unless the next reader gets them.
struct SumRounds {
    go: usize,
    compute: usize,
    back: usize,
}

impl SumRounds {
    fn new(first: usize, distance: usize) -> SumRounds {
        let go = first + 3 * distance - 2;
        SumRounds {
            go,
            compute: go + 1,
            back: go + 2,
        }
    }
}

impl TravellingSums {
    fn new(b: &mut ProgramBuilder<'_>, stages: &[Stage]) -> TravellingSums {
        let sum = b.plan.request.dtype.sum();
        let names = ["travelling dk", "travelling dv"];
        let kind = (names, Component::TravellingGradients, sum);
        let buffers = TravelBuffers::new(b, stages, kind);
        let returned = pairs(b, kind, lists(stages, |stage| &stage.outgoing, None));
        TravellingSums { buffers, returned }
    }

    /// Brings the sums of a distance to their readers: from their owner, or from the reader before.
    fn go(
        &self,
        b: &mut ProgramBuilder<'_>,
        (stage, distance): (&Stage, usize),
        round: usize,
        own: [BufferId; 2],
    ) {
        let (plan, rank, branch) = (b.plan, b.rank, stage.branch);
        for (place, (reader, parcel)) in stage.outgoing[distance].iter().enumerate() {
            if plan.reader_of(branch, distance - 1, rank, parcel).is_some() {
                continue;
            }
            for side in 0..2 {
                let (to, width) = (self.buffers.outgoing[place][side], WIDTHS[side]);
                let blocks = plan.packing(parcel, b.own(width), width);
                b.pack(round, blocks, own[side], to);
                let at = address(*reader, rank, PASS_TAG + side);
                b.send(round, plan.parcel_message(at, to, (None, width), parcel));
            }
        }
        for (place, (owner, parcel)) in stage.incoming[distance].iter().enumerate() {
            let before = plan.reader_of(branch, distance - 1, *owner, parcel);
            let buffers = self.buffers.incoming[distance % 2][place];
            for side in 0..2 {
                let at = address(before.unwrap_or(*owner), *owner, PASS_TAG + side);
                let rows = (None, WIDTHS[side]);
                b.receive(round, plan.parcel_message(at, buffers[side], rows, parcel));
            }
        }
        for (place, (owner, parcel)) in stage.incoming[distance - 1].iter().enumerate() {
            let Some(next) = plan.reader_of(branch, distance, *owner, parcel) else {
                continue;
            };
            let buffers = self.buffers.incoming[(distance - 1) % 2][place];
            for side in 0..2 {
                let at = address(next, *owner, PASS_TAG + side);
                let rows = (None, WIDTHS[side]);
                b.send(round, plan.parcel_message(at, buffers[side], rows, parcel));
            }
        }
    }

    /// Returns the sums that no reader gets next; they replace those of their owner.
    fn back(
        &self,
        b: &mut ProgramBuilder<'_>,
        (stage, distance): (&Stage, usize),
        round: usize,
        own: [BufferId; 2],
    ) {
        let (plan, rank, branch) = (b.plan, b.rank, stage.branch);
        for (place, (owner, parcel)) in stage.incoming[distance].iter().enumerate() {
            if plan
                .reader_of(branch, distance + 1, *owner, parcel)
                .is_some()
            {
                continue;
            }
            let buffers = self.buffers.incoming[distance % 2][place];
            for side in 0..2 {
                let at = address(*owner, *owner, RETURN_TAG + side);
                let rows = (None, WIDTHS[side]);
                b.send(round, plan.parcel_message(at, buffers[side], rows, parcel));
            }
        }
        for (place, (reader, parcel)) in stage.outgoing[distance].iter().enumerate() {
            if plan.reader_of(branch, distance + 1, rank, parcel).is_some() {
                continue;
            }
            for side in 0..2 {
                let (from, width) = (self.returned[place][side], WIDTHS[side]);
                let at = address(*reader, rank, RETURN_TAG + side);
                b.receive(round, plan.parcel_message(at, from, (None, width), parcel));
                let blocks = reversed(plan.packing(parcel, b.own(width), width));
                b.copy(round + 1, blocks, false, from, own[side]);
            }
        }
    }
}

/// Keys travel, and the sums of dk and dv with them.
pub(super) fn travelling(plan: &Plan, rank: usize, dlse: bool, first_epoch: bool) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let (runs, at) = (b.query_runs_of(rank), own_queries(&b));
    let own = BackwardBuffers::new(&mut b, &runs, dlse, true);
    let (kv, dkv) = ([own.k, own.v], [own.dk, own.dv]);
    let stages = plan.stages(rank);
    let mut travelling = TravelBuffers::keys(&mut b, &stages);
    let sums = TravellingSums::new(&mut b, &stages);
    let mut first = 0;
    for stage in &stages {
        let jobs = b.own_tiles(stage.branch, at, TilePart::UpToOwn);
        let jobs = jobs.into_iter().map(|job| own.task(job));
        b.round(first).meanwhile.extend(jobs);
        let mut previous = first;
        for distance in 1..=stage.distances() {
            let of = (stage, distance);
            let rounds = SumRounds::new(first, distance);
            travelling.exchange_keys(&mut b, of, previous, kv);
            sums.go(&mut b, of, rounds.go, dkv);
            let buffers = travelling.incoming[distance % 2].iter();
            let buffers = buffers.zip(&sums.buffers.incoming[distance % 2]);
            for ((_, parcel), (&[k, v], &[dk, dv])) in stage.incoming[distance].iter().zip(buffers)
            {
                let rotating = BackwardBuffers {
                    k,
                    v,
                    dk,
                    dv,
                    ..own
                };
                let jobs = b.parcel_tiles(parcel, at);
                let jobs = jobs.into_iter().map(|job| rotating.task(job));
                b.round(rounds.compute).meanwhile.extend(jobs);
            }
            sums.back(&mut b, of, rounds.back, dkv);
            previous = rounds.compute;
        }
        first += 3 * stage.distances() + 1;
        let jobs = b.own_tiles(stage.branch, at, TilePart::AfterOwn);
        let jobs = jobs.into_iter().map(|job| own.task(job));
        b.round(first).meanwhile.extend(jobs);
        first += 1;
    }
    if first_epoch {
        b.replicas(plan.kept(rank));
    }
    own.outputs(&mut b, own.dq, runs);
    b.finish()
}

/// The tensors of queries that travel: (tensor, name, type, row width).
type QueryTensors = Vec<(Role, &'static str, DType, Width)>;

impl Plan {
    /// Everything about queries that their meeting with keys needs, as it is in the call: delta is
    /// made of it again.
    fn tile_query_tensors(&self, dlse: bool) -> QueryTensors {
        let (dtype, sum) = (self.request.dtype, self.request.dtype.sum());
        let wide = Width::WideCell;
        let mut tensors = vec![
            (Role::Q, "travelling q", dtype, Width::Query),
            (Role::Dout, "travelling dout", dtype, wide),
            (Role::Lse, "travelling lse", sum, Width::Cell),
            (Role::Out, "travelling out", self.request.out_dtype(), wide),
        ];
        tensors.extend(dlse.then_some((Role::Dlse, "travelling dlse", sum, Width::Cell)));
        tensors
    }

    /// The sections of a parcel of keys, each with the queries of a reader that see some of it, in
    /// whole tiles.
    fn meetings(&self, reader: usize, keys: &Parcel) -> Vec<(Section, Section)> {
        let mut meetings = Vec::new();
        for keys in &keys.sections {
            let (lane, segments) = (keys.lane, keys.segments);
            let Window { left, right } =
                (self.request.pattern).window_of(&keys.rows, segments.prefix);
            let seen_by = Window {
                left: right,
                right: left,
            };
            let reach = seen_by.reach(keys.rows.position, keys.rows.last_position());
            let seeing = |rows: Rows| {
                let seeing = rows.rows_before(reach.start)..rows.rows_before(reach.end);
                let (before, tile) = (self.on_grid(lane, &rows), self.tile());
                let start = (before + seeing.start) / tile * tile;
                let end = (before + seeing.end).next_multiple_of(tile);
                let whole = start.saturating_sub(before)..(end - before).min(rows.count);
                rows.part(whole).filter(|_| !seeing.is_empty())
            };
            let queries = (self.shards).select_queries(&self.lanes[lane], reader, segments);
            let queries = queries.filter_map(|(_, rows)| seeing(rows));
            meetings.extend(queries.map(|rows| (*keys, Section { rows, ..*keys })));
        }
        meetings
    }

    /// The queries of a reader that see some keys of a parcel.
    fn queries_of(&self, reader: usize, keys: &Parcel) -> Parcel {
        let meetings = self.meetings(reader, keys).into_iter();
        Parcel {
            sections: meetings.map(|(_, queries)| queries).collect(),
            ..keys.clone()
        }
    }
}

/// Queries that travel to the keys they see.
struct TravellingQueries {
    tensors: QueryTensors,
    /// By parity of the distance, by place: the tensors and their delta.
    incoming: [Vec<(Vec<BufferId>, BufferId)>; 2],
    outgoing: Vec<Vec<BufferId>>,
    /// For dq of queries that have theirs elsewhere.
    dq: BufferId,
}

impl TravellingQueries {
    fn new(b: &mut ProgramBuilder<'_>, stages: &[Stage], dlse: bool) -> TravellingQueries {
        let (plan, rank) = (b.plan, b.rank);
        let tensors = plan.tile_query_tensors(dlse);
        // Queries come from the readers of this rank's keys, and go to the owners of those that
        // it reads.
        let incoming = |(reader, parcel): &(usize, Parcel)| plan.queries_of(*reader, parcel);
        let outgoing = |(_, parcel): &(usize, Parcel)| plan.queries_of(rank, parcel);
        let sum = plan.request.dtype.sum();
        let component = Component::TravellingQueries;
        let largest =
            |b: &ProgramBuilder<'_>, parcels: &[Parcel], width| b.largest(parcels.iter(), width);
        let by_place = |lists: Vec<&ParcelList>, queries: &dyn Fn(&(usize, Parcel)) -> Parcel| {
            let count = lists.iter().map(|list| list.len()).max().unwrap_or(0);
            let of = |place: usize| -> Vec<Parcel> {
                let parcels = lists.iter().filter_map(|list| list.get(place));
                parcels.map(queries).collect()
            };
            (0..count).map(of).collect::<Vec<_>>()
        };
        let buffers = |b: &mut ProgramBuilder<'_>, parcels: &[Parcel]| {
            let mut buffers = Vec::new();
            for &(_, name, dtype, width) in &tensors {
                let elements = largest(&*b, parcels, width);
                buffers.push(b.buffer(name, component, dtype, elements));
            }
            buffers
        };
        let mut most = 0;
        let incoming = [0, 1].map(|parity| {
            let lists = lists(stages, |stage| &stage.outgoing, Some(parity)).collect();
            let mut places = Vec::new();
            for parcels in by_place(lists, &incoming) {
                let elements = largest(&*b, &parcels, Width::Cell);
                let delta = b.buffer("travelling delta", component, sum, elements);
                most = most.max(largest(&*b, &parcels, Width::Query));
                places.push((buffers(b, &parcels), delta));
            }
            places
        });
        let lists = lists(stages, |stage| &stage.incoming, None).collect();
        let mut sent = Vec::new();
        for parcels in by_place(lists, &outgoing) {
            sent.push(buffers(b, &parcels));
        }
        let dq = b.buffer("waste", Component::TravellingGradients, sum, most);
        TravellingQueries {
            tensors,
            incoming,
            outgoing: sent,
            dq,
        }
    }

    /// Sends this rank's queries to the owners of keys of a distance, and receives those that see
    /// its own keys.
    fn exchange(
        &self,
        b: &mut ProgramBuilder<'_>,
        (stage, distance): (&Stage, usize),
        round: usize,
        own: &[BufferId],
    ) {
        let (plan, rank) = (b.plan, b.rank);
        for (place, (owner, parcel)) in stage.incoming[distance].iter().enumerate() {
            let queries = plan.queries_of(rank, parcel);
            for (i, &(role, _, _, width)) in self.tensors.iter().enumerate() {
                let to = self.outgoing[place][i];
                b.pack(
                    round,
                    plan.packing(&queries, b.own(width), width),
                    own[i],
                    to,
                );
                let at = address(*owner, *owner, PASS_TAG + i);
                let message = plan.parcel_message(at, to, (Some(role), width), &queries);
                b.send(round, message);
            }
        }
        for (place, (reader, parcel)) in stage.outgoing[distance].iter().enumerate() {
            let queries = plan.queries_of(*reader, parcel);
            let (buffers, delta) = &self.incoming[distance % 2][place];
            for (i, &(role, _, _, width)) in self.tensors.iter().enumerate() {
                let at = address(*reader, rank, PASS_TAG + i);
                let rows = (Some(role), width);
                b.receive(round, plan.parcel_message(at, buffers[i], rows, &queries));
            }
            let delta = Task::Delta {
                cells: plan.parcel_elements(&queries, Width::Cell),
                dim: plan.request.shape.value_dim,
                out: buffers[3],
                dout: buffers[1],
                dlse: buffers.get(4).copied(),
                delta: *delta,
            };
            b.round(round + 1).before.push(delta);
        }
    }

    /// The jobs of the queries of a distance with this rank's keys.
    fn jobs(
        &self,
        b: &ProgramBuilder<'_>,
        (stage, distance): (&Stage, usize),
        own: BackwardBuffers,
    ) -> Vec<Task> {
        let plan = b.plan;
        let mut tasks = Vec::new();
        for (place, (reader, parcel)) in stage.outgoing[distance].iter().enumerate() {
            let queries = plan.queries_of(*reader, parcel);
            let (buffers, delta) = &self.incoming[distance % 2][place];
            let rotating = BackwardBuffers {
                q: buffers[0],
                dout: buffers[1],
                lse: buffers[2],
                delta: *delta,
                dq: self.dq,
                ..own
            };
            let meetings = plan.meetings(*reader, parcel);
            let sections = plan.sections(&queries, Width::Query);
            let sections = sections.zip(plan.sections(&queries, Width::Cell));
            for (((q_at, of), (cell_at, _)), (keys, _)) in sections.zip(&meetings) {
                let k = plan.resident(keys.lane, &keys.rows, b.own(Width::Key), Width::Key);
                let job = plan.job(
                    keys.lane,
                    keys.segments,
                    (&of.rows, plan.packed(q_at, of, Width::Query)),
                    (&keys.rows, k),
                    plan.packed(cell_at, of, Width::Cell),
                    None,
                );
                let rows = (&of.rows, &keys.rows);
                let job: Option<Job> = b.on_tiles(keys.lane, rows, TilePart::All, job);
                tasks.extend(job.map(|job| rotating.task(job)));
            }
        }
        tasks
    }
}

/// Keys travel for dq, and queries for dk and dv: all sums are at home.
pub(super) fn at_home(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let (runs, at) = (b.query_runs_of(rank), own_queries(&b));
    let own = BackwardBuffers::new(&mut b, &runs, dlse, true);
    let stages = plan.stages(rank);
    let mut keys = TravelBuffers::keys(&mut b, &stages);
    let sum = plan.request.dtype.sum();
    let kind = (["waste"; 2], Component::TravellingGradients, sum);
    let waste = pairs(&mut b, kind, lists(&stages, |stage| &stage.incoming, None));
    let queries = TravellingQueries::new(&mut b, &stages, dlse);
    let inputs = b.query_inputs(&queries.tensors);
    let mut first = 0;
    for stage in &stages {
        let jobs = b.own_tiles(stage.branch, at, TilePart::UpToOwn);
        let jobs = jobs.into_iter().map(|job| own.task(job));
        b.round(first).meanwhile.extend(jobs);
        for distance in 1..=stage.distances() {
            let (of, round) = ((stage, distance), first + distance);
            keys.exchange_keys(&mut b, of, round - 1, [own.k, own.v]);
            queries.exchange(&mut b, of, round - 1, &inputs);
            let buffers = keys.incoming[distance % 2].iter().zip(&waste);
            for ((_, parcel), (&[k, v], &[dk, dv])) in stage.incoming[distance].iter().zip(buffers)
            {
                let rotating = BackwardBuffers {
                    k,
                    v,
                    dk,
                    dv,
                    ..own
                };
                let jobs = b.parcel_tiles(parcel, at);
                let jobs = jobs.into_iter().map(|job| rotating.task(job));
                b.round(round).meanwhile.extend(jobs);
            }
            let jobs = queries.jobs(&b, of, own);
            b.round(round).meanwhile.extend(jobs);
        }
        first += stage.distances() + 1;
        let jobs = b.own_tiles(stage.branch, at, TilePart::AfterOwn);
        let jobs = jobs.into_iter().map(|job| own.task(job));
        b.round(first).meanwhile.extend(jobs);
        first += 1;
    }
    own.outputs(&mut b, own.dq, runs);
    b.finish()
}
