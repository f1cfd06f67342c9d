//! Calls with injected faults: the right bits, or a typed error on every rank inside its deadline.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::Pattern;
use encke_core::conformance::Configuration;
use encke_core::naive::NaiveKernel;
use encke_core::plan::Queries;
use encke_core::sharding::Sharding;
use encke_ring::{RankError, RingError};
use encke_sim::fault_config::{FaultConfig, FaultKind, RankDeath, ReceiverChecks, SlowRank};
use encke_sim::fault_outcome::{self, FaultOutcome};
use encke_sim::fault_run::{self, FaultRun};
use encke_sim::random_call::RandomCall;

use crate::support::bits;

fn run_and_check(call: &RandomCall, config: &FaultConfig) -> (FaultRun, FaultOutcome) {
    fault_outcome::run_and_check(&NaiveKernel, call, config).expect("the call can begin")
}

fn random_case(seed: u64, kind: FaultKind) -> (RandomCall, FaultConfig) {
    fault_outcome::random_case(kind, seed).expect("a random configuration is legal")
}

#[test]
fn two_thousand_seeds_give_the_right_bits_or_valid_errors() {
    for kind in FaultKind::ALL {
        let (mut correct, mut failed, mut hit) = (0, 0, 0);
        for seed in 0..250 {
            let (call, config) = random_case(seed, kind);
            let (run, outcome) = run_and_check(&call, &config);
            assert!(outcome.is_allowed(), "seed {seed}, {kind:?}: {outcome:?}");
            correct += usize::from(outcome == FaultOutcome::Correct);
            failed += usize::from(outcome != FaultOutcome::Correct);
            hit += usize::from(!run.faults.is_empty());
        }
        assert!(hit > 50, "{kind:?} was injected in {hit} runs");
        // Some runs complete under each kind, and some fail under each that can make a run fail.
        assert!(correct > 0, "{kind:?}");
        let harmless = matches!(kind, FaultKind::Reordering | FaultKind::Duplication);
        assert_eq!(failed == 0, harmless, "{kind:?}: {failed} failed");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_seed_gives_the_right_bits_or_valid_errors(seed in any::<u64>()) {
        let (call, config) = random_case(seed, FaultKind::Everything);
        let (_, outcome) = run_and_check(&call, &config);
        prop_assert!(outcome.is_allowed(), "{:?}", outcome);
    }

    #[test]
    fn a_seed_reproduces_the_run(seed in any::<u64>()) {
        let (call, config) = random_case(seed, FaultKind::Everything);
        let run = || fault_run::run(&NaiveKernel, &call.plan, &call.inputs(), &config);
        let (one, other) = (run().expect("it begins"), run().expect("it begins"));
        prop_assert_eq!(&one.faults, &other.faults);
        prop_assert_eq!(&one.ends, &other.ends);
        prop_assert_eq!(one.events, other.events);
        match (&one.result, &other.result) {
            (Ok(one), Ok(other)) => prop_assert_eq!(bits(one.tensors()), bits(other.tensors())),
            (Err(one), Err(other)) => prop_assert_eq!(one, other),
            _ => prop_assert!(false, "one run completed, the other did not"),
        }
    }
}

/// The number of 150 runs that return wrong values.
fn wrong_results(kind: FaultKind, checks: ReceiverChecks) -> usize {
    let wrong = |seed: &u64| {
        let (call, mut config) = random_case(*seed, kind);
        config.checks = checks;
        matches!(run_and_check(&call, &config).1, FaultOutcome::Wrong { .. })
    };
    (0..150).filter(wrong).count()
}

#[test]
fn without_checksums_corruption_gives_wrong_results() {
    assert_eq!(wrong_results(FaultKind::Corruption, ReceiverChecks::All), 0);
    let wrong = wrong_results(FaultKind::Corruption, ReceiverChecks::NoChecksum);
    assert!(wrong > 10, "the mutant survives: {wrong} wrong");
}

#[test]
fn without_round_checks_duplication_and_reordering_give_wrong_results() {
    for kind in [FaultKind::Duplication, FaultKind::Reordering] {
        assert_eq!(wrong_results(kind, ReceiverChecks::All), 0);
        let wrong = wrong_results(kind, ReceiverChecks::NoRound);
        assert!(
            wrong > 5,
            "the mutant survives under {kind:?}: {wrong} wrong"
        );
    }
}

/// A dense ring of four: every rank needs the rows of every other.
fn dense_ring() -> RandomCall {
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = Pattern::dense();
    request.queries = Queries::Sharded;
    request.shape = request.shape.with_tokens(32);
    request.sharding = Sharding::contiguous(4).expect("four ranks");
    RandomCall::new(&configuration, false).expect("legal")
}

#[test]
fn a_death_is_the_first_error_and_neighbours_miss_their_deadlines() {
    let mut config = FaultConfig::none(5);
    config.deaths = vec![RankDeath::new(2, 1)];
    let (run, outcome) = run_and_check(&dense_ring(), &config);
    let died = RankError::Died { rank: 2, round: 1 };
    assert_eq!(outcome, FaultOutcome::Failed { first: died });
    let Err(RingError::Rank { rank, others, .. }) = run.result else {
        panic!("a rank died");
    };
    assert_eq!(rank, 2);
    let missed = |(_, error): &(usize, RankError)| {
        let message = error.to_string();
        message.contains("for rank 2") && message.contains("deadline of 100ms")
    };
    assert!(others.iter().any(missed), "{others:?}");
}

#[test]
fn ranks_wait_for_a_slow_rank_until_their_deadline() {
    for (times, correct) in [(90, true), (120, false)] {
        let mut config = FaultConfig::none(5);
        config.slow = Some(SlowRank { rank: 1, times });
        let (_, outcome) = run_and_check(&dense_ring(), &config);
        assert!(outcome.is_allowed(), "{outcome:?}");
        assert_eq!(outcome == FaultOutcome::Correct, correct, "{times} times");
    }
}

#[test]
fn if_all_messages_are_lost_all_ranks_fail_at_their_first_deadline() {
    let mut config = FaultConfig::none(9);
    config.loss = 1.0;
    let (run, outcome) = run_and_check(&dense_ring(), &config);
    assert!(
        matches!(outcome, FaultOutcome::Failed { .. }),
        "{outcome:?}"
    );
    for end in &run.ends {
        assert_eq!(end.at, config.compute + Duration::from_millis(100));
        assert_eq!(end.round, 0);
    }
}

#[test]
fn ranks_that_finished_also_fail_if_another_rank_failed() {
    // Under a causal mask the first rank needs no other, and finishes long before the last one.
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = Pattern::dense().causal(true);
    request.queries = Queries::Sharded;
    request.shape = request.shape.with_tokens(32);
    request.sharding = Sharding::contiguous(4).expect("four ranks");
    let call = RandomCall::new(&configuration, false).expect("legal");
    let mut config = FaultConfig::none(5);
    config.deaths = vec![RankDeath::new(3, 2)];
    let (run, outcome) = run_and_check(&call, &config);
    assert!(
        matches!(outcome, FaultOutcome::Failed { .. }),
        "{outcome:?}"
    );
    assert_eq!(run.ends[0].error, None);
    let Err(RingError::Rank { others, .. }) = run.result else {
        panic!("a rank died");
    };
    let (rank, error) = &others[0];
    assert_eq!(*rank, 0);
    assert!(
        error.to_string().contains("because rank 3 failed"),
        "{error}"
    );
}
