//! The operations that move elements: upload, download, fill, copy, pack and the checksum.
//!
//! The decision here: these are compared bitwise. A copy has no tolerance, and a conversion has one
//! correct result, the nearest value.

use super::bench::KernelBench;
use super::failure::Failure;
use super::random::Random;
use crate::dtype::{DType, Data};
use crate::job::{Block, Operand};
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::naive::NaiveKernel;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};
use crate::transport::WireBuffer;

/// One random case of each operation.
pub(super) fn check<K: Kernel>(bench: &KernelBench<'_, K>) -> Result<(), Failure> {
    let random = &mut Random::new(bench.seed ^ 0x30fe);
    tokens(bench, random)?;
    copy(bench, random)?;
    fill(bench, random)?;
    parcel(bench, random)?;
    pack(bench, random)
}

/// Disjoint runs: a random strided run, and one token before it.
fn runs(random: &mut Random, tokens: usize) -> Vec<Run> {
    let run = |first: usize, stride: usize, count: usize| Run {
        first,
        stride,
        count,
    };
    let first = random.below(tokens);
    let rest = tokens - first;
    let stride = random.pick(&[1, 2, 3]);
    let mut runs = vec![run(first, stride, random.size(rest.div_ceil(stride)))];
    if first > 0 {
        runs.push(run(random.below(first), 1, 1));
    }
    if random.once_in(2) {
        runs.reverse();
    }
    runs
}

fn tokens<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let dtype = random.pick(&[bench.dtype, bench.dtype.sum()]);
    let host = random.pick(&DType::ALL);
    let [b, n, h, d] = [
        random.size(3),
        random.size(40),
        random.size(4),
        random.size(20),
    ];
    let mut strides = [0, 0, 0, 1];
    let mut extent = d;
    let mut axes = [(0, b), (1, n), (2, h)];
    random.shuffle(&mut axes);
    for (axis, count) in axes {
        strides[axis] = extent + random.below(3);
        extent += strides[axis] * (count - 1);
    }
    let values: Vec<f64> = (0..extent).map(|_| random.unit()).collect();
    let data = Data::from_f64(host, &values);
    let view = View::from_slice(data.as_slice(), [b, n, h, d], strides);
    let view = view.map_err(|error| bench.failure(error))?;
    let runs = runs(random, n);
    let rows: usize = runs.iter().map(|run| run.count).sum();

    let elements = b * rows * h * d;
    let mut buffer = bench.put(dtype, &vec![7.5; elements + 3])?;
    bench.done(bench.kernel.upload(&view, &runs, &mut buffer))?;
    let mut expected = vec![7.5; elements + 3];
    let mut returned = vec![f64::INFINITY; b * n * h * d];
    let order: Vec<usize> = runs.iter().flat_map(|run| run.tokens()).collect();
    for (i, slot) in expected[..elements].iter_mut().enumerate() {
        let (row, head, c) = (i / (h * d), i / d % h, i % d);
        let (batch, token) = (row / rows, order[row % rows]);
        *slot = dtype.round(view.data().get(view.row(batch, token, head) + c));
        returned[((batch * n + token) * h + head) * d + c] = *slot;
    }
    let got = bench.get(dtype, elements + 3, &buffer)?;
    let expected = Data::from_f64(dtype, &expected);
    bench.unchanged("upload", &expected, &got, |_| false)?;

    let mut tensor = Tensor::zeros(host, [b, n, h, d]);
    NaiveKernel.fill(tensor.data_mut(), f64::INFINITY).ok();
    bench.done(bench.kernel.download(&buffer, &runs, &mut tensor))?;
    let expected = Data::from_f64(host, &returned);
    bench.unchanged("download", &expected, tensor.data(), |_| false)
}

fn copy<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let (batch, segments, rows) = (random.size(3), random.size(3), random.size(20));
    let (heads, width) = (random.size(4), random.size(70));
    let mut operand = || {
        let row = heads * width + width * random.below(2);
        let segment = row * rows + width * random.below(3);
        let mut slots: Vec<usize> = (0..heads).map(|h| h * width).collect();
        random.shuffle(&mut slots);
        let operand = Operand {
            offset: width * random.below(3),
            batch: segment * segments,
            segment,
            row,
            heads: slots.into(),
        };
        let elements = operand.offset + segment * segments * batch + width;
        (operand, elements)
    };
    let ((from, from_elements), (to, to_elements)) = (operand(), operand());
    let block = Block {
        batch,
        segments,
        rows,
        heads,
        width,
        from,
        to,
    };
    let types = [bench.dtype, bench.dtype.sum()];
    let (from_type, to_type) = (random.pick(&types), random.pick(&types));
    let add = random.once_in(2);
    let mut random_data = |dtype: DType, count: usize| {
        let values: Vec<f64> = (0..count).map(|_| random.unit()).collect();
        Data::from_f64(dtype, &values)
    };
    let (source, before) = (
        random_data(from_type, from_elements),
        random_data(to_type, to_elements),
    );
    let mut expected = before.clone();
    bench.done(NaiveKernel.copy(&block, add, source.as_slice(), &mut expected))?;
    let (source, mut target) = (bench.put_data(&source)?, bench.put_data(&before)?);
    let from = bench.kernel.input(&source);
    bench.done(bench.kernel.copy(&block, add, from, &mut target))?;
    let got = bench.get(to_type, to_elements, &target)?;
    let what = if add { "adding rows" } else { "copying rows" };
    bench.unchanged(what, &expected, &got, |_| false)
}

fn fill<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let value = random.pick(&[0.0, -1.5, f64::NEG_INFINITY]);
    let elements = random.size(300);
    let allocated = bench.done(bench.kernel.allocate(bench.dtype, elements))?;
    let zeros = Data::zeros(bench.dtype, elements);
    let got = bench.get(bench.dtype, elements, &allocated)?;
    bench.unchanged("allocate", &zeros, &got, |_| false)?;
    let mut buffer = allocated;
    bench.done(bench.kernel.fill(&mut buffer, value))?;
    let expected = Data::from_f64(bench.dtype, &vec![value; elements]);
    let got = bench.get(bench.dtype, elements, &buffer)?;
    bench.unchanged("fill", &expected, &got, |_| false)
}

/// The operations of a transport on a buffer.
fn parcel<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let elements = 1 + random.size(100);
    let values: Vec<f64> = (0..elements).map(|_| random.unit()).collect();
    let mut source = bench.put(bench.dtype, &values)?;
    let mut target = bench.done(bench.kernel.allocate(bench.dtype, elements))?;
    let sent = 1 + random.below(elements - 1);
    target.copy_from(&source, sent);
    let mut prefix = values[..sent].to_vec();
    prefix.resize(elements, 0.0);
    let expected = Data::from_f64(bench.dtype, &prefix);
    let got = bench.get(bench.dtype, elements, &target)?;
    bench.unchanged("copying a parcel", &expected, &got, |_| false)?;
    if source.checksum(sent) != target.checksum(sent) {
        return Err(bench.failure("equal parcels have different checksums"));
    }
    let mut other = values.clone();
    other[random.below(sent)] += 1.0;
    if bench.put(bench.dtype, &other)?.checksum(sent) == source.checksum(sent) {
        return Err(bench.failure("the checksum did not change with an element"));
    }
    let mut exact = bench.done(bench.kernel.allocate(bench.dtype, sent))?;
    let before = exact.allocated_bytes();
    exact.copy_from(&source, sent);
    let got = bench.get(bench.dtype, sent, &exact)?;
    let expected = Data::from_f64(bench.dtype, &values[..sent]);
    bench.unchanged(
        "filling a parcel from a larger one",
        &expected,
        &got,
        |_| false,
    )?;
    let after = exact.allocated_bytes();
    if after > before {
        let grew = format!("a parcel of {before} bytes that received a part of a larger one");
        return Err(bench.failure(format!("{grew} holds {after}")));
    }
    let bytes = source.element_bytes();
    if bytes != bench.dtype.bytes() || source.allocated_bytes() < elements * bytes {
        return Err(bench.failure("a parcel reports a wrong size"));
    }
    let taken = source.take();
    if taken.elements() != elements || source.elements() != 0 {
        return Err(bench.failure("taking a parcel must leave an empty one"));
    }
    Ok(())
}

/// Packed parcels may alias their source rows: writing to one buffer must not change another, and a
/// buffer that received a short message must keep its capacity.
fn pack<K: Kernel>(bench: &KernelBench<'_, K>, random: &mut Random) -> Result<(), Failure> {
    let kernel = bench.kernel;
    let (packed, room) = (1 + random.below(300), 300 + random.below(100));
    let values: Vec<f64> = (0..packed + random.below(50))
        .map(|_| random.unit())
        .collect();
    let expected = Data::from_f64(bench.dtype, &values);
    let mut rows = bench.put(bench.dtype, &values)?;
    let mut parcel = bench.done(kernel.allocate(bench.dtype, room))?;
    let mut sent = bench.done(kernel.allocate(bench.dtype, room))?;
    // One piece from the start, or two pieces in exchanged order.
    let cut = if random.once_in(2) { 0 } else { packed / 2 };
    let mut blocks = vec![Block::contiguous(packed - cut, cut, 0)];
    if cut > 0 {
        blocks.push(Block::contiguous(cut, 0, packed - cut));
    }
    let mut moved = values[cut..packed].to_vec();
    moved.extend(&values[..cut]);
    let moved = Data::from_f64(bench.dtype, &moved);
    let input = kernel.input(&rows);
    bench.done(kernel.pack(&blocks, input, &mut parcel))?;
    sent.copy_from(&parcel, packed);
    let all = |what: &str, buffer: &K::Buffer, expected: &Data| {
        let elements = expected.as_slice().len();
        let got = bench.get(bench.dtype, elements, buffer)?;
        bench.unchanged(what, expected, &got, |_| false)
    };
    all("packing a parcel", &parcel, &moved)?;
    bench.done(kernel.fill(&mut parcel, 2.0))?;
    let twos = Data::from_f64(bench.dtype, &vec![2.0; room]);
    all("writing to what was packed", &parcel, &twos)?;
    all("writing to a parcel, of its rows,", &rows, &expected)?;
    all("writing to a parcel, of what was sent,", &sent, &moved)?;
    bench.done(kernel.fill(&mut rows, 3.0))?;
    all("writing to rows, of what was sent,", &sent, &moved)
}
