//! The forward program of one rank.

use super::builder::Builder;
use super::direct::RingPair;
use super::flow::CARRY;
use super::jobs::QueryRows;
use super::layout::Width;
use super::membership::Progress;
use super::program::{BufferId, CarryIds, Component, Fill, RankPlan, Role, Task};
use super::{Plan, Queries};

pub(super) fn program(plan: &Plan, rank: usize) -> RankPlan {
    match plan.request.queries {
        Queries::Sharded => sharded(plan, rank, None),
        Queries::Replicated => replicated(plan, rank),
    }
}

/// The buffers that all kinds have: q (all rows or the own ones), k and v.
struct Buffers {
    q: BufferId,
    k: BufferId,
    v: BufferId,
}

fn buffers(b: &mut Builder<'_>, q_rows: usize) -> Buffers {
    let dtype = b.plan.request.dtype;
    let rows = b.rows;
    let buffers = Buffers {
        q: b.resident("q", Component::Queries, dtype, q_rows, Width::Query),
        k: b.resident("k", Component::OwnKv, dtype, rows, Width::Kv),
        v: b.resident("v", Component::OwnKv, dtype, rows, Width::Kv),
    };
    for (role, buffer) in [(Role::K, buffers.k), (Role::V, buffers.v)] {
        b.input(role, buffer, b.runs_of(b.rank));
    }
    buffers
}

/// out and lse of the own rows.
fn ends(b: &mut Builder<'_>) -> (BufferId, BufferId) {
    let request = &b.plan.request;
    let (out_dtype, sum) = (request.out_dtype(), request.dtype.sum());
    let out = b.resident("out", Component::Output, out_dtype, b.rows, Width::WideCell);
    let lse = b.resident("lse", Component::Output, sum, b.rows, Width::Cell);
    (out, lse)
}

/// Makes out and lse of the own rows from the carry, in the round after the last.
fn finish(b: &mut Builder<'_>, carry: CarryIds, out: BufferId, lse: BufferId) {
    let plan = b.plan;
    let request = &plan.request;
    let (rows, round) = (b.rows, b.next_round());
    b.round(round).before.push(Task::Finish {
        cells: request.shape.batch * rows * plan.slots,
        dim: request.shape.dim,
        gain: request.pattern.gain(),
        carry,
        out,
        lse,
    });
}

/// Queries that see everything at once, attended to the end.
fn attend(b: &mut Builder<'_>, at: QueryRows, of: Buffers, (out, lse): (BufferId, BufferId)) {
    let Buffers { q, k, v } = of;
    // Cells that see nothing keep the zeros that out begins with.
    let value = Fill::MinusInfinity;
    let empty = Task::Fill { buffer: lse, value };
    b.round(0).before.push(empty);
    b.local_jobs(at, |job| Task::Attend {
        job,
        q,
        k,
        v,
        out,
        lse,
    });
}

/// Queries stay, keys visit. Where none visits and one job is all that a query sees, it is attended
/// to the end, without a carry. A program that continues does what is not done yet, and gets keys
/// straight from where they are.
pub(super) fn sharded(plan: &Plan, rank: usize, so_far: Option<&[Progress]>) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let rows = b.rows;
    let Buffers { q, k, v } = buffers(&mut b, rows);
    b.input(Role::Q, q, b.runs_of(rank));
    let at = QueryRows {
        q: b.own(),
        cells: b.own(),
        dq: None,
    };
    let begins = so_far.is_none_or(|so_far| !so_far[rank].begun);
    if b.sees_all_at_once() {
        let (out, lse) = ends(&mut b);
        if begins {
            attend(&mut b, at, Buffers { q, k, v }, (out, lse));
        }
        return ended(b, out, lse, so_far.is_none());
    }
    let carry = b.carry(Component::Carry, rows);
    let forward = |job, k, v| Task::Forward {
        job,
        q,
        k,
        v,
        begins: false,
        carry,
    };
    if begins {
        b.clear_carry(0, carry);
        b.local_jobs(at, |job| forward(job, k, v));
    }
    // What is left after a death comes by itself, and one distance at a time.
    let width = so_far.map_or(plan.request.schedule.width, |_| 1);
    for seat in b.seats_of(width) {
        let wanted = |of: RingPair| so_far.is_none_or(|so_far| of.is_new_to_queries(so_far));
        let visit = match so_far {
            None => b.visit(seat, Component::TravellingKv, &b.keys([k, v])),
            Some(_) => b.fetch(seat, [k, v], wanted),
        };
        b.jobs_with_keys(seat, at, |stop, meeting, job| {
            let kv = visit.at(stop);
            wanted(meeting).then(|| forward(job, kv[0], kv[1]))
        });
    }
    let (out, lse) = ends(&mut b);
    finish(&mut b, carry, out, lse);
    ended(b, out, lse, so_far.is_none())
}

/// The program that ends with these rows, and in a `first` epoch what it keeps for others.
fn ended(mut b: Builder<'_>, out: BufferId, lse: BufferId, first: bool) -> RankPlan {
    if first {
        b.replicas(b.plan.kept(b.rank));
    }
    b.output(Role::Out, out, b.runs_of(b.rank));
    b.output(Role::Lse, lse, b.runs_of(b.rank));
    b.finish()
}

/// Keys stay; each rank attends everyone's queries to its own keys once, and the carries are
/// gathered. Then the finished rows are shared.
fn replicated(plan: &Plan, rank: usize) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let request = &plan.request;
    let Buffers { q, k, v } = buffers(&mut b, request.shape.tokens);
    let carry = b.carry(Component::Carry, b.rows);
    b.clear_carry(0, carry);
    b.input(Role::Q, q, b.all_runs());
    let at = QueryRows {
        q: b.among_all(rank),
        cells: b.own(),
        dq: None,
    };
    let forward = |job, carry| Task::Forward {
        job,
        q,
        k,
        v,
        begins: false,
        carry,
    };
    b.local_jobs(at, |job| forward(job, carry));
    for seat in b.seats() {
        let into = [carry.acc, carry.m, carry.l];
        let gather = b.gather(seat, Component::TravellingCarry, &CARRY, &into, b.own());
        b.jobs_with_queries(seat, false, |stop, job| forward(job, gather.carry_at(stop)));
    }
    let (n, sum) = (request.shape.tokens, request.dtype.sum());
    let out_dtype = request.out_dtype();
    let out = b.resident("all out", Component::Output, out_dtype, n, Width::WideCell);
    let lse = b.resident("all lse", Component::Output, sum, n, Width::Cell);
    // The own rows are finished where their journey begins: no rank holds them a third time.
    let out_travel = b.sharing(out_dtype, Width::WideCell);
    let lse_travel = b.sharing(sum, Width::Cell);
    finish(&mut b, carry, out_travel[0], lse_travel[0]);
    let start = plan.settled_round() + 1;
    b.share(start, 0, out_travel, out, Width::WideCell);
    b.share(start, 1, lse_travel, lse, Width::Cell);
    b.output(Role::Out, out, b.all_runs());
    b.output(Role::Lse, lse, b.all_runs());
    b.finish()
}
