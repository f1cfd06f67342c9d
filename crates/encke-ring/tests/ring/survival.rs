//! Calls that survive: whichever rank dies in whichever round, the others return the right result,
//! or one error that names the lost tokens.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::conformance::{Random, extent};
use encke_core::kernel::{Kernel, KernelError};
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Role;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::transport::TransportError;
use encke_core::{DType, Error, GroupScale, Mode, Pattern, Shape, Tensor};
use encke_ring::{Fault, FaultPhase, Outcome, RankError, RingError, ThreadRing};

use crate::calls::randomly_slow;
use crate::instrumented::{InstrumentedKernel, KernelCall, caller};
use crate::support::{CallTensors, Configuration, DEADLINE, check, difference};

/// The usual tolerance for f64.
const TOLERANCE: f64 = 1e-12;

/// One call of either pass. The forward results that a backward pass takes are made up: a lse near
/// that of the rows keeps the gradients in range.
fn call<K: Kernel>(ring: &ThreadRing<K>, request: &Request) -> Result<Outcome, RingError> {
    let shape = &request.shape;
    let tensors = CallTensors::random(shape, 5);
    let cells = [shape.batch, shape.queries, shape.heads, 1];
    let lse = vec![3.0; cells.iter().product()];
    let lse = Tensor::from_f64(DType::F64, cells, &lse).expect("sizes agree");
    let inputs = [
        (Role::Q, tensors.q.view()),
        (Role::K, tensors.k.view()),
        (Role::V, tensors.v.view()),
        (Role::Out, tensors.dout.view()),
        (Role::Lse, lse.view()),
        (Role::Dout, tensors.dout.view()),
        (Role::Dlse, tensors.dlse.view()),
    ];
    let count = match request.pass {
        Pass::Forward => 3,
        Pass::Backward { .. } | Pass::BackwardByBranch => inputs.len(),
    };
    ring.run(request, &inputs[..count])
}

fn with_faults(faults: &[Fault]) -> ThreadRing<NaiveKernel> {
    ThreadRing::new(NaiveKernel, DEADLINE).with_faults(faults.to_vec())
}

fn requests(ranks: usize) -> Vec<Request> {
    let mode = Mode::Group {
        scale: GroupScale::One,
    };
    let dilated = Pattern::dilated(&[9, 40], &[1, 3], mode).expect("legal");
    let patterns = [
        (Pattern::dense(), Cut::Contiguous),
        (Pattern::dense().causal(true), Cut::Zigzag),
        (dilated.clone().causal(true), Cut::Contiguous),
        (dilated, Cut::Striped),
    ];
    let passes = [Pass::Forward, Pass::Backward { dlse: true }];
    let each = patterns.into_iter().flat_map(|(pattern, cut)| {
        passes.map(|pass| Request {
            pass,
            redundancy: 1,
            ..Request::new(
                Shape::new(2, 37, 4, 2, 3).expect("sizes are positive"),
                pattern.clone(),
                Sharding::new(ranks, cut.clone()).expect("ranks are positive"),
                DType::F64,
            )
        })
    });
    each.collect()
}

/// Asserts that two calls returned the same, up to rounding.
fn assert_near(got: &Outcome, expected: &Outcome, what: &dyn std::fmt::Debug) {
    for ((role, got), (_, expected)) in got.tensors().iter().zip(expected.tensors()) {
        let off = difference(got, &expected.to_f64());
        assert!(off <= TOLERANCE, "{role:?} is off by {off:e}: {what:?}");
    }
}

fn bits(outcome: &Outcome) -> Vec<Vec<u8>> {
    let tensors = outcome.tensors().iter();
    tensors.map(|(_, x)| x.data().bytes().to_vec()).collect()
}

/// Every rank dies in every round, in both phases of the round.
#[test]
fn the_result_is_right_whichever_rank_dies_in_whichever_round() {
    for request in requests(4) {
        let undisturbed = call(&with_faults(&[]), &request).expect("nothing fails");
        let plan = Plan::new(request.clone()).expect("legal");
        for rank in 0..4 {
            for round in 0..=plan.rank(rank).expect("exists").rounds.len() {
                for phase in [FaultPhase::Begin, FaultPhase::Midst] {
                    let fault = Fault {
                        rank,
                        epoch: 0,
                        round,
                        phase,
                    };
                    let outcome = call(&with_faults(&[fault]), &request).expect("it survives");
                    assert_near(&outcome, &undisturbed, &(fault, &request.pass));
                    let dead: Vec<usize> = outcome.deaths.iter().map(|(rank, _)| *rank).collect();
                    assert_eq!(dead, [rank]);
                    // Less work than running the call twice.
                    assert!(outcome.pairs < 2 * undisturbed.pairs, "{fault:?}");
                }
            }
        }
    }
}

/// The same fault gives the same bits, whatever the timing.
#[test]
fn timing_does_not_change_the_bits_of_a_call_that_survived() {
    for request in requests(5) {
        for (rank, round) in [(0, 1), (3, 0), (4, 2), (2, 3)] {
            let fault = Fault {
                rank,
                epoch: 0,
                round,
                phase: FaultPhase::Begin,
            };
            let expected = bits(&call(&with_faults(&[fault]), &request).expect("it survives"));
            for _ in 0..3 {
                let ring = ThreadRing::new(randomly_slow(), DEADLINE).with_faults(vec![fault]);
                let outcome = call(&ring, &request).expect("it survives");
                assert_eq!(bits(&outcome), expected, "{fault:?} {:?}", request.pass);
            }
        }
    }
}

#[test]
fn several_ranks_may_die_while_a_copy_of_every_shard_is_left() {
    for request in requests(6) {
        let undisturbed = call(&with_faults(&[]), &request).expect("nothing fails");
        // 1 dies, then 4 in the continuation, then 0 in the next one; 2, 5 and the rank that
        // adopted the shard of 1 continue.
        let die = |rank, epoch, round| Fault {
            rank,
            epoch,
            round,
            phase: FaultPhase::Begin,
        };
        let faults = [die(1, 0, 1), die(4, 1, 1), die(0, 2, 0)];
        // Rank 1, which had the copy of rank 0's tokens, is dead.
        let lost = call(&with_faults(&faults), &request).expect_err("0 is lost");
        assert!(is_lost(&lost, 0, 1, &[1, 4, 0]), "{lost:?}");
        let faults = [die(1, 0, 1), die(5, 1, 1), die(3, 2, 0)];
        let outcome = call(&with_faults(&faults), &request).expect("it survives");
        assert_near(&outcome, &undisturbed, &faults);
        assert_eq!(outcome.deaths.len(), 3);
        // Two at once that are not neighbours.
        let faults = [die(1, 0, 1), die(3, 0, 1)];
        let outcome = call(&with_faults(&faults), &request).expect("it survives");
        assert_near(&outcome, &undisturbed, &faults);
        // Two at once that are neighbours.
        let faults = [die(2, 0, 1), die(3, 0, 0)];
        let lost = call(&with_faults(&faults), &request).expect_err("2 is lost");
        assert!(is_lost(&lost, 2, 3, &[2, 3]), "{lost:?}");
    }
}

/// True if every survivor ended with the same error about the lost shard.
fn is_lost(error: &RingError, shard: usize, keeper: usize, dead: &[usize]) -> bool {
    let keepers = vec![keeper];
    let expected = RankError::Lost(Error::LostShard { shard, keepers });
    let RingError::Rank {
        rank,
        source,
        others,
    } = error
    else {
        return false;
    };
    let ends = others.iter().map(|(rank, error)| (*rank, error));
    let mut ends = ends.chain([(*rank, source)]);
    !dead.contains(rank)
        && ends.all(|(rank, error)| match dead.contains(&rank) {
            true => error.is_death(),
            false => *error == expected,
        })
}

#[test]
fn errors_that_are_not_deaths_end_the_call_for_all_ranks() {
    let request = &requests(4)[0];
    // A kernel that fails.
    let is_by =
        |call: &KernelCall<'_>, rank| matches!(call, KernelCall::Attend { .. }) && caller() == rank;
    let refuses = InstrumentedKernel(|call: KernelCall<'_>| match is_by(&call, 2) {
        true => Err(KernelError::Unsupported {
            kernel: "test",
            what: "this".to_string(),
        }),
        false => Ok(()),
    });
    let error = call(&ThreadRing::new(refuses, DEADLINE), request).expect_err("2 refuses");
    let RingError::Rank {
        rank: 2,
        source: RankError::Kernel { .. },
        others,
    } = error
    else {
        panic!("{error:?}");
    };
    assert_eq!(others.len(), 3);
    assert!(
        others.iter().all(|(_, error)| error.is_consequence()),
        "{others:?}"
    );
    // A stuck rank is not dead: the deadline of its neighbours expires.
    let stuck = InstrumentedKernel(|call: KernelCall<'_>| {
        if is_by(&call, 1) {
            std::thread::sleep(Duration::from_millis(400));
        }
        Ok(())
    });
    let ring = ThreadRing::new(stuck, Duration::from_millis(50));
    let error = call(&ring, request).expect_err("1 is stuck");
    let RingError::Rank { source, others, .. } = error else {
        panic!("{error:?}");
    };
    let deadline = RankError::Transport(TransportError::Deadline {
        rank: 0,
        peer: 0,
        round: 0,
        waited: Duration::ZERO,
        limit: Duration::ZERO,
    });
    let same = std::mem::discriminant(&deadline) == std::mem::discriminant(&source);
    assert!(same && others.len() == 3, "{source:?}, {others:?}");
}

#[test]
fn the_call_ends_even_if_all_ranks_die() {
    let request = &requests(3)[0];
    let die = |rank| Fault {
        rank,
        epoch: 0,
        round: rank,
        phase: FaultPhase::Midst,
    };
    let error = call(&with_faults(&[0, 1, 2].map(die)), request).expect_err("no rank is left");
    let RingError::Rank { source, others, .. } = error else {
        panic!("{error:?}");
    };
    assert!(source.is_death() && others.iter().all(|(_, error)| error.is_death()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(20, 60)))]

    /// Any call, any rank, any round; in one case of three another rank dies after it.
    #[test]
    fn any_call_survives_any_death(seed in any::<u64>()) {
        let drawn = (0..).map(|i| Configuration::any(seed ^ (i << 40)));
        let mut drawn = drawn.filter(|case| case.request.sharding.ranks() > 1);
        let mut case = drawn.next().expect("most have more ranks");
        case.request.schedule.backward = Rotating::Keys;
        for pass in [Pass::Forward, Pass::Backward { dlse: true }] {
            let queries = Queries::Sharded;
            let request = Request { pass, queries, redundancy: 1, ..case.request.clone() };
            let kept = Configuration { request: request.clone(), seed };
            if pass == Pass::Forward {
                check(&with_faults(&[]), &kept).map_err(TestCaseError::fail)?;
            }
            let plan = Plan::new(request.clone()).expect("legal");
            let mut random = Random::new(seed);
            let mut fault = |epoch| {
                let rank = random.below(plan.ranks());
                let round = random.below(plan.rank(rank).expect("exists").rounds.len() + 1);
                let phase = random.pick(&[FaultPhase::Begin, FaultPhase::Midst]);
                Fault { rank, epoch, round, phase }
            };
            let faults: Vec<Fault> = (0..1 + usize::from(seed % 3 == 0)).map(&mut fault).collect();
            let undisturbed = call(&with_faults(&[]), &request).expect("nothing fails");
            match call(&with_faults(&faults), &request) {
                Ok(outcome) => assert_near(&outcome, &undisturbed, &faults),
                Err(RingError::Rank { source: RankError::Lost(_), .. }) => {
                    prop_assert!(faults.len() > 1);
                }
                Err(RingError::Rank { source, others, .. }) if source.is_death() => {
                    // No rank was left.
                    prop_assert_eq!(others.len() + 1, plan.ranks());
                    prop_assert!(others.iter().all(|(_, error)| error.is_death()));
                }
                Err(error) => prop_assert!(false, "{error:?}"),
            }
        }
    }
}
