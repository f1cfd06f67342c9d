//! Schedules of two levels: results are those of the reference, a node's parcels cross to the next
//! node once, in pieces, and the memory that this takes is known.

use encke_core::conformance::extent;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Instant;

use encke_core::naive::NaiveKernel;
use encke_core::plan::nodes::NodeLayout;
use encke_core::plan::program::{BufferId, Component, RankPlan, Role, Task};
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Bits, DType, Error, Pattern, Shape, Tensor};
use encke_ring::threads::endpoints;
use encke_ring::trace::Recorder;
use encke_ring::{Rank, ThreadRing};

use crate::support::{CallTensors, Configuration, DEADLINE, check};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(60, 300)))]

    #[test]
    fn two_levels_equal_the_reference(seed in any::<u64>()) {
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        for case in [Configuration::random(seed), Configuration::masked(seed)] {
            check(&ring, &case.in_nodes()).map_err(TestCaseError::fail)?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(120, 600)))]

    /// Two levels compute the same pairs and send no more bytes than one level.
    #[test]
    fn two_levels_send_no_more_than_one(seed in any::<u64>()) {
        for case in [Configuration::random(seed), Configuration::masked(seed)] {
            let request = case.in_nodes().request;
            for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
                let of = |node: usize| {
                    let schedule = request.schedule.with_node(node);
                    let plan = Plan::new(Request { pass, schedule, ..request.clone() });
                    let explanation = plan.expect("legal").explain().expect("every rank exists");
                    (explanation.pairs, explanation.sent_bytes)
                };
                let (one, two) = (of(1), of(request.schedule.node));
                prop_assert_eq!(one.0, two.0);
                prop_assert!(two.1 <= one.1, "{} and {} bytes", two.1, one.1);
            }
        }
    }
}

fn dense(ranks: usize, node: usize, cut: Cut, causal: bool, pass: Pass) -> Plan {
    let request = Request::new(
        Shape::new(1, 16 * ranks, 2, 1, 4).expect("sizes are positive"),
        Pattern::dense().causal(causal),
        Sharding::new(ranks, cut).expect("ranks are positive"),
        DType::F32,
    );
    let schedule = Schedule::RING.with_node(node);
    Plan::new(Request {
        pass,
        schedule,
        ..request
    })
    .expect("legal")
}

/// Bytes that a rank sends to ranks of its own node and to others, and the most that it sends to
/// others in one round.
fn sent(plan: &Plan, rank: usize, node: usize) -> [usize; 3] {
    let program = plan.rank(rank).expect("the rank exists");
    let mut sent = [0; 3];
    for round in &program.rounds {
        let mut across = 0;
        for message in &round.sends {
            let other = message.address.peer / node != rank / node;
            sent[usize::from(other)] += program.message_bytes(message);
            across += program.message_bytes(message) * usize::from(other);
        }
        sent[2] = sent[2].max(across);
    }
    sent
}

#[test]
fn every_rank_sends_a_parcel_to_the_next_node_once_a_turn() {
    // Keys and values of 16 tokens, one head of 4 elements, 4 bytes each.
    let parcel = 2 * 16 * 4 * 4;
    let forward = |node| dense(16, node, Cut::Contiguous, false, Pass::Forward);
    let (one, two) = (forward(1), forward(4));
    for rank in 0..16 {
        // Three turns with a parcel to another node each, a quarter of it in a round; four turns
        // of three hops inside.
        assert_eq!(sent(&two, rank, 4), [12 * parcel, 3 * parcel, parcel / 4]);
        // One level: all 15 parcels pass the last rank of a node, whole.
        let expected = match rank % 4 {
            3 => [0, 15 * parcel, parcel],
            _ => [15 * parcel, 0, 0],
        };
        assert_eq!(sent(&one, rank, 4), expected);
    }
    // One more parcel, and one more piece.
    let held = |plan: &Plan| plan.rank(5).expect("it exists").memory()[&Component::TravellingKv];
    assert_eq!(held(&one), 2 * parcel);
    assert_eq!(held(&two), 3 * parcel + parcel / 4);
    // Gradients: sums of twice the size, one piece of them on the way in each round as well.
    let backward = |node| {
        let pass = Pass::Backward { dlse: false };
        dense(16, node, Cut::Contiguous, false, pass)
    };
    let [_, between, most] = sent(&backward(4), 6, 4);
    assert_eq!(between, 2 * 3 * parcel);
    // The sum of the last turn returns whole.
    assert_eq!(most, parcel);
}

#[test]
fn every_message_of_two_levels_overlaps_with_jobs() {
    for (cut, causal) in [(Cut::Contiguous, false), (Cut::Zigzag, true)] {
        for backward in [Rotating::Keys, Rotating::Queries] {
            for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
                let mut request = dense(12, 4, cut.clone(), causal, pass).request().clone();
                request.schedule.backward = backward;
                // Long enough for a job to be cut in halves.
                request.shape = request.shape.with_tokens(12 * 192);
                let plan = Plan::new(request).expect("legal");
                for rank in 0..12 {
                    let program = plan.rank(rank).expect("the rank exists");
                    for (number, round) in program.rounds.iter().enumerate() {
                        let travels = !round.sends.is_empty() || !round.receives.is_empty();
                        let computes = round.meanwhile.iter().any(|task| task.job().is_some());
                        assert!(
                            computes || !travels,
                            "{cut:?} {pass:?} {backward:?}: rank {rank}, round {number}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rings_that_cannot_have_two_levels_have_one_and_say_why() {
    let layouts = |ranks, node| {
        let plan = dense(ranks, node, Cut::Contiguous, false, Pass::Forward);
        let words = plan.explain().expect("every rank exists").to_string();
        (plan.layouts().to_vec(), words)
    };
    let says = |ranks, node, layout, words: &str| {
        let (layouts, text) = layouts(ranks, node);
        assert_eq!(layouts, [layout]);
        assert!(text.contains(words), "{text}");
    };
    says(8, 8, NodeLayout::OneNode, "one level: all in one node");
    says(
        8,
        3,
        NodeLayout::Uneven,
        "one level: its ranks lie unevenly in nodes",
    );
    let (two, text) = layouts(8, 4);
    let nodes = two[0].node_ring().expect("two levels");
    assert_eq!((nodes.nodes, nodes.members), (2, 4));
    assert!(text.contains("rotate inside 2 nodes of 4"), "{text}");
    // A short window reaches into the next node without filling it.
    let window = encke_core::Window {
        left: Some(40),
        right: Some(0),
    };
    let mut request = dense(8, 4, Cut::Contiguous, false, Pass::Forward)
        .request()
        .clone();
    request.pattern = Pattern::dense().window(window);
    let plan = Plan::new(request).expect("legal");
    assert!(
        plan.layouts().contains(&NodeLayout::MoreBytes),
        "{:?}",
        plan.layouts()
    );
}

#[test]
fn what_two_levels_do_not_do_is_refused() {
    let plan = dense(8, 4, Cut::Contiguous, false, Pass::Forward);
    let refused = |change: fn(&mut Request)| {
        let mut request = plan.request().clone();
        change(&mut request);
        match Plan::new(request).map(|_| ()) {
            Err(Error::NodeOption { node: 4, what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        refused(|of| of.queries = Queries::Replicated),
        "replicated queries"
    );
    assert_eq!(
        refused(|of| of.schedule.width = 2),
        "rounds of several distances"
    );
    assert_eq!(refused(|of| of.redundancy = 1), "redundancy");
    let bits = "bits that do not depend on the ring";
    assert_eq!(refused(|of| of.bits = Bits::InvariantTiles(16)), bits);
    let mut none = plan.request().clone();
    none.schedule.node = 0;
    assert!(matches!(
        Plan::new(none).map(|_| ()),
        Err(Error::Zero { .. })
    ));
}

/// Messages between two ranks in a round carry different pieces: all of a parcel arrives.
#[test]
fn the_pieces_of_a_parcel_are_all_of_it() {
    let plan = dense(8, 4, Cut::Striped, true, Pass::Forward);
    let program = plan.rank(1).expect("the rank exists");
    let mut tokens: BTreeMap<usize, usize> = BTreeMap::new();
    for round in &program.rounds {
        for message in round.receives.iter().filter(|of| of.address.peer == 5) {
            let origin = message.origin.as_ref().expect("rows of an input");
            for token in origin
                .rows
                .iter()
                .flat_map(|rows| rows.runs())
                .flat_map(|r| r.tokens())
            {
                *tokens.entry(token).or_default() += 1;
            }
        }
    }
    // Keys and values of the 16 tokens of rank 5.
    assert_eq!(tokens.len(), 16);
    assert!(
        tokens
            .iter()
            .all(|(token, count)| token % 8 == 5 && *count == 2),
        "{tokens:?}"
    );
}

/// Runs the programs of all ranks on threads.
fn run_programs(programs: Vec<RankPlan>, tensors: &CallTensors) -> Tensor {
    let kernel = &NaiveKernel;
    let ends = endpoints(programs.len(), DEADLINE);
    let ranks = std::thread::scope(|scope| {
        let threads = programs.into_iter().zip(ends).map(|(program, mut end)| {
            scope.spawn(move || {
                let number = program.rank;
                let mut rank = Rank::new(kernel, program).expect("there is memory");
                for (role, tensor) in [
                    (Role::Q, &tensors.q),
                    (Role::K, &tensors.k),
                    (Role::V, &tensors.v),
                ] {
                    rank.load(kernel, role, &tensor.view()).expect("it fits");
                }
                let mut recorder = Recorder::new(number, Instant::now());
                let run = rank.run(kernel, &mut end, &mut recorder);
                run.expect("nothing fails");
                rank
            })
        });
        let threads: Vec<_> = threads.collect();
        let ranks = threads.into_iter().map(|of| of.join().expect("no panic"));
        ranks.collect::<Vec<_>>()
    });
    let mut out = Tensor::zeros(DType::F64, tensors.q.dims());
    for rank in ranks {
        rank.store(kernel, Role::Out, &mut out).expect("it fits");
    }
    out
}

/// A parcel that goes to the node after the next, and pieces that arrive in the wrong order.
#[test]
fn mutants_that_send_to_the_wrong_node_or_in_the_wrong_order_die() {
    const NODE: usize = 2;
    let plan = dense(8, NODE, Cut::Contiguous, false, Pass::Forward);
    let request = Request {
        dtype: DType::F64,
        ..plan.request().clone()
    };
    let plan = Plan::new(request).expect("legal");
    let tensors = CallTensors::random(&plan.request().shape, 7);
    let run = |mutate: &dyn Fn(&mut RankPlan)| {
        let programs = (0..8).map(|rank| {
            let mut program = plan.rank(rank).expect("the rank exists");
            mutate(&mut program);
            program
        });
        run_programs(programs.collect(), &tensors)
    };
    let right = run(&|_| ());
    let wrong_node = run(&|program| {
        let node = program.rank / NODE;
        for round in &mut program.rounds {
            let sends = round.sends.iter_mut().map(|message| (message, NODE));
            let receives = round.receives.iter_mut().map(|message| (message, 8 - NODE));
            for (message, by) in sends.chain(receives) {
                let peer = &mut message.address.peer;
                if *peer / NODE != node {
                    *peer = (*peer + by) % 8;
                }
            }
        }
    });
    assert_ne!(right, wrong_node);
    let wrong_order = run(&|program| {
        // The first turn's pieces are put together: the two of the keys are exchanged.
        let mut pieces: BTreeMap<BufferId, Vec<&mut BufferId>> = BTreeMap::new();
        for task in &mut program.rounds[NODE].before {
            if let Task::Copy { from, to, .. } = task {
                pieces.entry(*to).or_default().push(from);
            }
        }
        assert_eq!(pieces.len(), 2, "keys and values");
        for of in pieces.into_values() {
            let [one, other] = of.try_into().expect("two pieces");
            std::mem::swap(one, other);
        }
    });
    assert_ne!(right, wrong_order);
}
