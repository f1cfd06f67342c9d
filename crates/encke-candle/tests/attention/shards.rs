//! One operation per rank with that rank's rows, as in several processes, here on threads.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{Tensor, Var};
use encke::threads::endpoints;
use encke::{Attention as Whole, Cut, MixingGradient, Mode, OffsetRule, Pattern};
use encke_candle::{Attention, ShardBackend, attention};

use crate::plain::{distance, random};

#[test]
fn shards_have_the_gradients_of_the_whole_sequence() {
    let (tokens, ranks) = (40, 4);
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[8, 40], &[1, 4], mode)
        .unwrap()
        .causal(true);
    let settings = Whole::builder()
        .pattern(pattern)
        .ranks(ranks)
        .sharding(Cut::Contiguous);
    let inputs = [(1, 4), (2, 2), (3, 2)].map(|(seed, heads)| random(seed, [1, tokens, heads, 8]));
    let weights = random(4, [1, tokens, 4, 8]);

    let gradients = |inputs: &[Tensor; 3], weights: &Tensor, attend: &Attention| {
        let [q, k, v] = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
        let out = attention(&q, &k, &v, attend).unwrap();
        let loss = (out.clone() * weights).unwrap().sum_all().unwrap();
        let gradients = loss.backward().unwrap();
        let of = |x: &Var| gradients.get(x).unwrap().clone();
        [out, of(&q), of(&k), of(&v)]
    };
    let whole = Attention::new(settings.clone()).unwrap();
    let expected = gradients(&inputs, &weights, &whole);

    let parts: Vec<[Tensor; 4]> = std::thread::scope(|scope| {
        let ends = endpoints(ranks, Duration::from_secs(60))
            .into_iter()
            .enumerate();
        let threads = ends.map(|(rank, transport)| {
            let (settings, inputs, weights) = (settings.clone(), &inputs, &weights);
            scope.spawn(move || {
                let shard = settings.build_shard(rank).unwrap();
                let rows = shard.sharding().rows(tokens, rank);
                let own = |x: &Tensor| x.narrow(1, rank * rows, rows).unwrap();
                let attend = Attention::from_backend(Arc::new(ShardBackend::new(
                    shard,
                    tokens,
                    transport,
                    |_| (),
                )));
                gradients(&inputs.each_ref().map(own), &own(weights), &attend)
            })
        });
        let threads: Vec<_> = threads.collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for (at, expected) in expected.iter().enumerate() {
        let own: Vec<&Tensor> = parts.iter().map(|part| &part[at]).collect();
        let got = Tensor::cat(&own, 1).unwrap();
        assert_eq!(
            distance(&got, expected),
            0.0,
            "threads and shards have the same bits"
        );
    }
}
