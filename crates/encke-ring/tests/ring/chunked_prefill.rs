//! Prefill in chunks: with invariant bits, a call with the next queries and the keys so far gives
//! the rows of one call with all of them, bit for bit, whatever the sizes of the chunks.

use std::ops::Range;

use proptest::prelude::*;

use encke_core::conformance::{CallTensors, Configuration, Random, extent};
use encke_core::plan::Request;
use encke_core::plan::program::Role;
use encke_core::{DType, Tensor};
use encke_cpu::{CpuKernel, InstructionSet};
use encke_ring::ThreadRing;

use crate::support::DEADLINE;

/// Rows of a tensor.
fn rows(tensor: &Tensor, range: &Range<usize>) -> Tensor {
    let [batch, tokens, heads, dim] = tensor.dims();
    let width = heads * dim;
    let values = tensor.to_f64();
    let entries = values.chunks_exact((tokens * width).max(1));
    let chosen = entries.flat_map(|entry| &entry[range.start * width..range.end * width]);
    let chosen: Vec<f64> = chosen.copied().collect();
    let dims = [batch, range.len(), heads, dim];
    Tensor::from_f64(tensor.dtype(), dims, &chosen).expect("as many values as rows")
}

/// out and lse of the queries of `range`, with the keys before its end.
fn prefill(
    ring: &ThreadRing<CpuKernel>,
    request: &Request,
    tensors: &CallTensors,
    range: &Range<usize>,
) -> [Tensor; 2] {
    let mut request = request.clone();
    let shape = request.shape.with_tokens(range.end);
    request.shape = shape.with_queries(range.len()).expect("a query");
    request.pattern = request.pattern.query_offset(Some(range.start));
    let ranks = request.sharding.ranks();
    let request = request.on_ranks(ranks).expect("ranks are positive");
    let q = rows(&tensors.q, range);
    let [k, v] = [&tensors.k, &tensors.v].map(|keys| rows(keys, &(0..range.end)));
    let inputs = [
        (Role::Q, q.view()),
        (Role::K, k.view()),
        (Role::V, v.view()),
    ];
    let mut outcome = ring.run(&request, &inputs).expect("nothing fails");
    [Role::Out, Role::Lse].map(|role| outcome.take(role).expect("a forward pass returns it"))
}

/// A causal call on tiles, with a query for each key.
fn causal(seed: u64, dtype: DType) -> Configuration {
    let mut case = Configuration::tiled(seed, dtype);
    let request = &mut case.request;
    request.shape = request
        .shape
        .with_queries(request.shape.tokens)
        .expect("all");
    request.pattern = request.pattern.clone().documents(None).causal(true);
    case
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(8, 60)))]

    #[test]
    fn chunks_of_any_size_have_the_bits_of_one_call(seed in any::<u64>()) {
        let mut random = Random::new(seed);
        let sets = InstructionSet::ALL.into_iter().filter(|set| set.is_available());
        for set in sets {
            // Tiles of AMX hold 32 queries, from the first query of the call on.
            let grid = if set == InstructionSet::Amx { 32 } else { 1 };
            let dtype = random.pick(&[DType::F32, DType::Bf16, DType::F16, DType::F64]);
            let case = causal(seed, dtype);
            let ring = ThreadRing::new(CpuKernel::with(set).expect("available"), DEADLINE);
            let tensors = CallTensors::random(&case.request.shape, seed);
            let tokens = case.request.shape.tokens;
            let whole = prefill(&ring, &case.request, &tensors, &(0..tokens));
            let mut begin = 0;
            while begin < tokens {
                let most = random.pick(&[1, 7, 100, tokens]);
                let length = (1 + random.below(most)).next_multiple_of(grid);
                let range = begin..(begin + length).min(tokens);
                let ranks = 1 + random.below(4);
                let request = case.request.clone().on_ranks(ranks).expect("positive");
                let chunk = prefill(&ring, &request, &tensors, &range);
                for (got, whole) in chunk.iter().zip(&whole) {
                    let expected = rows(whole, &range);
                    prop_assert_eq!(
                        got.data().bytes(), expected.data().bytes(),
                        "{}, rows {:?} on {} ranks: {:?}", set, range, ranks, case
                    );
                }
                begin = range.end;
            }
        }
    }
}
