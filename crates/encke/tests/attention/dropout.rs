//! Dropout of a training loop: each step has another seed, and all of them share a plan.

use encke::{Attention, Builder, Cut, DType, Dropout, Fault, FaultPhase, Pattern, Shape, Tensor};

use crate::support::TestTensors;

const SEEDS: [u64; 5] = [3, u64::MAX, 0, 7, 3];

fn settings(seed: u64) -> Builder {
    let dropout = Dropout::new(0.4, seed).expect("a probability");
    let builder = Attention::builder().pattern(Pattern::dense().causal(true));
    builder
        .ranks(3)
        .sharding(Cut::Zigzag)
        .dropout(Some(dropout))
}

/// out and dq of a step.
fn step(attention: &Attention, tensors: &TestTensors) -> [Tensor; 2] {
    let forward = tensors.forward(attention);
    let backward = tensors.backward(attention, &forward);
    [Tensor::clone(&forward.out), backward.dq]
}

#[test]
fn a_loop_with_another_seed_in_each_step_plans_once_and_allocates_once() {
    let shape = Shape::new(2, 61, 4, 2, 8).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F32, 1);
    let attention = settings(11).build().expect("legal");
    let mut steps = Vec::new();
    for seed in SEEDS {
        let got = step(&attention.with_seed(seed), &tensors);
        let alone = settings(seed).build().expect("legal");
        assert_eq!(got, step(&alone, &tensors), "seed {seed}");
        steps.push(got);
    }
    assert_eq!(steps[0], steps[4]);
    assert_ne!(steps[0], steps[1]);
    let stats = attention.stats();
    // A plan for each pass, whose buffers every later step takes.
    let hits = 2 * (SEEDS.len() - 1);
    assert_eq!((stats.plan_misses, stats.plan_hits), (2, hits));
    assert_eq!((stats.buffer_misses, stats.buffer_hits), (2, hits));
}

#[test]
fn a_call_that_survives_a_death_keeps_its_own_seed() {
    let shape = Shape::new(1, 40, 2, 1, 4).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F64, 2);
    let fault = Fault {
        rank: 1,
        epoch: 0,
        round: 1,
        phase: FaultPhase::Begin,
    };
    let surviving = settings(11).redundancy(1);
    let attention = surviving.drill(vec![fault]).build().expect("legal");
    for seed in SEEDS {
        let got = step(&attention.with_seed(seed), &tensors);
        let alone = settings(seed).build().expect("legal");
        for (got, expected) in got.iter().zip(step(&alone, &tensors)) {
            let pairs = got.to_f64().into_iter().zip(expected.to_f64());
            let off = pairs.fold(0.0, |most: f64, (x, y)| most.max((x - y).abs()));
            assert!(off < 1e-12, "off by {off:e} with seed {seed}");
        }
    }
}
