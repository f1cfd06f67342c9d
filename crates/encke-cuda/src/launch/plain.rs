//! Attention without matrix units: f32 and f64, and whatever no other kernel takes.

use cudarc::driver::PushKernelArg;
use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::{LaunchContext, grid};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::jobs::groups;
use crate::memory::Memory;
use crate::operands::{Gradient, Operands, Targets};
use crate::program::Program;

const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/numbers.cuh").into(),
    || include_str!("../kernels/plain.cu").into(),
];
/// The largest head dimension.
const DIM: usize = 256;

/// Rows of a block, as in plain.cu.
const TILE: usize = 16;
const THREADS: u32 = (TILE * TILE) as u32;

pub(crate) fn program(dtype: DType, dim: usize) -> Program {
    // Few variants, so that few are compiled: head dimensions up to 64, 128 and 256.
    let columns = dim.next_power_of_two().clamp(64, DIM) / TILE;
    Program::new("plain", TEXTS)
        .stored(dtype)
        .define("COLUMNS", columns)
}

/// Shared memory for `sides` tiles of rows and `squares` tiles of pairs.
fn shared_bytes(dtype: DType, dim: usize, sides: usize, squares: usize) -> usize {
    (sides * TILE * (dim + 1) + squares * TILE * TILE) * dtype.sum().bytes()
}

fn check(job: &Job) -> Result<()> {
    if job.dim <= DIM {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("a head dimension of {}: the limit is {DIM}", job.dim),
    })
}

/// Blocks for `rows` rows of `heads` heads.
fn blocks(site: &LaunchContext, job: &Job, rows: usize, heads: usize) -> usize {
    let tiles = rows.div_ceil(TILE) * heads * job.segments * job.batch;
    tiles.clamp(1, site.device.processors() as usize * 64)
}

/// Forward: from a carry or from nothing, into the carry or to the end.
pub(crate) fn forward(
    site: &LaunchContext,
    job: &Job,
    operands: Operands<'_>,
    state: SoftmaxState<'_, Buffer>,
) -> Result<()> {
    check(job)?;
    let (device, dtype) = (&site.device, operands.dtype());
    let told = site.tables.job(device, job)?;
    let targets = Targets::new(state, dtype)?;
    let program = program(dtype, job.dim);
    let shared = shared_bytes(dtype, job.dim, 3, 1);
    let function = device.function(&program, "plain_forward", shared)?;
    let shape = grid(blocks(site, job, job.queries, job.heads), THREADS, shared);
    let mut reads = operands.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(told.tables());
    reads.extend(targets.reads());
    let writes = targets.writes();
    let inputs: Vec<u64> = reads[..3].iter().map(|x| x.pointer()).collect();
    let outputs = targets.pointers();
    let (begins, ends) = (i32::from(targets.begins), i32::from(targets.ends));
    device.enqueue(device.compute(), "attention", &reads, &writes, |stream| {
        let mut launch = stream.launch_builder(&function);
        for pointer in &inputs {
            launch.arg(pointer);
        }
        launch.arg(&told.value);
        for pointer in &outputs {
            launch.arg(pointer);
        }
        launch.arg(&begins).arg(&ends);
        // SAFETY: the arguments of `plain_forward`; the plan's jobs lie inside their buffers.
        unsafe { launch.launch(shape) }.map(|_| ())
    })
}

/// Backward: dk and dv by key rows, then dq by query rows.
pub(crate) fn backward(
    site: &LaunchContext,
    job: &Job,
    operands: Operands<'_>,
    gradient: Gradient<'_>,
) -> Result<()> {
    check(job)?;
    let (device, dtype) = (&site.device, operands.dtype());
    let told = site.tables.job(device, job)?;
    let (table, count) = groups(&job.k);
    let table = site.tables.get(device, table)?;
    let targets = gradient.own(dtype)?;
    let program = program(dtype, job.dim);
    let mut reads: Vec<&Memory> = operands.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(targets.upstream()?);
    let inputs: Vec<u64> = reads.iter().map(|x| x.pointer()).collect();
    reads.extend(told.tables());
    reads.push(&table);

    let shared = shared_bytes(dtype, job.dim, 4, 2);
    let function = device.function(&program, "plain_dkv", shared)?;
    let shape = grid(blocks(site, job, job.keys, count), THREADS, shared);
    let (dq, dk, dv) = (
        targets.dq.pointer(),
        targets.dk.pointer(),
        targets.dv.pointer(),
    );
    let (groups, count) = (table.pointer(), count as i32);
    let writes = [&*targets.dk, &*targets.dv];
    device.enqueue(
        device.compute(),
        "gradients of keys",
        &reads,
        &writes,
        |stream| {
            let mut launch = stream.launch_builder(&function);
            for pointer in &inputs {
                launch.arg(pointer);
            }
            launch
                .arg(&dk)
                .arg(&dv)
                .arg(&groups)
                .arg(&count)
                .arg(&told.value);
            // SAFETY: the arguments of `plain_dkv`; the plan's jobs lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )?;

    let shared = shared_bytes(dtype, job.dim, 4, 1);
    let function = device.function(&program, "plain_dq", shared)?;
    let shape = grid(blocks(site, job, job.queries, job.heads), THREADS, shared);
    device.enqueue(
        device.compute(),
        "gradients of queries",
        &reads,
        &[&targets.dq],
        |stream| {
            let mut launch = stream.launch_builder(&function);
            for pointer in &inputs {
                launch.arg(pointer);
            }
            launch.arg(&dq).arg(&told.value);
            // SAFETY: the arguments of `plain_dq`; the plan's jobs lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )
}
