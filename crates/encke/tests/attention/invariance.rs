//! A changed key, NaN included, changes only the rows that attend to it; every run gives the same
//! bits.

use encke::{Attention, Cut, DType, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor};

use crate::support::TestTensors;

fn longnet() -> Pattern {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    Pattern::dilated(&[8, 32, 128], &[1, 4, 16], mode).expect("sizes are positive")
}

/// The tensor with row `token` of every head replaced.
fn replaced(tensor: &Tensor, token: usize, value: f64) -> Tensor {
    let [_, n, h, d] = tensor.dims();
    let mut values = tensor.to_f64();
    for (i, x) in values.iter_mut().enumerate() {
        if i / (h * d) % n == token {
            *x = value;
        }
    }
    Tensor::from_f64(tensor.dtype(), tensor.dims(), &values).expect("sizes agree")
}

/// Rows (token, head) whose output bits differ.
fn changed(a: &Tensor, b: &Tensor) -> Vec<(usize, usize)> {
    let [_, n, h, d] = a.dims();
    let (a, b) = (a.to_f64(), b.to_f64());
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<u64>>();
    let rows = a.chunks(d).zip(b.chunks(d)).enumerate();
    let differing = rows.filter(|(_, (a, b))| bits(a) != bits(b));
    differing.map(|(i, _)| (i / h % n, i % h)).collect()
}

#[test]
fn a_key_changes_only_the_rows_that_attend_to_it() {
    let shape = Shape::new(1, 150, 4, 2, 8).expect("legal");
    for pattern in [
        longnet(),
        longnet().causal(true),
        Pattern::dense().causal(true),
    ] {
        for (ranks, cut) in [(1, Cut::Contiguous), (4, Cut::Zigzag), (7, Cut::Contiguous)] {
            let builder = Attention::builder().pattern(pattern.clone());
            let attention = builder.ranks(ranks).sharding(cut).build().expect("legal");
            let tensors = TestTensors::random(&shape, DType::F32, 21);
            let before = tensors.forward(&attention);
            for token in [0, 33, 149] {
                for value in [0.25, f64::NAN, f64::INFINITY] {
                    let k = replaced(&tensors.k, token, value);
                    let v = replaced(&tensors.v, token, value);
                    let (q, k, v) = (tensors.q.view(), k.view(), v.view());
                    let after = attention.forward(&q, &k, &v).expect("legal");
                    let sees =
                        |(t, h): &(usize, usize)| pattern.multiplicity(&shape, *h, *t, token) > 0;
                    let rows = changed(&before.out, &after.out);
                    assert!(rows.iter().all(sees), "{pattern:?} {ranks} {token} {value}");
                    assert!(!rows.is_empty());
                }
            }
        }
    }
}

#[test]
fn every_run_gives_the_same_bits() {
    let shape = Shape::new(2, 200, 4, 4, 16).expect("legal");
    let tensors = TestTensors::random(&shape, DType::Bf16, 2);
    for (ranks, cut) in [(8, Cut::Contiguous), (5, Cut::Zigzag), (3, Cut::Striped)] {
        let run = || {
            let builder = Attention::builder()
                .pattern(longnet().causal(true))
                .ranks(ranks);
            let attention = builder.sharding(cut.clone()).build().expect("legal");
            let forward = tensors.forward(&attention);
            let backward = tensors.backward(&attention, &forward);
            (
                forward.out,
                forward.lse,
                backward.dq,
                backward.dk,
                backward.dv,
            )
        };
        let first = run();
        for _ in 0..5 {
            assert_eq!(run(), first);
        }
    }
}
