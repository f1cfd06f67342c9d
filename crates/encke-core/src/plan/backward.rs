//! The backward program of one rank.

use super::builder::Builder;
use super::flow::{DKV, DQ};
use super::jobs::QueryRows;
use super::layout::{Width, flat};
use super::program::{BufferId, Component, Fill, RankPlan, Role, Task};
use super::{Plan, Queries};
use crate::job::Job;
use crate::sharding::Run;

pub(super) fn program(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    match plan.request.queries {
        Queries::Sharded => sharded(plan, rank, dlse),
        Queries::Replicated => replicated(plan, rank, dlse),
    }
}

/// Everything a backward job may read or write at home.
struct Buffers {
    q: BufferId,
    k: BufferId,
    v: BufferId,
    dout: BufferId,
    lse: BufferId,
    delta: BufferId,
    dq: BufferId,
    dk: BufferId,
    dv: BufferId,
}

impl Buffers {
    /// A job on `k` and `v`, adding to `dq`, `dk` and `dv`.
    fn task(&self, job: Job, [k, v]: [BufferId; 2], dq: BufferId, [dk, dv]: [BufferId; 2]) -> Task {
        Task::Backward {
            job,
            q: self.q,
            k,
            v,
            dout: self.dout,
            lse: self.lse,
            delta: self.delta,
            dq,
            dk,
            dv,
        }
    }
}

/// Buffers, inputs and first tasks. What belongs to queries has `runs` (all rows or the own ones).
fn buffers(b: &mut Builder<'_>, runs: &[Run], with_dlse: bool) -> Buffers {
    let plan = b.plan;
    let request = &plan.request;
    let (dtype, sum) = (request.dtype, request.dtype.sum());
    let own = b.rows;
    let rows = runs.iter().map(|run| run.count).sum();
    let out_dtype = request.out_dtype();
    let q = b.resident("q", Component::Queries, dtype, rows, Width::Query);
    let k = b.resident("k", Component::OwnKv, dtype, own, Width::Kv);
    let v = b.resident("v", Component::OwnKv, dtype, own, Width::Kv);
    let out = b.resident("out", Component::Output, out_dtype, rows, Width::WideCell);
    let lse = b.resident("lse", Component::Output, sum, rows, Width::Cell);
    let dout = b.resident(
        "dout",
        Component::Upstream,
        out_dtype,
        rows,
        Width::WideCell,
    );
    let dlse = with_dlse.then(|| b.resident("dlse", Component::Upstream, sum, rows, Width::Cell));
    let delta = b.resident("delta", Component::Upstream, sum, rows, Width::Cell);
    let dq = b.resident("dq", Component::Gradients, sum, own, Width::Query);
    let dk = b.resident("dk", Component::Gradients, sum, own, Width::Kv);
    let dv = b.resident("dv", Component::Gradients, sum, own, Width::Kv);

    let of_queries = [
        (Role::Q, q),
        (Role::Out, out),
        (Role::Lse, lse),
        (Role::Dout, dout),
    ];
    for (role, buffer) in of_queries {
        b.input(role, buffer, runs.to_vec());
    }
    if let Some(dlse) = dlse {
        b.input(Role::Dlse, dlse, runs.to_vec());
    }
    for (role, buffer) in [(Role::K, k), (Role::V, v)] {
        b.input(role, buffer, b.runs_of(b.rank));
    }
    let before = &mut b.round(0).before;
    for buffer in [dq, dk, dv] {
        let value = Fill::Zero;
        before.push(Task::Fill { buffer, value });
    }
    before.push(Task::Delta {
        cells: request.shape.batch * rows * plan.slots,
        dim: request.shape.dim,
        out,
        dout,
        dlse,
        delta,
    });
    Buffers {
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

/// dQ stays; keys visit, and their gradients follow one round behind and come home.
fn sharded(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let runs = b.runs_of(rank);
    let at_home = buffers(&mut b, &runs, dlse);
    let Buffers {
        k, v, dq, dk, dv, ..
    } = at_home;
    let at = QueryRows {
        q: b.own(),
        cells: b.own(),
        dq: None,
    };
    b.local_jobs(at, |job| at_home.task(job, [k, v], dq, [dk, dv]));
    for seat in b.seats() {
        let visit = b.visit(seat, [k, v]);
        let own = b.own();
        let gather = b.gather(seat, Component::TravellingGradients, &DKV, &[dk, dv], own);
        b.jobs_with_keys(seat, at, |distance, job| {
            let (k, v) = visit.at(distance);
            let into = [gather.at(distance)[0], gather.at(distance)[1]];
            at_home.task(job, [k, v], dq, into)
        });
    }
    b.output(Role::Dq, dq, runs.clone());
    b.output(Role::Dk, dk, runs.clone());
    b.output(Role::Dv, dv, runs);
    b.finish()
}

/// Keys and their gradients stay; each rank has everyone's queries, and what it finds for their
/// gradients is gathered. Then dq is shared.
fn replicated(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let all_runs = b.all_runs();
    let at_home = buffers(&mut b, &all_runs, dlse);
    let Buffers {
        k, v, dq, dk, dv, ..
    } = at_home;
    let at = QueryRows {
        q: b.among_all(rank),
        cells: b.among_all(rank),
        dq: Some(b.own()),
    };
    b.local_jobs(at, |job| at_home.task(job, [k, v], dq, [dk, dv]));
    for seat in b.seats() {
        let own = b.own();
        let gather = b.gather(seat, Component::TravellingGradients, &DQ, &[dq], own);
        b.jobs_with_queries(seat, true, |distance, job| {
            at_home.task(job, [k, v], gather.at(distance)[0], [dk, dv])
        });
    }
    let (n, sum) = (plan.request.shape.tokens, plan.request.dtype.sum());
    let all_dq = b.resident("all dq", Component::Gradients, sum, n, Width::Query);
    let (start, travel) = (plan.settled_round(), b.sharing(sum, Width::Query));
    let own = plan.request.shape.batch * b.rows * plan.resident_width(Width::Query);
    b.copy(start, vec![flat(1, own, 0, 0)], false, dq, travel[0]);
    b.share(start, 0, travel, all_dq, Width::Query);
    let runs = b.runs_of(rank);
    b.output(Role::Dq, all_dq, all_runs);
    b.output(Role::Dk, dk, runs.clone());
    b.output(Role::Dv, dv, runs);
    b.finish()
}
