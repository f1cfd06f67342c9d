//! The jobs of a rank: with its own rows, of its queries with rotating keys, and of its keys with
//! the queries of other ranks. Forward and backward programs differ in the task they make of a job,
//! not in which jobs there are.

use std::collections::{BTreeMap, BTreeSet};

use super::batches::{BatchSlot, BatchedSection};
use super::builder::ProgramBuilder;
use super::join_heads::join_heads;
use super::layout::Resident;
use super::packed::pack_documents;
use super::position::{RingPair, RingPosition};
use super::program::Task;
use super::topology::Plan;
use super::width::Width;
use crate::job::{Job, Operand};
use crate::pattern::Lane;
use crate::rows::{Rows, Segments};

/// Where the rows of one rank's queries are: in q, in cells, and in delta and dq if these layouts
/// differ.
#[derive(Clone, Copy)]
pub(super) struct QueryRows {
    pub q: Resident,
    pub cells: Resident,
    pub delta: Option<Resident>,
    pub dq: Option<Resident>,
}

/// Jobs of a batch with their lanes, parcel after parcel.
struct ParcelJobs<'a> {
    plan: &'a Plan,
    parcels: Vec<(usize, Vec<(&'a Lane, Job)>)>,
}

impl<'a> ParcelJobs<'a> {
    fn new(plan: &'a Plan) -> ParcelJobs<'a> {
        let parcels = Vec::new();
        ParcelJobs { plan, parcels }
    }

    fn add(&mut self, of: &BatchedSection<'_>, job: Option<Job>) {
        let lane = &self.plan.lanes[of.section.lane];
        let job = job.map(|job| (lane, job));
        match self.parcels.last_mut() {
            Some((last, jobs)) if *last == of.parcel => jobs.extend(job),
            _ => self.parcels.push((of.parcel, job.into_iter().collect())),
        }
    }

    /// The jobs, each with its parcel; those of one parcel are joined by their heads.
    fn joined(self) -> impl Iterator<Item = (usize, Job)> {
        let of = |(parcel, jobs): (usize, Vec<(&Lane, Job)>)| {
            let jobs = join_heads(jobs).into_iter();
            jobs.map(move |job| (parcel, job))
        };
        self.parcels.into_iter().flat_map(of)
    }
}

impl ProgramBuilder<'_> {
    /// Whether every cell of this rank is complete after one local job: no keys rotate to this
    /// rank, no cell is in two jobs, and jobs can write the output.
    pub fn one_job_per_cell(&self) -> bool {
        let (plan, rank) = (self.plan, self.rank);
        let mut slots = BTreeSet::new();
        let one_run = |&(lane, group): &(usize, usize)| {
            let segments = plan.groups[lane][group].segments;
            let runs = plan.shards.select_keys(&plan.lanes[lane], rank, segments);
            runs.count() <= 1
        };
        let distinct_slots = plan.lanes.iter().all(|lane| {
            let mut heads = lane.heads.iter();
            heads.all(|head| slots.insert(head.slot))
        });
        plan.request.jobs_write_output()
            && plan.rings_of[rank].is_empty()
            && distinct_slots
            && plan.groups_of[rank].iter().all(one_run)
    }

    /// Jobs of this rank with itself, in round 0.
    pub fn local_jobs(&mut self, at: QueryRows, task: impl Fn(Job) -> Task) {
        let (plan, rank) = (self.plan, self.rank);
        // Jobs with the same runs and part of the keys, document after document.
        let mut families: BTreeMap<[usize; 4], Vec<Job>> = BTreeMap::new();
        let mut jobs = Vec::new();
        let packed = plan.request.pattern.document_list().is_some();
        for &(lane, group) in &plan.groups_of[rank] {
            let segments = plan.groups[lane][group].segments;
            let select = || {
                plan.shards
                    .select_queries(&plan.lanes[lane], rank, segments)
            };
            let select_keys = || plan.shards.select_keys(&plan.lanes[lane], rank, segments);
            for (q_run, q_rows) in select() {
                for (k_run, k_rows) in select_keys() {
                    let k = plan.resident(lane, &k_rows, self.own(Width::Key), Width::Key);
                    let job = self.resident_job(lane, segments, (&q_rows, at), (&k_rows, k));
                    let in_prefix = k_rows.last_position() < segments.prefix;
                    let family = [lane, q_run, k_run, usize::from(!in_prefix)];
                    match packed {
                        true => families.entry(family).or_default().extend(job),
                        false => jobs.extend(job.map(|job| (&plan.lanes[lane], job))),
                    }
                }
            }
        }
        let packed = families.into_values().flat_map(pack_documents);
        let jobs = join_heads(jobs).into_iter().chain(packed);
        self.round(0).meanwhile.extend(jobs.map(task));
    }

    /// Jobs of this rank's queries with rotating keys, each in the round of its batch; `task` may
    /// skip some.
    pub fn jobs_with_keys(
        &mut self,
        position: RingPosition<'_>,
        at: QueryRows,
        task: impl Fn(BatchSlot, RingPair, Job) -> Option<Task>,
    ) {
        let plan = self.plan;
        for batch in position.needed_batches() {
            let mut jobs = ParcelJobs::new(plan);
            for of in plan.batch_sections(&batch.parcels, Width::Key) {
                for q_rows in self.own_queries(&of) {
                    let k = plan.packed(of.location, of.section, Width::Key);
                    let keys = (&of.section.rows, k);
                    let segments = of.section.segments;
                    let job = self.resident_job(of.section.lane, segments, (&q_rows, at), keys);
                    jobs.add(&of, job);
                }
            }
            for (parcel, job) in jobs.joined() {
                let parcel = &batch.parcels[parcel];
                let pair = position.pair(parcel.distance, parcel.owner);
                // A skipped job must not create its round.
                if let Some(task) = task(batch.slot, pair, job) {
                    self.round(batch.slot.round).meanwhile.push(task);
                }
            }
        }
    }

    /// Jobs of this rank's keys with rotating queries, each in the round of its batch.
    pub fn jobs_with_rotating(
        &mut self,
        position: RingPosition<'_>,
        task: impl Fn(BatchSlot, Job) -> Task,
    ) {
        let plan = self.plan;
        for batch in position.needed_batches() {
            let cells = plan.batch_sections(&batch.parcels, Width::Cell);
            let queries = plan.batch_sections(&batch.parcels, Width::Query);
            let mut jobs = ParcelJobs::new(plan);
            for (of, cell) in queries.iter().zip(cells) {
                for k_rows in self.own_keys(of) {
                    let q = plan.packed(of.location, of.section, Width::Query);
                    let cells = plan.packed(cell.location, of.section, Width::Cell);
                    jobs.add(of, self.own_keys_job(of, q, &k_rows, cells, None));
                }
            }
            let tasks = jobs.joined().map(|(_, job)| task(batch.slot, job));
            let tasks: Vec<Task> = tasks.collect();
            if !tasks.is_empty() {
                self.round(batch.slot.round).meanwhile.extend(tasks);
            }
        }
    }

    /// Jobs of this rank's keys with the queries of other ranks, of which every rank holds a copy.
    /// The result goes into the batch: cells, or dq if `gradient` is set.
    pub fn jobs_with_queries(
        &mut self,
        position: RingPosition<'_>,
        gradient: bool,
        task: impl Fn(BatchSlot, Job) -> Task,
    ) {
        let plan = self.plan;
        let width = if gradient { Width::Query } else { Width::Cell };
        for batch in position.needed_batches() {
            for of in plan.batch_sections(&batch.parcels, width) {
                let owner = position.ring.members[batch.parcels[of.parcel].owner];
                let (lane, rows) = (of.section.lane, &of.section.rows);
                let all = self.among_all(owner);
                for k_rows in self.own_keys(&of) {
                    let packed = plan.packed(of.location, of.section, width);
                    let (cells, dq) = match gradient {
                        true => (plan.resident(lane, rows, all, Width::Cell), Some(packed)),
                        false => (packed, None),
                    };
                    let q = plan.resident(lane, rows, all, Width::Query);
                    let job = self.own_keys_job(&of, q, &k_rows, cells, dq);
                    let task = job.map(|job| task(batch.slot, job));
                    self.round(batch.slot.round).meanwhile.extend(task);
                }
            }
        }
    }

    /// This rank's queries in the lane and segments of a section.
    fn own_queries(&self, of: &BatchedSection<'_>) -> Vec<Rows> {
        let (lane, segments) = (&self.plan.lanes[of.section.lane], of.section.segments);
        let rows = self.plan.shards.select_queries(lane, self.rank, segments);
        rows.map(|(_, rows)| rows).collect()
    }

    /// This rank's keys in the lane and segments of a section.
    fn own_keys(&self, of: &BatchedSection<'_>) -> Vec<Rows> {
        let (lane, segments) = (&self.plan.lanes[of.section.lane], of.section.segments);
        let rows = self.plan.shards.select_keys(lane, self.rank, segments);
        rows.map(|(_, rows)| rows).collect()
    }

    /// A job of a section's queries with this rank's keys.
    fn own_keys_job(
        &self,
        of: &BatchedSection<'_>,
        q: Operand,
        k_rows: &Rows,
        cells: Operand,
        dq: Option<Operand>,
    ) -> Option<Job> {
        let (lane, segments) = (of.section.lane, of.section.segments);
        let own = self.own(Width::Key);
        let k = self.plan.resident(lane, k_rows, own, Width::Key);
        self.plan.job(
            lane,
            segments,
            (&of.section.rows, q),
            (k_rows, k),
            cells,
            dq,
        )
    }

    /// A job whose queries are resident.
    pub fn resident_job(
        &self,
        lane: usize,
        segments: Segments,
        (q_rows, at): (&Rows, QueryRows),
        keys: (&Rows, Operand),
    ) -> Option<Job> {
        let plan = self.plan;
        let resident = |at: Resident, width: Width| plan.resident(lane, q_rows, at, width);
        let job = plan.job(
            lane,
            segments,
            (q_rows, resident(at.q, Width::Query)),
            keys,
            resident(at.cells, Width::Cell),
            at.dq.map(|at| resident(at, Width::Query)),
        );
        job.map(|job| Job {
            delta: at.delta.map(|at| resident(at, Width::Delta)),
            ..job
        })
    }
}
