//! Calls under hardship: the right bits, or a typed error for every rank inside its deadline.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::conformance::Configuration;
use encke_core::naive::NaiveKernel;
use encke_core::transport::TransportError;
use encke_ring::{RankError, RingError};
use encke_sim::hardship::{Checks, Death, Hardship, Kind, Slow};
use encke_sim::lockstep;
use encke_sim::trial::{self, Trial};

use crate::support::{Call, bits};

/// How a trial ended, if it ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Right,
    Failed,
    /// Wrong numbers: what must never be.
    Wrong,
}

fn rounds(call: &Call) -> usize {
    let of = |rank| call.plan.rank(rank).expect("the rank exists").rounds.len();
    (0..call.plan.ranks()).map(of).max().unwrap_or(0)
}

fn tried(call: &Call, hardship: &Hardship) -> Trial {
    let trial = trial::run(&NaiveKernel, &call.plan, &call.views(), hardship);
    trial.expect("the call can begin")
}

/// Holds a trial against the undisturbed run, and its errors against what they must be.
fn judge(call: &Call, hardship: &Hardship, trial: &Trial) -> Result<Verdict, String> {
    for end in &trial.ends {
        let latest = hardship.latest_end(end.rank, end.round.min(rounds(call) - 1));
        if end.at > latest {
            return Err(format!("{end:?} is after {latest:?}"));
        }
    }
    match &trial.result {
        Ok(outcome) => {
            let undisturbed = lockstep::run(&NaiveKernel, &call.plan, &call.views());
            let undisturbed = undisturbed.map_err(|error| error.to_string())?;
            let right = bits(outcome.tensors()) == bits(undisturbed.tensors());
            Ok(if right {
                Verdict::Right
            } else {
                Verdict::Wrong
            })
        }
        Err(RingError::Rank {
            rank,
            source,
            others,
        }) => {
            let mut failed: Vec<usize> = others.iter().map(|(rank, _)| *rank).collect();
            failed.push(*rank);
            failed.sort_unstable();
            if failed != (0..call.plan.ranks()).collect::<Vec<_>>() {
                return Err(format!("not every rank has an error: {failed:?}"));
            }
            if source.is_consequence() {
                return Err(format!("the first failure follows from none: {source}"));
            }
            for (rank, error) in others.iter().map(|(r, e)| (*r, e)).chain([(*rank, source)]) {
                named(call, hardship, rank, error)?;
            }
            Ok(Verdict::Failed)
        }
        Err(other) => Err(format!("not a rank's error: {other}")),
    }
}

/// Whether an error is typed as it must be and names the rank, its peer, the round and the times.
fn named(call: &Call, hardship: &Hardship, rank: usize, error: &RankError) -> Result<(), String> {
    let program = call.plan.rank(rank).map_err(|error| error.to_string())?;
    let expects = |peer: usize, round: usize| {
        let receives = &program.rounds[round].receives;
        receives.iter().any(|message| message.address.peer == peer)
    };
    let fine = match error {
        RankError::Transport(TransportError::Deadline {
            rank: who,
            peer,
            round,
            waited,
            limit,
        }) => {
            *who == rank && expects(*peer, *round) && *limit == hardship.deadline && waited == limit
        }
        RankError::Transport(TransportError::Corrupt {
            rank: who,
            peer,
            round,
            got,
            expected,
            ..
        }) => *who == rank && expects(*peer, *round) && got != expected,
        RankError::Transport(TransportError::PeerFailed {
            rank: who, peer, ..
        }) => *who == rank && *peer != rank,
        RankError::Died { rank: who, round } => {
            *who == rank
                && hardship.death
                    == Some(Death {
                        rank,
                        round: *round,
                    })
        }
        _ => false,
    };
    match fine {
        true => Ok(()),
        false => Err(format!("rank {rank} ended with {error:?}")),
    }
}

fn trial_of(seed: u64, kind: Kind) -> (Call, Hardship) {
    let call = Call::new(&Configuration::random(seed), seed % 2 == 1);
    let hardship = Hardship::random(kind, seed, call.plan.ranks(), rounds(&call));
    (call, hardship)
}

#[test]
fn two_thousand_seeds_end_right_or_in_errors() {
    for kind in Kind::ALL {
        let (mut right, mut failed, mut struck) = (0, 0, 0);
        for seed in 0..250 {
            let (call, hardship) = trial_of(seed, kind);
            let trial = tried(&call, &hardship);
            match judge(&call, &hardship, &trial) {
                Ok(Verdict::Right) => right += 1,
                Ok(Verdict::Failed) => failed += 1,
                wrong => panic!("seed {seed}, {kind:?}: {wrong:?}"),
            }
            struck += usize::from(!trial.strikes.is_empty());
        }
        assert!(struck > 50, "{kind:?} struck in {struck} runs");
        // Each kind is survived in some runs, and each that can end a run does in some.
        assert!(right > 0, "{kind:?}");
        let harmless = matches!(kind, Kind::Reordering | Kind::Duplication);
        assert_eq!(failed == 0, harmless, "{kind:?}: {failed} failed");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_seed_ends_right_or_in_errors(seed in any::<u64>()) {
        let (call, hardship) = trial_of(seed, Kind::Everything);
        let verdict = judge(&call, &hardship, &tried(&call, &hardship));
        let verdict = verdict.map_err(TestCaseError::fail)?;
        prop_assert_ne!(verdict, Verdict::Wrong);
    }

    #[test]
    fn the_seed_brings_the_run_back(seed in any::<u64>()) {
        let (call, hardship) = trial_of(seed, Kind::Everything);
        let (one, other) = (tried(&call, &hardship), tried(&call, &hardship));
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

/// What a mutant's runs come to.
fn wrong_numbers(kind: Kind, checks: Checks) -> usize {
    let wrong = |seed: &u64| {
        let (call, mut hardship) = trial_of(*seed, kind);
        hardship.checks = checks;
        // A mutant may also trip over an assertion of the simulator; it is wrong numbers that count.
        matches!(
            judge(&call, &hardship, &tried(&call, &hardship)),
            Ok(Verdict::Wrong)
        )
    };
    (0..150).filter(wrong).count()
}

#[test]
fn without_checksums_corruption_gives_wrong_numbers() {
    assert_eq!(wrong_numbers(Kind::Corruption, Checks::All), 0);
    let wrong = wrong_numbers(Kind::Corruption, Checks::NoChecksum);
    assert!(wrong > 10, "the mutant lives: {wrong} wrong");
}

#[test]
fn without_rounds_repetition_and_reordering_give_wrong_numbers() {
    for kind in [Kind::Duplication, Kind::Reordering] {
        assert_eq!(wrong_numbers(kind, Checks::All), 0);
        let wrong = wrong_numbers(kind, Checks::NoRound);
        assert!(wrong > 5, "the mutant lives under {kind:?}: {wrong} wrong");
    }
}

/// A dense ring of four: everyone needs everyone.
fn dense_ring() -> Call {
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = encke_core::Pattern::dense();
    request.queries = encke_core::plan::Queries::Sharded;
    request.shape.tokens = 32;
    request.sharding = encke_core::sharding::Sharding::contiguous(4).expect("four ranks");
    Call::new(&configuration, false)
}

#[test]
fn a_dead_rank_is_named_first_and_missed_by_its_neighbours() {
    let call = dense_ring();
    let mut hardship = Hardship::none(5);
    hardship.death = Some(Death { rank: 2, round: 1 });
    let trial = tried(&call, &hardship);
    assert_eq!(judge(&call, &hardship, &trial), Ok(Verdict::Failed));
    let Err(RingError::Rank {
        rank,
        source,
        others,
    }) = trial.result
    else {
        panic!("a rank died");
    };
    assert_eq!((rank, source), (2, RankError::Died { rank: 2, round: 1 }));
    let missed = |(_, error): &(usize, RankError)| {
        let said = error.to_string();
        said.contains("for rank 2") && said.contains("deadline of 100ms")
    };
    assert!(others.iter().any(missed), "{others:?}");
}

#[test]
fn a_slow_rank_is_waited_for_until_the_deadline_and_no_longer() {
    let call = dense_ring();
    for (times, right) in [(90, true), (120, false)] {
        let mut hardship = Hardship::none(5);
        hardship.slow = Some(Slow { rank: 1, times });
        let trial = tried(&call, &hardship);
        let expected = if right {
            Verdict::Right
        } else {
            Verdict::Failed
        };
        assert_eq!(
            judge(&call, &hardship, &trial),
            Ok(expected),
            "{times} times"
        );
    }
}

#[test]
fn one_lost_message_ends_every_rank() {
    let call = dense_ring();
    let mut hardship = Hardship::none(9);
    hardship.loss = 1.0;
    let trial = tried(&call, &hardship);
    assert_eq!(judge(&call, &hardship, &trial), Ok(Verdict::Failed));
    for end in &trial.ends {
        assert_eq!(end.at, hardship.compute + Duration::from_millis(100));
        assert_eq!(end.round, 0);
    }
}
