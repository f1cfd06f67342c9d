//! Attention of few queries to many keys: the keys are split over the GPU, and the splits are
//! merged in their order. bf16 and f16 on every GPU from Ampere on.
//!
//! Always repeatable: the number of splits depends on the job's shape and the GPU alone, and no two
//! blocks write the same element.

use cudarc::driver::DeviceRepr;
use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::split_tilings::{GpuSize, SplitPlan, merge_program};
use super::{KernelValue, LaunchContext, addresses, grid, mma, mma_tiles, pointer_arguments};
use crate::allocation::DeviceAllocation;
use crate::arguments::to_i32;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::Result;
use crate::masked_job::TileRows;
use crate::operands::{DeviceInputs, SoftmaxMemory};

/// Threads of a block of `split_merge`, as there.
const MERGE_THREADS: u32 = 128;

/// The kernel's `SplitParams`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SplitParams {
    members: u64,
    groups: i32,
    group: i32,
    splits: i32,
    pad: i32,
}

// SAFETY: plain numbers in C layout; padding is an explicit field.
unsafe impl DeviceRepr for SplitParams {}

/// How the keys of a job are split; None if other kernels compute it as fast or these do not
/// support it. `hopper`: whether one of the others has wgmma.
pub(crate) fn plan(device: &Device, job: &Job, dtype: DType, hopper: bool) -> Option<SplitPlan> {
    let gpu = GpuSize {
        multiprocessors: device.multiprocessors() as usize,
        shared_bytes: device.shared_bytes(),
    };
    let supported = mma::supports(device, job, dtype);
    supported
        .then(|| SplitPlan::new(job, gpu, hopper))
        .flatten()
}

/// Forward: starts or continues a softmax, and leaves it in the carry or finishes it.
pub(crate) fn forward(
    context: &LaunchContext,
    job: &Job,
    plan: &SplitPlan,
    inputs: DeviceInputs<'_>,
    state: SoftmaxState<'_, Buffer>,
) -> Result<()> {
    let (device, dtype) = (&context.device, inputs.dtype());
    let memory = SoftmaxMemory::new(state, dtype)?;
    let params = (context.tables).job_argument(device, job, TileRows::Queries, plan.queries)?;
    let members = context.tables.get(device, plan.members.clone())?;
    let states = DeviceAllocation::new(device, plan.workspace_bytes(job.value_dim))?;
    let [acc_bytes, one_bytes] = plan.state_bytes(job.value_dim);
    let at = |bytes: usize| states.pointer() + bytes as u64;
    let state_pointers = [at(0), at(acc_bytes), at(acc_bytes + one_bytes)];
    let split_params = SplitParams {
        members: members.pointer(),
        groups: to_i32(plan.groups(), "groups of heads")?,
        group: to_i32(plan.group, "heads of a group")?,
        splits: to_i32(plan.splits, "splits")?,
        pad: 0,
    };

    let variant = &plan.variant;
    let shared = variant.shared_bytes();
    let program = variant.program(dtype, mma_tiles::aligned(job));
    let function = device.function(&program, "split_forward", shared)?;
    let kernel = (&function, grid(plan.blocks, variant.threads(), shared));
    let mut reads = inputs.memory()?.map(|memory| &**memory).to_vec();
    let pointers = addresses(&reads);
    reads.extend(params.tables());
    reads.push(&members);
    let mut arguments: Vec<&dyn KernelValue> = vec![params.value(), &split_params];
    arguments.extend(pointer_arguments(&pointers));
    arguments.extend(pointer_arguments(&state_pointers));
    // SAFETY: the arguments of `split_forward`; the plan's jobs lie inside their buffers, and
    // `states` has every split of every cell.
    unsafe { context.launch("attention", kernel, &reads, &[&states], &arguments)? };

    let function = device.function(&merge_program(dtype), "split_merge", 0)?;
    let kernel = (&function, grid(plan.cells, MERGE_THREADS, 0));
    let mut reads = vec![&states];
    reads.extend(params.tables());
    reads.extend(memory.reads());
    let outputs = memory.pointers();
    let numbers = [
        to_i32(job.value_dim, "elements in a row")?,
        split_params.splits,
        memory.starts.into(),
        memory.finishes.into(),
    ];
    let mut arguments: Vec<&dyn KernelValue> = vec![params.job()];
    arguments.extend(pointer_arguments(&state_pointers));
    arguments.extend(pointer_arguments(&outputs));
    arguments.extend(numbers.iter().map(|number| number as &dyn KernelValue));
    let (what, writes) = ("merging splits", memory.writes());
    // SAFETY: the arguments of `split_merge`; one block for each cell of the job.
    unsafe { context.launch(what, kernel, &reads, &writes, &arguments) }
}
