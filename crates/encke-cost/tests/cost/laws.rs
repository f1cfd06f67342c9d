//! Laws that hold for every plan and every machine.
//!
//! The oracle is a recurrence over rounds, written from the programs alone: a round ends when its
//! jobs have ended and each of its transfers, begun when both ends had posted, has taken its
//! latency and the time of its bytes. It ignores that ports are shared, so it is a lower bound, and
//! exact where no port is shared.

use std::collections::{BTreeMap, BTreeSet};

use encke_core::plan::program::{RankPlan, Task};
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_cost::{Machine, simulate};
use proptest::prelude::*;

use crate::support::{dense, link, machine};

fn patterns() -> impl Strategy<Value = Pattern> {
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let group = Mode::Group {
        scale: GroupScale::One,
    };
    let dilated = |segments: &[usize], rates: &[usize], mode: Mode| {
        Pattern::dilated(segments, rates, mode).unwrap()
    };
    let patterns = vec![
        Pattern::dense(),
        dilated(&[4, 16], &[1, 2], group),
        dilated(&[8, 32], &[1, 4], mix),
        dilated(&[5, 12, 64], &[1, 3, 7], mix),
    ];
    (prop::sample::select(patterns), any::<bool>()).prop_map(|(p, causal)| p.causal(causal))
}

fn requests() -> impl Strategy<Value = Request> {
    let cuts = prop::sample::select(vec![Cut::Contiguous, Cut::Zigzag, Cut::Striped]);
    let passes = prop::sample::select(vec![Pass::Forward, Pass::Backward { dlse: false }]);
    let queries = prop::sample::select(vec![Queries::Sharded, Queries::Replicated]);
    let widths = prop::sample::select(vec![1, 2, 3, usize::MAX]);
    let rotating = prop::sample::select(vec![Rotating::Keys, Rotating::Queries]);
    let schedules = (widths, rotating)
        .prop_map(|(width, backward)| Schedule::RING.with_width(width).with_backward(backward));
    let kinds = (cuts, passes, queries, schedules);
    (1usize..80, 1usize..9, patterns(), kinds).prop_map(
        |(tokens, ranks, pattern, (cut, pass, queries, schedule))| Request {
            pass,
            queries,
            schedule,
            ..Request::new(
                Shape::new(1, tokens, 3, 3, 4).unwrap(),
                pattern,
                Sharding::new(ranks, cut).unwrap(),
                DType::F32,
            )
        },
    )
}

/// Machines on which only jobs and transfers take time.
fn machines() -> impl Strategy<Value = Machine> {
    let speed = || prop::sample::select(vec![100.0, 1e3, 1e4, f64::INFINITY]);
    let latency = || prop::sample::select(vec![0.0, 0.1, 1.0]);
    (1usize..5, 1usize..4, speed(), speed(), latency(), latency()).prop_map(
        |(ranks_per_node, nics, intra_node, inter_node, fast, slow)| Machine {
            ranks_per_node,
            nics,
            inter_node: link(slow, inter_node),
            ..machine(1000.0, link(fast, intra_node))
        },
    )
}

fn programs(plan: &Plan) -> Vec<RankPlan> {
    (0..plan.ranks())
        .map(|rank| plan.rank(rank).unwrap())
        .collect()
}

fn jobs_s(tasks: &[Task], flops: f64) -> f64 {
    let each = |task: &Task| match task {
        Task::Forward { job, .. } | Task::Conclude { job, .. } | Task::Attend { job, .. } => {
            (job.pairs() * 4 * job.dim as u128) as f64 / flops
        }
        Task::Backward { job, .. } => (job.pairs() * 10 * job.dim as u128) as f64 / flops,
        _ => 0.0,
    };
    tasks.iter().map(each).sum()
}

/// The end of the last rank if no port were shared, and whether none is.
fn oracle(plan: &Plan, machine: &Machine) -> (f64, bool) {
    let programs = programs(plan);
    let flops = machine.device.rates[0].forward.flops;
    let mut ends = vec![0.0f64; programs.len()];
    let mut unshared = true;
    let rounds = programs
        .iter()
        .map(|program| program.rounds.len())
        .max()
        .unwrap();
    for t in 0..rounds {
        let posts = ends.clone();
        let mut ports: BTreeMap<(bool, usize), BTreeSet<(usize, usize)>> = BTreeMap::new();
        for (a, program) in programs.iter().enumerate() {
            let Some(round) = program.rounds.get(t) else {
                continue;
            };
            let mut end = posts[a] + jobs_s(&round.meanwhile, flops);
            let mut transfers: BTreeMap<(usize, usize), usize> = BTreeMap::new();
            for message in &round.sends {
                let transfer = (a, message.address.peer);
                *transfers.entry(transfer).or_default() += program.message_bytes(message);
                ports
                    .entry((true, machine.nic_of(a)))
                    .or_default()
                    .insert(transfer);
                ports.entry((true, a + 1000)).or_default().insert(transfer);
            }
            for message in &round.receives {
                let transfer = (message.address.peer, a);
                *transfers.entry(transfer).or_default() += program.message_bytes(message);
                ports
                    .entry((false, machine.nic_of(a)))
                    .or_default()
                    .insert(transfer);
                ports.entry((false, a + 1000)).or_default().insert(transfer);
            }
            for ((from, to), bytes) in transfers {
                let link = machine.link(from, to).0;
                let begin = posts[from].max(posts[to]);
                end = end.max(begin + link.latency_s + bytes as f64 / link.bytes_per_s);
            }
            ends[a] = end;
        }
        unshared &= ports.values().all(|transfers| transfers.len() <= 1);
    }
    (ends.into_iter().fold(0.0, f64::max), unshared)
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn bytes_and_time_are_conserved(request in requests(), machine in machines()) {
        let plan = Plan::new(request).unwrap();
        let run = simulate(&plan, &machine, 0..usize::MAX).unwrap();
        prop_assert_eq!(run.bytes(), plan.explain().unwrap().sent_bytes as u64);
        let sum = |of: fn(&encke_cost::RankTime) -> u64| run.ranks.iter().map(of).sum::<u64>();
        prop_assert_eq!(sum(|rank| rank.sent_bytes), run.bytes());
        prop_assert_eq!(sum(|rank| rank.received_bytes), run.bytes());
        let transferred: u64 = run.transfers.iter().map(|transfer| transfer.bytes).sum();
        prop_assert_eq!(transferred, run.bytes());
        prop_assert_eq!(run.trace.sent_bytes() as u64, run.bytes());
        for (rank, program) in run.ranks.iter().zip(programs(&plan)) {
            let jobs: f64 = program.rounds.iter().map(|r| jobs_s(&r.meanwhile, 1000.0)).sum();
            prop_assert!(near(rank.compute_s, jobs));
            prop_assert!(near(rank.busy_s() + rank.exposed_s + rank.idle_s, rank.end_s));
            prop_assert!(rank.exposed_s <= rank.in_flight_s + 1e-9);
            prop_assert!(rank.busy_s() <= run.seconds * (1.0 + 1e-12));
        }
        for link in &run.links {
            prop_assert!(link.busiest_port_s <= run.seconds * (1.0 + 1e-9));
        }
        prop_assert_eq!(simulate(&plan, &machine, 0..usize::MAX).unwrap(), run);
    }

    #[test]
    fn the_oracle_is_a_bound_and_exact_where_no_port_is_shared(
        request in requests(),
        mut machine in machines(),
    ) {
        let plan = Plan::new(request).unwrap();
        let got = simulate(&plan, &machine, 0..0).unwrap().seconds;
        let (bound, unshared) = oracle(&plan, &machine);
        prop_assert!(got >= bound * (1.0 - 1e-9), "{got} beats {bound}");
        if unshared {
            prop_assert!(near(got, bound), "{got}, not {bound}");
        }
        // Infinitely fast links are shared without loss: the critical path of the jobs is left.
        machine.intra_node = link(0.0, f64::INFINITY);
        machine.inter_node = link(0.0, f64::INFINITY);
        let free = simulate(&plan, &machine, 0..0).unwrap().seconds;
        let (path, _) = oracle(&plan, &machine);
        prop_assert!(near(free, path), "{free}, not {path}");
        prop_assert!(free <= got * (1.0 + 1e-9));
    }

    #[test]
    fn time_scales_with_the_speed_of_everything(
        request in requests(),
        machine in machines(),
        slower in 1.0f64..10.0,
    ) {
        let plan = Plan::new(request).unwrap();
        let mut slow = machine.clone();
        for rate in &mut slow.device.rates {
            rate.forward.flops /= slower;
            rate.backward.flops /= slower;
        }
        for link in [&mut slow.intra_node, &mut slow.inter_node] {
            link.latency_s *= slower;
            link.bytes_per_s /= slower;
        }
        let run = |machine: &Machine| simulate(&plan, machine, 0..0).unwrap().seconds;
        prop_assert!(near(run(&slow), slower * run(&machine)));
    }

    #[test]
    fn a_slower_link_or_rank_never_helps_a_dense_ring(
        tokens in 1usize..64,
        ranks in 1usize..9,
        machine in machines(),
        slower in 1.0f64..10.0,
        victim in 0usize..9,
    ) {
        let plan = dense(tokens, ranks);
        let before = simulate(&plan, &machine, 0..0).unwrap().seconds;
        for inter_node in [false, true] {
            let mut slow = machine.clone();
            let Machine { intra_node: intra, inter_node: inter, .. } = &mut slow;
            let link = if inter_node { inter } else { intra };
            link.bytes_per_s /= slower;
            let after = simulate(&plan, &slow, 0..0).unwrap().seconds;
            prop_assert!(after >= before * (1.0 - 1e-12), "{after} after {before}");
        }
        let mut slow = machine.clone();
        slow.stragglers.insert(victim % ranks, slower);
        let after = simulate(&plan, &slow, 0..0).unwrap().seconds;
        prop_assert!(after >= before * (1.0 - 1e-12), "{after} after {before}");
    }

    #[test]
    fn shared_cores_take_the_time_of_all_work_together(request in requests(), cores in 1usize..5) {
        let plan = Plan::new(request).unwrap();
        let mut machine = machine(1000.0, link(0.0, f64::INFINITY));
        machine.device.shared_cores = Some(cores);
        let run = simulate(&plan, &machine, 0..0).unwrap();
        let jobs = |program: &RankPlan| -> f64 {
            program.rounds.iter().map(|round| jobs_s(&round.meanwhile, 1000.0)).sum()
        };
        let work: f64 = programs(&plan).iter().map(jobs).sum();
        prop_assert!(near(run.seconds, work), "{} for {work} s of work", run.seconds);
    }
}
