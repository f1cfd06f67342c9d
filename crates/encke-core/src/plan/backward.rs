//! The backward program of one rank.

use super::builder::ProgramBuilder;
use super::jobs::QueryRows;
use super::layout::flat;
use super::position::RingPair;
use super::program::{BufferId, Component, Fill, RankPlan, Role, Task};
use super::progress::ShardProgress;
use super::reduce::{DKV, DQ, ReducePath};
use super::request::{Pass, Queries};
use super::rings::Rotating;
use super::rotation::RotatingTensor;
use super::schedule::Schedule;
use super::topology::Plan;
use super::width::Width;
use crate::job::Job;
use crate::sharding::Run;

pub(super) fn program(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    match plan.request.queries {
        Queries::Sharded => match plan.request.rotating() {
            Rotating::Keys => rotating_keys(plan, rank, dlse, None),
            Rotating::Queries => rotating_queries(plan, rank, dlse),
        },
        Queries::Replicated => replicated(plan, rank, dlse),
    }
}

/// The buffers of a backward job.
#[derive(Clone, Copy)]
pub(super) struct BackwardBuffers {
    pub q: BufferId,
    pub k: BufferId,
    pub v: BufferId,
    pub dout: BufferId,
    pub lse: BufferId,
    pub delta: BufferId,
    pub dq: BufferId,
    pub dk: BufferId,
    pub dv: BufferId,
}

impl BackwardBuffers {
    /// Plans this rank's buffers and inputs, and if the shard `starts`, its first tasks. Tensors of
    /// queries have the rows `runs` (all rows or this rank's).
    pub fn new(
        b: &mut ProgramBuilder<'_>,
        runs: &[Run],
        with_dlse: bool,
        starts: bool,
    ) -> BackwardBuffers {
        let plan = b.plan;
        let request = &plan.request;
        let (dtype, sum) = (request.dtype, request.dtype.sum());
        let own = b.rows;
        let rows = runs.iter().map(|run| run.count).sum();
        let out_dtype = request.out_dtype();
        let q = b.resident("q", Component::Queries, dtype, rows, Width::Query);
        let k = b.resident("k", Component::OwnKv, dtype, own, Width::Key);
        let v = b.resident("v", Component::OwnKv, dtype, own, Width::Value);
        let by_branch = request.pass == Pass::BackwardByBranch;
        let out = (!by_branch)
            .then(|| b.resident("out", Component::Output, out_dtype, rows, Width::WideCell));
        let lse = b.resident("lse", Component::Output, sum, rows, Width::Cell);
        let dout = b.resident("dout", Component::Upstream, dtype, rows, Width::WideCell);
        let dlse =
            with_dlse.then(|| b.resident("dlse", Component::Upstream, sum, rows, Width::Cell));
        let delta_width = if by_branch { Width::Delta } else { Width::Cell };
        let delta = b.resident("delta", Component::Upstream, sum, rows, delta_width);
        let dq = b.resident("dq", Component::Gradients, sum, b.query_rows, Width::Query);
        let dk = b.resident("dk", Component::Gradients, sum, own, Width::Key);
        let dv = b.resident("dv", Component::Gradients, sum, own, Width::Value);

        let of_queries = [
            (Role::Q, Some(q)),
            (Role::Out, out),
            (Role::Lse, Some(lse)),
            (Role::Dout, Some(dout)),
            (Role::Dlse, dlse),
            (Role::Delta, by_branch.then_some(delta)),
        ];
        for (role, buffer) in of_queries {
            if let Some(buffer) = buffer {
                b.input(role, buffer, runs.to_vec());
            }
        }
        for (role, buffer) in [(Role::K, k), (Role::V, v)] {
            b.input(role, buffer, b.runs_of(b.rank));
        }
        if starts {
            for buffer in [dq, dk, dv] {
                b.fill(0, buffer, Fill::Zero);
            }
            b.round(0).before.extend(out.map(|out| Task::Delta {
                cells: request.shape.batch * rows * plan.slots,
                dim: request.shape.value_dim,
                out,
                dout,
                dlse,
                delta,
            }));
        }
        BackwardBuffers {
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
        }
    }

    pub fn task(self, job: Job) -> Task {
        let BackwardBuffers {
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
        } = self;
        Task::Backward {
            job,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
        }
    }

    /// The tensors that rotate with the queries, in the order of [`Plan::query_tensors`].
    fn rotating_queries(&self, plan: &Plan) -> [RotatingTensor; 4] {
        let mut own = [self.q, self.dout, self.lse, self.delta].into_iter();
        plan.query_tensors()
            .map(|(name, dtype, width, role)| RotatingTensor {
                name,
                own: own.next().expect("as many buffers as tensors"),
                dtype,
                width,
                role,
            })
    }

    /// Adds the output ports: dq of `queries`, dk and dv of this rank's rows.
    pub fn outputs(&self, b: &mut ProgramBuilder<'_>, dq: BufferId, queries: Vec<Run>) {
        let runs = b.runs_of(b.rank);
        b.output(Role::Dq, dq, queries);
        b.output(Role::Dk, self.dk, runs.clone());
        b.output(Role::Dv, self.dv, runs);
    }
}

/// This rank's queries with sharded queries.
pub(super) fn own_queries(b: &ProgramBuilder<'_>) -> QueryRows {
    QueryRows {
        q: b.own(Width::Query),
        cells: b.own(Width::Cell),
        delta: (b.plan.request.pass == Pass::BackwardByBranch).then(|| b.own(Width::Delta)),
        dq: None,
    }
}

/// Sharded queries with rotating keys: q and dq stay; k and v rotate, and dk and dv follow one
/// round behind. They are reduced along the ring or, with redundancy, returned directly. A
/// continuation (`progress` is set) computes only what is missing; the parts of its jobs' results
/// that were already added are discarded.
pub(super) fn rotating_keys(
    plan: &Plan,
    rank: usize,
    dlse: bool,
    progress: Option<&[ShardProgress]>,
) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let (runs, at) = (b.query_runs_of(rank), own_queries(&b));
    let starts = progress.is_none_or(|progress| !progress[rank].begun);
    let own = BackwardBuffers::new(&mut b, &runs, dlse, starts);
    if starts {
        b.local_jobs(at, |job| own.task(job));
    }
    let to_queries = |of: RingPair| progress.is_none_or(|done| of.is_new_to_queries(done));
    let to_keys = |of: RingPair| progress.is_none_or(|done| of.is_new_to_keys(done));
    let wanted = |of: RingPair| to_queries(of) || to_keys(of);
    let discarded = progress.map(|_| discard_buffers(&mut b, (to_queries, to_keys)));
    let component = Component::TravellingGradients;
    let path = match plan.request.redundancy {
        0 => ReducePath::Ring,
        _ => ReducePath::Direct,
    };
    let schedule = progress.map_or(plan.request.schedule, |_| Schedule::RING);
    for position in b.positions(schedule) {
        let (kv, dkv, rows) = ([own.k, own.v], [own.dk, own.dv], b.own(Width::Key));
        let (rotation, reduction) = match progress {
            None => (
                b.rotate(position, Component::TravellingKv, &b.keys(kv)),
                b.reduce(position, component, &DKV, (&dkv, rows), path),
            ),
            Some(_) => (
                b.fetch(position, kv, wanted),
                b.return_gradients(position, &DKV, &dkv, rows, to_keys),
            ),
        };
        b.jobs_with_keys(position, at, |slot, pair, job| {
            let (kv, dkv) = (rotation.at(slot), reduction.at(slot));
            let mut buffers = BackwardBuffers {
                k: kv[0],
                v: kv[1],
                dk: dkv[0],
                dv: dkv[1],
                ..own
            };
            if let Some([dq, dk, dv]) = discarded {
                if !to_queries(pair) {
                    buffers.dq = dq;
                }
                if !to_keys(pair) {
                    (buffers.dk, buffers.dv) = (dk, dv);
                }
            }
            wanted(pair).then(|| buffers.task(job))
        });
    }
    if progress.is_none() {
        b.replicas(plan.kept(rank));
    }
    own.outputs(&mut b, own.dq, runs);
    match (progress, path) {
        (None, ReducePath::Ring) => b.finish_balanced(),
        // A successor only knows whether the shard has begun, so all local work is in round 0.
        _ => b.finish(),
    }
}

/// Buffers for the dq, dk and dv of pairs that are new to one side only: large enough for the
/// results that were already added on the other side.
fn discard_buffers(
    b: &mut ProgramBuilder<'_>,
    (to_queries, to_keys): (impl Fn(RingPair) -> bool, impl Fn(RingPair) -> bool),
) -> [BufferId; 3] {
    let (plan, sum) = (b.plan, b.plan.request.dtype.sum());
    let positions = b.positions(Schedule::RING);
    let pairs = || {
        let incoming = positions.iter().flat_map(|position| position.incoming());
        incoming.map(|(pair, parcel)| (to_queries(pair), to_keys(pair), parcel))
    };
    let discards_dq = pairs().any(|(queries, keys, _)| !queries && keys);
    let for_queries_only = || pairs().filter(|(queries, keys, _)| *queries && !keys);
    let parcels = || for_queries_only().map(|(_, _, parcel)| parcel);
    let q_elements = plan.request.shape.batch * b.query_rows * plan.resident_width(Width::Query);
    let elements = [
        if discards_dq { q_elements } else { 0 },
        b.largest(parcels(), Width::Key),
        b.largest(parcels(), Width::Value),
    ];
    elements.map(|elements| b.buffer("waste", Component::TravellingGradients, sum, elements))
}

/// Sharded queries with rotating queries: k, v, dk and dv stay; q, dout, lse and delta rotate, and
/// dq follows one round behind. Per element of a query row, that sends two stored elements and one
/// sum (q, dout, dq); rotating keys send two stored elements and two sums (k, v, dk, dv), but have
/// fewer heads under grouped-query attention.
fn rotating_queries(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let (runs, at) = (b.query_runs_of(rank), own_queries(&b));
    let own = BackwardBuffers::new(&mut b, &runs, dlse, true);
    b.local_jobs(at, |job| own.task(job));
    let tensors = own.rotating_queries(plan);
    let component = Component::TravellingGradients;
    for position in b.positions(plan.request.schedule) {
        let rotation = b.rotate(position, Component::TravellingQueries, &tensors);
        let dq = (&[own.dq][..], b.own(Width::Query));
        let reduction = b.reduce(position, component, &DQ, dq, ReducePath::Ring);
        b.jobs_with_rotating(position, |slot, job| {
            let tensors = rotation.at(slot);
            let rotating = BackwardBuffers {
                q: tensors[0],
                dout: tensors[1],
                lse: tensors[2],
                delta: tensors[3],
                dq: reduction.at(slot)[0],
                ..own
            };
            rotating.task(job)
        });
    }
    own.outputs(&mut b, own.dq, runs);
    b.finish_balanced()
}

/// Replicated queries: each rank holds all queries and adds to dk and dv of its own keys; its
/// contributions to dq are reduced to the owners of the queries, and dq is all-gathered.
fn replicated(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let all_runs = b.all_query_runs();
    let own = BackwardBuffers::new(&mut b, &all_runs, dlse, true);
    let at = QueryRows {
        q: b.among_all(rank),
        cells: b.among_all(rank),
        delta: None,
        dq: Some(b.own(Width::Query)),
    };
    b.local_jobs(at, |job| own.task(job));
    let component = Component::TravellingGradients;
    for position in b.positions(plan.request.schedule) {
        let dq = (&[own.dq][..], b.own(Width::Query));
        let reduction = b.reduce(position, component, &DQ, dq, ReducePath::Ring);
        b.jobs_with_queries(position, true, |slot, job| {
            let dq = reduction.at(slot)[0];
            BackwardBuffers { dq, ..own }.task(job)
        });
    }
    let (n, sum) = (plan.request.shape.queries, plan.request.dtype.sum());
    let all_dq = b.resident("all dq", Component::Gradients, sum, n, Width::Query);
    let (start, rotating) = (
        plan.settled_round(),
        b.all_gather_buffers(sum, Width::Query),
    );
    let elements = plan.request.shape.batch * b.query_rows * plan.resident_width(Width::Query);
    b.copy(start, vec![flat(1, elements)], false, own.dq, rotating[0]);
    b.all_gather(start, 0, rotating, all_dq, Width::Query);
    own.outputs(&mut b, all_dq, all_runs);
    b.finish()
}
