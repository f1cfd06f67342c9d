//! Deaths that are survived: every victim in every round, by seed, and the same bits as threads.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::conformance::Configuration;
use encke_core::naive::NaiveKernel;
use encke_core::plan::{Queries, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Error, GroupScale, Mode, Pattern};
use encke_ring::{Fault, FaultPhase, RankError, RingError, ThreadRing};
use encke_sim::fault_config::{Death, FaultConfig, Kind};
use encke_sim::fault_outcome::{self, FaultOutcome};
use encke_sim::fault_run::{self, FaultRun};
use encke_sim::sample::Sample;

use crate::support::bits;

fn tried(sample: &Sample, hardship: &FaultConfig) -> (FaultRun, FaultOutcome) {
    fault_outcome::try_out(&NaiveKernel, sample, hardship).expect("the call can begin")
}

fn surviving(pattern: Pattern, ranks: usize, cut: Cut, backward: bool) -> Sample {
    let mut configuration = Configuration::random(1);
    let request = &mut configuration.request;
    request.pattern = pattern;
    request.queries = Queries::Sharded;
    request.shape.tokens = 33;
    request.shape.heads = 4;
    request.shape.kv_heads = 2;
    request.sharding = Sharding::new(ranks, cut).expect("ranks are positive");
    request.redundancy = 1;
    request.schedule = Schedule::RING;
    Sample::new(&configuration, backward).expect("legal")
}

fn samples(ranks: usize) -> Vec<Sample> {
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
        [false, true].map(|backward| surviving(pattern.clone(), ranks, cut.clone(), backward))
    });
    passes.collect()
}

/// Every (step, victim) pair is survived, computes less than twice, and gives the bits that threads
/// give when the same rank dies in the same round.
#[test]
fn every_victim_in_every_round_as_in_threads() {
    for sample in samples(4) {
        let all = sample.plan.explain().expect("legal").pairs;
        let request = sample.plan.request();
        for rank in 0..4 {
            for round in 0..=sample.plan.rank(rank).expect("exists").rounds.len() {
                let mut hardship = FaultConfig::none(5);
                hardship.deaths = vec![Death::new(rank, round)];
                let (trial, verdict) = tried(&sample, &hardship);
                assert_eq!(
                    verdict,
                    FaultOutcome::Survived { deaths: 1 },
                    "{rank} {round}"
                );
                let outcome = trial.result.expect("it survived");
                assert!(outcome.pairs < 2 * all);
                let fault = Fault {
                    rank,
                    epoch: 0,
                    round,
                    phase: FaultPhase::Begin,
                };
                let ring = ThreadRing::new(NaiveKernel, Duration::from_secs(60));
                let ring = ring.with_faults(vec![fault]);
                let threads = ring.run(request, &sample.inputs()).expect("it survives");
                let (one, other) = (bits(outcome.tensors()), bits(threads.tensors()));
                assert_eq!(one, other, "{fault:?} {:?}", request.pass);
                assert_eq!(outcome.pairs, threads.pairs);
            }
        }
    }
}

#[test]
fn two_thousand_seeds_survive_or_end_in_errors() {
    for kind in Kind::ALL {
        let (mut right, mut survived, mut lost) = (0, 0, 0);
        for seed in 0..250 {
            let drawn = fault_outcome::draw_surviving(kind, seed, 1).expect("legal");
            let (trial, verdict) = tried(&drawn.0, &drawn.1);
            assert!(verdict.holds(), "seed {seed}, {kind:?}: {verdict:?}");
            right += usize::from(verdict == FaultOutcome::Right);
            survived += usize::from(matches!(verdict, FaultOutcome::Survived { .. }));
            let is_lost = |error: &RankError| matches!(error, RankError::Lost(_));
            let mut ends = trial.ends.iter().filter_map(|end| end.error.as_ref());
            lost += usize::from(ends.any(is_lost));
            // Who waits longer for the news than its deadline allows cannot know.
            let known = drawn.1.detection < drawn.1.deadline;
            if kind == Kind::Death && drawn.1.deaths.len() == 1 && known {
                assert_eq!(verdict, FaultOutcome::Survived { deaths: 1 }, "seed {seed}");
            }
        }
        // Where somebody always dies, nothing is left as it would have been.
        let deadly = matches!(kind, Kind::Death | Kind::Everything);
        assert_eq!(right > 0, !deadly, "{kind:?}: {right} right");
        assert_eq!(survived > 0, deadly, "{kind:?}: {survived} survived");
        assert!(lost > 0 || kind != Kind::Death, "{kind:?}: {lost} lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn the_seed_brings_the_run_back(seed in any::<u64>()) {
        let (sample, hardship) = fault_outcome::draw_surviving(Kind::Death, seed, 1).expect("legal");
        let run = || fault_run::run(&NaiveKernel, &sample.plan, &sample.inputs(), &hardship);
        let (one, other) = (run().expect("it begins"), run().expect("it begins"));
        prop_assert_eq!(&one.ends, &other.ends);
        match (&one.result, &other.result) {
            (Ok(one), Ok(other)) => prop_assert_eq!(bits(one.tensors()), bits(other.tensors())),
            (Err(one), Err(other)) => prop_assert_eq!(one, other),
            _ => prop_assert!(false, "one ended well, the other did not"),
        }
    }

    #[test]
    fn with_two_keepers_any_two_may_die(seed in any::<u64>()) {
        let (sample, mut hardship) = fault_outcome::draw_surviving(Kind::Death, seed, 2).expect("legal");
        hardship.deaths.truncate(2);
        hardship.detection = Duration::from_millis(30);
        let (_, verdict) = tried(&sample, &hardship);
        prop_assert!(matches!(verdict, FaultOutcome::Survived { .. }), "{:?}", verdict);
    }
}

#[test]
fn a_lost_shard_is_named_by_every_survivor() {
    for sample in samples(5) {
        let mut hardship = FaultConfig::none(5);
        hardship.deaths = vec![Death::new(2, 1), Death::new(3, 0)];
        let (trial, verdict) = tried(&sample, &hardship);
        assert!(
            matches!(verdict, FaultOutcome::Failed { .. }),
            "{verdict:?}"
        );
        let keepers = vec![3];
        let word = RankError::Lost(Error::LostShard { shard: 2, keepers });
        for end in &trial.ends {
            match end.rank {
                2 | 3 => assert!(end.error.as_ref().is_some_and(RankError::is_death)),
                _ => assert_eq!(end.error.as_ref(), Some(&word)),
            }
        }
        let Err(RingError::Rank { others, .. }) = trial.result else {
            panic!("a shard is lost");
        };
        assert_eq!(others.len(), 4);
    }
}
