//! Bits that do not depend on the ring: every comparison is an equality of all bits.

use std::time::Instant;

use proptest::prelude::*;

use encke_core::conformance::{Random, extent};
use encke_core::job::Job;
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::{Fill, RankPlan, Role, Task};
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Bits, DType, Error, Pattern, Shape, Tensor};
use encke_cpu::{CpuKernel, InstructionSet};
use encke_ring::threads::endpoints;
use encke_ring::trace::Recorder;
use encke_ring::{Fault, FaultPhase, Rank, ThreadRing};

use crate::support::{CallTensors, Configuration, DEADLINE, RingResults, check, run};

/// The bytes of out, lse, dq, dk and dv.
fn bits(results: &RingResults) -> [Vec<u8>; 5] {
    let RingResults {
        out,
        lse,
        dq,
        dk,
        dv,
    } = results;
    [out, lse, dq, dk, dv].map(|tensor| tensor.data().bytes().to_vec())
}

fn on_ranks(case: &Configuration, ranks: usize) -> Configuration {
    Configuration {
        request: case
            .request
            .clone()
            .on_ranks(ranks)
            .expect("ranks are positive"),
        seed: case.seed,
    }
}

/// A ring whose cuts are anywhere between tiles, some of them equal.
fn cut_anywhere(case: &Configuration, random: &mut Random, ranks: usize) -> Configuration {
    let tokens = case.request.shape.tokens;
    let fine = case
        .request
        .clone()
        .on_ranks(tokens)
        .expect("one rank a token");
    let Cut::Firsts(cuts) = fine.sharding.cut() else {
        panic!("a sharding on a grid has first tokens");
    };
    let mut firsts: Vec<usize> = (0..ranks).map(|_| random.pick(cuts)).collect();
    firsts[0] = 0;
    firsts.sort_unstable();
    let sharding = Sharding::new(ranks, Cut::Firsts(firsts)).expect("ranks are positive");
    Configuration {
        request: Request {
            sharding,
            ..case.request.clone()
        },
        seed: case.seed,
    }
}

/// The results of a case are the same on rings of some sizes.
fn same_on_rings(set: InstructionSet, case: &Configuration, ranks: &[usize]) -> Result<(), String> {
    let ring = ThreadRing::new(CpuKernel::with(set).expect("it is available"), DEADLINE);
    let alone = bits(&run(&ring, case)?);
    let mut random = Random::new(case.seed);
    for &ranks in ranks {
        let cut = cut_anywhere(case, &mut random, ranks);
        let mut at_home = cut.clone();
        at_home.request.schedule.backward = Rotating::Queries;
        for case in [on_ranks(case, ranks), cut, at_home] {
            let got = bits(&run(&ring, &case)?);
            for (name, (got, alone)) in ["out", "lse", "dq", "dk", "dv"]
                .into_iter()
                .zip(got.iter().zip(&alone))
            {
                if got != alone {
                    return Err(format!("{name} differs, {set}: {case:?}"));
                }
            }
        }
    }
    Ok(())
}

fn arms() -> Vec<InstructionSet> {
    let all = InstructionSet::ALL.into_iter();
    all.filter(|set| set.is_available()).collect()
}

const TYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F64];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(6, 24)))]

    #[test]
    fn every_ring_has_the_bits_of_one_rank_on_every_arm(seed in any::<u64>()) {
        let mut random = Random::new(seed);
        for set in arms() {
            let case = Configuration::tiled(seed, random.pick(&TYPES));
            let ranks = [2, 3, 4 + random.below(29)];
            same_on_rings(set, &case, &ranks).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn results_are_those_of_the_reference(seed in any::<u64>()) {
        let mut case = Configuration::tiled(seed, DType::F64);
        let shape = &mut case.request.shape;
        (shape.batch, shape.heads, shape.kv_heads, shape.dim) = (1, 4, 2, 4);
        case.request.slopes = None;
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        for ranks in [1, 3] {
            check(&ring, &on_ranks(&case, ranks)).map_err(TestCaseError::fail)?;
        }
    }
}

fn dense(tokens: usize, causal: bool, dtype: DType) -> Configuration {
    let shape = Shape::new(1, tokens, 4, 2, 16).expect("legal");
    let pattern = Pattern::dense().causal(causal);
    let sharding = Sharding::contiguous(1).expect("legal");
    Configuration {
        request: Request {
            bits: Bits::InvariantTiles(32),
            ..Request::new(shape, pattern, sharding, dtype)
        },
        seed: 7,
    }
}

#[test]
fn rings_of_1_to_32_have_the_same_bits() {
    let all: Vec<usize> = (2..=32).collect();
    let ranks = extent(vec![2, 3, 4, 7, 13, 32], all);
    for (causal, set) in [false, true]
        .into_iter()
        .zip(arms().into_iter().rev().cycle())
    {
        let case = dense(32 * 32, causal, DType::F32);
        assert_eq!(same_on_rings(set, &case, &ranks), Ok(()));
    }
}

#[test]
fn planned_bits_depend_on_the_ring() {
    // What the tests above compare is not equal by itself.
    let mut case = dense(256, false, DType::F32);
    case.request.bits = Bits::Planned;
    let ring = ThreadRing::new(CpuKernel::new().expect("a kernel"), DEADLINE);
    let alone = bits(&run(&ring, &case).unwrap());
    let two = bits(&run(&ring, &on_ranks(&case, 2)).unwrap());
    assert!(alone.iter().zip(&two).all(|(one, other)| one != other));
}

/// Runs a program of one rank on the inputs of a case.
fn run_program(kernel: &CpuKernel, program: RankPlan, case: &Configuration) -> Tensor {
    let tensors = CallTensors::random(&case.request.shape, case.seed);
    let mut rank = Rank::new(kernel, program).expect("there is memory");
    for (role, tensor) in [
        (Role::Q, &tensors.q),
        (Role::K, &tensors.k),
        (Role::V, &tensors.v),
    ] {
        rank.load(kernel, role, &tensor.view()).expect("it fits");
    }
    let mut recorder = Recorder::new(0, Instant::now());
    let mut endpoint = endpoints(1, DEADLINE).remove(0);
    rank.run(kernel, &mut endpoint, &mut recorder)
        .expect("nothing fails");
    let mut out = Tensor::zeros(DType::F32, tensors.q.dims());
    rank.store(kernel, Role::Out, &mut out).expect("it fits");
    out
}

#[test]
fn a_mutant_with_two_tiles_swapped_has_other_bits() {
    let case = dense(128, false, DType::F32);
    let plan = Plan::new(case.request.clone()).expect("legal");
    let program = plan.rank(0).expect("one rank");
    for set in arms() {
        let kernel = CpuKernel::with(set).expect("it is available");
        // The steps of a job as jobs of their own, with two of them swapped.
        let run = |swap: Option<usize>| {
            let mut mutant = program.clone();
            for task in mutant.rounds[0].meanwhile.split_off(0) {
                let Task::Forward { job, carry, .. } = &task else {
                    panic!("attention that updates a carry");
                };
                for (buffer, value) in [
                    (carry.acc, Fill::Zero),
                    (carry.m, Fill::MinusInfinity),
                    (carry.l, Fill::Zero),
                ] {
                    let fill = Task::Fill { buffer, value };
                    mutant.rounds[0].before.push(fill);
                }
                let mut steps: Vec<Job> = job.tile_steps().collect();
                assert_eq!(steps.len(), 4, "a step for each diagonal");
                if let Some(at) = swap {
                    steps.swap(at, at + 1);
                }
                for step in steps {
                    let mut task = task.clone();
                    if let Task::Forward { job, starts, .. } = &mut task {
                        (*job, *starts) = (step, false);
                    }
                    mutant.rounds[0].meanwhile.push(task);
                }
            }
            run_program(&kernel, mutant, &case)
        };
        let expected = run(None);
        assert_eq!(run(None), expected);
        for at in 0..3 {
            assert_ne!(
                run(Some(at)),
                expected,
                "{set}, step {at} swapped with the next"
            );
        }
    }
}

#[test]
fn a_rank_that_dies_does_not_change_a_bit() {
    for causal in [false, true] {
        let mut case = on_ranks(&dense(256, causal, DType::F32), 4);
        let kernel = || CpuKernel::new().expect("a kernel");
        let expected = bits(&run(&ThreadRing::new(kernel(), DEADLINE), &case).unwrap());
        case.request.redundancy = 1;
        for (rank, round) in [(0, 0), (1, 1), (3, 2), (2, 5)] {
            let fault = Fault {
                rank,
                epoch: 0,
                round,
                phase: FaultPhase::Begin,
            };
            let ring = ThreadRing::new(kernel(), DEADLINE).with_faults(vec![fault]);
            let survived = bits(&run(&ring, &case).unwrap());
            assert_eq!(survived, expected, "rank {rank} dies in round {round}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    for set in arms() {
        let kernel = || CpuKernel::with(set).expect("it is available");
        let ring = ThreadRing::new(kernel(), DEADLINE);
        for dtype in TYPES {
            let one = dense(300, true, dtype);
            let mut two = one.clone();
            two.request.shape.batch = 2;
            let tensors = CallTensors::random(&two.request.shape, 1);
            let first = |tensor: &Tensor| {
                let [_, rows, heads, dim] = tensor.dims();
                let values = &tensor.to_f64()[..rows * heads * dim];
                Tensor::from_f64(DType::F64, [1, rows, heads, dim], values).expect("it fits")
            };
            let forward = |request: &Request, [q, k, v]: [&Tensor; 3]| {
                let inputs = [
                    (Role::Q, q.view()),
                    (Role::K, k.view()),
                    (Role::V, v.view()),
                ];
                let mut outcome = ring.run(request, &inputs).expect("nothing fails");
                outcome.take(Role::Out).expect("an output")
            };
            let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(first);
            let alone = forward(&one.request, [&q, &k, &v]);
            let both = forward(&two.request, [&tensors.q, &tensors.k, &tensors.v]);
            let bytes = alone.data().bytes();
            assert_eq!(bytes, &both.data().bytes()[..bytes.len()], "{set} {dtype}");
        }
    }
}

fn refusal(change: impl Fn(&mut Request)) -> Error {
    let mut request = on_ranks(&dense(256, true, DType::F32), 4).request;
    change(&mut request);
    Plan::new(request).expect_err("it is refused")
}

#[test]
fn what_has_an_order_of_its_own_is_refused_with_its_name() {
    let names = |error: Error, words: &[&str]| {
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{text}");
        }
    };
    let error = refusal(|request| request.queries = Queries::Replicated);
    names(error, &["replicated queries", "shard"]);
    let error = refusal(|request| request.schedule = Schedule::GATHER);
    names(error, &["schedule", "width 1"]);
    for cut in [Cut::Zigzag, Cut::Striped] {
        let sharding = Sharding::new(4, cut).expect("legal");
        let error = refusal(|request| request.sharding = sharding.clone());
        names(error, &["contiguous", "rank 0"]);
    }
    let sharding = Sharding::new(2, Cut::Firsts(vec![0, 100])).expect("legal");
    let error = refusal(|request| request.sharding = sharding.clone());
    names(error, &["token 100", "tiles of 32", "96 or 128"]);
    let error = refusal(|request| request.bits = Bits::InvariantTiles(48));
    names(error, &["48", "power of two"]);
}
