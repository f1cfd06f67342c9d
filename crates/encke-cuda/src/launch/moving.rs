//! Fill, copy and add.

use cudarc::driver::PushKernelArg;
use encke_core::DType;
use encke_core::job::Block;
use encke_core::transport::Parcel;

use super::{Site, spread};
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
pub(crate) fn fill(site: &Site, buffer: &mut Buffer, value: f64) -> Result<()> {
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

/// Copies, or adds, the rows of a block.
pub(crate) fn copy(
    site: &Site,
    block: &Block,
    add: bool,
    from: &Buffer,
    to: &mut Buffer,
) -> Result<()> {
    let device = &site.device;
    let types = (from.dtype(), to.dtype());
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
