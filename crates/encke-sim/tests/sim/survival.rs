//! Recovery from deaths: every rank in every round, by seed, and the same bits as threads.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::conformance::Configuration;
use encke_core::naive::NaiveKernel;
use encke_core::plan::{Queries, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Error, GroupScale, Mode, Pattern};
use encke_ring::{Fault, FaultPhase, RankError, RingError, ThreadRing};
use encke_sim::fault_config::{FaultConfig, FaultKind, RankDeath};
use encke_sim::fault_outcome::{self, FaultOutcome};
use encke_sim::fault_run::{self, FaultRun};
use encke_sim::random_call::RandomCall;

use crate::support::bits;

fn run_and_check(call: &RandomCall, config: &FaultConfig) -> (FaultRun, FaultOutcome) {
    fault_outcome::run_and_check(&NaiveKernel, call, config).expect("the call can begin")
}

fn deadly_case(seed: u64, redundancy: usize) -> (RandomCall, FaultConfig) {
    let case = fault_outcome::random_surviving_case(FaultKind::Death, seed, redundancy);
    case.expect("a random configuration is legal")
}

fn surviving_call(pattern: Pattern, ranks: usize, cut: Cut, backward: bool) -> RandomCall {
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = pattern;
    request.queries = Queries::Sharded;
    request.shape = request.shape.with_tokens(33);
    request.shape.heads = 4;
    request.shape.kv_heads = 2;
    request.sharding = Sharding::new(ranks, cut).expect("ranks are positive");
    request.redundancy = 1;
    request.schedule = Schedule::RING;
    RandomCall::new(&configuration, backward).expect("legal")
}

fn calls(ranks: usize) -> Vec<RandomCall> {
    let mode = Mode::Group {
        scale: GroupScale::One,
    };
    let dilated = Pattern::dilated(&[9, 40], &[1, 3], mode).expect("legal");
    let each = [
        (Pattern::dense(), Cut::Contiguous),
        (Pattern::dense().causal(true), Cut::Zigzag),
        (Pattern::dense().causal(true), Cut::Striped),
        (dilated.clone().causal(true), Cut::Contiguous),
        (dilated, Cut::Striped),
    ];
    let passes = each.into_iter().flat_map(|(pattern, cut)| {
        [false, true].map(|backward| surviving_call(pattern.clone(), ranks, cut.clone(), backward))
    });
    passes.collect()
}

/// Each rank's death in each round is survived, computes less than twice the pairs, and gives the
/// bits of threads of which the same rank dies in the same round.
#[test]
fn any_rank_may_die_in_any_round_with_the_bits_of_threads() {
    for call in calls(4) {
        let all = call.plan.explain().expect("legal").pairs;
        let request = call.plan.request();
        for rank in 0..4 {
            for round in 0..=call.plan.rank(rank).expect("exists").rounds.len() {
                let mut config = FaultConfig::none(5);
                config.deaths = vec![RankDeath::new(rank, round)];
                let (run, outcome) = run_and_check(&call, &config);
                assert_eq!(
                    outcome,
                    FaultOutcome::Survived { deaths: 1 },
                    "{rank} {round}"
                );
                let outcome = run.result.expect("it survived");
                assert!(outcome.pairs < 2 * all);
                let fault = Fault {
                    rank,
                    epoch: 0,
                    round,
                    phase: FaultPhase::Begin,
                };
                let ring = ThreadRing::new(NaiveKernel, Duration::from_secs(60));
                let ring = ring.with_faults(vec![fault]);
                let threads = ring.run(request, &call.inputs()).expect("it survives");
                let (one, other) = (bits(outcome.tensors()), bits(threads.tensors()));
                assert_eq!(one, other, "{fault:?} {:?}", request.pass);
                assert_eq!(outcome.pairs, threads.pairs);
            }
        }
    }
}

#[test]
fn two_thousand_seeds_survive_or_give_valid_errors() {
    for kind in FaultKind::ALL {
        let (mut correct, mut survived, mut lost) = (0, 0, 0);
        for seed in 0..250 {
            let drawn = fault_outcome::random_surviving_case(kind, seed, 1).expect("legal");
            let (run, outcome) = run_and_check(&drawn.0, &drawn.1);
            assert!(outcome.is_allowed(), "seed {seed}, {kind:?}: {outcome:?}");
            correct += usize::from(outcome == FaultOutcome::Correct);
            survived += usize::from(matches!(outcome, FaultOutcome::Survived { .. }));
            let is_lost = |error: &RankError| matches!(error, RankError::Lost(_));
            let mut ends = run.ends.iter().filter_map(|end| end.error.as_ref());
            lost += usize::from(ends.any(is_lost));
            // A death that is detected after the deadline is not known in time.
            let detected = drawn.1.detection < drawn.1.deadline;
            if kind == FaultKind::Death && drawn.1.deaths.len() == 1 && detected {
                assert_eq!(outcome, FaultOutcome::Survived { deaths: 1 }, "seed {seed}");
            }
        }
        // If a rank dies in every run, no run has the bits of a run without faults.
        let deadly = matches!(kind, FaultKind::Death | FaultKind::Everything);
        assert_eq!(correct > 0, !deadly, "{kind:?}: {correct} correct");
        assert_eq!(survived > 0, deadly, "{kind:?}: {survived} survived");
        assert!(
            lost > 0 || kind != FaultKind::Death,
            "{kind:?}: {lost} lost"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_seed_reproduces_the_run(seed in any::<u64>()) {
        let (call, config) = deadly_case(seed, 1);
        let run = || fault_run::run(&NaiveKernel, &call.plan, &call.inputs(), &config);
        let (one, other) = (run().expect("it begins"), run().expect("it begins"));
        prop_assert_eq!(&one.ends, &other.ends);
        match (&one.result, &other.result) {
            (Ok(one), Ok(other)) => prop_assert_eq!(bits(one.tensors()), bits(other.tensors())),
            (Err(one), Err(other)) => prop_assert_eq!(one, other),
            _ => prop_assert!(false, "one run completed, the other did not"),
        }
    }

    #[test]
    fn with_redundancy_two_any_two_ranks_may_die(seed in any::<u64>()) {
        let (call, mut config) = deadly_case(seed, 2);
        config.deaths.truncate(2);
        config.detection = Duration::from_millis(30);
        let (_, outcome) = run_and_check(&call, &config);
        prop_assert!(matches!(outcome, FaultOutcome::Survived { .. }), "{:?}", outcome);
    }
}

#[test]
fn every_survivor_names_a_lost_shard() {
    for call in calls(5) {
        let mut config = FaultConfig::none(5);
        config.deaths = vec![RankDeath::new(2, 1), RankDeath::new(3, 0)];
        let (run, outcome) = run_and_check(&call, &config);
        assert!(
            matches!(outcome, FaultOutcome::Failed { .. }),
            "{outcome:?}"
        );
        let keepers = vec![3];
        let lost = RankError::Lost(Error::LostShard { shard: 2, keepers });
        for end in &run.ends {
            match end.rank {
                2 | 3 => assert!(end.error.as_ref().is_some_and(RankError::is_death)),
                _ => assert_eq!(end.error.as_ref(), Some(&lost)),
            }
        }
        let Err(RingError::Rank { others, .. }) = run.result else {
            panic!("a shard is lost");
        };
        assert_eq!(others.len(), 4);
    }
}
