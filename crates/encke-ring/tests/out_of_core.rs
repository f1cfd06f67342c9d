//! Streamed ranks against a ring of threads: the same bits forward, the same numbers backward, the
//! same bytes planned and held.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Run, Sharding};
use encke_core::{
    DType, Data, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor, reference,
};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;
use encke_ring::out_of_core::{
    Checksum, Files, Generator, GradientFile, RowRange, RowSink, RowSource, Samples, Stream,
    StreamError, TensorFile, fit_ranks, row_width,
};
use proptest::prelude::*;

/// Tensors in memory, as a source and as a sink.
#[derive(Default)]
struct Memory {
    tensors: BTreeMap<u8, Tensor>,
}

impl Memory {
    fn insert(&mut self, role: Role, tensor: Tensor) {
        self.tensors.insert(role as u8, tensor);
    }

    fn get(&self, role: Role) -> &Tensor {
        &self.tensors[&(role as u8)]
    }

    /// Every (place in the tensor, place in the stretch) of a row.
    fn rows(dims: [usize; 4], stretch: &RowRange<'_>) -> Vec<(usize, usize)> {
        let [_, n, h, d] = dims;
        let mut rows = Vec::new();
        for token in stretch.tokens.tokens() {
            for &head in stretch.heads {
                let there = ((stretch.batch * n + token) * h + head) * d;
                rows.push((there, rows.len() * d));
            }
        }
        rows
    }
}

impl RowSource for Memory {
    fn dtype(&self, role: Role) -> DType {
        self.get(role).dtype()
    }

    fn read(&self, stretch: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        let tensor = self.get(stretch.role);
        for (there, here) in Memory::rows(tensor.dims(), stretch) {
            for i in 0..tensor.dims()[3] {
                to.set(here + i, tensor.data().as_slice().get(there + i));
            }
        }
        Ok(())
    }
}

impl RowSink for Memory {
    fn write(&mut self, stretch: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        let tensor = self.tensors.get_mut(&(stretch.role as u8)).unwrap();
        let dims = tensor.dims();
        for (there, here) in Memory::rows(dims, stretch) {
            for i in 0..dims[3] {
                let number = from.as_slice().get(here + i);
                tensor.data_mut().set(there + i, number);
            }
        }
        Ok(())
    }
}

/// A tensor of the generator, as a whole.
fn generated(generator: &Generator, role: Role, dims: [usize; 4]) -> Tensor {
    let [b, n, h, _] = dims;
    let mut numbers = Vec::new();
    for batch in 0..b {
        for (token, head) in (0..n).flat_map(|t| (0..h).map(move |h| (t, h))) {
            numbers.extend(generator.row(role, batch, token, head, DType::F32));
        }
    }
    Tensor::from_f64(DType::F32, dims, &numbers).unwrap()
}

fn dims(role: Role, shape: &Shape) -> [usize; 4] {
    let heads = match role {
        Role::K | Role::V | Role::Dk | Role::Dv => shape.kv_heads,
        _ => shape.heads,
    };
    [shape.batch, shape.tokens, heads, row_width(role, shape)]
}

fn empty(roles: &[(Role, DType)], shape: &Shape) -> Memory {
    let mut memory = Memory::default();
    for &(role, dtype) in roles {
        memory.insert(role, Tensor::zeros(dtype, dims(role, shape)));
    }
    memory
}

fn ring() -> ThreadRing<CpuKernel> {
    ThreadRing::new(CpuKernel::new().unwrap(), Duration::from_secs(60))
}

/// Streams every rank of a request, with a spool where it is a backward pass. Returns the bytes
/// that ranks would have received.
fn stream(
    kernel: &CpuKernel,
    request: &Request,
    source: &dyn RowSource,
    sink: &mut Memory,
) -> usize {
    let plan = Plan::new(request.clone()).unwrap();
    let mut stream = Stream::new(kernel, &plan).unwrap();
    let file = tempfile::tempfile().unwrap();
    let mut spool =
        (request.pass != Pass::Forward).then(|| GradientFile::new(file, request).unwrap());
    let mut received = 0;
    for rank in 0..plan.ranks() {
        let done = stream.rank(rank, source, sink, spool.as_mut()).unwrap();
        let planned = plan.rank(rank).unwrap();
        let buffers: usize = planned.memory().values().sum();
        assert_eq!(done.memory.allocated_bytes, buffers, "rank {rank}");
        assert_eq!(done.pairs, planned.pairs());
        received += done.events.iter().map(|e| e.received_bytes).sum::<usize>();
    }
    if let Some(spool) = spool {
        spool.finish(sink).unwrap();
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
        // Group mode wants a head for each branch.
        let shape = Shape::new(batch, tokens, 2 * kv * group, kv, dim).unwrap();
        let sharding = Sharding::new(ranks, cut).unwrap();
        let request = Request::new(shape, pattern, sharding, dtype);
        Request {
            schedule: request.schedule.with_width(width),
            ..request
        }
    })
}

/// The roles of a backward pass that have a gradient, and what it is given.
const GRADIENTS: [Role; 3] = [Role::Dq, Role::Dk, Role::Dv];
const GIVEN: [Role; 6] = [Role::Q, Role::K, Role::V, Role::Out, Role::Lse, Role::Dout];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn forward_has_the_bits_of_the_ring_and_backward_its_numbers(request in requests()) {
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
            // The sums are made in another order, then rounded once.
            let off = (2.0 * dtype.epsilon() + 64.0 * sum.epsilon()) * largest;
            for (x, y) in ring.to_f64().iter().zip(streamed.to_f64()) {
                prop_assert!((x - y).abs() <= off, "{:?}: {} is not {}", role, y, x);
            }
        }
    }

    #[test]
    fn one_row_of_the_reference_is_that_row(request in requests()) {
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
fn what_no_rank_can_do_alone_is_refused() {
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

/// A LongNet pattern of few keys.
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
fn the_checksum_does_not_depend_on_the_number_of_ranks_but_on_the_output() {
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
    // One branch less, or other numbers, is far outside of it.
    let less = Pattern::dilated(&[32, 128, 512], &[1, 4, 16], mix()).unwrap();
    for other in [sum(8, less.causal(true), 0), sum(8, pattern(), 1)] {
        assert!((other.value() - base.value()).abs() > 1000.0 * tolerance);
    }
}

#[test]
fn samples_are_the_rows_that_were_asked_for() {
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
        let wanted = [(0, 0), (7, 3), (128, 1), (128, 2), (299, 3)];
        let mut samples = Samples::new(wanted);
        for rank in 0..3 {
            stream.rank(rank, &generator, &mut samples, None).unwrap();
        }
        let rows = samples.take();
        assert!(rows.keys().copied().eq(wanted));
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
fn files_hold_what_was_written_wherever_it_was() {
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
    let stretch = |role, batch, tokens| RowRange {
        role,
        batch,
        tokens,
        heads: &all,
    };
    for role in [Role::K, Role::V] {
        for (batch, first) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let stretch = stretch(role, batch, run(first, 2, 5));
            let mut numbers = Data::zeros(DType::F32, 5 * 3 * 4);
            generator.read(&stretch, &mut numbers).unwrap();
            files.write(&stretch, &numbers).unwrap();
        }
    }
    let lists = [(Role::K, &all[..]), (Role::V, &[1]), (Role::K, &[0, 2])];
    for (role, heads) in lists {
        let stretch = RowRange {
            heads,
            ..stretch(role, 1, run(3, 3, 3))
        };
        let mut expected = Data::zeros(DType::F32, 3 * heads.len() * 4);
        let mut read = expected.clone();
        generator.read(&stretch, &mut expected).unwrap();
        RowSource::read(&files, &stretch, &mut read).unwrap();
        assert_eq!(read, expected);
    }
    let nowhere = stretch(Role::Q, 0, run(0, 1, 1));
    let refused = RowSource::read(&files, &nowhere, &mut Data::zeros(DType::F32, 12));
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
