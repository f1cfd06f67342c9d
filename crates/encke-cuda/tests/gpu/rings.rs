//! Whole rings on a GPU against the reference, and the two kinds of hops against each other.

use std::time::Duration;

use encke_core::conformance::{Configuration, Tensors};
use encke_core::pattern::{GroupScale, MixingGradient, Mode, OffsetRule};
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape, Tensor, reference};
use encke_cuda::CudaKernel;
use encke_ring::ThreadRing;

use crate::tally::Tally;

const DEADLINE: Duration = Duration::from_secs(60);
/// Random requests.
const SEEDS: u64 = 60;

type Ring = ThreadRing<CudaKernel>;
/// out, lse, dq, dk, dv.
type Results = [Tensor; 5];

/// The tensors of a request, rounded to its type.
fn tensors(request: &Request, seed: u64) -> Tensors {
    let mut tensors = Tensors::random(&request.shape, seed);
    let round = |tensor: &mut Tensor, dtype: DType| {
        let rounded = Tensor::from_f64(dtype, tensor.dims(), &tensor.to_f64());
        *tensor = rounded.expect("the same shape");
    };
    let Tensors {
        q,
        k,
        v,
        dout,
        dlse,
    } = &mut tensors;
    for tensor in [q, k, v, dout] {
        round(tensor, request.dtype);
    }
    round(dlse, request.dtype.sum());
    tensors
}

/// Runs a request forward and backward.
fn results(ring: &Ring, request: &Request, tensors: &Tensors) -> Result<Results, String> {
    let words = |error: encke_ring::RingError| error.to_string();
    let inputs = [
        (Role::Q, tensors.q.view()),
        (Role::K, tensors.k.view()),
        (Role::V, tensors.v.view()),
    ];
    let mut forward = ring.run(request, &inputs).map_err(words)?;
    let [out, lse] = [Role::Out, Role::Lse].map(|role| forward.take(role));
    let (out, lse) = (out.ok_or("no out")?, lse.ok_or("no lse")?);
    let backward = Request {
        pass: Pass::Backward { dlse: true },
        ..request.clone()
    };
    let more = [
        (Role::Out, out.view()),
        (Role::Lse, lse.view()),
        (Role::Dout, tensors.dout.view()),
        (Role::Dlse, tensors.dlse.view()),
    ];
    let inputs: Vec<_> = inputs.into_iter().chain(more).collect();
    let mut gradients = ring.run(&backward, &inputs).map_err(words)?;
    let mut gradient = |role| gradients.take(role).ok_or("a gradient is missing");
    let (dq, dk, dv) = (
        gradient(Role::Dq)?,
        gradient(Role::Dk)?,
        gradient(Role::Dv)?,
    );
    Ok([out, lse, dq, dk, dv])
}

/// The same from the reference.
fn expected(request: &Request, tensors: &Tensors) -> Result<[Vec<f64>; 5], String> {
    let Request { shape, pattern, .. } = request;
    let scale = request.scale();
    let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
    let forward = reference::forward(shape, pattern, scale, &q, &k, &v);
    let forward = forward.map_err(|error| error.to_string())?;
    let (dout, dlse) = (tensors.dout.to_f64(), tensors.dlse.to_f64());
    let back = reference::backward(shape, pattern, scale, &q, &k, &v, &dout, Some(&dlse));
    let back = back.map_err(|error| error.to_string())?;
    Ok([forward.out, forward.lse, back.dq, back.dk, back.dv])
}

/// How far a result may be off, relative to the largest number.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 3e-5,
        DType::F16 => 5e-3,
        DType::Bf16 => 3e-2,
    }
}

fn difference(got: &Tensor, expected: &[f64]) -> f64 {
    let got = got.to_f64();
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

/// One request on both rings: right, and the same bits.
fn check(
    rings: &[Ring; 2],
    request: &Request,
    seed: u64,
    truth: &[Vec<f64>; 5],
) -> Result<(), String> {
    let tensors = tensors(request, seed);
    let [pointer, pinned] = rings;
    let [pointer, pinned] = [
        results(pointer, request, &tensors)?,
        results(pinned, request, &tensors)?,
    ];
    let names = ["out", "lse", "dq", "dk", "dv"];
    for (((name, got), same), truth) in names.iter().zip(&pointer).zip(&pinned).zip(truth) {
        let error = difference(got, truth);
        if error > tolerance(request.dtype) {
            return Err(format!(
                "{name} is off by {error:e}: seed {seed}, {request:?}"
            ));
        }
        if got.data().bytes() != same.data().bytes() {
            return Err(format!(
                "{name} depends on the hops: seed {seed}, {request:?}"
            ));
        }
    }
    Ok(())
}

/// Dense and causal; dilated under one softmax; dilated by groups of heads and causal.
fn patterns() -> Vec<Pattern> {
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let group = Mode::Group {
        scale: GroupScale::One,
    };
    let dilated = |mode| Pattern::dilated(&[64, 160], &[1, 3], mode).expect("two branches");
    vec![
        Pattern::dense(),
        Pattern::dense().causal(true),
        dilated(mix),
        dilated(group).causal(true),
    ]
}

/// Rings of one to eight ranks of one pattern, however the tokens are cut.
fn sizes(rings: &[Ring; 2], pattern: &Pattern, dtype: DType) -> Vec<Result<(), String>> {
    let shape = Shape::new(1, 203, 4, 2, 64).expect("sizes are positive");
    let request = |ranks: usize, cut: Cut| {
        let sharding = Sharding::new(ranks, cut).expect("ranks are positive");
        Request::new(shape, pattern.clone(), sharding, dtype)
    };
    let alone = request(1, Cut::Contiguous);
    let truth = match expected(&alone, &tensors(&alone, 7)) {
        Ok(truth) => truth,
        Err(error) => return vec![Err(error)],
    };
    let cuts = |ranks| [Cut::Contiguous, Cut::Zigzag].map(|cut| request(ranks, cut));
    let requests = (1..=8).flat_map(cuts);
    requests
        .map(|request| check(rings, &request, 7, &truth))
        .collect()
}

/// All of it.
pub fn run(tally: &mut Tally, pointer: CudaKernel, pinned: CudaKernel) {
    let rings = [pointer, pinned].map(|kernel| ThreadRing::new(kernel, DEADLINE));
    for dtype in DType::ALL {
        tally.group(
            &format!("rings of 1 to 8 ranks, {dtype}, both hops"),
            patterns()
                .iter()
                .flat_map(|pattern| sizes(&rings, pattern, dtype)),
        );
    }
    tally.group(
        "random requests, f64, both hops",
        (0..SEEDS).map(|seed| {
            let Configuration { request, seed } = Configuration::random(seed);
            let truth = expected(&request, &tensors(&request, seed))?;
            check(&rings, &request, seed, &truth)
        }),
    );
}
