//! The backward program of one rank.

use super::builder::Builder;
use super::direct::RingPair;
use super::flow::{DKV, DQ};
use super::jobs::QueryRows;
use super::layout::{Width, flat};
use super::membership::Progress;
use super::program::{BufferId, Component, Fill, RankPlan, Role, Task};
use super::rings::Rotating;
use super::rotation::RotatingTensor;
use super::{Plan, Queries};
use crate::job::Job;
use crate::sharding::Run;

pub(super) fn program(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    match plan.request.queries {
        Queries::Sharded => match plan.request.schedule.backward {
            Rotating::Keys => sharded(plan, rank, dlse, None),
            Rotating::Queries => visited(plan, rank, dlse),
        },
        Queries::Replicated => replicated(plan, rank, dlse),
    }
}

/// Everything a backward job may read or write at home.
#[derive(Clone, Copy)]
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
    /// What visits where queries do, in this order.
    fn cargo(&self, plan: &Plan) -> [RotatingTensor; 4] {
        let own = [self.q, self.dout, self.lse, self.delta];
        let mut own = own.into_iter();
        plan.query_cargo()
            .map(|(name, dtype, width, role)| RotatingTensor {
                name,
                own: own.next().expect("as many buffers as tensors"),
                dtype,
                width,
                role,
            })
    }

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

/// Buffers and inputs, and where a shard `begins` its first tasks. What belongs to queries has
/// `runs` (all rows or the own ones).
fn buffers(b: &mut Builder<'_>, runs: &[Run], with_dlse: bool, begins: bool) -> Buffers {
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
    let dout = b.resident("dout", Component::Upstream, dtype, rows, Width::WideCell);
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
    if begins {
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
    }
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

/// dQ stays; keys visit, and their gradients follow one round behind and come home: added up on the
/// way, or, where a death is to be survived, each by itself. A program that continues does what is
/// not done yet; what a job finds that is there already goes to waste.
pub(super) fn sharded(
    plan: &Plan,
    rank: usize,
    dlse: bool,
    so_far: Option<&[Progress]>,
) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let (runs, own) = (b.runs_of(rank), b.own());
    let begins = so_far.is_none_or(|so_far| !so_far[rank].begun);
    let at_home = buffers(&mut b, &runs, dlse, begins);
    let Buffers {
        k, v, dq, dk, dv, ..
    } = at_home;
    let at = QueryRows {
        q: own,
        cells: own,
        dq: None,
    };
    if begins {
        b.local_jobs(at, |job| at_home.task(job, [k, v], dq, [dk, dv]));
    }
    let to_queries = |of: RingPair| so_far.is_none_or(|so_far| of.is_new_to_queries(so_far));
    let to_keys = |of: RingPair| so_far.is_none_or(|so_far| of.is_new_to_keys(so_far));
    let wanted = |of: RingPair| to_queries(of) || to_keys(of);
    let waste = so_far.map(|_| waste(&mut b, (to_queries, to_keys)));
    let gradients = Component::TravellingGradients;
    let width = so_far.map_or(plan.request.schedule.width, |_| 1);
    for seat in b.seats_of(width) {
        let visit = match so_far {
            None => b.visit(seat, Component::TravellingKv, &b.keys([k, v])),
            Some(_) => b.fetch(seat, [k, v], wanted),
        };
        let gather = match (so_far, plan.request.redundancy) {
            (None, 0) => b.gather(seat, gradients, &DKV, &[dk, dv], own),
            (None, _) => b.gather_straight(seat, gradients, &DKV, &[dk, dv], own),
            (Some(_), _) => b.deliver(seat, &DKV, &[dk, dv], own, to_keys),
        };
        b.jobs_with_keys(seat, at, |stop, meeting, job| {
            let (kv, into) = (visit.at(stop), gather.at(stop));
            let (mut dq, mut dkv) = (dq, [into[0], into[1]]);
            if let Some([waste_q, waste_k, waste_v]) = waste {
                if !to_queries(meeting) {
                    dq = waste_q;
                }
                if !to_keys(meeting) {
                    dkv = [waste_k, waste_v];
                }
            }
            wanted(meeting).then(|| at_home.task(job, [kv[0], kv[1]], dq, dkv))
        });
    }
    if so_far.is_none() {
        b.replicas(plan.kept(rank));
    }
    b.output(Role::Dq, dq, runs.clone());
    b.output(Role::Dk, dk, runs.clone());
    b.output(Role::Dv, dv, runs);
    match (so_far, plan.request.redundancy) {
        (None, 0) => b.finish_at_home(),
        // Whoever takes over asks whether a shard has begun, and then all of its own is done.
        _ => b.finish(),
    }
}

/// Where dq, dk and dv go that are known already: as large as the meetings need that are new to one
/// side only.
fn waste(
    b: &mut Builder<'_>,
    (to_queries, to_keys): (impl Fn(RingPair) -> bool, impl Fn(RingPair) -> bool),
) -> [BufferId; 3] {
    let (plan, sum) = (b.plan, b.plan.request.dtype.sum());
    let seats = b.seats_of(1);
    let met = || {
        let rotating = seats.iter().flat_map(|seat| {
            let rotating = seat.rotating();
            rotating.map(|(distance, home, parcel)| (seat.meeting(distance, home), parcel))
        });
        rotating.map(|(of, parcel)| (to_queries(of), to_keys(of), parcel))
    };
    let of_queries = met().any(|(queries, keys, _)| !queries && keys);
    let of_keys = met().filter(|(queries, keys, _)| *queries && !keys);
    let most = of_keys.map(|(_, _, parcel)| plan.parcel_elements(parcel, Width::Kv));
    let most = most.max().unwrap_or(0);
    let all = plan.request.shape.batch * b.rows * plan.resident_width(Width::Query);
    let elements = [if of_queries { all } else { 0 }, most, most];
    elements.map(|elements| b.buffer("waste", Component::TravellingGradients, sum, elements))
}

/// Keys and their gradients stay; queries visit with all that is known of them, and what is found
/// for their gradients follows one round behind and comes home. For each number of a query that is
/// two stored numbers and one sum on the way (q, dout, dq); keys have two sums (k, v, dk, dv), and
/// fewer heads where several queries share one.
fn visited(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let (runs, own) = (b.runs_of(rank), b.own());
    let at_home = buffers(&mut b, &runs, dlse, true);
    let Buffers {
        k, v, dq, dk, dv, ..
    } = at_home;
    let at = QueryRows {
        q: own,
        cells: own,
        dq: None,
    };
    b.local_jobs(at, |job| at_home.task(job, [k, v], dq, [dk, dv]));
    let cargo = at_home.cargo(plan);
    for seat in b.seats() {
        let visit = b.visit(seat, Component::TravellingQueries, &cargo);
        let gather = b.gather(seat, Component::TravellingGradients, &DQ, &[dq], own);
        b.jobs_with_rotating(seat, |stop, job| {
            let met = visit.at(stop);
            let rotating = Buffers {
                q: met[0],
                dout: met[1],
                lse: met[2],
                delta: met[3],
                ..at_home
            };
            rotating.task(job, [k, v], gather.at(stop)[0], [dk, dv])
        });
    }
    b.output(Role::Dq, dq, runs.clone());
    b.output(Role::Dk, dk, runs.clone());
    b.output(Role::Dv, dv, runs);
    b.finish_at_home()
}

/// Keys and their gradients stay; each rank has everyone's queries, and what it finds for their
/// gradients is gathered. Then dq is shared.
fn replicated(plan: &Plan, rank: usize, dlse: bool) -> RankPlan {
    let mut b = Builder::new(plan, rank);
    let all_runs = b.all_runs();
    let at_home = buffers(&mut b, &all_runs, dlse, true);
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
        b.jobs_with_queries(seat, true, |stop, job| {
            at_home.task(job, [k, v], gather.at(stop)[0], [dk, dv])
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
