//! Rows generated and summed on the GPU, against the host's generator and checksum.

use encke_core::job::Block;
use encke_core::memory::Memory;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data, host};
use encke_cuda::{CudaKernel, generated_rows};
use encke_ring::out_of_core::{Checksum, Generator, RowRange, TensorSink, TensorSource};

use crate::tally::GpuTally;

/// Tokens before the rows in their buffer, so that an ignored offset shows.
const TOKENS_BEFORE: usize = 3;

pub fn run(tally: &mut GpuTally, kernel: &CudaKernel) {
    let heads: [&[usize]; 3] = [&[0], &[1, 5], &[0, 1, 2, 3, 4, 5, 6, 7]];
    let runs = [(0, 1, 5000), ((1 << 30) + 7, 4096, 700), (1 << 40, 3, 1)];
    let mut checks = Vec::new();
    for (dtype, dim) in [
        (DType::Bf16, 64),
        (DType::F16, 20),
        (DType::F32, 72),
        (DType::F64, 130),
    ] {
        for (heads, (first, stride, count)) in heads.into_iter().zip(runs) {
            let tokens = Run {
                first,
                stride,
                count,
            };
            let range = RowRange {
                role: Role::K,
                batch: 1,
                tokens,
                heads,
            };
            let checked = check(kernel, &range, dtype, dim);
            checks.push(checked.map_err(|what| format!("{dtype}, {dim}: {what}")));
        }
    }
    tally.group("rows generated and summed on the GPU", checks);
}

/// Compares one range of rows bit for bit.
fn check(
    kernel: &CudaKernel,
    range: &RowRange<'_>,
    dtype: DType,
    dim: usize,
) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let RowRange {
        role,
        batch,
        tokens,
        heads,
    } = *range;
    let generator = Generator::new(99, dim);
    let (rows, at) = (tokens.count * heads.len(), TOKENS_BEFORE * dim);
    let mut generated = Data::zeros(DType::F32, rows * dim);
    generator
        .read(range, &mut generated)
        .map_err(|e| text(&e))?;
    let mut expected = Data::zeros(dtype, at + rows * dim);
    let block = Block::contiguous(rows * dim, 0, at);
    host::copy(&block, false, generated.as_slice(), &mut expected);

    let mut buffer = kernel
        .allocate(dtype, at + rows * dim)
        .map_err(|e| text(&e))?;
    let key = |&head: &usize| generator.head_key(role, batch, head);
    let keys: Vec<u64> = heads.iter().map(key).collect();
    let target = (&mut buffer, at);
    let enqueued = generated_rows::generate(kernel, tokens, &keys, dim, target);
    enqueued.map_err(|e| text(&e))?;
    let sums = generated_rows::checksum(kernel, batch, tokens, heads, dim, (&buffer, at));
    let (signed, squares, summed) = sums.and_then(|sums| sums.read()).map_err(|e| text(&e))?;
    let data = kernel.move_to_host(buffer).map_err(|e| text(&e))?;
    if data.bytes() != expected.bytes() {
        return Err("rows differ from the host's".into());
    }
    let mut alone = Data::zeros(dtype, rows * dim);
    let block = Block::contiguous(rows * dim, at, 0);
    host::copy(&block, false, expected.as_slice(), &mut alone);
    let mut sum = Checksum::default();
    let out = RowRange {
        role: Role::Out,
        ..*range
    };
    sum.write(&out, &alone).map_err(|e| text(&e))?;
    let found = Checksum::of_units(signed, squares, summed);
    if sum != found {
        return Err(format!("{found:?}, the host has {sum:?}"));
    }
    Ok(())
}
