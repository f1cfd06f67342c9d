//! Attention without tensor cores: f32 and f64, and jobs that no other kernel supports.

use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::{KernelValue, LaunchContext, addresses, grid, pointer_arguments};
use crate::allocation::DeviceAllocation;
use crate::arguments::groups;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::operands::{BackwardOperands, DeviceInputs, SoftmaxMemory};
use crate::program::Program;

const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/element_types.cuh").into(),
    || include_str!("../kernels/plain.cu").into(),
];
/// The largest head dimension.
const MAX_DIM: usize = 256;

/// Rows of a tile, as in plain.cu.
const TILE: usize = 16;
const THREADS: u32 = (TILE * TILE) as u32;

pub(crate) fn program(dtype: DType, dim: usize) -> Program {
    // Three variants, for head dimensions up to 64, 128 and 256, so that few are compiled.
    let columns = dim.next_power_of_two().clamp(64, MAX_DIM) / TILE;
    Program::new("plain", TEXTS)
        .stored(dtype)
        .define("COLUMNS", columns)
}

/// Shared memory for `operands` tiles of rows and `scores` tiles of scores.
fn shared_bytes(dtype: DType, dim: usize, operands: usize, scores: usize) -> usize {
    (operands * TILE * (dim + 1) + scores * TILE * TILE) * dtype.sum().bytes()
}

fn check(job: &Job) -> Result<()> {
    if job.dim <= MAX_DIM {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("a head dimension of {}: the limit is {MAX_DIM}", job.dim),
    })
}

/// Blocks for `rows` rows of `heads` heads.
fn blocks(context: &LaunchContext, job: &Job, rows: usize, heads: usize) -> usize {
    let tiles = rows.div_ceil(TILE) * heads * job.segments * job.batch;
    tiles.clamp(1, context.device.multiprocessors() as usize * 64)
}

/// Forward: starts or continues a softmax, and leaves it in the carry or finishes it.
pub(crate) fn forward(
    context: &LaunchContext,
    job: &Job,
    inputs: DeviceInputs<'_>,
    state: SoftmaxState<'_, Buffer>,
) -> Result<()> {
    check(job)?;
    let (device, dtype) = (&context.device, inputs.dtype());
    let params = context.tables.job(device, job)?;
    let memory = SoftmaxMemory::new(state, dtype)?;
    let program = program(dtype, job.dim);
    let shared = shared_bytes(dtype, job.dim, 3, 1);
    let function = device.function(&program, "plain_forward", shared)?;
    let blocks = blocks(context, job, job.queries, job.heads);
    let kernel = (&function, grid(blocks, THREADS, shared));
    let mut reads = inputs.memory()?.map(|memory| &**memory).to_vec();
    let (inputs, outputs) = (addresses(&reads), memory.pointers());
    reads.extend(params.tables());
    reads.extend(memory.reads());
    let (starts, finishes) = (i32::from(memory.starts), i32::from(memory.finishes));
    let mut arguments = pointer_arguments(&inputs);
    arguments.push(&params.value);
    arguments.extend(pointer_arguments(&outputs));
    arguments.extend([&starts as &dyn KernelValue, &finishes]);
    // SAFETY: the arguments of `plain_forward`; the plan's jobs lie inside their buffers.
    unsafe { context.launch("attention", kernel, &reads, &memory.writes(), &arguments) }
}

/// Backward: dk and dv by key rows, then dq by query rows.
pub(crate) fn backward(
    context: &LaunchContext,
    job: &Job,
    inputs: DeviceInputs<'_>,
    gradients: BackwardOperands<'_>,
) -> Result<()> {
    check(job)?;
    let (device, dtype) = (&context.device, inputs.dtype());
    let params = context.tables.job(device, job)?;
    let (table, count) = groups(&job.k);
    let table = context.tables.get(device, table)?;
    let memory = gradients.into_memory(dtype)?;
    let program = program(dtype, job.dim);
    let mut reads: Vec<&DeviceAllocation> = inputs.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(memory.upstream()?);
    let inputs = addresses(&reads);
    reads.extend(params.tables());
    reads.push(&table);

    let shared = shared_bytes(dtype, job.dim, 4, 2);
    let function = device.function(&program, "plain_dkv", shared)?;
    let shape = grid(blocks(context, job, job.keys, count), THREADS, shared);
    let outputs = [memory.dk.pointer(), memory.dv.pointer(), table.pointer()];
    let count = count as i32;
    let writes = [&*memory.dk, &*memory.dv];
    let (what, kernel) = ("gradients of keys", (&function, shape));
    let mut arguments = pointer_arguments(&inputs);
    arguments.extend(pointer_arguments(&outputs));
    arguments.extend([&count as &dyn KernelValue, &params.value]);
    // SAFETY: the arguments of `plain_dkv`; the plan's jobs lie inside their buffers.
    unsafe { context.launch(what, kernel, &reads, &writes, &arguments)? };

    let shared = shared_bytes(dtype, job.dim, 4, 1);
    let function = device.function(&program, "plain_dq", shared)?;
    let blocks = blocks(context, job, job.queries, job.heads);
    let (what, kernel) = (
        "gradients of queries",
        (&function, grid(blocks, THREADS, shared)),
    );
    let dq = memory.dq.pointer();
    let mut arguments = pointer_arguments(&inputs);
    arguments.extend([&dq as &dyn KernelValue, &params.value]);
    // SAFETY: the arguments of `plain_dq`; the plan's jobs lie inside their buffers.
    unsafe { context.launch(what, kernel, &reads, &[&memory.dq], &arguments) }
}
