//! The jobs of a rank: with its own rows, with keys that visit its queries, and with queries that
//! its keys are visited by. Forward and backward programs differ in what they make of a job, not
//! in which jobs there are.

use super::batches::Stop;
use super::builder::Builder;
use super::direct::RingPair;
use super::flow::RingPosition;
use super::layout::{Resident, Width};
use super::program::Task;
use crate::job::{Job, Operand};
use crate::rows::{Rows, Segments};
use std::collections::BTreeSet;

/// Where the rows of one rank's queries lie: in q, in cells, and in dq if that is another layout.
#[derive(Clone, Copy)]
pub(super) struct QueryRows {
    pub q: Resident,
    pub cells: Resident,
    pub dq: Option<Resident>,
}

impl Builder<'_> {
    /// Whether no keys visit this rank, and no cell of its is in more than one of its jobs, which
    /// can write the end of it.
    pub fn sees_all_at_once(&self) -> bool {
        let (plan, rank) = (self.plan, self.rank);
        let mut slots = BTreeSet::new();
        let alone = |&(lane, group): &(usize, usize)| {
            let segments = plan.groups[lane][group].segments;
            let runs = plan.shards.select(&plan.lanes[lane], rank, segments);
            runs.count() <= 1
        };
        let own = plan.lanes.iter().all(|lane| {
            let mut heads = lane.heads.iter();
            heads.all(|head| slots.insert(head.slot))
        });
        let ends = plan.request.ends_in_jobs() && plan.rings_of[rank].is_empty();
        ends && own && plan.groups_of[rank].iter().all(alone)
    }

    /// Jobs of this rank with itself, in round 0.
    pub fn local_jobs(&mut self, at: QueryRows, task: impl Fn(Job) -> Task) {
        let (plan, rank) = (self.plan, self.rank);
        for &(lane, group) in &plan.groups_of[rank] {
            let segments = plan.groups[lane][group].segments;
            let select = || plan.shards.select(&plan.lanes[lane], rank, segments);
            for (_, q_rows) in select() {
                for (_, k_rows) in select() {
                    let k = plan.resident(lane, &k_rows, self.own(), Width::Kv);
                    let job = self.resident_job(lane, segments, (&q_rows, at), (&k_rows, k));
                    self.round(0).meanwhile.extend(job.map(&task));
                }
            }
        }
    }

    /// Jobs of this rank's queries with the keys that visit it, each in the round of its load;
    /// `task` may do without some.
    pub fn jobs_with_keys(
        &mut self,
        seat: RingPosition<'_>,
        at: QueryRows,
        task: impl Fn(Stop, RingPair, Job) -> Option<Task>,
    ) {
        let plan = self.plan;
        for load in seat.loads().iter().filter(|load| load.is_needed()) {
            for laid in plan.laid(&load.items, Width::Kv) {
                let (item, section) = (&load.items[laid.item], laid.section);
                let meeting = seat.meeting(item.distance, seat.ring.members[item.home]);
                let lane = section.lane;
                let own = plan
                    .shards
                    .select(&plan.lanes[lane], self.rank, section.segments);
                for (_, q_rows) in own {
                    let k = plan.packed(laid.place, section, Width::Kv);
                    let keys = (&section.rows, k);
                    let job = self.resident_job(lane, section.segments, (&q_rows, at), keys);
                    if let Some(task) = job.and_then(|job| task(load.stop, meeting, job)) {
                        self.round(load.stop.round).meanwhile.push(task);
                    }
                }
            }
        }
    }

    /// Jobs of this rank's keys with the queries that visit it, each in the round of its load.
    pub fn jobs_with_rotating(&mut self, seat: RingPosition<'_>, task: impl Fn(Stop, Job) -> Task) {
        let plan = self.plan;
        for load in seat.loads().iter().filter(|load| load.is_needed()) {
            let cells = plan.laid(&load.items, Width::Cell);
            for (laid, cell) in plan.laid(&load.items, Width::Query).iter().zip(cells) {
                let section = laid.section;
                let lane = section.lane;
                let own = plan
                    .shards
                    .select(&plan.lanes[lane], self.rank, section.segments);
                for (_, k_rows) in own {
                    let job = plan.job(
                        lane,
                        section.segments.count,
                        (
                            &section.rows,
                            plan.packed(laid.place, section, Width::Query),
                        ),
                        (&k_rows, plan.resident(lane, &k_rows, self.own(), Width::Kv)),
                        plan.packed(cell.place, section, Width::Cell),
                        None,
                    );
                    let task = job.map(|job| task(load.stop, job));
                    self.round(load.stop.round).meanwhile.extend(task);
                }
            }
        }
    }

    /// Jobs of this rank's keys with the queries of others, all of which it holds a copy of. What
    /// is computed for them goes into the load: cells or (with `gradient`) dq.
    pub fn jobs_with_queries(
        &mut self,
        seat: RingPosition<'_>,
        gradient: bool,
        task: impl Fn(Stop, Job) -> Task,
    ) {
        let plan = self.plan;
        let width = if gradient { Width::Query } else { Width::Cell };
        for load in seat.loads().iter().filter(|load| load.is_needed()) {
            for laid in plan.laid(&load.items, width) {
                let section = laid.section;
                let home = seat.ring.members[load.items[laid.item].home];
                let (lane, rows, all) = (section.lane, &section.rows, self.among_all(home));
                let own = plan
                    .shards
                    .select(&plan.lanes[lane], self.rank, section.segments);
                for (_, k_rows) in own {
                    let packed = plan.packed(laid.place, section, width);
                    let (cells, dq) = match gradient {
                        true => (plan.resident(lane, rows, all, Width::Cell), Some(packed)),
                        false => (packed, None),
                    };
                    let job = plan.job(
                        lane,
                        section.segments.count,
                        (rows, plan.resident(lane, rows, all, Width::Query)),
                        (&k_rows, plan.resident(lane, &k_rows, self.own(), Width::Kv)),
                        cells,
                        dq,
                    );
                    let task = job.map(|job| task(load.stop, job));
                    self.round(load.stop.round).meanwhile.extend(task);
                }
            }
        }
    }

    /// A job whose queries are resident.
    fn resident_job(
        &self,
        lane: usize,
        segments: Segments,
        (q_rows, at): (&Rows, QueryRows),
        keys: (&Rows, Operand),
    ) -> Option<Job> {
        let plan = self.plan;
        let resident = |at: Resident, width: Width| plan.resident(lane, q_rows, at, width);
        plan.job(
            lane,
            segments.count,
            (q_rows, resident(at.q, Width::Query)),
            keys,
            resident(at.cells, Width::Cell),
            at.dq.map(|at| resident(at, Width::Query)),
        )
    }
}
