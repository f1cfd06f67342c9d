//! Random configurations and the comparison of a ring with the reference.

use std::time::Duration;

use encke_core::conformance::Random;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{
    DType, Data, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor, reference,
};
use encke_ring::ThreadRing;

pub const DEADLINE: Duration = Duration::from_secs(60);

/// One random call, small enough for the reference.
#[derive(Debug, Clone)]
pub struct Case {
    pub request: Request,
    pub seed: u64,
}

fn pattern(random: &mut Random, heads: usize) -> Pattern {
    let causal = random.below(2) == 0;
    if random.below(4) == 0 {
        return Pattern::dense().causal(causal);
    }
    let mix = random.below(2) == 0;
    let most = if mix { 3 } else { heads.min(3) };
    let branches = 1 + random.below(most);
    let segments: Vec<usize> = (0..branches).map(|_| 1 + random.below(40)).collect();
    let dilations: Vec<usize> = (0..branches).map(|_| 1 + random.below(6)).collect();
    let mode = if mix {
        Mode::Mix {
            offsets: [OffsetRule::HeadMod, OffsetRule::HeadBlock][random.below(2)],
            gradient: MixingGradient::Exact,
        }
    } else {
        Mode::Group {
            scale: [GroupScale::One, GroupScale::Groups][random.below(2)],
        }
    };
    let pattern = Pattern::dilated(&segments, &dilations, mode);
    pattern.expect("sizes are positive").causal(causal)
}

fn cut(random: &mut Random, tokens: usize, ranks: usize) -> Cut {
    match random.below(4) {
        0 => Cut::Contiguous,
        1 => Cut::Zigzag,
        2 => Cut::Striped,
        _ => {
            let mut firsts: Vec<usize> = (1..ranks).map(|_| random.below(tokens + 1)).collect();
            firsts.push(0);
            firsts.sort_unstable();
            Cut::Firsts(firsts)
        }
    }
}

impl Case {
    pub fn random(seed: u64) -> Case {
        let mut random = Random::new(seed);
        let kv_heads = 1 + random.below(3);
        let heads = kv_heads * (1 + random.below(3));
        let tokens = 1 + random.below(70);
        let ranks = [1, 2, 3, 4, 5, 8, 16, 32][random.below(8)];
        let dim = 1 + random.below(5);
        let shape = Shape::new(1 + random.below(2), tokens, heads, kv_heads, dim);
        let pattern = pattern(&mut random, heads);
        let sharding = Sharding::new(ranks, cut(&mut random, tokens, ranks));
        let mut request = Request::new(
            shape.expect("sizes are positive"),
            pattern,
            sharding.expect("ranks are positive"),
            DType::F64,
        );
        if random.below(3) == 0 {
            request.queries = Queries::Replicated;
        }
        Case { request, seed }
    }
}

/// The tensors of a case.
pub struct Tensors {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub dout: Tensor,
    pub dlse: Tensor,
}

impl Tensors {
    pub fn random(shape: &Shape, seed: u64) -> Tensors {
        let mut random = Random::new(seed ^ 0x5eed);
        let Shape {
            batch,
            tokens,
            heads,
            kv_heads,
            dim,
        } = *shape;
        let mut tensor = |h: usize, d: usize| {
            let dims = [batch, tokens, h, d];
            let values = (0..dims.iter().product()).map(|_| 2.0 * random.unit());
            let data = Data::F64(values.collect());
            Tensor::from_data(data, dims).expect("as many numbers as the shape has")
        };
        Tensors {
            q: tensor(heads, dim),
            k: tensor(kv_heads, dim),
            v: tensor(kv_heads, dim),
            dout: tensor(heads, dim),
            dlse: tensor(heads, 1),
        }
    }
}

/// The largest difference, relative to the largest number; infinities must agree.
pub fn difference(got: &Tensor, expected: &[f64]) -> f64 {
    let got = got.to_f64();
    assert_eq!(got.len(), expected.len());
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-3, |most: f64, x| most.max(x.abs()));
    let each = got.iter().zip(expected).map(|(a, b)| match a == b {
        true => 0.0,
        false => (a - b).abs() / scale,
    });
    each.fold(0.0, |most, x| {
        if x.is_nan() {
            f64::INFINITY
        } else {
            x.max(most)
        }
    })
}

/// What a ring made of a case.
pub struct Results {
    pub out: Tensor,
    pub lse: Tensor,
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
}

/// Runs a case forward and backward.
pub fn run<K: Kernel>(ring: &ThreadRing<K>, case: &Case) -> Result<Results, String> {
    let tensors = Tensors::random(&case.request.shape, case.seed);
    let words = |error: encke_ring::RingError| format!("seed {}: {error}", case.seed);
    let inputs = [
        (Role::Q, tensors.q.view()),
        (Role::K, tensors.k.view()),
        (Role::V, tensors.v.view()),
    ];
    let mut forward = ring.run(&case.request, &inputs).map_err(words)?;
    let mut take = |role| {
        forward
            .take(role)
            .expect("a forward pass returns out and lse")
    };
    let (out, lse) = (take(Role::Out), take(Role::Lse));
    let request = Request {
        pass: Pass::Backward { dlse: true },
        ..case.request.clone()
    };
    let more = [
        (Role::Out, out.view()),
        (Role::Lse, lse.view()),
        (Role::Dout, tensors.dout.view()),
        (Role::Dlse, tensors.dlse.view()),
    ];
    let inputs: Vec<_> = inputs.into_iter().chain(more).collect();
    let mut backward = ring.run(&request, &inputs).map_err(words)?;
    let mut take = |role| {
        backward
            .take(role)
            .expect("a backward pass returns gradients")
    };
    let (dq, dk, dv) = (take(Role::Dq), take(Role::Dk), take(Role::Dv));
    Ok(Results {
        out,
        lse,
        dq,
        dk,
        dv,
    })
}

/// Holds a case against the reference.
pub fn check<K: Kernel>(ring: &ThreadRing<K>, case: &Case) -> Result<(), String> {
    let got = run(ring, case)?;
    let Request { shape, pattern, .. } = &case.request;
    let tensors = Tensors::random(shape, case.seed);
    let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
    let scale = case.request.scale();
    let forward = reference::forward(shape, pattern, scale, &q, &k, &v);
    let forward = forward.map_err(|error| error.to_string())?;
    let (dout, dlse) = (tensors.dout.to_f64(), tensors.dlse.to_f64());
    let gradients = reference::backward(shape, pattern, scale, &q, &k, &v, &dout, Some(&dlse));
    let gradients = gradients.map_err(|error| error.to_string())?;
    for (name, got, expected) in [
        ("out", &got.out, &forward.out),
        ("lse", &got.lse, &forward.lse),
        ("dq", &got.dq, &gradients.dq),
        ("dk", &got.dk, &gradients.dk),
        ("dv", &got.dv, &gradients.dv),
    ] {
        let error = difference(got, expected);
        if error > 1e-12 {
            return Err(format!("{name} is off by {error:e} in {case:?}"));
        }
    }
    Ok(())
}
