//! Kernels on cells: merging carries, finishing a softmax, delta.

use std::sync::Arc;

use encke_core::DType;
use encke_core::job::Block;
use encke_core::kernel::Carry;
use encke_core::transport::WireBuffer;

use super::{KernelValue, LaunchContext, addresses, pointer_arguments, spread};
use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::program::Program;

pub(super) const THREADS: u32 = 256;
const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/element_types.cuh").into(),
    || include_str!("../kernels/warp_rows.cuh").into(),
    || include_str!("../kernels/cells.cu").into(),
];

pub(crate) fn program(dtype: DType) -> Program {
    Program::new("cells", TEXTS).stored(dtype)
}

/// Blocks for `cells` cells, one warp each.
pub(super) fn blocks(cells: usize) -> usize {
    cells.div_ceil(THREADS as usize / 32)
}

/// Merges the cells of one carry into another.
pub(crate) fn merge(
    context: &LaunchContext,
    block: &Block,
    from: &Carry<Buffer>,
    to: &mut Carry<Buffer>,
) -> Result<()> {
    let device = &context.device;
    let dtype = to.acc.dtype();
    for buffer in [&from.acc, &from.m, &from.l, &to.m, &to.l] {
        buffer.check_dtype("a carry", dtype)?;
    }
    let params = context.tables.block(device, block)?;
    let function = device.function(&program(dtype), "merge_cells", 0)?;
    let cells = block.batch * block.segments * block.rows * block.heads;
    let shape = spread(device, blocks(cells), THREADS);
    let sources = [from.acc.memory()?, from.m.memory()?, from.l.memory()?].map(|x| &**x);
    let targets = [
        to.acc.writable()?.clone(),
        to.m.writable()?.clone(),
        to.l.writable()?.clone(),
    ];
    let mut reads = sources.to_vec();
    reads.extend(params.tables());
    let writes: Vec<&DeviceAllocation> = targets.iter().map(|x| &**x).collect();
    let pointers = addresses(sources.iter().chain(&writes));
    let mut arguments = pointer_arguments(&pointers);
    arguments.push(&params.value);
    let kernel = (&function, shape);
    // SAFETY: the arguments of `merge_cells`; the plan's blocks lie inside their buffers.
    unsafe { context.launch("merging carries", kernel, &reads, &writes, &arguments) }
}

/// The memory of a buffer whose first `elements` elements are written: a fill that is pending is
/// not needed where these are all.
fn overwritten(buffer: &mut Buffer, elements: usize) -> Result<Arc<DeviceAllocation>> {
    let whole = buffer.elements() == elements;
    let memory = Arc::clone(buffer.writable()?);
    if whole {
        memory.cancel_fill();
    }
    Ok(memory)
}

/// Finishes the softmax of `cells` cells.
pub(crate) fn finish(
    context: &LaunchContext,
    cells: usize,
    dim: usize,
    gain: f64,
    carry: &Carry<Buffer>,
    out: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let device = &context.device;
    let dtype = out.dtype();
    for buffer in [&carry.acc, &carry.m, &carry.l, &*lse] {
        buffer.check_dtype("a carry", dtype.sum())?;
    }
    let function = device.function(&program(dtype), "finish_cells", 0)?;
    let shape = spread(device, blocks(cells), THREADS);
    let reads = [carry.acc.memory()?, carry.m.memory()?, carry.l.memory()?].map(|x| &**x);
    let targets = [overwritten(out, cells * dim)?, overwritten(lse, cells)?];
    let writes = [&*targets[0], &*targets[1]];
    let pointers = addresses(reads.iter().chain(&writes));
    let (cells, dim) = (cells as i64, dim as i64);
    let mut arguments = pointer_arguments(&pointers);
    arguments.extend([&cells as &dyn KernelValue, &dim, &gain]);
    let kernel = (&function, shape);
    // SAFETY: the arguments of `finish_cells`; every buffer has `cells` cells.
    unsafe { context.launch("finishing a softmax", kernel, &reads, &writes, &arguments) }
}

/// delta = dout·out − dlse. `out` may also hold sums that were not rounded yet; `dout` always has
/// the type that jobs read.
pub(crate) fn delta(
    context: &LaunchContext,
    cells: usize,
    dim: usize,
    out: &Buffer,
    dout: &Buffer,
    dlse: Option<&Buffer>,
    delta: &mut Buffer,
) -> Result<()> {
    let device = &context.device;
    let dtype = dout.dtype();
    let name = match out.dtype() == dtype {
        true => "delta_cells",
        false => "delta_of_sums",
    };
    delta.check_dtype("delta", dtype.sum())?;
    if out.dtype() != dtype {
        out.check_dtype("out", dtype.sum())?;
    }
    if let Some(dlse) = dlse {
        dlse.check_dtype("dlse", dtype.sum())?;
    }
    let function = device.function(&program(dtype), name, 0)?;
    let shape = spread(device, blocks(cells), THREADS);
    let mut reads = vec![&**out.memory()?, &**dout.memory()?];
    let dlse = dlse.map(Buffer::memory).transpose()?;
    reads.extend(dlse.map(|x| &**x));
    let target = overwritten(delta, cells)?;
    let pointers = [
        reads[0].pointer(),
        reads[1].pointer(),
        dlse.map_or(0, |x| x.pointer()),
        target.pointer(),
    ];
    let (cells, dim) = (cells as i64, dim as i64);
    let mut arguments = pointer_arguments(&pointers);
    arguments.extend([&cells as &dyn KernelValue, &dim]);
    let kernel = (&function, shape);
    // SAFETY: the arguments of `delta_cells`; every buffer has `cells` cells.
    unsafe { context.launch("computing delta", kernel, &reads, &[&target], &arguments) }
}
