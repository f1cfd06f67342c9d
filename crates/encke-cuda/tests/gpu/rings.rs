//! Whole rings on a GPU against the reference, and the kinds of hops against each other.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::conformance::{CallTensors, Configuration};
use encke_core::naive::NaiveKernel;
use encke_core::pattern::{GroupScale, MixingGradient, Mode, OffsetRule};
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::transport::Transport;
use encke_core::{DType, Pattern, Shape, Tensor, View, reference};
use encke_cuda::{Buffer, CudaKernel, Nccl, Staged};
use encke_ring::error::catch_panic;
use encke_ring::threads::endpoints;
use encke_ring::trace::Recorder;
use encke_ring::{Outcome, Rank, ThreadRing, call};

use crate::tally::GpuTally;

const DEADLINE: Duration = Duration::from_secs(60);
/// Random requests.
const SEEDS: u64 = 60;

type CudaRing = ThreadRing<CudaKernel>;
/// out, lse, dq, dk, dv.
type GpuResults = [Tensor; 5];
const NAMES: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// The tensors of a request, rounded to its type.
fn tensors(request: &Request, seed: u64) -> CallTensors {
    rounded(CallTensors::random(&request.shape, seed), request)
}

fn rounded(mut tensors: CallTensors, request: &Request) -> CallTensors {
    let round = |tensor: &mut Tensor, dtype: DType| {
        let rounded = Tensor::from_f64(dtype, tensor.dims(), &tensor.to_f64());
        *tensor = rounded.expect("the same shape");
    };
    let CallTensors {
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

/// Executes a request.
type Driver<'a> = dyn Fn(&Request, &[(Role, View<'_>)]) -> Result<Outcome, String> + 'a;

/// Threads on one GPU.
fn threads(ring: &CudaRing) -> Box<Driver<'_>> {
    Box::new(|request, inputs| ring.run(request, inputs).map_err(|error| error.to_string()))
}

/// The thread that uploads a rank's rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loader {
    /// The rank's own thread.
    Own,
    /// Another thread: the first driver call of the rank's own thread is its first job.
    Other,
}

/// Ranks with a transport each.
fn separate_ranks<'a, T: Transport<Buffer> + Send>(
    kernel: &'a CudaKernel,
    loader: Loader,
    wires: impl Fn(usize) -> Result<Vec<T>, String> + 'a,
) -> Box<Driver<'a>> {
    Box::new(move |request, inputs| {
        let text = |error: encke_ring::RingError| error.to_string();
        let plan = Arc::new(Plan::new(request.clone()).map_err(|error| error.to_string())?);
        let ranks = (0..plan.ranks()).map(|rank| call::new_rank(kernel, &plan, rank));
        let mut ranks = ranks.collect::<Result<Vec<_>, _>>().map_err(text)?;
        let wires = wires(ranks.len())?;
        let load =
            |rank: &mut Rank<CudaKernel>, recorder: &mut Recorder, by: Loader| match loader == by {
                true => call::load_inputs(kernel, rank, inputs, recorder),
                false => Ok(()),
            };
        for rank in &mut ranks {
            let mut recorder = Recorder::new(rank.plan().rank, Instant::now());
            let loaded = load(rank, &mut recorder, Loader::Other);
            loaded.map_err(|error| error.to_string())?;
        }
        std::thread::scope(|scope| {
            let members = ranks.iter_mut().zip(wires);
            let run = |(rank, mut wire): (&'_ mut Rank<CudaKernel>, T)| {
                let mut recorder = Recorder::new(rank.plan().rank, Instant::now());
                catch_panic(|| {
                    load(rank, &mut recorder, Loader::Own)?;
                    rank.run(kernel, &mut wire, &mut recorder)
                })
            };
            let threads: Vec<_> = members
                .map(|member| scope.spawn(move || run(member)))
                .collect();
            let mut ended = threads.into_iter().map(|thread| thread.join());
            ended.try_for_each(|ended| match ended {
                Ok(ended) => ended.map_err(|error| error.to_string()),
                Err(_) => Err("a rank panicked".to_string()),
            })
        })?;
        Outcome::collect(kernel, &plan, &mut ranks, Vec::new(), Vec::new()).map_err(text)
    })
}

/// Runs a request forward and backward.
fn results(
    drive: &Driver<'_>,
    request: &Request,
    tensors: &CallTensors,
) -> Result<GpuResults, String> {
    let inputs = [
        (Role::Q, tensors.q.view()),
        (Role::K, tensors.k.view()),
        (Role::V, tensors.v.view()),
    ];
    let mut forward = drive(request, &inputs)?;
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
    let mut gradients = drive(&backward, &inputs)?;
    let mut gradient = |role| gradients.take(role).ok_or("a gradient is missing");
    let (dq, dk, dv) = (
        gradient(Role::Dq)?,
        gradient(Role::Dk)?,
        gradient(Role::Dv)?,
    );
    Ok([out, lse, dq, dk, dv])
}

/// The results of the reference.
fn expected(request: &Request, tensors: &CallTensors) -> Result<[Vec<f64>; 5], String> {
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

/// The largest allowed error, relative to the largest value.
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

/// Checks one request against the reference, and all drivers for the same bits.
fn check(
    drivers: &[&Driver<'_>],
    request: &Request,
    seed: u64,
    truth: &[Vec<f64>; 5],
) -> Result<(), String> {
    let tensors = tensors(request, seed);
    let all = drivers
        .iter()
        .map(|drive| results(drive, request, &tensors));
    let all = all.collect::<Result<Vec<GpuResults>, String>>()?;
    for (at, name) in NAMES.iter().enumerate() {
        let error = difference(&all[0][at], &truth[at]);
        if error > tolerance(request.dtype) {
            return Err(format!(
                "{name} is off by {error:e}: seed {seed}, {request:?}"
            ));
        }
        let bits = |results: &GpuResults| results[at].data().bytes().to_vec();
        if all.iter().any(|results| bits(results) != bits(&all[0])) {
            return Err(format!(
                "{name} depends on the hops: seed {seed}, {request:?}"
            ));
        }
    }
    Ok(())
}

/// Dense; dense and causal; dilated under one softmax; dilated by groups of heads and causal.
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

/// Branches with separate slots: out, lse and their gradients have more rows than q. Compared with
/// the naive kernel on threads, in f64.
fn slots(
    driver: &Driver<'_>,
    ranks: RangeInclusive<usize>,
    dtype: DType,
) -> Vec<Result<(), String>> {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let pattern = Pattern::dilated(&[64, 160], &[1, 3], mode).expect("two branches");
    let shape = Shape::new(1, 203, 4, 2, 64).expect("sizes are positive");
    let wide = Shape {
        heads: pattern.slots(4).len(),
        ..shape
    };
    let naive = ThreadRing::new(NaiveKernel, DEADLINE);
    let truth = |request: &Request, inputs: &[(Role, View<'_>)]| {
        naive
            .run(request, inputs)
            .map_err(|error| error.to_string())
    };
    let of = |ranks: usize, queries: Queries| -> Result<(), String> {
        let sharding = Sharding::new(ranks, Cut::Contiguous).expect("ranks are positive");
        let mut request = Request::new(shape, pattern.clone(), sharding, dtype);
        request.queries = queries;
        let CallTensors { dout, dlse, .. } = CallTensors::random(&wide, 9);
        let all = CallTensors {
            dout,
            dlse,
            ..CallTensors::random(&shape, 7)
        };
        let narrow = rounded(all, &request);
        let exact = Request {
            dtype: DType::F64,
            ..request.clone()
        };
        let expected = results(&truth, &exact, &rounded(narrow.clone(), &exact))?;
        let got = results(driver, &request, &narrow)?;
        for (at, name) in NAMES.iter().enumerate() {
            let error = difference(&got[at], &expected[at].to_f64());
            if error > tolerance(dtype) {
                return Err(format!("{name} is off by {error:e}: {request:?}"));
            }
        }
        Ok(())
    };
    let modes = [Queries::Sharded, Queries::Replicated];
    ranks
        .flat_map(|ranks| modes.map(|queries| of(ranks, queries)))
        .collect()
}

/// Rings of several sizes of one pattern, with both shardings of the tokens.
fn sizes(
    drivers: &[&Driver<'_>],
    ranks: RangeInclusive<usize>,
    pattern: &Pattern,
    dtype: DType,
) -> Vec<Result<(), String>> {
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
    ranks
        .flat_map(cuts)
        .map(|request| check(drivers, &request, 7, &truth))
        .collect()
}

/// Rings whose parcels are whole blocks of keys, which ranks that share a GPU attend in chains:
/// checks values, and that two runs give the same bits.
fn chains(driver: &Driver<'_>, dtype: DType, dim: usize) -> Vec<Result<(), String>> {
    let mut all = Vec::new();
    for (batch, tokens, causal) in [(1, 2048, true), (1, 1024, false), (2, 1024, true)] {
        let shape = Shape::new(batch, tokens, 2, 1, dim).expect("sizes are positive");
        let pattern = Pattern::dense().causal(causal);
        let request = |ranks: usize, cut: Cut| {
            let sharding = Sharding::new(ranks, cut).expect("ranks are positive");
            Request::new(shape, pattern.clone(), sharding, dtype)
        };
        let inputs = tensors(&request(1, Cut::Contiguous), 7);
        let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(Tensor::to_f64);
        let truth = reference::forward(&shape, &pattern, shape.default_scale(), &q, &k, &v);
        let truth = truth.expect("sizes agree");
        let views = [
            (Role::Q, inputs.q.view()),
            (Role::K, inputs.k.view()),
            (Role::V, inputs.v.view()),
        ];
        let of = |request: Request| -> Result<(), String> {
            let mut runs = [driver(&request, &views)?, driver(&request, &views)?];
            for (role, truth) in [(Role::Out, &truth.out), (Role::Lse, &truth.lse)] {
                let [once, again] = runs.each_mut().map(|outcome| outcome.take(role));
                let (once, again) = (once.ok_or("no result")?, again.ok_or("no result")?);
                let error = difference(&once, truth);
                if error > tolerance(dtype) / 4.0 {
                    return Err(format!("{role:?} is off by {error:e}: {request:?}"));
                }
                if once.data().bytes() != again.data().bytes() {
                    return Err(format!("{role:?} is not what it was before: {request:?}"));
                }
            }
            Ok(())
        };
        for ranks in [2, 4, 8] {
            let cuts = [Cut::Contiguous, Cut::Zigzag, Cut::Striped];
            all.extend(cuts.map(|cut| of(request(ranks, cut))));
        }
    }
    all
}

/// Transports that stage parcels through pinned memory.
fn staged(kernel: &CudaKernel) -> Box<Driver<'_>> {
    separate_ranks(kernel, Loader::Own, |ranks: usize| {
        let wires = endpoints(ranks, DEADLINE).into_iter().enumerate();
        let wire = |(rank, wire)| Staged::new(wire, kernel.device(), rank, DEADLINE);
        Ok(wires.map(wire).collect::<Vec<_>>())
    })
}

/// Threads whose ranks another thread has loaded.
fn preloaded(kernel: &CudaKernel) -> Box<Driver<'_>> {
    let wires = |ranks: usize| Ok(endpoints(ranks, DEADLINE));
    separate_ranks(kernel, Loader::Other, wires)
}

/// Transports over NCCL. A single rank exchanges nothing, but runs on one all the same.
fn nccl<'a>(kernel: &'a CudaKernel, nccl: &'a Arc<Nccl>) -> Box<Driver<'a>> {
    separate_ranks(kernel, Loader::Own, |ranks: usize| {
        crate::nccl::joined(nccl, kernel, ranks, DEADLINE)
    })
}

/// Runs all checks.
pub fn run(tally: &mut GpuTally, pointer: CudaKernel, pinned: CudaKernel) {
    let rings = [pointer, pinned].map(|kernel| ThreadRing::new(kernel, DEADLINE));
    let [pointer, pinned] = rings.each_ref().map(threads);
    let kernel = rings[0].kernel();
    let (staged, preloaded, patterns) = (staged(kernel), preloaded(kernel), patterns());
    let all = &DType::ALL[..];
    let mut group = |name: &str, drivers: &[&Driver<'_>], ranks: RangeInclusive<usize>, of| {
        for &dtype in of {
            let of = |pattern: &Pattern| sizes(drivers, ranks.clone(), pattern, dtype);
            tally.group(&format!("{name}, {dtype}"), patterns.iter().flat_map(of));
        }
    };
    let name = "rings of 1 to 8 ranks, pointer and pinned hops";
    group(name, &[&*pointer, &*pinned], 1..=8, all);
    group(
        "rings of 2 to 5 ranks, staged",
        &[&*pointer, &*staged],
        2..=5,
        all,
    );
    // The first driver compiles and loads every program.
    group(
        "rings of 2 and 3 ranks, loaded by another thread",
        &[&*pointer, &*preloaded],
        2..=3,
        all,
    );
    if let Ok(loaded) = Nccl::load() {
        let wires = nccl(kernel, &loaded);
        // One type only: joining takes NCCL half a second, twice per check.
        let drivers = [&*pointer, &*wires];
        group("one rank, NCCL", &drivers, 1..=1, &[DType::Bf16]);
        if crate::nccl::shares_gpus() {
            let name = "rings of 2 to 4 ranks, NCCL";
            group(name, &drivers, 2..=4, &[DType::Bf16]);
        }
    }
    for &dtype in all {
        let name = format!("rings of 1 to 5 ranks, separate branches, {dtype}");
        // Lazy, so that the group's time is its own.
        let all = std::iter::once_with(|| slots(&*pointer, 1..=5, dtype));
        tally.group(&name, all.flatten());
    }
    for (dtype, dim) in [(DType::Bf16, 128), (DType::F16, 64)] {
        for (name, driver) in [
            ("pointer", &pointer),
            ("pinned", &pinned),
            ("staged", &staged),
        ] {
            let name = format!("rings of 2, 4 and 8 ranks in chains, {name} hops, {dtype}");
            let all = std::iter::once_with(|| chains(&**driver, dtype, dim));
            tally.group(&name, all.flatten());
        }
    }
    tally.group(
        "random requests, f64, all hops",
        (0..SEEDS).map(|seed| {
            let Configuration { request, seed } = Configuration::random(seed);
            let truth = expected(&request, &tensors(&request, seed))?;
            let drivers = [&*pointer, &*pinned, &*staged];
            check(&drivers, &request, seed, &truth)
        }),
    );
}
