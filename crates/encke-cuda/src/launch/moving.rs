//! Fill, copy and add.

use cudarc::driver::{PushKernelArg, result};
use encke_core::DType;
use encke_core::job::{Block, Operand};
use encke_core::transport::WireBuffer;

use super::{LaunchContext, spread};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::program::Program;

const THREADS: u32 = 256;
const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/numbers.cuh").into(),
    || include_str!("../kernels/moving.cu").into(),
];

fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
    }
}

pub(crate) fn program(from: DType, to: DType) -> Program {
    let program = Program::new("moving", TEXTS);
    program
        .define("FROM", element(from))
        .define("TO", element(to))
}

/// Sets every element.
pub(crate) fn fill(site: &LaunchContext, buffer: &mut Buffer, value: f64) -> Result<()> {
    let (dtype, elements) = (buffer.dtype(), buffer.elements() as i64);
    let memory = buffer.fresh()?;
    if value == 0.0 && value.is_sign_positive() {
        memory.clear()?;
        return Ok(());
    }
    memory.take_blank();
    let device = &site.device;
    let function = device.function(&program(dtype, dtype), "fill", 0)?;
    let shape = spread(
        device,
        (elements as usize).div_ceil(THREADS as usize),
        THREADS,
    );
    let pointer = memory.pointer();
    device.enqueue(
        device.compute(),
        "filling a buffer",
        &[],
        &[memory],
        |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&pointer).arg(&elements).arg(&value);
            // SAFETY: the arguments are those of `fill` in moving.cu, and the buffer has `elements`.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}

/// Bytes from which on a copy is left to the copy engine, beside what is computed. Fewer are there
/// before an event has gone from one stream to the other.
const LONG: usize = 1 << 20;

/// Where the numbers of a block begin on both sides, and how many there are, if they lie side by
/// side on both.
fn side_by_side(block: &Block) -> Option<(usize, usize, usize)> {
    let row = block.heads * block.width;
    let dense = |of: &Operand| {
        let mut heads = of.heads.iter().enumerate();
        heads.all(|(i, head)| *head == of.heads[0] + i * block.width)
            && (block.rows == 1 || of.row == row)
            && (block.segments == 1 || of.segment == block.rows * row)
            && (block.batch == 1 || of.batch == block.segments * block.rows * row)
    };
    let numbers = block.batch * block.segments * block.rows * row;
    let all = numbers > 0 && dense(&block.from) && dense(&block.to);
    all.then(|| (block.from.at(0, 0, 0, 0), block.to.at(0, 0, 0, 0), numbers))
}

/// Copies numbers that lie side by side, on a stream of copies.
fn copy_long(
    site: &LaunchContext,
    (at, to_at, numbers): (usize, usize, usize),
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    let (device, width) = (&site.device, from.dtype().bytes());
    let source = from.memory()?.clone();
    let target = match to_at {
        0 => to.target(numbers)?.clone(),
        _ => to.own()?.clone(),
    };
    if numbers == to.elements() {
        target.take_blank();
    }
    let pointer = |start: u64, at: usize| start + (at * width) as u64;
    let (from, to) = (
        pointer(source.pointer(), at),
        pointer(target.pointer(), to_at),
    );
    device.enqueue(
        device.outward(),
        "copying rows",
        &[&source],
        &[&target],
        |stream| {
            // SAFETY: the plan's blocks lie inside their buffers.
            unsafe { result::memcpy_dtod_async(to, from, numbers * width, stream.cu_stream()) }
        },
    )
}

/// Copies, or adds, the rows of a block.
pub(crate) fn copy(
    site: &LaunchContext,
    block: &Block,
    add: bool,
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    let device = &site.device;
    let types = (from.dtype(), to.dtype());
    let long = |of: &(usize, usize, usize)| of.2 * types.0.bytes() >= LONG;
    if !add
        && types.0 == types.1
        && let Some(place) = side_by_side(block).filter(long)
    {
        return copy_long(site, place, from, to);
    }
    let program = program(types.0, types.1);
    let (source, target) = (from.memory()?.clone(), to.own()?.clone());
    let add = add as i32;
    let rows = block.batch * block.segments * block.rows * block.heads;
    if rows == 1 {
        let bytes = |dtype: DType, at: usize| (dtype.bytes() * at) as u64;
        let from = source.pointer() + bytes(types.0, block.from.at(0, 0, 0, 0));
        let to = target.pointer() + bytes(types.1, block.to.at(0, 0, 0, 0));
        let elements = block.width as i64;
        let function = device.function(&program, "move_numbers", 0)?;
        let shape = spread(device, block.width.div_ceil(THREADS as usize), THREADS);
        return device.enqueue(
            device.compute(),
            "copying rows",
            &[&source],
            &[&target],
            |stream| {
                let mut launch = stream.launch_builder(&function);
                launch.arg(&from).arg(&to).arg(&elements).arg(&add);
                // SAFETY: the arguments of `move_numbers`; the plan's blocks lie inside their buffers.
                unsafe { launch.launch(shape) }.map(|_| ())
            },
        );
    }
    let told = site.tables.block(device, block)?;
    let function = device.function(&program, "move_rows", 0)?;
    let shape = spread(device, rows.div_ceil(THREADS as usize / 32), THREADS);
    let mut reads = vec![&*source];
    reads.extend(told.tables());
    let (from, to) = (source.pointer(), target.pointer());
    device.enqueue(
        device.compute(),
        "copying rows",
        &reads,
        &[&target],
        |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&from).arg(&to).arg(&told.value).arg(&add);
            // SAFETY: the arguments of `move_rows`; the plan's blocks lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}

/// Copies rows into a buffer that holds nothing else from then on; what lies in the same order in
/// another one is a part of it, and nothing is copied: the multiprocessors may be busy for long.
pub(crate) fn pack(
    site: &LaunchContext,
    blocks: &[Block],
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    if let [block] = blocks
        && let Some((at, 0, numbers)) = side_by_side(block)
        && to.take_part(from, at, numbers)?
    {
        return Ok(());
    }
    let mut blocks = blocks.iter();
    blocks.try_for_each(|block| copy(site, block, false, from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(offset: usize, row: usize, heads: &[usize]) -> Operand {
        Operand {
            offset,
            batch: 6 * row,
            segment: 3 * row,
            row,
            heads: heads.into(),
        }
    }

    fn block(from: Operand, to: Operand) -> Block {
        Block {
            batch: 2,
            segments: 2,
            rows: 3,
            heads: 2,
            width: 4,
            from,
            to,
        }
    }

    #[test]
    fn rows_without_gaps_are_one_piece() {
        let dense = operand(16, 8, &[0, 4]);
        let later = operand(80, 8, &[8, 12]);
        assert_eq!(
            side_by_side(&block(dense.clone(), later)),
            Some((16, 88, 96))
        );
        for other in [
            operand(0, 9, &[0, 4]),
            operand(0, 8, &[4, 0]),
            operand(0, 8, &[0, 5]),
            Operand {
                segment: 25,
                ..dense.clone()
            },
            Operand {
                batch: 49,
                ..dense.clone()
            },
        ] {
            assert_eq!(side_by_side(&block(dense.clone(), other.clone())), None);
            assert_eq!(side_by_side(&block(other, dense.clone())), None);
        }
    }
}
