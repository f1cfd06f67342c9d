//! Sinks and phantom keys of a call that survives: wherever a rank dies, also while it stores, each
//! row has its extra terms once, and the gradient of the sinks is that of the reference.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use encke_core::conformance::CallTensors;
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{
    DType, Data, Documents, MixingGradient, Mode, OffsetRule, Padding, Pattern, Scores, Shape,
    Tensor, Window, reference,
};
use encke_ring::out_of_core::{
    ExtraTermRows, FromSource, RowRange, StreamError, TensorSink, TensorSource, WithExtraTerms,
};
use encke_ring::threads::endpoints;
use encke_ring::{RankError, ShardCall};

const RANKS: usize = 4;
const SINKS: [f64; 4] = [0.3, -1.0, 4.0, f64::NEG_INFINITY];

/// Tensors that all ranks read and write.
#[derive(Default)]
struct SharedTensors(Mutex<BTreeMap<u8, Tensor>>);

impl SharedTensors {
    fn of(tensors: Vec<(Role, Tensor)>) -> SharedTensors {
        let named = tensors.into_iter().map(|(role, of)| (role as u8, of));
        SharedTensors(Mutex::new(named.collect()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u8, Tensor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, role: Role) -> Tensor {
        self.lock()[&(role as u8)].clone()
    }

    /// Calls `each` with (element here, element in the range).
    fn each(dims: [usize; 4], range: &RowRange<'_>, mut each: impl FnMut(usize, usize)) {
        let [_, n, h, d] = dims;
        let rows = range.tokens.tokens();
        let rows = rows.flat_map(|t| range.heads.iter().map(move |head| (t, head)));
        for (at, (token, head)) in rows.enumerate() {
            let row = ((range.batch * n + token) * h + head) * d;
            (0..d).for_each(|i| each(row + i, at * d + i));
        }
    }
}

impl TensorSource for SharedTensors {
    fn dtype(&self, role: Role) -> DType {
        self.get(role).dtype()
    }

    fn read(&self, range: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        let tensor = self.get(range.role);
        SharedTensors::each(tensor.dims(), range, |there, here| {
            to.set(here, tensor.data().as_slice().get(there));
        });
        Ok(())
    }
}

/// Writes to the shared tensors; dies at one of its writes.
struct MortalSink<'s> {
    tensors: &'s SharedTensors,
    writes_left: usize,
}

impl TensorSink for MortalSink<'_> {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        if self.writes_left == 0 {
            std::panic::resume_unwind(Box::new("killed while it stores"));
        }
        self.writes_left -= 1;
        let mut tensors = self.tensors.lock();
        let tensor = tensors.get_mut(&(range.role as u8)).expect("an output");
        let dims = tensor.dims();
        SharedTensors::each(dims, range, |there, here| {
            tensor.data_mut().set(there, from.as_slice().get(here));
        });
        Ok(())
    }
}

/// Runs a call of which `victim` dies at its write number `writes`. Returns whether it did.
fn run(
    request: &Request,
    sinks: Option<&[f64]>,
    tensors: &SharedTensors,
    (victim, writes): (usize, usize),
) -> bool {
    let plan = Plan::new(request.clone()).unwrap();
    let endpoints = endpoints(RANKS, Duration::from_secs(60));
    let ended: Vec<Result<(), RankError>> = thread::scope(|scope| {
        let ranks = endpoints.into_iter().enumerate().map(|(rank, endpoint)| {
            let plan = &plan;
            scope.spawn(move || {
                let (group, mut endpoint) = (endpoint.group(), endpoint);
                let mut sink = MortalSink {
                    tensors,
                    writes_left: if rank == victim { writes } else { usize::MAX },
                };
                let mut output = WithExtraTerms {
                    terms: ExtraTermRows { sinks, request },
                    source: tensors,
                    sink: &mut sink,
                };
                let mut call = ShardCall::new(&NaiveKernel, plan, rank).unwrap();
                call.load(&mut FromSource(tensors)).unwrap();
                let ran = call.run_surviving(&mut endpoint, &mut output);
                if ran.is_err() {
                    group.mark_dead(rank);
                }
                ran
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (rank, ended) in ended.iter().enumerate() {
        assert!(rank == victim || ended.is_ok(), "rank {rank}: {ended:?}");
    }
    ended[victim].is_err()
}

fn assert_close(got: &Tensor, expected: &[f64], what: &str) {
    for (at, (x, y)) in got.to_f64().iter().zip(expected).enumerate() {
        let close = x == y || (x - y).abs() <= 1e-12 * y.abs().max(1.0);
        assert!(close, "{what}, element {at}: {x} instead of {y}");
    }
}

/// The calls: with sinks, or with torchscale's padding.
fn calls() -> Vec<(Request, Option<&'static [f64]>)> {
    let shape = Shape::new(2, 37, 4, 2, 3).unwrap();
    let window = Window {
        left: Some(9),
        right: Some(2),
    };
    let documents = Documents::new(&[20, 1, 16]).unwrap();
    let masked = Pattern::dense().window(window).documents(Some(documents));
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadBlock,
        gradient: MixingGradient::Exact,
    };
    let padded = Pattern::dilated(&[9, 40], &[3, 3], mix).unwrap();
    let padded = padded.padding(Padding::Torchscale);
    let calls = [
        (masked, Cut::Contiguous, Some(&SINKS[..])),
        (Pattern::dense().causal(true), Cut::Zigzag, Some(&SINKS[..])),
        (padded, Cut::Striped, None),
    ];
    let call = |(pattern, cut, sinks)| {
        let sharding = Sharding::new(RANKS, cut).unwrap();
        let request = Request::new(shape, pattern, sharding, DType::F64);
        let request = Request {
            redundancy: 1,
            ..request
        };
        (request, sinks)
    };
    calls.into_iter().map(call).collect()
}

#[test]
fn each_row_has_its_terms_once_wherever_a_rank_dies_while_it_stores() {
    for (forward, sinks) in calls() {
        let shape = &forward.shape;
        let inputs = CallTensors::random(shape, 7);
        let scores = Scores {
            sinks: sinks.map(Into::into),
            ..forward.scores()
        };
        let [q, k, v, dout] = [&inputs.q, &inputs.k, &inputs.v, &inputs.dout];
        let values = [q, k, v].map(Tensor::to_f64);
        let [qs, ks, vs] = &values;
        let pattern = &forward.pattern;
        let rows = reference::forward(shape, pattern, scores.clone(), qs, ks, vs).unwrap();
        let gradients =
            reference::backward(shape, pattern, scores, qs, ks, vs, &dout.to_f64(), None).unwrap();
        let given = [(Role::Q, q), (Role::K, k), (Role::V, v), (Role::Dout, dout)];
        let tensors = || {
            let mut all: Vec<_> = given.map(|(role, tensor)| (role, tensor.clone())).into();
            all.extend([
                (Role::Out, Tensor::zeros(DType::F64, inputs.dout.dims())),
                (Role::Lse, Tensor::zeros(DType::F64, inputs.dlse.dims())),
                (Role::Dq, Tensor::zeros(DType::F64, q.dims())),
                (Role::Dk, Tensor::zeros(DType::F64, k.dims())),
                (Role::Dv, Tensor::zeros(DType::F64, v.dims())),
            ]);
            SharedTensors::of(all)
        };
        let backward = Request {
            pass: Pass::Backward { dlse: false },
            ..forward.clone()
        };
        for victim in 0..RANKS {
            let mut deaths = 0;
            for writes in 0.. {
                let shared = tensors();
                let died = run(&forward, sinks, &shared, (victim, writes));
                let what = format!("rank {victim} after {writes} writes");
                assert_close(&shared.get(Role::Out), &rows.out, &format!("out, {what}"));
                assert_close(&shared.get(Role::Lse), &rows.lse, &format!("lse, {what}"));
                run(&backward, sinks, &shared, (victim, writes));
                assert_close(&shared.get(Role::Dk), &gradients.dk, &format!("dk, {what}"));
                if let Some(sinks) = sinks {
                    let request = &backward;
                    let terms = ExtraTermRows {
                        sinks: Some(sinks),
                        request,
                    };
                    let mut sums = vec![0.0; sinks.len()];
                    for rank in 0..RANKS {
                        let part = terms.gradient(&request.query_runs(rank), false, &shared);
                        let part = part.unwrap();
                        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
                    }
                    let sums = Tensor::from_f64(DType::F64, [1, 1, 1, sums.len()], &sums).unwrap();
                    assert_close(&sums, &gradients.dsinks, &format!("dsinks, {what}"));
                }
                if !died {
                    break;
                }
                deaths += 1;
            }
            assert!(deaths > 3, "rank {victim} died {deaths} times");
        }
    }
}
