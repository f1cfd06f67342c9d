//! Fewer queries than keys in tensors that stay in shards: the results of one rank, on whole shards
//! and on ranks that are elsewhere.

use std::time::Duration;

use encke::conformance::CallTensors;
use encke::threads::endpoints;
use encke::{
    Attention, Builder, CallRows, Checkpoint, Cut, Documents, Error, Pattern, Shape,
    ShardAttention, Sharded, Tensor, Window,
};

const TOKENS: usize = 45;
const RANKS: usize = 4;

fn cuts() -> [Cut; 4] {
    let uneven = Cut::Firsts(vec![0, 20, 20, 41]);
    [Cut::Contiguous, uneven, Cut::Zigzag, Cut::Striped]
}

/// Patterns with their number of queries.
fn patterns() -> Vec<(Pattern, usize)> {
    let window = Window {
        left: Some(6),
        right: Some(1),
    };
    let documents = Documents::new(&[9, 1, 30, 5]).expect("lengths");
    let packed = Pattern::dense().causal(true).documents(Some(documents));
    vec![
        (Pattern::dense().causal(true), 7),
        (Pattern::dense().window(window).query_offset(Some(12)), 17),
        (packed.clone().query_offset(Some(3)), 20),
        (packed, 44),
    ]
}

fn builder(pattern: &Pattern, ranks: usize, cut: Cut) -> Builder {
    let builder = Attention::builder().pattern(pattern.clone());
    builder.ranks(ranks).sharding(cut).softcap(Some(2.0))
}

/// out, lse, dq, dk and dv on one rank.
fn alone(pattern: &Pattern, tensors: &CallTensors) -> [Tensor; 5] {
    let attention = builder(pattern, 1, Cut::Contiguous).build().expect("legal");
    let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
    let forward = attention.forward(&q, &k, &v).expect("legal");
    let (dout, dlse) = (tensors.dout.view(), tensors.dlse.view());
    let saved = &forward.checkpoint;
    let backward = attention.backward(&q, &k, &v, saved, &dout, Some(&dlse));
    let backward = backward.expect("legal");
    let [out, lse] = [&forward.out, &forward.lse].map(|of| Tensor::clone(of));
    [out, lse, backward.dq, backward.dk, backward.dv]
}

fn assert_close(got: &[Tensor; 5], expected: &[Tensor; 5], what: &str) {
    for (name, (got, expected)) in ["out", "lse", "dq", "dk", "dv"]
        .into_iter()
        .zip(got.iter().zip(expected))
    {
        assert_eq!(got.dims(), expected.dims(), "{name}, {what}");
        let pairs = got.to_f64().into_iter().zip(expected.to_f64());
        for (at, (x, y)) in pairs.enumerate() {
            let near = x == y || (x - y).abs() <= 1e-12 * y.abs().max(1.0);
            assert!(near, "{name}, element {at}: {x} instead of {y}, {what}");
        }
    }
}

fn cases() -> impl Iterator<Item = (Pattern, Shape, Cut)> {
    patterns().into_iter().flat_map(|(pattern, queries)| {
        let shape = Shape::new(2, TOKENS, 4, 2, 3).and_then(|of| of.with_queries(queries));
        let shape = shape.and_then(|of| of.with_value_dim(5)).expect("legal");
        cuts().map(|cut| (pattern.clone(), shape, cut))
    })
}

#[test]
fn sharded_tensors_of_fewer_queries_give_the_results_of_one_rank() {
    for (pattern, shape, cut) in cases() {
        let tensors = CallTensors::random(&shape, 5);
        let ring = builder(&pattern, RANKS, cut.clone())
            .build()
            .expect("legal");
        let keys = |of: &Tensor| ring.shard(&of.view()).expect("legal");
        let rows = |of: &Tensor| ring.shard_queries(&of.view(), TOKENS).expect("legal");
        let (q, k, v) = (rows(&tensors.q), keys(&tensors.k), keys(&tensors.v));
        let forward = ring.forward_shards(&q, &k, &v).expect("legal");
        let (dout, dlse) = (rows(&tensors.dout), rows(&tensors.dlse));
        let results = (&forward.out, &forward.lse);
        let backward = ring.backward_shards((&q, &k, &v), results, &dout, Some(&dlse));
        let backward = backward.expect("legal");
        let whole = |of: &Sharded| of.gather().expect("legal");
        let got = [
            whole(&forward.out),
            whole(&forward.lse),
            whole(&backward.dq),
            whole(&backward.dk),
            whole(&backward.dv),
        ];
        let what = format!("{pattern:?}, {cut:?}");
        assert_close(&got, &alone(&pattern, &tensors), &what);
    }
}

/// out, lse, dq, dk and dv of a rank, from its shards of q, k, v, dout and dlse.
fn rank_alone(
    rank: &ShardAttention,
    rows: CallRows,
    [q, k, v, dout, dlse]: [&Tensor; 5],
    transport: &mut dyn encke::Transport<encke::Data>,
) -> Result<[Tensor; 5], Error> {
    let (q, k, v) = (q.view(), k.view(), v.view());
    let forward = rank.forward(rows, [&q, &k, &v], transport)?;
    let gradients = (&dout.view(), Some(&dlse.view()));
    // The second time every rank recomputes the forward pass.
    let nothing = Checkpoint::nothing();
    let again = rank.backward(rows, [&q, &k, &v], &nothing, gradients, transport)?;
    let saved = &forward.checkpoint;
    let backward = rank.backward(rows, [&q, &k, &v], saved, gradients, transport)?;
    assert_eq!(again.dq, backward.dq);
    let [out, lse] = [&forward.out, &forward.lse].map(|of| Tensor::clone(of));
    Ok([out, lse, backward.dq, backward.dk, backward.dv])
}

#[test]
fn ranks_elsewhere_with_fewer_queries_give_the_results_of_one_rank() {
    for (pattern, shape, cut) in cases() {
        let tensors = CallTensors::random(&shape, 6);
        let rows = CallRows {
            queries: shape.queries,
            keys: TOKENS,
        };
        let ring = builder(&pattern, RANKS, cut.clone())
            .build()
            .expect("legal");
        let keys = |of: &Tensor| ring.shard(&of.view()).expect("legal");
        let queries = |of: &Tensor| ring.shard_queries(&of.view(), TOKENS).expect("legal");
        let inputs = [
            queries(&tensors.q),
            keys(&tensors.k),
            keys(&tensors.v),
            queries(&tensors.dout),
            queries(&tensors.dlse),
        ];
        let (inputs, builder) = (&inputs, &builder(&pattern, RANKS, cut.clone()));
        let results: Vec<[Tensor; 5]> = std::thread::scope(|scope| {
            let wires = endpoints(RANKS, Duration::from_secs(60)).into_iter();
            let ranks = wires.enumerate().map(|(rank, mut wire)| {
                scope.spawn(move || {
                    let attention = builder.clone().build_shard(rank).expect("legal");
                    let own = inputs.each_ref().map(|of| of.shard(rank));
                    rank_alone(&attention, rows, own, &mut wire).expect("legal")
                })
            });
            let ranks: Vec<_> = ranks.collect();
            let joined = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            joined.collect()
        });
        let got: [Tensor; 5] = std::array::from_fn(|at| {
            let shards = results.iter().map(|of| of[at].clone()).collect();
            let of = if at < 3 { &inputs[0] } else { &inputs[1] };
            let whole = Sharded::from_shards_at(shards, ring.sharding(), of.positions().clone());
            whole.and_then(|of| of.gather()).expect("legal")
        });
        let what = format!("{pattern:?}, {cut:?}");
        assert_close(&got, &alone(&pattern, &tensors), &what);
    }
}
