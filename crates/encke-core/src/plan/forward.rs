//! The forward program of one rank.

use super::builder::ProgramBuilder;
use super::jobs::QueryRows;
use super::position::RingPair;
use super::program::{BufferId, CarryIds, Component, Fill, RankPlan, Role, Task};
use super::progress::ShardProgress;
use super::reduce::{CARRY, ReducePath};
use super::request::Queries;
use super::schedule::Schedule;
use super::topology::Plan;
use super::width::Width;

pub(super) fn program(plan: &Plan, rank: usize) -> RankPlan {
    match plan.request.queries {
        Queries::Sharded => sharded(plan, rank, None),
        Queries::Replicated => replicated(plan, rank),
    }
}

/// q (all rows or this rank's), k and v.
pub(super) struct ForwardBuffers {
    pub q: BufferId,
    pub k: BufferId,
    pub v: BufferId,
}

pub(super) fn buffers(b: &mut ProgramBuilder<'_>, q_rows: usize) -> ForwardBuffers {
    let dtype = b.plan.request.dtype;
    let rows = b.rows;
    let buffers = ForwardBuffers {
        q: b.resident("q", Component::Queries, dtype, q_rows, Width::Query),
        k: b.resident("k", Component::OwnKv, dtype, rows, Width::Key),
        v: b.resident("v", Component::OwnKv, dtype, rows, Width::Value),
    };
    for (role, buffer) in [(Role::K, buffers.k), (Role::V, buffers.v)] {
        b.input(role, buffer, b.runs_of(b.rank));
    }
    buffers
}

/// out and lse of this rank's rows.
pub(super) fn outputs(b: &mut ProgramBuilder<'_>) -> (BufferId, BufferId) {
    let request = &b.plan.request;
    let (out_dtype, sum) = (request.out_dtype(), request.dtype.sum());
    let rows = b.query_rows;
    let out = b.resident("out", Component::Output, out_dtype, rows, Width::WideCell);
    let lse = b.resident("lse", Component::Output, sum, rows, Width::Cell);
    (out, lse)
}

/// Computes out and lse of this rank's rows from the carry, in a round after the last one.
pub(super) fn finish_softmax(
    b: &mut ProgramBuilder<'_>,
    carry: CarryIds,
    out: BufferId,
    lse: BufferId,
) {
    let plan = b.plan;
    let request = &plan.request;
    let (rows, round) = (b.query_rows, b.next_round());
    b.round(round).before.push(Task::Finish {
        cells: request.shape.batch * rows * plan.slots,
        dim: request.shape.value_dim,
        gain: request.pattern.gain(),
        carry,
        out,
        lse,
    });
}

/// Sharded queries: queries stay, keys and values rotate. If every cell is complete after one local
/// job, that job writes out and lse without a carry. A continuation (`progress` is set) computes
/// only what is missing and fetches keys directly from their owners.
pub(super) fn sharded(plan: &Plan, rank: usize, progress: Option<&[ShardProgress]>) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let rows = b.query_rows;
    let ForwardBuffers { q, k, v } = buffers(&mut b, rows);
    b.input(Role::Q, q, b.query_runs_of(rank));
    let at = QueryRows {
        q: b.own(Width::Query),
        cells: b.own(Width::Cell),
        delta: None,
        dq: None,
    };
    let starts = progress.is_none_or(|progress| !progress[rank].begun);
    if b.one_job_per_cell() {
        let (out, lse) = outputs(&mut b);
        if starts {
            // Cells that see no key keep the zeros that out is allocated with.
            b.fill(0, lse, Fill::MinusInfinity);
            b.local_jobs(at, |job| Task::Attend {
                job,
                q,
                k,
                v,
                out,
                lse,
            });
        }
        return with_outputs(b, out, lse, progress.is_none());
    }
    let carry = b.carry(Component::Carry, rows);
    let forward = |job, k, v| Task::Forward {
        job,
        q,
        k,
        v,
        starts: false,
        carry,
    };
    if starts {
        b.clear_carry(0, carry);
        b.local_jobs(at, |job| forward(job, k, v));
    }
    // A continuation takes one distance per round.
    let schedule = progress.map_or(plan.request.schedule, |_| Schedule::RING);
    for position in b.positions(schedule) {
        let wanted = |of: RingPair| progress.is_none_or(|progress| of.is_new_to_queries(progress));
        let rotation = match progress {
            None => b.rotate(position, Component::TravellingKv, &b.keys([k, v])),
            Some(_) => b.fetch(position, [k, v], wanted),
        };
        b.jobs_with_keys(position, at, |slot, pair, job| {
            let kv = rotation.at(slot);
            wanted(pair).then(|| forward(job, kv[0], kv[1]))
        });
    }
    let (out, lse) = outputs(&mut b);
    finish_softmax(&mut b, carry, out, lse);
    with_outputs(b, out, lse, progress.is_none())
}

/// Adds the output ports and, in the first epoch, the replicas this rank holds.
pub(super) fn with_outputs(
    mut b: ProgramBuilder<'_>,
    out: BufferId,
    lse: BufferId,
    first_epoch: bool,
) -> RankPlan {
    if first_epoch {
        b.replicas(b.plan.kept(b.rank));
    }
    b.output(Role::Out, out, b.query_runs_of(b.rank));
    b.output(Role::Lse, lse, b.query_runs_of(b.rank));
    b.finish()
}

/// Replicated queries: each rank attends all queries to its own keys, the carries are reduced to
/// the owners of the queries, and the finished rows are all-gathered.
fn replicated(plan: &Plan, rank: usize) -> RankPlan {
    let mut b = ProgramBuilder::new(plan, rank);
    let request = &plan.request;
    let ForwardBuffers { q, k, v } = buffers(&mut b, request.shape.queries);
    let carry = b.carry(Component::Carry, b.query_rows);
    b.clear_carry(0, carry);
    b.input(Role::Q, q, b.all_query_runs());
    let at = QueryRows {
        q: b.among_all(rank),
        cells: b.own(Width::Cell),
        delta: None,
        dq: None,
    };
    let forward = |job, carry| Task::Forward {
        job,
        q,
        k,
        v,
        starts: false,
        carry,
    };
    b.local_jobs(at, |job| forward(job, carry));
    let component = Component::TravellingCarry;
    for position in b.positions(request.schedule) {
        let into = [carry.acc, carry.m, carry.l];
        let own = b.own(Width::Cell);
        let reduction = b.reduce(position, component, &CARRY, (&into, own), ReducePath::Ring);
        b.jobs_with_queries(position, false, |slot, job| {
            forward(job, reduction.carry_at(slot))
        });
    }
    let (n, sum) = (request.shape.queries, request.dtype.sum());
    let out_dtype = request.out_dtype();
    let out = b.resident("all out", Component::Output, out_dtype, n, Width::WideCell);
    let lse = b.resident("all lse", Component::Output, sum, n, Width::Cell);
    // This rank's rows are finished directly in the buffer they rotate from.
    let rotating_out = b.all_gather_buffers(out_dtype, Width::WideCell);
    let rotating_lse = b.all_gather_buffers(sum, Width::Cell);
    finish_softmax(&mut b, carry, rotating_out[0], rotating_lse[0]);
    let start = plan.settled_round() + 1;
    b.all_gather(start, 0, rotating_out, out, Width::WideCell);
    b.all_gather(start, 1, rotating_lse, lse, Width::Cell);
    b.output(Role::Out, out, b.all_query_runs());
    b.output(Role::Lse, lse, b.all_query_runs());
    b.finish()
}
