//! Schedules: results do not depend on them; memory, bytes sent and the number of jobs do, and are
//! checked here.

use proptest::prelude::*;

use encke_core::conformance::{Random, extent};
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Error, Pattern, Shape, Tensor};
use encke_ring::ThreadRing;

use crate::support::{Configuration, DEADLINE, RingResults, check, run};

const WIDTHS: [usize; 4] = [1, 2, 3, usize::MAX];

const FREIGHTS: [Rotating; 2] = [Rotating::Keys, Rotating::Queries];

fn with_width(request: &Request, width: usize) -> Request {
    Request {
        schedule: request.schedule.with_width(width),
        ..request.clone()
    }
}

fn schedules() -> impl Iterator<Item = Schedule> {
    let with = |width| {
        let ring = Schedule::RING.with_width(width);
        FREIGHTS.map(|backward| ring.with_backward(backward))
    };
    WIDTHS.into_iter().flat_map(with)
}

fn bits(of: &RingResults) -> Vec<Vec<u64>> {
    let bits = |tensor: &Tensor| tensor.to_f64().iter().map(|x| x.to_bits()).collect();
    [&of.out, &of.lse, &of.dq, &of.dk, &of.dv]
        .map(bits)
        .to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(20, 100)))]

    /// Every schedule agrees with the reference, and has the same bits each time.
    #[test]
    fn every_schedule_equals_the_reference(seed in any::<u64>()) {
        let case = Configuration::random(seed);
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        for schedule in schedules() {
            let request = Request { schedule, ..case.request.clone() };
            let case = Configuration { request, seed };
            check(&ring, &case).map_err(TestCaseError::fail)?;
            let [once, again] = [(); 2].map(|()| run(&ring, &case).expect("nothing fails"));
            prop_assert_eq!(bits(&once), bits(&again));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(120, 600)))]

    /// A wider schedule computes the same pairs, and needs no more bytes and no more rounds.
    #[test]
    fn a_wider_schedule_sends_no_more_bytes(seed in any::<u64>()) {
        let drawn = Configuration::random(seed).request;
        for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
            let mut before: Option<(u128, usize, usize)> = None;
            for width in WIDTHS {
                let request = Request { pass, ..with_width(&drawn, width) };
                let plan = Plan::new(request).expect("legal");
                let explanation = plan.explain().expect("every rank exists");
                let rounds = explanation.rings.iter().map(|ring| ring.rounds).max();
                let now = (explanation.pairs, explanation.sent_bytes, rounds.unwrap_or(0));
                if let Some(before) = before {
                    prop_assert_eq!(now.0, before.0);
                    prop_assert!(now.2 <= before.2);
                }
                let ring = before.get_or_insert(now);
                prop_assert!(now.1 <= ring.1, "width {} sends more than the ring", width);
            }
        }
    }
}

/// Dense attention on 8 ranks of 16 tokens each.
fn dense(cut: Cut, causal: bool, width: usize, pass: Pass) -> Plan {
    let request = Request::new(
        Shape::new(1, 128, 2, 1, 4).expect("sizes are positive"),
        Pattern::dense().causal(causal),
        Sharding::new(8, cut).expect("ranks are positive"),
        DType::F32,
    );
    let schedule = Schedule::RING.with_width(width);
    let request = Request {
        pass,
        schedule,
        ..request
    };
    Plan::new(request).expect("legal")
}

/// Jobs of one rank, round by round.
fn jobs(plan: &Plan, rank: usize) -> Vec<usize> {
    let rounds = plan.rank(rank).expect("the rank exists").rounds;
    let jobs = rounds.iter().map(|round| round.meanwhile.len());
    jobs.filter(|count| *count > 0).collect()
}

#[test]
fn parcels_in_one_round_are_one_job() {
    for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
        let of = |cut: Cut, causal, width, rank| jobs(&dense(cut, causal, width, pass), rank);
        for (width, rounds) in [(1, 7), (2, 4), (3, 3), (4, 2), (7, 1), (usize::MAX, 1)] {
            // One job in each round, and one for the rank's own tokens before.
            let all = vec![1; rounds + 1];
            assert_eq!(of(Cut::Contiguous, false, width, 3), all, "width {width}");
            assert_eq!(of(Cut::Contiguous, true, width, 7), all, "width {width}");
        }
    }
    // A gathered zigzag: first halves of lower and of higher ranks, and second halves.
    let backward = Pass::Backward { dlse: false };
    let of = |width| jobs(&dense(Cut::Zigzag, true, width, backward), 3);
    assert_eq!(of(7), [1, 3]);
    assert_eq!(of(1), [1, 2, 2, 2, 2, 1, 1, 1]);
}

#[test]
fn wider_schedules_hold_and_send_the_expected_bytes() {
    // Keys and values of 16 tokens, one head of 4 elements, 4 bytes each.
    let parcel = 2 * 16 * 4 * 4;
    let held = |width: usize| {
        let plan = dense(Cut::Contiguous, false, width, Pass::Forward);
        let program = plan.rank(2).expect("the rank exists");
        let sent: usize = program.sent_bytes().values().sum();
        (
            program.memory()[&Component::TravellingKv] / parcel,
            sent / parcel,
        )
    };
    assert_eq!(held(1), (2, 7));
    // Two sets of batches, a receive buffer for each parcel of the first, and the rank's own rows.
    assert_eq!(held(2), (4 + 2 + 1, 7));
    assert_eq!(held(3), (6 + 3 + 1, 7));
    // Nothing is forwarded: one set, its receive buffers, and the rank's own rows.
    assert_eq!(held(7), (7 + 7 + 1, 7));
    assert_eq!(held(usize::MAX), held(7));
}

/// Bytes sent in a backward pass over 8 ranks of 16 tokens, per element of a parcel's rows.
fn backward_bytes(heads: usize, dtype: DType, backward: Rotating) -> f64 {
    let (tokens, dim) = (128, 64);
    let request = Request::new(
        Shape::new(1, tokens, heads, 2, dim).expect("sizes are positive"),
        Pattern::dense(),
        Sharding::new(8, Cut::Contiguous).expect("ranks are positive"),
        dtype,
    );
    let request = Request {
        pass: Pass::Backward { dlse: false },
        schedule: Schedule::RING.with_backward(backward),
        ..request
    };
    let explanation = Plan::new(request).and_then(|plan| plan.explain());
    let sent = explanation.expect("legal").sent_bytes;
    sent as f64 / (7 * tokens * 2 * dim) as f64
}

#[test]
fn rotating_queries_sends_fewer_bytes_unless_heads_share_keys() {
    let of = |heads, dtype| FREIGHTS.map(|freight| backward_bytes(heads, dtype, freight));
    // lse and delta are two elements for each 64.
    let cells = 2.0 * 4.0 / 64.0;
    assert_eq!(of(2, DType::F32), [16.0, 12.0 + cells]);
    assert_eq!(of(2, DType::Bf16), [12.0, 8.0 + cells]);
    assert_eq!(of(4, DType::Bf16), [12.0, 2.0 * (8.0 + cells)]);
}

#[test]
fn rotating_queries_leaves_keys_in_place() {
    let mut request = dense(Cut::Zigzag, true, 1, Pass::Backward { dlse: true })
        .request()
        .clone();
    request.schedule.backward = Rotating::Queries;
    let plan = Plan::new(request).expect("legal");
    for rank in 0..8 {
        let memory = plan.rank(rank).expect("the rank exists").memory();
        assert!(memory.contains_key(&Component::TravellingQueries));
        assert!(!memory.contains_key(&Component::TravellingKv));
    }
    let words = plan.explain().expect("every rank exists").to_string();
    assert!(words.contains("parcels of queries"), "{words}");
    // The forward pass of the same schedule rotates keys.
    let forward = Request {
        pass: Pass::Forward,
        ..plan.request().clone()
    };
    let memory = Plan::new(forward).and_then(|plan| plan.rank(0));
    assert!(
        memory
            .expect("legal")
            .memory()
            .contains_key(&Component::TravellingKv)
    );
}

#[test]
fn a_parcel_is_sent_only_to_ranks_that_need_it() {
    // Causal and contiguous: each parcel goes to each higher rank once, for every width.
    for width in WIDTHS {
        let plan = dense(Cut::Contiguous, true, width, Pass::Forward);
        let explanation = plan.explain().expect("every rank exists");
        let parcel = 2 * 16 * 4 * 4;
        assert_eq!(explanation.sent_bytes, parcel * 7 * 8 / 2, "width {width}");
    }
}

#[test]
fn impossible_schedules_are_refused() {
    let plan = dense(Cut::Contiguous, false, 1, Pass::Forward);
    let with = |width, redundancy| {
        let request = Request {
            redundancy,
            ..with_width(plan.request(), width)
        };
        Plan::new(request).map(|_| ())
    };
    assert_eq!(with(0, 0), Err(Error::NoWidth));
    let redundancy = 1;
    assert_eq!(with(2, redundancy), Ok(()));
    let request = Request {
        redundancy,
        schedule: Schedule::RING.with_backward(Rotating::Queries),
        ..plan.request().clone()
    };
    let refused = Plan::new(request).map(|_| ());
    assert_eq!(refused, Err(Error::RedundantRotation { redundancy }));
}

#[test]
fn wide_rounds_work_with_replicated_queries() {
    let mut random = Random::new(5);
    for width in WIDTHS {
        let mut case = Configuration::random(random.bits());
        case.request.queries = Queries::Replicated;
        case.request.sharding = Sharding::new(5, Cut::Zigzag).expect("ranks are positive");
        case.request.schedule = Schedule::RING.with_width(width);
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        check(&ring, &case).expect("it equals the reference");
        let outputs = Plan::new(case.request).expect("legal");
        let program = outputs.rank(0).expect("the rank exists");
        assert!(program.outputs.iter().any(|port| port.role == Role::Lse));
    }
}
