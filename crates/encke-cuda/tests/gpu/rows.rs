//! Rows made and summed on the GPU, against the generator and the checksum they repeat.

use encke_core::job::Block;
use encke_core::memory::Memory;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data, host};
use encke_cuda::{CudaKernel, generated_rows};
use encke_ring::out_of_core::{Checksum, Generator, RowRange, Sink, Source};

use crate::tally::Tally;

/// Tokens before the rows in their buffer: nothing may begin at 0 by chance.
const BEFORE: usize = 3;

pub fn run(tally: &mut Tally, kernel: &CudaKernel) {
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
            let stretch = RowRange {
                role: Role::K,
                batch: 1,
                tokens,
                heads,
            };
            let checked = check(kernel, &stretch, dtype, dim);
            checks.push(checked.map_err(|what| format!("{dtype}, {dim}: {what}")));
        }
    }
    tally.group("rows made and summed on the GPU", checks);
}

/// One stretch, bit for bit.
fn check(
    kernel: &CudaKernel,
    stretch: &RowRange<'_>,
    dtype: DType,
    dim: usize,
) -> Result<(), String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let RowRange {
        role,
        batch,
        tokens,
        heads,
    } = *stretch;
    let generator = Generator::new(99, dim);
    let (rows, at) = (tokens.count * heads.len(), BEFORE * dim);
    let mut made = Data::zeros(DType::F32, rows * dim);
    generator.read(stretch, &mut made).map_err(|e| told(&e))?;
    let mut expected = Data::zeros(dtype, at + rows * dim);
    let block = Block::contiguous(rows * dim, 0, at);
    host::copy(&block, false, made.as_slice(), &mut expected);

    let mut buffer = kernel
        .allocate(dtype, at + rows * dim)
        .map_err(|e| told(&e))?;
    let key = |&head: &usize| generator.head_key(role, batch, head);
    let keys: Vec<u64> = heads.iter().map(key).collect();
    let place = (&mut buffer, at);
    let generated = generated_rows::generate(kernel, tokens, &keys, dim, place);
    generated.map_err(|e| told(&e))?;
    let sums = generated_rows::checksum(kernel, batch, tokens, heads, dim, (&buffer, at));
    let (signed, squares, summed) = sums.and_then(|sums| sums.read()).map_err(|e| told(&e))?;
    let numbers = kernel.into_host(buffer).map_err(|e| told(&e))?;
    if numbers.bytes() != expected.bytes() {
        return Err("other rows than the host's".into());
    }
    let mut alone = Data::zeros(dtype, rows * dim);
    let block = Block::contiguous(rows * dim, at, 0);
    host::copy(&block, false, expected.as_slice(), &mut alone);
    let mut sum = Checksum::default();
    let out = RowRange {
        role: Role::Out,
        ..*stretch
    };
    sum.write(&out, &alone).map_err(|e| told(&e))?;
    let found = Checksum::of_units(signed, squares, summed);
    if sum != found {
        return Err(format!("{found:?}, the host has {sum:?}"));
    }
    Ok(())
}
