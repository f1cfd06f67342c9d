//! Merging carries, ending a softmax, delta.

use cudarc::driver::PushKernelArg;
use encke_core::DType;
use encke_core::job::Block;
use encke_core::kernel::Carry;

use super::{LaunchContext, spread};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::program::Program;

const THREADS: u32 = 256;
const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/numbers.cuh").into(),
    || include_str!("../kernels/cells.cu").into(),
];

pub(crate) fn program(dtype: DType) -> Program {
    Program::new("cells", TEXTS).stored(dtype)
}

/// Refuses a buffer of another type than the kernel reads.
pub(crate) fn expect(what: &str, buffer: &Buffer, dtype: DType) -> Result<()> {
    if buffer.dtype() == dtype {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("{what} of type {}, {dtype} was expected", buffer.dtype()),
    })
}

/// Merges the cells of one carry into another.
pub(crate) fn merge(
    site: &LaunchContext,
    block: &Block,
    from: &Carry<Buffer>,
    to: &mut Carry<Buffer>,
) -> Result<()> {
    let device = &site.device;
    let dtype = to.acc.dtype();
    for buffer in [&from.acc, &from.m, &from.l, &to.m, &to.l] {
        expect("a carry", buffer, dtype)?;
    }
    let told = site.tables.block(device, block)?;
    let function = device.function(&program(dtype), "merge_cells", 0)?;
    let cells = block.batch * block.segments * block.rows * block.heads;
    let shape = spread(device, cells.div_ceil(THREADS as usize / 32), THREADS);
    let sources = [from.acc.memory()?, from.m.memory()?, from.l.memory()?].map(|x| &**x);
    let targets = [
        to.acc.own()?.clone(),
        to.m.own()?.clone(),
        to.l.own()?.clone(),
    ];
    let mut reads = sources.to_vec();
    reads.extend(told.tables());
    let writes: Vec<&Memory> = targets.iter().map(|x| &**x).collect();
    let pointers: Vec<u64> = sources.iter().chain(&writes).map(|x| x.pointer()).collect();
    device.enqueue(
        device.compute(),
        "merging carries",
        &reads,
        &writes,
        |stream| {
            let mut launch = stream.launch_builder(&function);
            for pointer in &pointers {
                launch.arg(pointer);
            }
            launch.arg(&told.value);
            // SAFETY: the arguments of `merge_cells`; the plan's blocks lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}

/// Ends the softmax of `cells` cells.
pub(crate) fn finish(
    site: &LaunchContext,
    cells: usize,
    dim: usize,
    gain: f64,
    carry: &Carry<Buffer>,
    out: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let device = &site.device;
    let dtype = out.dtype();
    for buffer in [&carry.acc, &carry.m, &carry.l, &*lse] {
        expect("a carry", buffer, dtype.sum())?;
    }
    let function = device.function(&program(dtype), "finish_cells", 0)?;
    let shape = spread(device, cells.div_ceil(THREADS as usize / 32), THREADS);
    let reads = [carry.acc.memory()?, carry.m.memory()?, carry.l.memory()?].map(|x| &**x);
    let targets = [out.own()?.clone(), lse.own()?.clone()];
    let writes = [&*targets[0], &*targets[1]];
    let pointers: Vec<u64> = reads.iter().chain(&writes).map(|x| x.pointer()).collect();
    let (cells, dim) = (cells as i64, dim as i64);
    device.enqueue(
        device.compute(),
        "ending a softmax",
        &reads,
        &writes,
        |stream| {
            let mut launch = stream.launch_builder(&function);
            for pointer in &pointers {
                launch.arg(pointer);
            }
            launch.arg(&cells).arg(&dim).arg(&gain);
            // SAFETY: the arguments of `finish_cells`; every buffer has `cells` cells.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}

/// delta = dout·out − dlse. Where out is sums that were not rounded yet, dout is of the type that jobs
/// read.
pub(crate) fn delta(
    site: &LaunchContext,
    cells: usize,
    dim: usize,
    out: &Buffer,
    dout: &Buffer,
    dlse: Option<&Buffer>,
    delta: &mut Buffer,
) -> Result<()> {
    let device = &site.device;
    let dtype = dout.dtype();
    let name = match out.dtype() == dtype {
        true => "delta_cells",
        false => "delta_of_sums",
    };
    expect("delta", delta, dtype.sum())?;
    if out.dtype() != dtype {
        expect("out", out, dtype.sum())?;
    }
    if let Some(dlse) = dlse {
        expect("dlse", dlse, dtype.sum())?;
    }
    let function = device.function(&program(dtype), name, 0)?;
    let shape = spread(device, cells.div_ceil(THREADS as usize / 32), THREADS);
    let mut reads = vec![&**out.memory()?, &**dout.memory()?];
    let dlse = dlse.map(Buffer::memory).transpose()?;
    reads.extend(dlse.map(|x| &**x));
    let target = delta.own()?.clone();
    let pointers = [
        reads[0].pointer(),
        reads[1].pointer(),
        dlse.map_or(0, |x| x.pointer()),
    ];
    let (to, cells, dim) = (target.pointer(), cells as i64, dim as i64);
    device.enqueue(
        device.compute(),
        "computing delta",
        &reads,
        &[&target],
        |stream| {
            let mut launch = stream.launch_builder(&function);
            for pointer in &pointers {
                launch.arg(pointer);
            }
            launch.arg(&to).arg(&cells).arg(&dim);
            // SAFETY: the arguments of `delta_cells`; every buffer has `cells` cells.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}
