//! Rows generated on the device, and checksums of rows computed there, for sequences that are never
//! stored (`encke billion --device cuda`).
//!
//! These kernels are not attention. They replace transfers over the bus, 4 TB in each direction for
//! a billion tokens. `encke_ring::out_of_core` defines both functions on the host; the kernels
//! agree with it bit for bit.

use encke_core::DType;
use encke_core::sharding::Run;
use encke_core::transport::WireBuffer;

use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::kernel::CudaKernel;
use crate::launch::{KernelValue, LaunchContext, grid, pointer_arguments};
use crate::program::Program;

const THREADS: usize = 256;

/// Elements that one thread generates at a time, as in vector8.cuh.
const VECTOR: usize = 8;

/// The largest number of heads, which are the second dimension of a grid.
const MAX_HEADS: usize = 65_535;

/// Rows that one block sums at most. A row's sum is an integer in units of 2^-32, so the sums of
/// this many rows fit into 64 bits as long as the sum of a row stays below 2^15.
const ROWS_PER_BLOCK: usize = 1 << 16;

const GENERATOR: &[fn() -> String] = &[
    || include_str!("kernels/element_types.cuh").into(),
    || include_str!("kernels/vector8.cuh").into(),
    || include_str!("kernels/generator.cu").into(),
];
const CHECKSUM: &[fn() -> String] = &[
    || include_str!("kernels/element_types.cuh").into(),
    || include_str!("kernels/vector8.cuh").into(),
    || include_str!("kernels/checksum.cu").into(),
];

pub(crate) fn generator_program(dtype: DType, dim: usize) -> Program {
    let program = Program::new("generator", GENERATOR);
    program.stored(dtype).define("DIM", dim)
}

pub(crate) fn checksum_program(dtype: DType, dim: usize) -> Program {
    let program = Program::new("checksum", CHECKSUM);
    program.stored(dtype).define("DIM", dim)
}

/// Refuses rows outside the buffer.
fn check(buffer: &Buffer, at: usize, tokens: Run, heads: usize, dim: usize) -> Result<()> {
    let rows = tokens.count.checked_mul(heads);
    let end = rows.and_then(|rows| rows.checked_mul(dim)?.checked_add(at));
    let inside = end.is_some_and(|end| end <= buffer.elements());
    if inside && heads <= MAX_HEADS && at.is_multiple_of(dim) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!(
            "{} tokens of {heads} heads with {dim} elements at {at} in a buffer of {}",
            tokens.count,
            buffer.elements()
        ),
    })
}

/// Generates rows `[tokens, heads, dim]` of a sequence at element `at` of a buffer. `keys` has one
/// key per head; a row depends on its head's key and its token only.
pub fn generate(
    kernel: &CudaKernel,
    tokens: Run,
    keys: &[u64],
    dim: usize,
    (to, at): (&mut Buffer, usize),
) -> Result<()> {
    check(to, at, tokens, keys.len(), dim)?;
    if tokens.count == 0 || keys.is_empty() {
        return Ok(());
    }
    let context = kernel.context();
    let (device, dtype) = (&context.device, to.dtype());
    let table = keys.iter().map(|&key| key as i64).collect();
    let table = context.tables.get(device, table)?;
    let target = to.writable()?.clone();
    let function = device.function(&generator_program(dtype, dim), "generate", 0)?;
    let blocks = blocks(context, tokens.count * dim.div_ceil(VECTOR));
    let mut shape = grid(blocks, THREADS as u32, 0);
    shape.grid_dim.1 = keys.len() as u32;
    let pointer = target.pointer() + (at * dtype.bytes()) as u64;
    let (pointers, run) = ([pointer, table.pointer()], run_params(tokens));
    let mut arguments = pointer_arguments(&pointers);
    arguments.extend(run.iter().map(|value| value as &dyn KernelValue));
    let (what, kernel) = ("generating rows", (&function, shape));
    // SAFETY: the arguments of `generate`; the rows were checked to be inside the buffer.
    unsafe { context.launch(what, kernel, &[&table], &[&target], &arguments) }
}

/// Sums that a device computes.
pub struct RowSums {
    sums: Option<DeviceAllocation>,
    blocks: usize,
    rows: usize,
}

impl RowSums {
    /// The sum of all elements with their signs and the sum of their squares, in units of 2^-32,
    /// and the number of rows. Waits for the device.
    pub fn read(&self) -> Result<(i128, i128, u64)> {
        let mut sums = vec![0i64; 2 * self.blocks];
        if let Some(memory) = &self.sums {
            memory.read(bytemuck::cast_slice_mut(&mut sums))?;
        }
        let of = |which: usize| sums.iter().skip(which).step_by(2).map(|&x| i128::from(x));
        Ok((of(0).sum(), of(1).sum(), self.rows as u64))
    }
}

/// Sums rows `[tokens, heads, dim]` of a batch entry at element `at` of a buffer.
pub fn checksum(
    kernel: &CudaKernel,
    batch: usize,
    tokens: Run,
    heads: &[usize],
    dim: usize,
    (from, at): (&Buffer, usize),
) -> Result<RowSums> {
    check(from, at, tokens, heads.len(), dim)?;
    let rows = tokens.count * heads.len();
    if rows == 0 {
        return Ok(RowSums {
            sums: None,
            blocks: 0,
            rows,
        });
    }
    let context = kernel.context();
    let (device, dtype) = (&context.device, from.dtype());
    let table = heads.iter().map(|&head| head as i64).collect();
    let table = context.tables.get(device, table)?;
    let source = from.memory()?;
    let function = device.function(&checksum_program(dtype, dim), "checksum", 0)?;
    let per_head = blocks(context, tokens.count).max(tokens.count.div_ceil(ROWS_PER_BLOCK));
    let mut shape = grid(per_head, THREADS as u32, 0);
    shape.grid_dim.1 = heads.len() as u32;
    let blocks = per_head * heads.len();
    let sums = DeviceAllocation::new(device, blocks * 16)?;
    let pointer = source.pointer() + (at * dtype.bytes()) as u64;
    let (pointers, to) = ([pointer, table.pointer(), batch as u64], sums.pointer());
    let run = run_params(tokens);
    let mut arguments = pointer_arguments(&pointers);
    arguments.extend(run.iter().map(|value| value as &dyn KernelValue));
    arguments.push(&to);
    let (what, kernel) = ("summing rows", (&function, shape));
    // SAFETY: the arguments of `checksum`; the rows were checked to be inside the buffer, and
    // `sums` has room for one result per block.
    unsafe { context.launch(what, kernel, &[source, &table], &[&sums], &arguments)? };
    Ok(RowSums {
        sums: Some(sums),
        blocks,
        rows,
    })
}

fn run_params(tokens: Run) -> [i64; 3] {
    [tokens.first, tokens.stride, tokens.count].map(|x| x as i64)
}

/// Blocks for `threads` threads of one head, at most as many as fill the GPU.
fn blocks(context: &LaunchContext, threads: usize) -> usize {
    let most = context.device.multiprocessors() as usize * 16;
    threads.div_ceil(THREADS).clamp(1, most)
}
