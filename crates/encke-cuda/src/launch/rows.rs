//! Rows that are made on the device and rows that are summed there, for sequences nobody stores.
//!
//! Neither is attention: they are what would otherwise have to cross the bus, 4 TB in each direction
//! for a billion tokens. What is made and what is summed is defined by the streams of the simulator.

use cudarc::driver::PushKernelArg;
use encke_core::DType;
use encke_core::sharding::Run;
use encke_core::transport::WireBuffer;

use super::{LaunchContext, grid};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::program::Program;

const THREADS: usize = 256;

/// Numbers that one thread makes at once, as in eight.cuh.
const EIGHT: usize = 8;

/// The most heads: they are the second dimension of a grid.
const HEADS: usize = 65_535;

/// Rows that one block sums at most. Sums of a row are kept in units of 2^-32, so that many rows
/// fit into 64 bits as long as the sum of a row stays below 2^15.
const SUMMED: usize = 1 << 16;

const GENERATOR: &[fn() -> String] = &[
    || include_str!("../kernels/numbers.cuh").into(),
    || include_str!("../kernels/eight.cuh").into(),
    || include_str!("../kernels/generator.cu").into(),
];
const CHECKSUM: &[fn() -> String] = &[
    || include_str!("../kernels/numbers.cuh").into(),
    || include_str!("../kernels/eight.cuh").into(),
    || include_str!("../kernels/checksum.cu").into(),
];

pub(crate) fn generator(dtype: DType, dim: usize) -> Program {
    let program = Program::new("generator", GENERATOR);
    program.stored(dtype).define("DIM", dim)
}

pub(crate) fn summer(dtype: DType, dim: usize) -> Program {
    let program = Program::new("checksum", CHECKSUM);
    program.stored(dtype).define("DIM", dim)
}

/// Refuses rows that are not inside the buffer.
fn check(buffer: &Buffer, at: usize, tokens: Run, heads: usize, dim: usize) -> Result<()> {
    let rows = tokens.count.checked_mul(heads);
    let end = rows.and_then(|rows| rows.checked_mul(dim)?.checked_add(at));
    let inside = end.is_some_and(|end| end <= buffer.elements());
    if inside && heads <= HEADS && at.is_multiple_of(dim) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!(
            "{} tokens of {heads} heads with {dim} numbers at {at} in a buffer of {}",
            tokens.count,
            buffer.elements()
        ),
    })
}

/// Makes rows of a sequence.
pub(crate) fn generate(
    site: &LaunchContext,
    tokens: Run,
    keys: &[u64],
    dim: usize,
    to: &mut Buffer,
    at: usize,
) -> Result<()> {
    check(to, at, tokens, keys.len(), dim)?;
    if tokens.count == 0 || keys.is_empty() {
        return Ok(());
    }
    let (device, dtype) = (&site.device, to.dtype());
    let table = keys.iter().map(|&key| key as i64).collect();
    let table = site.tables.get(device, table)?;
    let target = to.own()?.clone();
    let function = device.function(&generator(dtype, dim), "generate", 0)?;
    let mut shape = grid(
        blocks(site, tokens.count * dim.div_ceil(EIGHT)),
        THREADS as u32,
        0,
    );
    shape.grid_dim.1 = keys.len() as u32;
    let pointer = target.pointer() + (at * dtype.bytes()) as u64;
    let keys = table.pointer();
    let [first, stride, count] = told(tokens);
    device.enqueue(
        device.compute(),
        "generating rows",
        &[&table],
        &[&target],
        |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&pointer).arg(&keys);
            launch.arg(&first).arg(&stride).arg(&count);
            // SAFETY: the arguments of `generate`; the rows were checked to be inside the buffer.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}

/// Sums that a device is at work on.
pub struct RowSums {
    sums: Option<Memory>,
    blocks: usize,
    rows: usize,
}

impl RowSums {
    /// The sum of all numbers with their signs and the sum of their squares, in units of 2^-32, and
    /// how many rows they are of. Waits for them.
    pub fn read(&self) -> Result<(i128, i128, u64)> {
        let mut sums = vec![0i64; 2 * self.blocks];
        if let Some(memory) = &self.sums {
            memory.read(bytemuck::cast_slice_mut(&mut sums))?;
        }
        let of = |which: usize| sums.iter().skip(which).step_by(2).map(|&x| i128::from(x));
        Ok((of(0).sum(), of(1).sum(), self.rows as u64))
    }
}

/// Sums up rows.
pub(crate) fn sum(
    site: &LaunchContext,
    batch: usize,
    tokens: Run,
    heads: &[usize],
    dim: usize,
    from: &Buffer,
    at: usize,
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
    let (device, dtype) = (&site.device, from.dtype());
    let names = heads.iter().map(|&head| head as i64).collect();
    let names = site.tables.get(device, names)?;
    let source = from.memory()?;
    let function = device.function(&summer(dtype, dim), "checksum", 0)?;
    let each = blocks(site, tokens.count).max(tokens.count.div_ceil(SUMMED));
    let mut shape = grid(each, THREADS as u32, 0);
    shape.grid_dim.1 = heads.len() as u32;
    let blocks = each * heads.len();
    let sums = Memory::new(device, blocks * 16)?;
    let pointer = source.pointer() + (at * dtype.bytes()) as u64;
    let (table, to, batch) = (names.pointer(), sums.pointer(), batch as u64);
    let [first, stride, count] = told(tokens);
    device.enqueue(
        device.compute(),
        "summing rows",
        &[source, &names],
        &[&sums],
        |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&pointer).arg(&table).arg(&batch);
            launch.arg(&first).arg(&stride).arg(&count).arg(&to);
            // SAFETY: the arguments of `checksum`; the rows were checked to be inside the buffer,
            // and there is room for one result of each block.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )?;
    Ok(RowSums {
        sums: Some(sums),
        blocks,
        rows,
    })
}

fn told(tokens: Run) -> [i64; 3] {
    [tokens.first, tokens.stride, tokens.count].map(|x| x as i64)
}

/// Blocks for so many threads of one head, as many as keep the GPU busy.
fn blocks(site: &LaunchContext, threads: usize) -> usize {
    let most = site.device.processors() as usize * 16;
    threads.div_ceil(THREADS).clamp(1, most)
}
