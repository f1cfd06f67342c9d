//! Resizes: every row arrives at its new owner, the bytes moved are those planned, and as few as
//! possible.

use proptest::prelude::*;

use encke_core::conformance::{Random, extent};
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::resize::{Resize, ResizeTensor};
use encke_core::plan::{Pass, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape, Tensor};
use encke_ring::{RingError, Sharded, ThreadRing};

use crate::support::{CallTensors, DEADLINE};

/// Any sharding of `tokens` tokens, empty shards included.
fn sharding(tokens: usize) -> impl Strategy<Value = Sharding> {
    let firsts = prop::collection::vec(0..=tokens, 0..6).prop_map(|mut firsts| {
        firsts.push(0);
        firsts.sort_unstable();
        (firsts.len(), Cut::Firsts(firsts))
    });
    let named = (1usize..8, 0..3).prop_map(|(ranks, kind)| {
        let cut = [Cut::Contiguous, Cut::Zigzag, Cut::Striped][kind as usize].clone();
        (ranks, cut)
    });
    prop_oneof![firsts, named].prop_map(|(ranks, cut)| Sharding::new(ranks, cut).unwrap())
}

pub fn tensor(seed: u64, dims: [usize; 4], dtype: DType) -> Tensor {
    let mut random = Random::new(seed);
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| random.unit()).collect();
    Tensor::from_f64(dtype, dims, &values).unwrap()
}

/// The owner of each token.
fn owners(sharding: &Sharding, tokens: usize) -> Vec<usize> {
    let mut owners = vec![usize::MAX; tokens];
    for rank in 0..sharding.ranks() {
        for run in sharding.runs(tokens, rank) {
            run.tokens().for_each(|token| owners[token] = rank);
        }
    }
    owners
}

fn case() -> impl Strategy<Value = (usize, Sharding, Sharding)> {
    (1usize..60).prop_flat_map(|n| (Just(n), sharding(n), sharding(n)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(60, 250)))]

    #[test]
    fn every_token_moves_from_its_old_to_its_new_owner((n, from, to) in case()) {
        let resize = Resize::new(&from, &to, n).unwrap();
        let (had, will) = (owners(&from, n), owners(&to, n));
        let mut seen = vec![0; n];
        for moved in resize.moves() {
            for token in moved.tokens.tokens() {
                prop_assert_eq!((moved.from, moved.to), (had[token], will[token]));
                seen[token] += 1;
            }
        }
        prop_assert!(seen.iter().all(|times| *times == 1));
        // Keeping each new rank at the place of its number does not move fewer tokens.
        let places = resize.places();
        let moved = (0..n).filter(|t| had[*t] != places[will[*t]]).count();
        prop_assert_eq!(moved, resize.moved_tokens());
        let stays = Resize::in_place(&from, &to, n).unwrap();
        prop_assert!(moved <= stays.moved_tokens());
        if from == to {
            prop_assert_eq!(moved, 0);
        }
    }

    #[test]
    fn rows_arrive_and_the_bytes_are_those_planned(
        (n, from, to) in case(),
        batch in 1usize..3,
        seed in any::<u64>(),
    ) {
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        let whole = [
            tensor(seed, [batch, n, 3, 2], DType::F32),
            tensor(seed ^ 1, [batch, n, 1, 5], DType::Bf16),
        ];
        let held: Vec<Sharded> = whole.iter()
            .map(|tensor| Sharded::split(&tensor.view(), &from).unwrap())
            .collect();
        let held: Vec<&Sharded> = held.iter().collect();
        let resize = Resize::new(&from, &to, n).unwrap();
        let resized = ring.resize(&resize, &held).unwrap();
        for (tensor, whole) in resized.tensors.iter().zip(&whole) {
            prop_assert_eq!(tensor, &Sharded::split(&whole.view(), &to).unwrap());
        }
        let moving: Vec<ResizeTensor> = held.iter().map(|tensor| tensor.moving()).collect();
        prop_assert_eq!(resized.trace.sent_bytes(), resize.sent_bytes(&moving));
        for memory in &resized.memory {
            prop_assert!(memory.planned.keys().all(|of| *of == Component::Rows));
            let had = memory.allocated_bytes + memory.borrowed_bytes;
            prop_assert_eq!(memory.planned_bytes(), had);
        }
    }
}

#[test]
fn the_place_that_shares_the_fewest_tokens_leaves() {
    // Quarters to thirds: the last rank takes the last place, and 4 of 12 tokens move instead of 6.
    let contiguous = |ranks| Sharding::contiguous(ranks).unwrap();
    let resize = Resize::new(&contiguous(4), &contiguous(3), 12).unwrap();
    assert_eq!(resize.moved_tokens(), 4);
    assert_eq!((resize.places()[0], resize.places()[2]), (0, 3));
    let stays = Resize::in_place(&contiguous(4), &contiguous(3), 12).unwrap();
    assert_eq!((stays.moved_tokens(), stays.places()), (6, &[0, 1, 2][..]));
    // Halving a striped ring: each remaining rank keeps all of its rows.
    let striped = |ranks| Sharding::new(ranks, Cut::Striped).unwrap();
    let resize = Resize::new(&striped(8), &striped(4), 64).unwrap();
    assert_eq!(resize.moved_tokens(), 32);
}

fn request(sharding: &Sharding, pass: Pass) -> Request {
    let shape = Shape::new(2, 41, 4, 2, 3).unwrap();
    let pattern = Pattern::dense().causal(true);
    Request {
        pass,
        ..Request::new(shape, pattern, sharding.clone(), DType::F64)
    }
}

#[test]
fn calls_on_shards_have_the_bits_of_calls_on_whole_tensors() {
    let ring = ThreadRing::new(NaiveKernel, DEADLINE);
    for (ranks, cut) in [
        (4, Cut::Contiguous),
        (3, Cut::Zigzag),
        (5, Cut::Striped),
        (1, Cut::Zigzag),
    ] {
        let sharding = Sharding::new(ranks, cut).unwrap();
        for redundancy in 0..ranks.min(2) {
            let mut request = request(&sharding, Pass::Forward);
            request.redundancy = redundancy;
            let tensors = CallTensors::random(&request.shape, 3);
            let whole = [
                (Role::Q, tensors.q.view()),
                (Role::K, tensors.k.view()),
                (Role::V, tensors.v.view()),
            ];
            let held = whole.map(|(role, view)| (role, Sharded::split(&view, &sharding).unwrap()));
            let held = held.each_ref().map(|(role, tensor)| (*role, tensor));
            let mut expected = ring.run(&request, &whole).unwrap();
            let mut got = ring.run_shards(&request, &held).unwrap();
            for role in [Role::Out, Role::Lse] {
                let got = got.take(role).unwrap();
                assert_eq!(got.sharding(), &sharding);
                assert_eq!(got.gather().unwrap(), expected.take(role).unwrap());
            }
            // Shards have the layout of a rank's buffers, so nothing is copied.
            let inputs = 41 * 2 * (4 + 2 + 2) * 3 * 8;
            let borrowed: usize = got.memory.iter().map(|memory| memory.borrowed_bytes).sum();
            assert_eq!(borrowed, inputs * (1 + redundancy));
        }
    }
}

#[test]
fn shards_of_another_ring_are_refused() {
    let ring = ThreadRing::new(NaiveKernel, DEADLINE);
    let (four, three) = (
        Sharding::contiguous(4).unwrap(),
        Sharding::contiguous(3).unwrap(),
    );
    let request = request(&three, Pass::Forward);
    let tensors = CallTensors::random(&request.shape, 3);
    let held = [&tensors.q, &tensors.k, &tensors.v]
        .map(|tensor| Sharded::split(&tensor.view(), &four).unwrap());
    let inputs = [
        (Role::Q, &held[0]),
        (Role::K, &held[1]),
        (Role::V, &held[2]),
    ];
    let refused = ring.run_shards(&request, &inputs).unwrap_err();
    assert!(
        matches!(refused, RingError::Sharding { tensor: "q", .. }),
        "{refused}"
    );
    assert!(refused.to_string().contains("4 ranks"), "{refused}");
    let resize = Resize::new(&three, &four, 41).unwrap();
    assert!(ring.resize(&resize, &[&held[0]]).is_err());
}
