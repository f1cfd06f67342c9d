//! Continuations against the pattern: after any deaths in any rounds, every result contains every
//! pair exactly as often as its multiplicity says.

mod labels;

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use encke_core::conformance::{Configuration, Random};
use encke_core::plan::membership::{Agreement, Epoch, RankProgress};
use encke_core::plan::program::{Component, Role};
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Error, Pattern, Shape};

use labels::{LabelCall, LabelPair};

/// The pairs that belong to every query row, and to every key row.
fn expected(request: &Request) -> [BTreeMap<(usize, usize, usize), Vec<LabelPair>>; 2] {
    let shape = &request.shape;
    let (mut of_queries, mut of_keys) = (BTreeMap::new(), BTreeMap::new());
    for (b, t) in (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t))) {
        for h in 0..shape.heads {
            of_queries.insert((b, t, h), Vec::new());
        }
        for h in 0..shape.kv_heads {
            of_keys.insert((b, t, h), Vec::new());
        }
    }
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
        for (q, k) in (0..shape.tokens).flat_map(|q| (0..shape.tokens).map(move |k| (q, k))) {
            let kv_head = shape.kv_head(h);
            let pair = (
                ((b * shape.tokens + q) * shape.heads + h) as u32,
                ((b * shape.tokens + k) * shape.kv_heads + kv_head) as u32,
            );
            for _ in 0..request.pattern.multiplicity(shape, h, q, k) {
                of_queries.entry((b, q, h)).or_default().push(pair);
                of_keys.entry((b, k, kv_head)).or_default().push(pair);
            }
        }
    }
    for rows in [&mut of_queries, &mut of_keys] {
        rows.values_mut().for_each(|pairs| pairs.sort_unstable());
    }
    [of_queries, of_keys]
}

fn assert_complete(world: &LabelCall) {
    let request = world.epoch.plan().request();
    let shape = request.shape;
    let [of_queries, of_keys] = expected(request);
    match request.pass {
        Pass::Forward => assert_eq!(world.output(Role::Out, shape.heads), of_queries),
        Pass::Backward { .. } | Pass::BackwardByBranch => {
            assert_eq!(world.output(Role::Dq, shape.heads), of_queries);
            assert_eq!(world.output(Role::Dk, shape.kv_heads), of_keys);
            assert_eq!(world.output(Role::Dv, shape.kv_heads), of_keys);
        }
    }
}

/// A random call with redundancy and dim 1.
fn case(seed: u64, redundancy: usize) -> Arc<Plan> {
    let mut random = Random::new(seed ^ 0xdead);
    let drawn = (0..).map(|i| Configuration::any(seed ^ (i << 32)));
    let mut drawn = drawn.filter(|drawn| {
        let ranks = drawn.request.sharding.ranks();
        ranks > redundancy && ranks <= 8
    });
    let drawn = drawn.next().expect("most have more ranks");
    let passes = [Pass::Forward, Pass::Backward { dlse: false }];
    let request = Request {
        shape: Shape {
            dim: 1,
            value_dim: 1,
            queries: drawn.request.shape.tokens,
            ..drawn.request.shape
        },
        pattern: drawn.request.pattern.clone().query_offset(None),
        queries: Queries::Sharded,
        pass: random.pick(&passes),
        redundancy,
        schedule: drawn.request.schedule.with_backward(Rotating::Keys),
        ..drawn.request
    };
    Arc::new(Plan::new(request).expect("a random case is legal"))
}

/// Runs a call with successive deaths, each in a random round of its epoch, until the call ends or
/// a shard is lost. A shard may be reported lost only if its rank and all keepers are gone.
fn survives(seed: u64, redundancy: usize, deaths: usize) {
    let plan = case(seed, redundancy);
    let mut world = LabelCall::new(&plan, seed);
    let mut random = Random::new(seed ^ 0xfade);
    for _ in 0..deaths {
        let living: Vec<usize> = world.epoch.living().collect();
        if living.len() == 1 {
            break;
        }
        let victim = living[random.below(living.len())];
        let rounds = world
            .epoch
            .program(victim)
            .expect("it is alive")
            .rounds
            .len();
        let death = (victim, random.below(rounds + 2));
        let patience = random.pick(&[0, 3, 1000]);
        let agreement = world.run(Some(death), patience);
        assert!(!world.epoch.is_last(&agreement));
        match world.resume(&agreement) {
            Ok(()) => {}
            Err(Error::LostShard { shard, keepers }) => {
                let gone = |rank: &usize| agreement.progress[*rank].is_none();
                assert!(gone(&shard) && keepers.iter().all(gone));
                assert!(plan.shards().rows(shard) > 0);
                return;
            }
            Err(other) => panic!("{other}"),
        }
    }
    let agreement = world.run(None, 0);
    assert!(world.epoch.is_last(&agreement), "{agreement:?}");
    assert_complete(&world);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn after_a_death_every_pair_is_computed_once(seed in any::<u64>()) {
        survives(seed, 1, 1);
    }

    #[test]
    fn after_several_deaths_every_pair_is_computed_once(seed in any::<u64>()) {
        survives(seed, 1, 3);
    }

    #[test]
    fn with_redundancy_two_more_ranks_may_die(seed in any::<u64>()) {
        survives(seed, 2, 4);
    }

    /// Redundancy adds the inputs of one more shard to each rank's memory and sends no more bytes.
    #[test]
    fn redundancy_costs_one_replica_and_no_traffic(seed in any::<u64>()) {
        let plan = case(seed, 1);
        let bare = Plan::new(Request { redundancy: 0, ..plan.request().clone() }).expect("legal");
        prop_assert_eq!(
            plan.explain().expect("legal").sent_bytes,
            bare.explain().expect("legal").sent_bytes
        );
        for rank in 0..plan.ranks() {
            let kept = (rank + plan.ranks() - 1) % plan.ranks();
            let program = plan.rank(rank).expect("exists");
            let other = bare.rank(kept).expect("exists");
            let inputs = other.inputs.iter().map(|port| other.buffers[port.buffer.0].bytes());
            let replica = program.memory().get(&Component::Replica).copied();
            prop_assert_eq!(replica, Some(inputs.sum()));
        }
    }
}

fn dense(ranks: usize, pass: Pass) -> Arc<Plan> {
    let shape = Shape::new(1, 8 * ranks, 2, 1, 1).expect("sizes are positive");
    let sharding = Sharding::new(ranks, Cut::Contiguous).expect("ranks are positive");
    let request = Request {
        pass,
        redundancy: 1,
        ..Request::new(shape, Pattern::dense(), sharding, DType::F64)
    };
    Arc::new(Plan::new(request).expect("legal"))
}

/// Survivors do not recompute completed work: the later a rank dies, the less is left to do, and it
/// is always less than a call from the start.
#[test]
fn survivors_keep_their_work() {
    for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
        let plan = dense(4, pass);
        let all = plan.explain().expect("legal").pairs;
        for victim in 0..4 {
            let mut left = Vec::new();
            for round in 0..=4 {
                let mut world = LabelCall::new(&plan, 1);
                let agreement = world.run(Some((victim, round)), usize::MAX);
                world.resume(&agreement).expect("its keeper is alive");
                let pairs = world.epoch.pairs().expect("legal");
                left.push(pairs);
                let agreement = world.run(None, 0);
                assert!(world.epoch.is_last(&agreement));
                assert_complete(&world);
            }
            assert!(
                left.is_sorted_by(|a, b| a >= b),
                "{pass:?} {victim}: {left:?}"
            );
            assert!(left.iter().all(|pairs| *pairs < all), "{left:?} of {all}");
            // After the last round, only the dead rank's own pairs are left.
            let own = plan.rank(victim).expect("exists").pairs();
            if pass == Pass::Forward {
                assert_eq!(left[4], own, "{left:?}");
            }
        }
    }
}

#[test]
fn impossible_redundancy_and_lost_shards_are_errors() {
    let plan = dense(4, Pass::Forward);
    let request = |queries, redundancy| Request {
        queries,
        redundancy,
        ..plan.request().clone()
    };
    let replicated = Plan::new(request(Queries::Replicated, 1)).expect_err("not supported");
    assert_eq!(replicated, Error::RedundantQueries { redundancy: 1 });
    let many = Plan::new(request(Queries::Sharded, 4)).expect_err("too many");
    let message = "redundancy 4 on 4 ranks: each rank's inputs are replicated on that many other \
                   ranks, of which there are 3";
    assert!(many.to_string().starts_with(message), "{many}");
    let gone = |ranks: &[usize]| Agreement {
        progress: (0..4)
            .map(|rank| {
                let progress = RankProgress {
                    done: 1,
                    finished: false,
                };
                (!ranks.contains(&rank)).then_some(progress)
            })
            .collect(),
    };
    let lost = Epoch::first(&plan).next(&gone(&[1, 2])).expect_err("lost");
    let shard = Error::LostShard {
        shard: 1,
        keepers: vec![2],
    };
    assert_eq!(lost, shard);
    let later = Epoch::first(&plan).next(&gone(&[1])).expect("2 keeps it");
    assert_eq!(later.host(1), Some(2));
    assert_eq!(later.next(&gone(&[1, 2])).expect_err("lost"), shard);
    assert!(later.next(&gone(&[1, 3])).is_ok());
}
