//! Fill, copy and add.

use cudarc::driver::result;
use encke_core::DType;
use encke_core::job::{Block, Operand};
use encke_core::transport::WireBuffer;

use super::{LaunchContext, spread};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::program::Program;

const THREADS: u32 = 256;
const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/element_types.cuh").into(),
    || include_str!("../kernels/copy.cu").into(),
];

/// Bytes from which on a copy uses the copy engine, concurrently with kernels. A smaller copy is
/// done before an event has passed from one stream to the other.
const COPY_ENGINE_BYTES: usize = 1 << 20;

fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
    }
}

pub(crate) fn program(from: DType, to: DType) -> Program {
    let program = Program::new("copy", TEXTS);
    program
        .define("FROM", element(from))
        .define("TO", element(to))
}

/// Sets every element.
pub(crate) fn fill(context: &LaunchContext, buffer: &mut Buffer, value: f64) -> Result<()> {
    let (dtype, elements) = (buffer.dtype(), buffer.elements());
    let memory = buffer.overwritable()?;
    let word = match dtype {
        _ if value == 0.0 && value.is_sign_positive() => Some(0),
        DType::F32 => Some((value as f32).to_bits()),
        _ => None,
    };
    if let Some(word) = word {
        memory.fill_words(word);
        return Ok(());
    }
    memory.cancel_fill();
    let device = &context.device;
    let function = device.function(&program(dtype, dtype), "fill", 0)?;
    let shape = spread(device, elements.div_ceil(THREADS as usize), THREADS);
    let (pointer, elements) = (memory.pointer(), elements as i64);
    let (kernel, writes) = ((&function, shape), [&**memory]);
    // SAFETY: the arguments of `fill`, and the buffer has `elements` elements.
    unsafe {
        let arguments = [&pointer as _, &elements as _, &value as _];
        context.launch("filling a buffer", kernel, &[], &writes, &arguments)
    }
}

/// The first element of a block on both sides, and the number of elements, if they are contiguous
/// on both.
fn contiguous(block: &Block) -> Option<(usize, usize, usize)> {
    let row = block.heads * block.width;
    let dense = |operand: &Operand| {
        let mut heads = operand.heads.iter().enumerate();
        heads.all(|(i, head)| *head == operand.heads[0] + i * block.width)
            && (block.rows == 1 || operand.row == row)
            && (block.segments == 1 || operand.segment == block.rows * row)
            && (block.batch == 1 || operand.batch == block.segments * block.rows * row)
    };
    let elements = block.batch * block.segments * block.rows * row;
    let both = elements > 0 && dense(&block.from) && dense(&block.to);
    both.then(|| (block.from.at(0, 0, 0, 0), block.to.at(0, 0, 0, 0), elements))
}

/// Copies contiguous elements with the copy engine.
fn copy_with_engine(
    context: &LaunchContext,
    (from_at, to_at, elements): (usize, usize, usize),
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    let (device, width) = (&context.device, from.dtype().bytes());
    let source = from.memory()?.clone();
    let target = match to_at {
        0 => to.receive_target(elements)?.clone(),
        _ => to.writable()?.clone(),
    };
    if elements == to.elements() {
        target.cancel_fill();
    }
    let from = source.pointer() + (from_at * width) as u64;
    let to = target.pointer() + (to_at * width) as u64;
    let (stream, what) = (device.device_to_host(), "copying rows");
    device.enqueue(stream, what, &[&source], &[&target], |stream| {
        // SAFETY: the plan's blocks lie inside their buffers.
        unsafe { result::memcpy_dtod_async(to, from, elements * width, stream.cu_stream()) }
    })
}

/// Copies, or adds, the rows of a block.
pub(crate) fn copy(
    context: &LaunchContext,
    block: &Block,
    add: bool,
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    let device = &context.device;
    let types = (from.dtype(), to.dtype());
    let large = |range: &(usize, usize, usize)| range.2 * types.0.bytes() >= COPY_ENGINE_BYTES;
    if !add
        && types.0 == types.1
        && let Some(range) = contiguous(block).filter(large)
    {
        return copy_with_engine(context, range, from, to);
    }
    let program = program(types.0, types.1);
    let (source, target) = (from.memory()?.clone(), to.writable()?.clone());
    let (what, add) = ("copying rows", add as i32);
    let rows = block.batch * block.segments * block.rows * block.heads;
    if rows == 1 {
        let bytes = |dtype: DType, at: usize| (dtype.bytes() * at) as u64;
        let from = source.pointer() + bytes(types.0, block.from.at(0, 0, 0, 0));
        let to = target.pointer() + bytes(types.1, block.to.at(0, 0, 0, 0));
        let elements = block.width as i64;
        let function = device.function(&program, "copy_elements", 0)?;
        let shape = spread(device, block.width.div_ceil(THREADS as usize), THREADS);
        let kernel = (&function, shape);
        // SAFETY: the arguments of `copy_elements`; the plan's blocks lie inside their buffers.
        return unsafe {
            let arguments = [&from as _, &to as _, &elements as _, &add as _];
            context.launch(what, kernel, &[&source], &[&target], &arguments)
        };
    }
    let params = context.tables.block(device, block)?;
    let function = device.function(&program, "copy_rows", 0)?;
    let shape = spread(device, rows.div_ceil(THREADS as usize / 32), THREADS);
    let mut reads = vec![&*source];
    reads.extend(params.tables());
    let (from, to) = (source.pointer(), target.pointer());
    let kernel = (&function, shape);
    // SAFETY: the arguments of `copy_rows`; the plan's blocks lie inside their buffers.
    unsafe {
        let arguments = [&from as _, &to as _, &params.value as _, &add as _];
        context.launch(what, kernel, &reads, &[&target], &arguments)
    }
}

/// Copies rows into a buffer that holds nothing else afterwards. Rows that are contiguous in the
/// same order are aliased instead: a copy would wait for busy multiprocessors.
pub(crate) fn pack(
    context: &LaunchContext,
    blocks: &[Block],
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    if let [block] = blocks
        && let Some((at, 0, elements)) = contiguous(block)
        && to.alias_part(from, at, elements)?
    {
        return Ok(());
    }
    let mut blocks = blocks.iter();
    blocks.try_for_each(|block| copy(context, block, false, from, to))
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
    fn rows_without_gaps_are_contiguous() {
        let dense = operand(16, 8, &[0, 4]);
        let later = operand(80, 8, &[8, 12]);
        assert_eq!(contiguous(&block(dense.clone(), later)), Some((16, 88, 96)));
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
            assert_eq!(contiguous(&block(dense.clone(), other.clone())), None);
            assert_eq!(contiguous(&block(other, dense.clone())), None);
        }
    }
}
