//! Laws that hold for every plan and every machine.
//!
//! The oracle is a recurrence over rounds, written from the programs alone: a round ends when its
//! jobs are done and when each of its hops, begun when both ends had posted, has had its latency and
//! its bytes. It knows nothing of shared ports, so it is a bound, and exact where none is shared.

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
    let freights = prop::sample::select(vec![Rotating::Keys, Rotating::Queries]);
    let schedules = (widths, freights).prop_map(|(width, backward)| Schedule { width, backward });
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

/// Machines whose tasks cost nothing but their jobs.
fn machines() -> impl Strategy<Value = Machine> {
    let speed = || prop::sample::select(vec![100.0, 1e3, 1e4, f64::INFINITY]);
    let latency = || prop::sample::select(vec![0.0, 0.1, 1.0]);
    (1usize..5, 1usize..4, speed(), speed(), latency(), latency()).prop_map(
        |(node, nics, inside, between, fast, slow)| Machine {
            node,
            nics,
            between: link(slow, between),
            ..machine(1000.0, link(fast, inside))
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

/// The end of each rank where no port is shared, and whether that is so.
fn oracle(plan: &Plan, machine: &Machine) -> (f64, bool) {
    let programs = programs(plan);
    let flops = machine.device.rates[0].forward.flops;
    let mut ends = vec![0.0f64; programs.len()];
    let mut alone = true;
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
            let mut hops: BTreeMap<(usize, usize), usize> = BTreeMap::new();
            for message in &round.sends {
                let hop = (a, message.address.peer);
                *hops.entry(hop).or_default() += program.message_bytes(message);
                ports
                    .entry((true, machine.nic_of(a)))
                    .or_default()
                    .insert(hop);
                ports.entry((true, a + 1000)).or_default().insert(hop);
            }
            for message in &round.receives {
                let hop = (message.address.peer, a);
                *hops.entry(hop).or_default() += program.message_bytes(message);
                ports
                    .entry((false, machine.nic_of(a)))
                    .or_default()
                    .insert(hop);
                ports.entry((false, a + 1000)).or_default().insert(hop);
            }
            for ((from, to), bytes) in hops {
                let link = machine.link(from, to).0;
                let begin = posts[from].max(posts[to]);
                end = end.max(begin + link.latency_s + bytes as f64 / link.bytes_per_s);
            }
            ends[a] = end;
        }
        alone &= ports.values().all(|hops| hops.len() <= 1);
    }
    (ends.into_iter().fold(0.0, f64::max), alone)
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
        prop_assert_eq!(run.transfers.iter().map(|hop| hop.bytes).sum::<u64>(), run.bytes());
        prop_assert_eq!(run.trace.sent_bytes() as u64, run.bytes());
        for (rank, program) in run.ranks.iter().zip(programs(&plan)) {
            let jobs: f64 = program.rounds.iter().map(|r| jobs_s(&r.meanwhile, 1000.0)).sum();
            prop_assert!(near(rank.compute_s, jobs));
            prop_assert!(near(rank.busy_s() + rank.exposed_s + rank.idle_s, rank.end_s));
            prop_assert!(rank.exposed_s <= rank.flying_s + 1e-9);
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
        let (bound, alone) = oracle(&plan, &machine);
        prop_assert!(got >= bound * (1.0 - 1e-9), "{got} beats {bound}");
        if alone {
            prop_assert!(near(got, bound), "{got}, not {bound}");
        }
        // Infinitely fast links are shared without loss: what is left is the path of the jobs.
        machine.inside = link(0.0, f64::INFINITY);
        machine.between = link(0.0, f64::INFINITY);
        let free = simulate(&plan, &machine, 0..0).unwrap().seconds;
        let (path, _) = oracle(&plan, &machine);
        prop_assert!(near(free, path), "{free}, not {path}");
        prop_assert!(free <= got * (1.0 + 1e-9));
    }

    #[test]
    fn a_machine_slower_in_everything_takes_as_much_longer(
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
        for link in [&mut slow.inside, &mut slow.between] {
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
        for between in [false, true] {
            let mut slow = machine.clone();
            let link = if between { &mut slow.between } else { &mut slow.inside };
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
    fn cores_that_are_shared_do_all_the_work_and_no_more(request in requests(), cores in 1usize..5) {
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
