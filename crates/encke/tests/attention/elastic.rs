//! A resized ring gives the bits of a new ring of that size, also between forward and backward.

use encke::{
    Attention, Cut, DType, Error, MixingGradient, Mode, NewRing, OffsetRule, Pattern, Shape,
    Sharding,
};

use crate::support::TestTensors;

fn longnet() -> Pattern {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[16, 64, 256], &[1, 2, 8], mode);
    pattern.expect("sizes are positive").causal(true)
}

/// A new ring that was never resized.
fn fresh(pattern: &Pattern, ranks: usize, cut: Cut) -> Attention {
    let builder = Attention::builder().pattern(pattern.clone());
    builder.ranks(ranks).sharding(cut).build().expect("legal")
}

#[test]
fn resizing_to_three_six_and_one_ranks_gives_the_bits_of_new_rings() {
    let shape = Shape::new(2, 203, 4, 2, 16).expect("legal");
    for (dtype, pattern) in [
        (DType::F32, longnet()),
        (DType::Bf16, Pattern::dense().causal(true)),
    ] {
        for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
            let tensors = TestTensors::random(&shape, dtype, 4);
            let mut ring = fresh(&pattern, 4, cut.clone());
            let shard = |tensor: &encke::Tensor| ring.shard(&tensor.view()).expect("legal");
            let [mut q, mut k, mut v, mut dout] =
                [&tensors.q, &tensors.k, &tensors.v, &tensors.dout].map(shard);
            let mut forward = ring.forward_shards(&q, &k, &v).expect("legal");
            for ranks in [3, 6, 1] {
                // The forward pass ran before the resize, the backward pass runs after it.
                let moved = ring.resize(
                    ranks,
                    &mut [
                        &mut q,
                        &mut k,
                        &mut v,
                        &mut dout,
                        &mut forward.out,
                        &mut forward.lse,
                    ],
                );
                let moved = moved.expect("legal");
                assert_eq!(moved.sent_bytes, moved.trace.sent_bytes());
                assert!(moved.sent_bytes > 0, "rows have moved");
                let new = fresh(&pattern, ranks, cut.clone());
                let results = (&forward.out, &forward.lse);
                let backward = ring.backward_shards((&q, &k, &v), results, &dout, None);
                let backward = backward.expect("legal");
                let out = forward.out.gather().expect("legal");
                let lse = forward.lse.gather().expect("legal");
                let whole = |tensor: &encke::Tensor| new.shard(&tensor.view()).expect("legal");
                let expected = new.backward_shards(
                    (&whole(&tensors.q), &whole(&tensors.k), &whole(&tensors.v)),
                    (&whole(&out), &whole(&lse)),
                    &whole(&tensors.dout),
                    None,
                );
                let expected = expected.expect("legal");
                assert_eq!(backward.dq, expected.dq);
                assert_eq!(backward.dk, expected.dk);
                assert_eq!(backward.dv, expected.dv);

                forward = ring.forward_shards(&q, &k, &v).expect("legal");
                let expected = tensors.forward(&new);
                assert_eq!(forward.out.gather().expect("legal"), *expected.out);
                assert_eq!(forward.lse.gather().expect("legal"), *expected.lse);
                let expected = tensors.backward(&new, &expected);
                let results = (&forward.out, &forward.lse);
                let backward = ring.backward_shards((&q, &k, &v), results, &dout, None);
                assert_eq!(
                    backward.expect("legal").dk.gather().expect("legal"),
                    expected.dk
                );
            }
        }
    }
}

#[test]
fn explicit_sizes_keep_rank_numbers_and_must_add_up() {
    let shape = Shape::new(1, 100, 2, 2, 8).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F32, 9);
    let mut ring = fresh(&Pattern::dense(), 4, Cut::Contiguous);
    let mut q = ring.shard(&tensors.q.view()).expect("legal");
    let before = q.clone();
    let refused = ring.resize(vec![50, 60], &mut [&mut q]).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("[50, 60] do not add up to the 100 tokens"),
        "{refused}"
    );
    assert_eq!((&q, ring.sharding().ranks()), (&before, 4));

    let moved = ring
        .resize(vec![40, 10, 30, 20], &mut [&mut q])
        .expect("legal");
    assert_eq!(moved.places, [0, 1, 2, 3]);
    // 15 tokens of the second rank go to the first, and 5 of the last to the third.
    assert_eq!(moved.sent_bytes, (15 + 5) * 2 * 8 * 4);
    assert_eq!(q.gather().expect("legal"), tensors.q);
    let striped = Sharding::new(3, Cut::Striped).expect("legal");
    ring.resize(NewRing::Sharding(striped.clone()), &mut [&mut q])
        .expect("legal");
    assert_eq!((q.sharding(), ring.sharding()), (&striped, &striped));
    assert_eq!(q.gather().expect("legal"), tensors.q);

    // A tensor that was not moved is refused.
    let old = before.clone();
    let refused = ring.forward_shards(&old, &old, &old).unwrap_err();
    assert!(
        matches!(refused, Error::Sharding { tensor: "q", .. }),
        "{refused}"
    );
    let zero = ring.resize(0, &mut [&mut q]).unwrap_err();
    assert!(zero.to_string().contains("ranks is 0"), "{zero}");
}

#[test]
fn a_trace_proposes_shards_by_speed() {
    let shape = Shape::new(1, 400, 2, 2, 8).expect("legal");
    let ring = fresh(&Pattern::dense(), 4, Cut::Contiguous);
    let mut report = TestTensors::random(&shape, DType::F32, 9)
        .forward(&ring)
        .report;
    // All ranks take equally long, except the third, which takes twice as long.
    for event in &mut report.trace.events {
        let slower = if event.rank == 2 { 2 } else { 1 };
        event.duration = std::time::Duration::from_millis(10) * slower;
    }
    let proposal = report
        .proposal()
        .expect("legal")
        .expect("the trace shows computation");
    assert_eq!(proposal.slowest.0, 2);
    assert_eq!(proposal.speeds, [1.0, 1.0, 0.5, 1.0]);
    assert_eq!(proposal.sizes.iter().sum::<usize>(), 400);
    let [a, b, c, d] = proposal.sizes[..] else {
        panic!("four ranks")
    };
    assert!(
        a.abs_diff(114) <= 1 && b.abs_diff(114) <= 1 && d.abs_diff(114) <= 1,
        "{proposal:?}"
    );
    assert!(c.abs_diff(57) <= 1, "{proposal:?}");
    // 4 ranks x 4 rounds of 10 ms, one of them twice as long: 3.5 ranks do it in 4/3.5 of 40 ms.
    assert!(
        (proposal.seconds - 0.04 * 4.0 / 3.5).abs() < 1e-9,
        "{proposal:?}"
    );
}
