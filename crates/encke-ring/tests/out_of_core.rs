//! Out-of-core ranks against a ring of threads: the same bits forward, the same gradients up to
//! rounding, the same bytes planned and allocated.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use encke_core::conformance::{CallTensors, Configuration};
use encke_core::plan::program::Role;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Run, Sharding};
use encke_core::{
    DType, Data, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor, reference,
};
use encke_cpu::CpuKernel;
use encke_ring::out_of_core::{
    Checksum, Files, FromSource, Generator, GradientFile, RowRange, Samples, Stream, StreamError,
    TensorFile, TensorSink, TensorSource, ToSink, fit_ranks, row_width,
};
use encke_ring::threads::endpoints;
use encke_ring::{ShardCall, ThreadRing};
use proptest::prelude::*;

/// Tensors in host memory, as a source and as a sink.
#[derive(Default)]
struct TensorStore {
    tensors: BTreeMap<u8, Tensor>,
}

impl TensorStore {
    fn insert(&mut self, role: Role, tensor: Tensor) {
        self.tensors.insert(role as u8, tensor);
    }

    fn get(&self, role: Role) -> &Tensor {
        &self.tensors[&(role as u8)]
    }

    /// The first element of every row: (in the tensor, in the range).
    fn rows(dims: [usize; 4], range: &RowRange<'_>) -> Vec<(usize, usize)> {
        let [_, n, h, d] = dims;
        let mut rows = Vec::new();
        for token in range.tokens.tokens() {
            for &head in range.heads {
                let there = ((range.batch * n + token) * h + head) * d;
                rows.push((there, rows.len() * d));
            }
        }
        rows
    }
}

impl TensorSource for TensorStore {
    fn dtype(&self, role: Role) -> DType {
        self.get(role).dtype()
    }

    fn read(&self, range: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        let tensor = self.get(range.role);
        for (there, here) in TensorStore::rows(tensor.dims(), range) {
            for i in 0..tensor.dims()[3] {
                to.set(here + i, tensor.data().as_slice().get(there + i));
            }
        }
        Ok(())
    }
}

impl TensorSink for TensorStore {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        let tensor = self.tensors.get_mut(&(range.role as u8)).unwrap();
        let dims = tensor.dims();
        for (there, here) in TensorStore::rows(dims, range) {
            for i in 0..dims[3] {
                let element = from.as_slice().get(here + i);
                tensor.data_mut().set(there + i, element);
            }
        }
        Ok(())
    }
}

/// A whole tensor of the generator.
fn generated(generator: &Generator, role: Role, dims: [usize; 4]) -> Tensor {
    let [b, n, h, _] = dims;
    let mut elements = Vec::new();
    for batch in 0..b {
        for (token, head) in (0..n).flat_map(|t| (0..h).map(move |h| (t, h))) {
            elements.extend(generator.row(role, batch, token, head, DType::F32));
        }
    }
    Tensor::from_f64(DType::F32, dims, &elements).unwrap()
}

fn dims(role: Role, shape: &Shape) -> [usize; 4] {
    let heads = match role {
        Role::K | Role::V | Role::Dk | Role::Dv => shape.kv_heads,
        _ => shape.heads,
    };
    [shape.batch, shape.tokens, heads, row_width(role, shape)]
}

fn empty(roles: &[(Role, DType)], shape: &Shape) -> TensorStore {
    let mut memory = TensorStore::default();
    for &(role, dtype) in roles {
        memory.insert(role, Tensor::zeros(dtype, dims(role, shape)));
    }
    memory
}

fn ring() -> ThreadRing<CpuKernel> {
    ThreadRing::new(CpuKernel::new().unwrap(), Duration::from_secs(60))
}

/// Streams every rank of a request, with a gradient file for a backward pass. Returns the bytes
/// that the ranks would have received.
fn stream(
    kernel: &CpuKernel,
    request: &Request,
    source: &dyn TensorSource,
    sink: &mut TensorStore,
) -> usize {
    let plan = Plan::new(request.clone()).unwrap();
    let mut stream = Stream::new(kernel, &plan).unwrap();
    let file = tempfile::tempfile().unwrap();
    let mut gradients =
        (request.pass != Pass::Forward).then(|| GradientFile::new(file, request).unwrap());
    let mut received = 0;
    for rank in 0..plan.ranks() {
        let done = stream.rank(rank, source, sink, gradients.as_mut()).unwrap();
        let planned = plan.rank(rank).unwrap();
        let buffers: usize = planned.memory().values().sum();
        assert_eq!(done.memory.allocated_bytes, buffers, "rank {rank}");
        assert_eq!(done.pairs, planned.pairs());
        received += done.events.iter().map(|e| e.received_bytes).sum::<usize>();
    }
    if let Some(gradients) = gradients {
        gradients.finish(sink).unwrap();
    }
    received
}

fn mix() -> Mode {
    Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    }
}

fn patterns() -> impl Strategy<Value = Pattern> {
    let group = Mode::Group {
        scale: GroupScale::Groups,
    };
    let dilated = move |mode: Mode| {
        let branches = prop::collection::vec((1usize..40, 1usize..6), 1..=2);
        branches.prop_map(move |list| {
            let (segments, rates): (Vec<usize>, Vec<usize>) = list.into_iter().unzip();
            Pattern::dilated(&segments, &rates, mode).unwrap()
        })
    };
    let some = prop_oneof![Just(Pattern::dense()), dilated(mix()), dilated(group)];
    (some, any::<bool>()).prop_map(|(pattern, causal)| pattern.causal(causal))
}

fn requests() -> impl Strategy<Value = Request> {
    let cuts = prop_oneof![Just(Cut::Contiguous), Just(Cut::Zigzag), Just(Cut::Striped)];
    let types = prop_oneof![Just(DType::F32), Just(DType::F64), Just(DType::Bf16)];
    let sizes = (1usize..=2, 1usize..50, 1usize..=2, 1usize..=2, 1usize..9);
    let widths = prop_oneof![Just(1), Just(2), Just(3), Just(usize::MAX)];
    let kinds = (cuts, types, widths);
    (sizes, patterns(), 1usize..=6, kinds).prop_map(|(sizes, pattern, ranks, kinds)| {
        let (batch, tokens, kv, group, dim) = sizes;
        let (cut, dtype, width) = kinds;
        // Group mode needs a head for each branch.
        let shape = Shape::new(batch, tokens, 2 * kv * group, kv, dim).unwrap();
        let sharding = Sharding::new(ranks, cut).unwrap();
        let request = Request::new(shape, pattern, sharding, dtype);
        Request {
            schedule: request.schedule.with_width(width),
            ..request
        }
    })
}

/// The outputs and the inputs of a backward pass.
const GRADIENTS: [Role; 3] = [Role::Dq, Role::Dk, Role::Dv];
const GIVEN: [Role; 6] = [Role::Q, Role::K, Role::V, Role::Out, Role::Lse, Role::Dout];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn forward_has_the_bits_of_the_ring_and_backward_agrees_up_to_rounding(request in requests()) {
        let ring = ring();
        let shape = request.shape;
        let (dtype, sum) = (request.dtype, request.dtype.sum());
        let generator = Generator::new(3, shape.dim);
        let inputs = [Role::Q, Role::K, Role::V]
            .map(|role| (role, generated(&generator, role, dims(role, &shape))));
        let views: Vec<_> = inputs.iter().map(|(role, tensor)| (*role, tensor.view())).collect();
        let mut outcome = ring.run(&request, &views).unwrap();
        let mut sink = empty(&[(Role::Out, dtype), (Role::Lse, sum)], &shape);
        let received = stream(ring.kernel(), &request, &generator, &mut sink);
        prop_assert_eq!(received, outcome.trace.sent_bytes());
        for role in [Role::Out, Role::Lse] {
            let (ring, streamed) = (outcome.take(role).unwrap(), sink.get(role));
            prop_assert_eq!(ring.data().bytes(), streamed.data().bytes());
        }

        let backward = Request { pass: Pass::Backward { dlse: false }, ..request };
        let mut source = sink;
        for (role, tensor) in inputs {
            source.insert(role, tensor);
        }
        let dout = generated(&generator, Role::Dout, dims(Role::Dout, &shape));
        source.insert(Role::Dout, dout);
        let views: Vec<_> = GIVEN.iter().map(|&role| (role, source.get(role).view())).collect();
        let mut outcome = ring.run(&backward, &views).unwrap();
        let mut sink = empty(&GRADIENTS.map(|role| (role, dtype)), &shape);
        let received = stream(ring.kernel(), &backward, &source, &mut sink);
        prop_assert_eq!(received, outcome.trace.sent_bytes());
        for role in GRADIENTS {
            let (ring, streamed) = (outcome.take(role).unwrap(), sink.get(role));
            if role == Role::Dq {
                prop_assert_eq!(ring.data().bytes(), streamed.data().bytes());
            }
            let largest = ring.to_f64().iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            // Sums are added in another order, then rounded once.
            let off = (2.0 * dtype.epsilon() + 64.0 * sum.epsilon()) * largest;
            for (x, y) in ring.to_f64().iter().zip(streamed.to_f64()) {
                prop_assert!((x - y).abs() <= off, "{:?}: {} is not {}", role, y, x);
            }
        }
    }

    #[test]
    fn the_reference_of_one_row_equals_that_row_of_the_whole(request in requests()) {
        let shape = request.shape;
        let generator = Generator::new(5, shape.dim);
        let [q, k, v] = [Role::Q, Role::K, Role::V]
            .map(|role| generated(&generator, role, dims(role, &shape)).to_f64());
        let whole = reference::forward(&shape, &request.pattern, 0.5, &q, &k, &v).unwrap();
        for token in [0, shape.tokens / 2, shape.tokens - 1] {
            for head in 0..shape.heads {
                let read = |role, token, head| generator.row(role, 0, token, head, DType::F32);
                let key = |token| {
                    let head = shape.kv_head(head);
                    (read(Role::K, token, head), read(Role::V, token, head))
                };
                let (q, place) = (read(Role::Q, token, head), (token, head));
                let row = reference::row(&shape, &request.pattern, 0.5, place, &q, key).unwrap();
                let at = token * shape.heads + head;
                prop_assert_eq!(row.lse, whole.lse[at]);
                let expected = &whole.out[at * shape.dim..(at + 1) * shape.dim];
                prop_assert_eq!(&row.out[..], expected);
            }
        }
    }
}

#[test]
fn requests_that_one_rank_cannot_compute_alone_are_refused() {
    let kernel = CpuKernel::new().unwrap();
    let shape = Shape::new(1, 32, 2, 2, 4).unwrap();
    let detached = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let sharding = Sharding::contiguous(2).unwrap();
    let request = |pattern| Request::new(shape, pattern, sharding.clone(), DType::F32);
    let mut replicated = request(Pattern::dense());
    replicated.queries = Queries::Replicated;
    let split = request(Pattern::dilated(&[8], &[2], detached).unwrap());
    for request in [replicated, split] {
        let plan = Plan::new(request).unwrap();
        let refused = Stream::new(&kernel, &plan).map(|_| ()).unwrap_err();
        assert!(matches!(refused, StreamError::Unsupported { .. }));
    }
}

/// A LongNet pattern with few keys.
fn longnet(tokens: usize) -> Pattern {
    let rates: Vec<usize> = (0..)
        .map(|i| 4usize.pow(i))
        .take_while(|rate| 32 * rate <= tokens)
        .collect();
    let segments: Vec<usize> = rates.iter().map(|rate| 32 * rate).collect();
    let pattern = Pattern::dilated(&segments, &rates, mix()).unwrap();
    pattern.causal(true)
}

#[test]
fn the_checksum_depends_on_the_output_but_not_on_the_number_of_ranks() {
    let kernel = CpuKernel::new().unwrap();
    let shape = Shape::new(1, 1 << 13, 1, 1, 64).unwrap();
    let sum = |ranks: usize, pattern: Pattern, seed: u64| {
        let sharding = Sharding::contiguous(ranks).unwrap();
        let plan = Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap();
        let mut stream = Stream::new(&kernel, &plan).unwrap();
        let mut checksum = Checksum::default();
        let generator = Generator::new(seed, 64);
        for rank in 0..ranks {
            stream.rank(rank, &generator, &mut checksum, None).unwrap();
        }
        assert_eq!(checksum.rows(), 1 << 13);
        checksum
    };
    let pattern = || longnet(1 << 13);
    let base = sum(8, pattern(), 0);
    let tolerance = base.tolerance(DType::F32);
    for ranks in [1, 5, 16] {
        let difference = (sum(ranks, pattern(), 0).value() - base.value()).abs();
        println!("{ranks} ranks: {difference} of {tolerance}");
        assert!(difference <= tolerance, "{ranks} ranks");
    }
    assert_eq!(sum(8, pattern(), 0), base);
    // One branch less, or other inputs, differ by far more.
    let less = Pattern::dilated(&[32, 128, 512], &[1, 4, 16], mix()).unwrap();
    for other in [sum(8, less.causal(true), 0), sum(8, pattern(), 1)] {
        assert!((other.value() - base.value()).abs() > 1000.0 * tolerance);
    }
}

#[test]
fn samples_are_the_selected_rows() {
    let kernel = CpuKernel::new().unwrap();
    let shape = Shape::new(1, 300, 4, 2, 8).unwrap();
    for cut in [Cut::Contiguous, Cut::Striped] {
        let sharding = Sharding::new(3, cut).unwrap();
        let request = Request::new(shape, longnet(300), sharding, DType::F32);
        let outputs = [(Role::Out, DType::F32), (Role::Lse, DType::F32)];
        let mut whole = empty(&outputs, &shape);
        let generator = Generator::new(1, 8);
        stream(&kernel, &request, &generator, &mut whole);
        let plan = Plan::new(request).unwrap();
        let mut stream = Stream::new(&kernel, &plan).unwrap();
        let selected = [(0, 0), (7, 3), (128, 1), (128, 2), (299, 3)];
        let mut samples = Samples::new(selected);
        for rank in 0..3 {
            stream.rank(rank, &generator, &mut samples, None).unwrap();
        }
        let rows = samples.take();
        assert!(rows.keys().copied().eq(selected));
        for ((token, head), row) in rows {
            let at = token * 4 + head;
            let out = whole.get(Role::Out).to_f64();
            assert_eq!(row.out, out[at * 8..(at + 1) * 8]);
            assert_eq!(row.lse, whole.get(Role::Lse).to_f64()[at]);
        }
    }
}

fn run(first: usize, stride: usize, count: usize) -> Run {
    Run {
        first,
        stride,
        count,
    }
}

#[test]
fn rows_read_from_files_are_those_written() {
    let file = Arc::new(tempfile::tempfile().unwrap());
    let tensor = |offset: u64| TensorFile {
        file: Arc::clone(&file),
        offset,
        dtype: DType::F32,
        dims: [2, 10, 3, 4],
    };
    let mut files = Files::new();
    files.add(Role::K, tensor(13));
    files.add(Role::V, tensor(13 + tensor(0).bytes()));
    let generator = Generator::new(9, 4);
    let all = [0, 1, 2];
    let range = |role, batch, tokens| RowRange {
        role,
        batch,
        tokens,
        heads: &all,
    };
    for role in [Role::K, Role::V] {
        for (batch, first) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let range = range(role, batch, run(first, 2, 5));
            let mut elements = Data::zeros(DType::F32, 5 * 3 * 4);
            generator.read(&range, &mut elements).unwrap();
            files.write(&range, &elements).unwrap();
        }
    }
    let lists = [(Role::K, &all[..]), (Role::V, &[1]), (Role::K, &[0, 2])];
    for (role, heads) in lists {
        let range = RowRange {
            heads,
            ..range(role, 1, run(3, 3, 3))
        };
        let mut expected = Data::zeros(DType::F32, 3 * heads.len() * 4);
        let mut read = expected.clone();
        generator.read(&range, &mut expected).unwrap();
        TensorSource::read(&files, &range, &mut read).unwrap();
        assert_eq!(read, expected);
    }
    let nowhere = range(Role::Q, 0, run(0, 1, 1));
    let refused = TensorSource::read(&files, &nowhere, &mut Data::zeros(DType::F32, 12));
    assert!(matches!(refused, Err(StreamError::Missing { .. })));
}

#[test]
fn the_smallest_number_of_ranks_that_fits_is_found() {
    let kernel = CpuKernel::new().unwrap();
    let shape = Shape::new(1, 1 << 20, 1, 1, 64).unwrap();
    let sharding = Sharding::contiguous(1).unwrap();
    let forward = Request::new(shape, longnet(1 << 20), sharding, DType::F32);
    let backward = Request {
        pass: Pass::Backward { dlse: false },
        ..forward.clone()
    };
    let both = [forward, backward];
    let mut before = usize::MAX;
    for limit in [64 << 20, 128 << 20, 512 << 20, 4 << 30] {
        let alone = fit_ranks(&kernel, &both[..1], limit).unwrap();
        let found = fit_ranks(&kernel, &both, limit).unwrap();
        assert!(found.bytes <= limit && alone.bytes <= limit);
        assert!(alone.ranks <= found.ranks && found.ranks <= before);
        before = found.ranks;
    }
    assert_eq!(before, 1);
    let Err(StreamError::Limit { least, .. }) = fit_ranks(&kernel, &both, 1 << 20) else {
        panic!("a megabyte is less than the program takes");
    };
    assert!(fit_ranks(&kernel, &both, least).is_ok());
    assert!(fit_ranks(&kernel, &both, least - 1).is_err());
}

/// A sink that several ranks share.
struct SharedStore<'a>(&'a Mutex<TensorStore>);

impl TensorSink for SharedStore<'_> {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        self.0.lock().unwrap().write(range, from)
    }
}

/// Four ranks that each load their rows from a source and write them to a sink; `dead` never
/// starts.
fn run_apart(request: &Request, source: &dyn TensorSource, dead: Option<usize>) -> TensorStore {
    let kernel = CpuKernel::new().unwrap();
    let plan = Plan::new(request.clone()).unwrap();
    let outputs = [(Role::Out, DType::F32), (Role::Lse, DType::F32)];
    let sink = Mutex::new(empty(&outputs, &request.shape));
    std::thread::scope(|scope| {
        let ranks = endpoints(plan.ranks(), Duration::from_secs(60));
        for (number, mut endpoint) in ranks.into_iter().enumerate() {
            let (kernel, plan, sink) = (&kernel, &plan, &sink);
            scope.spawn(move || {
                if dead == Some(number) {
                    return endpoint.group().mark_dead(number);
                }
                let mut output = SharedStore(sink);
                let mut call = ShardCall::new(kernel, plan, number).unwrap();
                call.load(&mut FromSource(source)).unwrap();
                match plan.request().redundancy {
                    0 => {
                        call.run(&mut endpoint).unwrap();
                        call.store(&mut ToSink(&mut output)).unwrap();
                    }
                    _ => {
                        let output = &mut ToSink(&mut output);
                        call.run_surviving(&mut endpoint, output).unwrap();
                    }
                }
                let report = call.finish();
                assert!(report.memory.ledger.total().peak_bytes > 0);
                assert!(report.pairs > 0);
            });
        }
    });
    sink.into_inner().unwrap()
}

#[test]
fn ranks_apart_read_a_source_write_a_sink_and_survive_a_death() {
    let shape = Shape::new(2, 37, 4, 2, 8).unwrap();
    let generator = Generator::new(3, shape.dim);
    let views = [Role::Q, Role::K, Role::V]
        .map(|role| (role, generated(&generator, role, dims(role, &shape))));
    let views = views
        .each_ref()
        .map(|(role, tensor)| (*role, tensor.view()));
    for redundancy in [0, 1] {
        let sharding = Sharding::contiguous(4).unwrap();
        let pattern = Pattern::dense().causal(true);
        let mut request = Request::new(shape, pattern, sharding, DType::F32);
        request.redundancy = redundancy;
        let mut expected = ring().run(&request, &views).unwrap();
        let undisturbed = run_apart(&request, &generator, None);
        let survived = (redundancy > 0).then(|| run_apart(&request, &generator, Some(2)));
        for role in [Role::Out, Role::Lse] {
            let expected = expected.take(role).unwrap();
            assert_eq!(undisturbed.get(role), &expected, "{role:?}");
            // After a death, jobs are merged in another order.
            let survived = survived.iter().flat_map(|of| of.get(role).to_f64());
            for (got, expected) in survived.zip(expected.to_f64()) {
                assert!((got - expected).abs() <= 1e-5, "{role:?}");
            }
        }
    }
}

/// With invariant bits, ranks one after another have the bits of one rank in memory: out, lse, dq,
/// dk and dv.
#[test]
fn invariant_bits_are_those_of_one_rank_in_memory() {
    let ring = ring();
    for seed in 0..40 {
        let dtype = [DType::F32, DType::Bf16][seed as usize % 2];
        let Configuration { request, .. } = Configuration::tiled(seed, dtype);
        let (shape, sum) = (request.shape, dtype.sum());
        let drawn = CallTensors::random(&shape, seed);
        let mut source = TensorStore::default();
        for (role, tensor) in [
            (Role::Q, &drawn.q),
            (Role::K, &drawn.k),
            (Role::V, &drawn.v),
            (Role::Dout, &drawn.dout),
        ] {
            let stored = Tensor::from_f64(dtype, tensor.dims(), &tensor.to_f64());
            source.insert(role, stored.unwrap());
        }
        let rows = [shape.batch, shape.queries, shape.heads];
        let of_queries = |width: usize| [rows[0], rows[1], rows[2], width];
        let of_keys = |width: usize| [shape.batch, shape.tokens, shape.kv_heads, width];
        let outputs = [
            (Role::Out, dtype, of_queries(shape.value_dim)),
            (Role::Lse, sum, of_queries(1)),
            (Role::Dq, dtype, of_queries(shape.dim)),
            (Role::Dk, dtype, of_keys(shape.dim)),
            (Role::Dv, dtype, of_keys(shape.value_dim)),
        ];
        let backward = Request {
            pass: Pass::Backward { dlse: false },
            schedule: Schedule::RING.with_backward(Rotating::Queries),
            ..request.clone()
        };
        for (request, roles, outputs) in [
            (request, &GIVEN[..3], &outputs[..2]),
            (backward, &GIVEN[..], &outputs[2..]),
        ] {
            let given = roles.iter().map(|&role| (role, source.get(role).view()));
            let mut alone = ring.run(&request, &given.collect::<Vec<_>>()).unwrap();
            let mut sink = TensorStore::default();
            for &(role, dtype, dims) in outputs {
                sink.insert(role, Tensor::zeros(dtype, dims));
            }
            let request = request.on_ranks(2 + seed as usize % 5).unwrap();
            stream(ring.kernel(), &request, &source, &mut sink);
            for &(role, ..) in outputs {
                let (one, streamed) = (alone.take(role).unwrap(), sink.get(role));
                let same = one.data().bytes() == streamed.data().bytes();
                assert!(same, "seed {seed}: {role:?} of {request:?}");
                source.insert(role, one);
            }
        }
    }
}

#[test]
fn sums_that_travel_are_refused() {
    let request = Configuration::tiled(1, DType::F32)
        .request
        .on_ranks(3)
        .unwrap();
    let request = Request {
        pass: Pass::Backward { dlse: false },
        ..request
    };
    let plan = Plan::new(request).unwrap();
    let kernel = CpuKernel::new().unwrap();
    let refused = Stream::new(&kernel, &plan).err().unwrap().to_string();
    assert!(
        refused.contains("invariant bits whose keys rotate"),
        "{refused}"
    );
}
