//! Calls under hardship: the right bits, or a typed error for every rank inside its deadline.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::Pattern;
use encke_core::conformance::Configuration;
use encke_core::naive::NaiveKernel;
use encke_core::plan::Queries;
use encke_core::sharding::Sharding;
use encke_ring::{RankError, RingError};
use encke_sim::fault_config::{ReceiverChecks, RankDeath, FaultConfig, FaultKind, SlowRank};
use encke_sim::fault_outcome::{self, FaultOutcome};
use encke_sim::fault_run::{self, FaultRun};
use encke_sim::random_call::RandomCall;

use crate::support::bits;

fn tried(sample: &RandomCall, hardship: &FaultConfig) -> (FaultRun, FaultOutcome) {
    fault_outcome::try_out(&NaiveKernel, sample, hardship).expect("the call can begin")
}

fn drawn(seed: u64, kind: FaultKind) -> (RandomCall, FaultConfig) {
    fault_outcome::draw(kind, seed).expect("a random configuration is legal")
}

#[test]
fn two_thousand_seeds_end_right_or_in_errors() {
    for kind in FaultKind::ALL {
        let (mut right, mut failed, mut struck) = (0, 0, 0);
        for seed in 0..250 {
            let (sample, hardship) = drawn(seed, kind);
            let (trial, verdict) = tried(&sample, &hardship);
            assert!(verdict.holds(), "seed {seed}, {kind:?}: {verdict:?}");
            right += usize::from(verdict == FaultOutcome::Right);
            failed += usize::from(verdict != FaultOutcome::Right);
            struck += usize::from(!trial.strikes.is_empty());
        }
        assert!(struck > 50, "{kind:?} struck in {struck} runs");
        // Each kind is survived in some runs, and each that can end a run does in some.
        assert!(right > 0, "{kind:?}");
        let harmless = matches!(kind, FaultKind::Reordering | FaultKind::Duplication);
        assert_eq!(failed == 0, harmless, "{kind:?}: {failed} failed");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_seed_ends_right_or_in_errors(seed in any::<u64>()) {
        let (sample, hardship) = drawn(seed, FaultKind::Everything);
        let (_, verdict) = tried(&sample, &hardship);
        prop_assert!(verdict.holds(), "{:?}", verdict);
    }

    #[test]
    fn the_seed_brings_the_run_back(seed in any::<u64>()) {
        let (sample, hardship) = drawn(seed, FaultKind::Everything);
        let run = || fault_run::run(&NaiveKernel, &sample.plan, &sample.inputs(), &hardship);
        let (one, other) = (run().expect("it begins"), run().expect("it begins"));
        prop_assert_eq!(&one.strikes, &other.strikes);
        prop_assert_eq!(&one.ends, &other.ends);
        prop_assert_eq!(one.events, other.events);
        match (&one.result, &other.result) {
            (Ok(one), Ok(other)) => prop_assert_eq!(bits(one.tensors()), bits(other.tensors())),
            (Err(one), Err(other)) => prop_assert_eq!(one, other),
            _ => prop_assert!(false, "one ended well, the other did not"),
        }
    }
}

/// How many of some runs end in wrong numbers.
fn wrong_numbers(kind: FaultKind, checks: ReceiverChecks) -> usize {
    let wrong = |seed: &u64| {
        let (sample, mut hardship) = drawn(*seed, kind);
        hardship.checks = checks;
        matches!(tried(&sample, &hardship).1, FaultOutcome::Wrong { .. })
    };
    (0..150).filter(wrong).count()
}

#[test]
fn without_checksums_corruption_gives_wrong_numbers() {
    assert_eq!(wrong_numbers(FaultKind::Corruption, ReceiverChecks::All), 0);
    let wrong = wrong_numbers(FaultKind::Corruption, ReceiverChecks::NoChecksum);
    assert!(wrong > 10, "the mutant lives: {wrong} wrong");
}

#[test]
fn without_rounds_repetition_and_reordering_give_wrong_numbers() {
    for kind in [FaultKind::Duplication, FaultKind::Reordering] {
        assert_eq!(wrong_numbers(kind, ReceiverChecks::All), 0);
        let wrong = wrong_numbers(kind, ReceiverChecks::NoRound);
        assert!(wrong > 5, "the mutant lives under {kind:?}: {wrong} wrong");
    }
}

/// A dense ring of four: everyone needs everyone.
fn dense_ring() -> RandomCall {
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = Pattern::dense();
    request.queries = Queries::Sharded;
    request.shape.tokens = 32;
    request.sharding = Sharding::contiguous(4).expect("four ranks");
    RandomCall::new(&configuration, false).expect("legal")
}

#[test]
fn a_dead_rank_is_named_first_and_missed_by_its_neighbours() {
    let mut hardship = FaultConfig::none(5);
    hardship.deaths = vec![RankDeath::new(2, 1)];
    let (trial, verdict) = tried(&dense_ring(), &hardship);
    let died = RankError::Died { rank: 2, round: 1 };
    assert_eq!(verdict, FaultOutcome::Failed { first: died });
    let Err(RingError::Rank { rank, others, .. }) = trial.result else {
        panic!("a rank died");
    };
    assert_eq!(rank, 2);
    let missed = |(_, error): &(usize, RankError)| {
        let said = error.to_string();
        said.contains("for rank 2") && said.contains("deadline of 100ms")
    };
    assert!(others.iter().any(missed), "{others:?}");
}

#[test]
fn a_slow_rank_is_waited_for_until_the_deadline_and_no_longer() {
    for (times, right) in [(90, true), (120, false)] {
        let mut hardship = FaultConfig::none(5);
        hardship.slow = Some(SlowRank { rank: 1, times });
        let (_, verdict) = tried(&dense_ring(), &hardship);
        assert!(verdict.holds(), "{verdict:?}");
        assert_eq!(verdict == FaultOutcome::Right, right, "{times} times");
    }
}

#[test]
fn where_every_message_is_lost_every_deadline_strikes_at_once() {
    let mut hardship = FaultConfig::none(9);
    hardship.loss = 1.0;
    let (trial, verdict) = tried(&dense_ring(), &hardship);
    assert!(
        matches!(verdict, FaultOutcome::Failed { .. }),
        "{verdict:?}"
    );
    for end in &trial.ends {
        assert_eq!(end.at, hardship.compute + Duration::from_millis(100));
        assert_eq!(end.round, 0);
    }
}

#[test]
fn finished_ranks_learn_that_another_failed() {
    // Under a causal mask the first rank needs nobody, and is done long before the last one.
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = Pattern::dense().causal(true);
    request.queries = Queries::Sharded;
    request.shape.tokens = 32;
    request.sharding = Sharding::contiguous(4).expect("four ranks");
    let sample = RandomCall::new(&configuration, false).expect("legal");
    let mut hardship = FaultConfig::none(5);
    hardship.deaths = vec![RankDeath::new(3, 2)];
    let (trial, verdict) = tried(&sample, &hardship);
    assert!(
        matches!(verdict, FaultOutcome::Failed { .. }),
        "{verdict:?}"
    );
    assert_eq!(trial.ends[0].error, None);
    let Err(RingError::Rank { others, .. }) = trial.result else {
        panic!("a rank died");
    };
    let (rank, error) = &others[0];
    assert_eq!(*rank, 0);
    assert!(
        error.to_string().contains("because rank 3 failed"),
        "{error}"
    );
}
