//! Attention without tensor cores: f32 and f64, and jobs that no other kernel supports. Every mask.

use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::{KernelValue, LaunchContext, addresses, grid, pointer_arguments};
use crate::allocation::DeviceAllocation;
use crate::arguments::groups;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::masked_job::{JobFeatures, TileRows};
use crate::operands::{BackwardOperands, DeviceInputs, Rounds, SoftmaxMemory};
use crate::program::Program;

const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/element_types.cuh").into(),
    || include_str!("../kernels/masks.cuh").into(),
    || include_str!("../kernels/plain.cu").into(),
];
/// The largest head dimension.
const MAX_DIM: usize = 576;

/// Rows of a tile, as in plain.cu.
const TILE: usize = 16;
const THREADS: u32 = (TILE * TILE) as u32;

pub(crate) fn program(dtype: DType, dim: usize, masked: bool) -> Program {
    // Few variants, so that few are compiled: for head dimensions up to 64, 128, 256 and 576.
    let columns = match dim {
        0..=256 => dim.next_power_of_two().max(64),
        _ => MAX_DIM,
    };
    let program = Program::new("plain", TEXTS)
        .stored(dtype)
        .define("COLUMNS", columns / TILE);
    match masked {
        true => program.define("MASKED", 1),
        false => program,
    }
}

fn program_of(dtype: DType, job: &Job) -> Program {
    let masked = JobFeatures::of(job).masked;
    program(dtype, job.dim.max(job.value_dim), masked)
}

/// Shared memory for tiles of rows as long as keys and as long as values, and tiles of scores.
fn shared_bytes(dtype: DType, job: &Job, (keys, values): (usize, usize), scores: usize) -> usize {
    let rows = keys * (job.dim + 1) + values * (job.value_dim + 1);
    (TILE * rows + scores * TILE * TILE) * dtype.sum().bytes()
}

/// Refuses head dimensions whose tiles do not fit.
fn check(context: &LaunchContext, dtype: DType, job: &Job, shared: usize) -> Result<()> {
    let (dim, most) = (job.dim.max(job.value_dim), context.device.shared_bytes());
    if dim <= MAX_DIM && shared <= most {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: match dim > MAX_DIM {
            true => format!("a head dimension of {dim}: the limit is {MAX_DIM}"),
            false => format!(
                "{dtype} with head dimensions of {} and {}: tiles of {shared} bytes do not fit \
                 into {most} bytes of shared memory; use a narrower type",
                job.dim, job.value_dim
            ),
        },
    })
}

/// Blocks for the tiles of `heads` heads.
fn blocks(context: &LaunchContext, job: &Job, tiles: usize, heads: usize) -> usize {
    let tiles = tiles * heads * job.segments * job.batch;
    tiles.clamp(1, context.device.multiprocessors() as usize * 64)
}

/// Forward: starts or continues a softmax, and leaves it in the carry or finishes it.
pub(crate) fn forward(
    context: &LaunchContext,
    job: &Job,
    inputs: DeviceInputs<'_>,
    state: SoftmaxState<'_, Buffer>,
) -> Result<()> {
    let (device, dtype) = (&context.device, inputs.dtype());
    let shared = shared_bytes(dtype, job, (2, 1), 1);
    check(context, dtype, job, shared)?;
    let params = (context.tables).job_argument(device, job, TileRows::Queries, TILE)?;
    let memory = SoftmaxMemory::new(state, dtype)?;
    let function = device.function(&program_of(dtype, job), "plain_forward", shared)?;
    let blocks = blocks(context, job, params.tiles(), job.heads);
    let kernel = (&function, grid(blocks, THREADS, shared));
    let mut reads = inputs.memory()?.map(|memory| &**memory).to_vec();
    let (inputs, outputs) = (addresses(&reads), memory.pointers());
    reads.extend(params.tables());
    reads.extend(memory.reads());
    let (starts, finishes) = (i32::from(memory.starts), i32::from(memory.finishes));
    let mut arguments = pointer_arguments(&inputs);
    arguments.push(params.value());
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
    let (device, dtype) = (&context.device, inputs.dtype());
    let shared = shared_bytes(dtype, job, (2, 2), 2);
    check(context, dtype, job, shared)?;
    let params = (context.tables).job_argument(device, job, TileRows::Keys, TILE)?;
    let (table, count) = groups(&job.k);
    let table = context.tables.get(device, table)?;
    let memory = gradients.into_memory(dtype, Rounds::Never)?;
    let program = program_of(dtype, job);
    let mut reads: Vec<&DeviceAllocation> = inputs.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(memory.upstream()?);
    let inputs = addresses(&reads);

    let function = device.function(&program, "plain_dkv", shared)?;
    let blocks_of_keys = blocks(context, job, params.tiles(), count);
    let shape = grid(blocks_of_keys, THREADS, shared);
    let outputs = [memory.dk.pointer(), memory.dv.pointer(), table.pointer()];
    let count = count as i32;
    let writes = [&*memory.dk, &*memory.dv];
    let (what, kernel) = ("gradients of keys", (&function, shape));
    let mut arguments = pointer_arguments(&inputs);
    arguments.extend(pointer_arguments(&outputs));
    arguments.extend([&count as &dyn KernelValue, params.value()]);
    let mut tables = params.tables();
    tables.push(&table);
    let read = [reads.clone(), tables].concat();
    // SAFETY: the arguments of `plain_dkv`; the plan's jobs lie inside their buffers.
    unsafe { context.launch(what, kernel, &read, &writes, &arguments)? };

    let params = (context.tables).job_argument(device, job, TileRows::Queries, TILE)?;
    let shared = shared_bytes(dtype, job, (2, 2), 1);
    let function = device.function(&program, "plain_dq", shared)?;
    let blocks = blocks(context, job, params.tiles(), job.heads);
    let (what, kernel) = (
        "gradients of queries",
        (&function, grid(blocks, THREADS, shared)),
    );
    let dq = memory.dq.pointer();
    let mut arguments = pointer_arguments(&inputs);
    arguments.extend([&dq as &dyn KernelValue, params.value()]);
    let read = [reads, params.tables()].concat();
    // SAFETY: the arguments of `plain_dq`; the plan's jobs lie inside their buffers.
    unsafe { context.launch(what, kernel, &read, &[&memory.dq], &arguments) }
}
