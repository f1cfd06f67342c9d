//! Every mode on every ring size, at f64.

use encke::conformance::extent;
use encke::{
    Attention, CheckpointPolicy, Cut, DType, Error, Fault, FaultPhase, GroupScale, MixingGradient,
    Mode, OffsetRule, Pattern, Queries, Shape, Tensor,
};

use crate::support::{TestTensors, difference, errors};

fn patterns() -> Vec<Pattern> {
    let mut patterns = vec![Pattern::dense()];
    for scale in [GroupScale::One, GroupScale::Groups] {
        patterns.push(dilated(Mode::Group { scale }));
    }
    for offsets in [OffsetRule::HeadMod, OffsetRule::HeadBlock] {
        for gradient in [MixingGradient::Exact, MixingGradient::Detached] {
            patterns.push(dilated(Mode::Mix { offsets, gradient }));
        }
    }
    patterns.push(dilated(Mode::Fkodom));
    let causal = patterns
        .clone()
        .into_iter()
        .map(|pattern| pattern.causal(true));
    patterns.iter().cloned().chain(causal).collect()
}

fn dilated(mode: Mode) -> Pattern {
    Pattern::dilated(&[6, 12, 24], &[1, 2, 5], mode).expect("sizes are positive")
}

#[test]
fn every_mode_equals_the_reference_on_every_ring() {
    // 48 tokens so that fkodom mode is legal too; heads no multiple of the branches.
    let shape = Shape::new(2, 48, 4, 2, 5).expect("legal");
    let cuts = |ranks: usize| {
        let uneven = (0..ranks)
            .map(|rank| (rank * rank * 48) / (ranks * ranks))
            .collect();
        [
            Cut::Contiguous,
            Cut::Zigzag,
            Cut::Striped,
            Cut::Firsts(uneven),
        ]
    };
    for pattern in patterns() {
        // The sums over the sequence that fkodom mode divides by can be small.
        let tolerance = if pattern.mode() == Mode::Fkodom {
            1e-9
        } else {
            1e-12
        };
        for &ranks in extent(&[1, 2, 5, 16][..], &[1, 2, 3, 4, 5, 8, 16, 32]) {
            for cut in cuts(ranks) {
                for queries in [Queries::Sharded, Queries::Replicated] {
                    if queries == Queries::Replicated && ![2, 5, 32].contains(&ranks) {
                        continue;
                    }
                    let builder = Attention::builder().pattern(pattern.clone()).ranks(ranks);
                    let builder = builder.sharding(cut.clone()).queries(queries);
                    let errors = errors(builder, &shape, DType::F64, 3);
                    let good = errors.iter().all(|error| *error <= tolerance);
                    assert!(good, "{pattern:?} {ranks} {cut:?} {queries:?}: {errors:?}");
                }
            }
        }
    }
}

#[test]
fn more_ranks_than_tokens() {
    let shape = Shape::new(1, 5, 2, 1, 3).expect("legal");
    for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
        let builder = Attention::builder().ranks(32).sharding(cut);
        let errors = errors(builder, &shape, DType::F64, 9);
        assert!(errors.iter().all(|error| *error <= 1e-13), "{errors:?}");
    }
}

#[test]
fn checkpoint_policies_change_memory_and_no_bit() {
    let shape = Shape::new(1, 48, 4, 2, 5).expect("legal");
    for pattern in patterns() {
        let tensors = TestTensors::random(&shape, DType::F32, 5);
        let policies = [
            CheckpointPolicy::KeepOutput,
            CheckpointPolicy::Recompute,
            CheckpointPolicy::Offload,
        ];
        let [(kept, keep), (nothing, recompute), (file, offload)] = policies.map(|policy| {
            let builder = Attention::builder().pattern(pattern.clone()).ranks(3);
            let attention = builder.checkpoint(policy).build().expect("legal");
            let forward = tensors.forward(&attention);
            let backward = tensors.backward(&attention, &forward);
            // A checkpoint can be read more than once, also from a file.
            let again = tensors.backward(&attention, &forward);
            assert_eq!(again.dq, backward.dq, "{pattern:?}");
            let bytes = forward.checkpoint.kept_bytes();
            (bytes, (backward.dq, backward.dk, backward.dv))
        });
        assert_eq!(keep, recompute, "{pattern:?}");
        assert_eq!(keep, offload, "{pattern:?}");
        // out and lse of every slot, and the lse of every head where slots are not heads.
        assert!(kept.0 >= 48 * 4 * (5 + 1) * 4 && kept.1 == 0, "{kept:?}");
        assert_eq!((nothing, file), ((0, 0), (0, kept.0)), "{pattern:?}");
    }
}

#[test]
fn the_gradient_of_the_lse_is_added() {
    let shape = Shape::new(1, 20, 2, 2, 4).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F64, 1);
    let dlse = crate::support::tensor(
        &mut encke::conformance::Random::new(8),
        DType::F64,
        [1, 20, 2, 1],
    );
    let attention = Attention::builder().ranks(3).build().expect("legal");
    let forward = tensors.forward(&attention);
    let [q, k, v, dout] =
        [&tensors.q, &tensors.k, &tensors.v, &tensors.dout].map(|tensor| tensor.view());
    let got = attention
        .backward(&q, &k, &v, &forward.checkpoint, &dout, Some(&dlse.view()))
        .expect("legal");
    let [q, k, v, dout, dlse] =
        [&tensors.q, &tensors.k, &tensors.v, &tensors.dout, &dlse].map(Tensor::to_f64);
    let (pattern, scale) = (Pattern::dense(), shape.default_scale());
    let expected =
        encke::reference::backward(&shape, &pattern, scale, &q, &k, &v, &dout, Some(&dlse))
            .expect("legal");
    assert!(difference(got.dq.data(), &expected.dq) < 1e-12);
    assert!(difference(got.dk.data(), &expected.dk) < 1e-12);
    assert!(difference(got.dv.data(), &expected.dv) < 1e-12);
}

#[test]
fn a_scale_of_zero_averages_the_values() {
    let shape = Shape::new(1, 12, 1, 1, 4).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F64, 2);
    let attention = Attention::builder()
        .scale(0.0)
        .ranks(2)
        .build()
        .expect("legal");
    let forward = tensors.forward(&attention);
    let v = tensors.v.to_f64();
    let mean = |c: usize| v.iter().skip(c).step_by(4).sum::<f64>() / 12.0;
    let means: Vec<f64> = (0..12 * 4).map(|i| mean(i % 4)).collect();
    assert!(difference(forward.out.data(), &means) < 1e-14);
}

/// Scales outside the normal values of the sums are refused before any work, the others are not.
#[test]
fn a_scale_that_the_sums_cannot_hold_is_refused() {
    let shape = Shape::new(1, 12, 1, 1, 4).expect("legal");
    let refusal = |dtype: DType, scale: f64| {
        let tensors = TestTensors::random(&shape, dtype, 2);
        let attention = Attention::builder().scale(scale).ranks(2).build();
        let attention = attention.expect("checked with the call");
        let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
        match attention.forward(&q, &k, &v) {
            Ok(forward) => {
                let lse = forward.lse.to_f64();
                assert!(!lse.iter().any(|x| x.is_nan()), "{dtype}, scale {scale:e}");
                None
            }
            Err(error) => Some(error.to_string()),
        }
    };
    for dtype in DType::ALL {
        let wide = dtype == DType::F64;
        for (scale, legal) in [
            (0.0, true),
            (-0.0, true),
            (-2.0, true),
            (1e-37, true),
            (1e37, true),
            (-1e37, true),
            (3e38, wide),
            (1e39, wide),
            (-1e39, wide),
            (1e-39, wide),
            (1e-46, wide),
            (-1e-46, wide),
            (1e300, wide),
            (1e-310, false),
            (f64::MAX, false),
            (f64::NAN, false),
            (f64::INFINITY, false),
            (f64::NEG_INFINITY, false),
        ] {
            let refusal = refusal(dtype, scale);
            assert_eq!(refusal.is_none(), legal, "{dtype}, {scale:e}: {refusal:?}");
            let named = refusal.is_none_or(|error| error.contains(&format!("scale is {scale:e};")));
            assert!(named, "{dtype}, {scale:e}");
        }
    }
}

#[test]
fn errors_of_invalid_requests_name_the_offending_values() {
    let shape = Shape::new(1, 10, 3, 3, 2).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F32, 4);
    let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
    let refused = |builder: encke::Builder| -> String {
        let built = builder.build();
        let result = built.and_then(|attention| attention.forward(&q, &k, &v));
        result
            .map(|_| ())
            .expect_err("it must be refused")
            .to_string()
    };
    let group = |segments: &[usize], dilations: &[usize]| {
        let mode = Mode::Group {
            scale: GroupScale::One,
        };
        Pattern::dilated(segments, dilations, mode).map_err(Error::from)
    };
    assert!(refused(Attention::builder().ranks(0)).contains("ranks is 0"));
    let four = group(&[1, 2, 3, 4], &[1, 1, 1, 1]).expect("sizes are positive");
    assert!(refused(Attention::builder().pattern(four)).contains("4 branches but only 3 heads"));
    let late = Attention::builder()
        .ranks(2)
        .sharding(Cut::Firsts(vec![1, 5]));
    assert!(refused(late).contains("rank 0 starts at token 1"));
    let far = Attention::builder()
        .ranks(2)
        .sharding(Cut::Firsts(vec![0, 11]));
    assert!(refused(far).contains("token 11"));
    let few = Attention::builder()
        .ranks(3)
        .sharding(Cut::Firsts(vec![0, 5]));
    assert!(refused(few).contains("is for 2 ranks, but the ring has 3"));
    let fkodom = Pattern::dilated(&[4], &[1], Mode::Fkodom).expect("sizes are positive");
    assert!(refused(Attention::builder().pattern(fkodom)).contains("10 is not a multiple of 4"));
    assert!(
        group(&[0], &[1])
            .expect_err("no segment")
            .to_string()
            .contains("segment length is 0")
    );
    assert!(
        group(&[4], &[0])
            .expect_err("no rate")
            .to_string()
            .contains("dilation rate is 0")
    );
    assert!(
        group(&[4, 8], &[1])
            .expect_err("unpaired")
            .to_string()
            .contains("2 segment lengths")
    );
    let wide = TestTensors::random(&shape, DType::F64, 4);
    let attention = Attention::builder().build().expect("legal");
    let mixed = attention.forward(&q, &wide.k.view(), &v).map(|_| ());
    assert!(
        mixed
            .expect_err("types differ")
            .to_string()
            .contains("k is f64 but q is f32")
    );
}

/// Every mode, those with separate slots included: after a rank's death the results are still the
/// reference's.
#[test]
fn every_mode_survives_a_death() {
    let shape = Shape::new(2, 48, 4, 2, 5).expect("legal");
    for pattern in patterns() {
        let tolerance = match pattern.mode() {
            Mode::Fkodom => 1e-9,
            _ => 1e-12,
        };
        for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
            for (rank, round, phase) in [
                (0, 0, FaultPhase::Begin),
                (3, 1, FaultPhase::Midst),
                (2, 2, FaultPhase::Begin),
                (1, 9, FaultPhase::Begin),
            ] {
                let fault = Fault {
                    rank,
                    epoch: 0,
                    round,
                    phase,
                };
                let builder = Attention::builder()
                    .pattern(pattern.clone())
                    .ranks(4)
                    .sharding(cut.clone())
                    .redundancy(1)
                    .drill(vec![fault]);
                let errors = errors(builder, &shape, DType::F64, 3);
                assert!(
                    errors.iter().all(|error| *error <= tolerance),
                    "{pattern:?} {cut:?} {fault:?}: {errors:?}"
                );
            }
        }
    }
}
