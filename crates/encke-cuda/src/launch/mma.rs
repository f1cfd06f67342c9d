//! Attention with mma.sync: bf16 and f16 on every GPU from Ampere on, forward and backward.
//!
//! Always repeatable: no two blocks add to the same element, so their order does not matter.

use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::mma_tiles::{self, MAX_DIM, MmaKernel, MmaTiling, TILINGS};
use super::{KernelValue, LaunchContext, addresses, grid, pointer_arguments};
use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::operands::{BackwardOperands, DeviceInputs, SoftmaxMemory};
use crate::program::Program;

/// The first compute capability with these instructions.
const CAPABILITY: (i32, i32) = (8, 0);

/// Whether these kernels support a job.
pub(crate) fn supports(device: &Device, job: &Job, dtype: DType) -> bool {
    let halves = matches!(dtype, DType::Bf16 | DType::F16);
    device.capability() >= CAPABILITY && halves && job.dim <= MAX_DIM && job.is_plain()
}

/// Programs that tests compile ahead of time: every tiling on a GPU that uses it, with types and
/// alignments alternating, and every kernel once for the newer GPUs.
pub(crate) fn programs() -> Vec<(Program, (i32, i32))> {
    let mut all = Vec::new();
    for (index, tiling) in TILINGS.iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][index / 2 % 2];
        let used = |shared| mma_tiles::choose(tiling.kernel, tiling.dim, shared) == Some(tiling);
        let capability = [(232_448, (9, 0)), (166_912, (8, 0)), (101_376, (8, 9))]
            .into_iter()
            .find(|(shared, _)| used(*shared));
        for &parts in tiling.parts() {
            let program = tiling.program(dtype, index % 3 != 2, parts);
            all.extend(capability.map(|(_, capability)| (program, capability)));
        }
        if tiling.dim == 128 && used(232_448) {
            all.push((tiling.program(DType::Bf16, true, 3), (10, 0)));
        }
        if tiling.dim == 64 && used(101_376) {
            all.push((tiling.program(DType::F16, true, 3), (12, 0)));
        }
    }
    all
}

/// One kernel for one job.
struct MmaLaunch<'a> {
    context: &'a LaunchContext,
    job: &'a Job,
    tiling: &'static MmaTiling,
    dtype: DType,
}

impl<'a> MmaLaunch<'a> {
    fn new(
        context: &'a LaunchContext,
        job: &'a Job,
        kernel: MmaKernel,
        dtype: DType,
    ) -> Result<MmaLaunch<'a>> {
        let shared = context.device.shared_bytes();
        let tiling =
            mma_tiles::choose(kernel, job.dim, shared).ok_or_else(|| Error::Unsupported {
                what: format!(
                    "a head dimension of {} in {dtype} on {}: the limit is {MAX_DIM}",
                    job.dim,
                    context.device.name()
                ),
            })?;
        Ok(MmaLaunch {
            context,
            job,
            tiling,
            dtype,
        })
    }

    /// Blocks for `rows` rows of every (batch entry, segment, head).
    fn blocks(&self, rows: usize) -> Result<usize> {
        let sequences = self.job.heads * self.job.segments * self.job.batch;
        let blocks = rows.div_ceil(self.tiling.rows()) * sequences;
        match i32::try_from(blocks) {
            Ok(_) => Ok(blocks),
            Err(_) => Err(Error::Unsupported {
                what: format!(
                    "{blocks} tiles in one job: the limit is {}; use more ranks",
                    i32::MAX
                ),
            }),
        }
    }

    /// Launches it over `rows` rows. The kernel's arguments are the job, `pointers` and `flags`.
    fn run(
        &self,
        what: &str,
        (rows, parts): (usize, u32),
        (reads, writes): (&[&DeviceAllocation], &[&DeviceAllocation]),
        (pointers, flags): (&[u64], &[i32]),
    ) -> Result<()> {
        let (device, tiling) = (&self.context.device, self.tiling);
        let params = self.context.tables.job(device, self.job)?;
        let program = tiling.program(self.dtype, mma_tiles::aligned(self.job), parts);
        let shared = tiling.shared_bytes();
        let function = device.function(&program, tiling.entry(), shared)?;
        let shape = grid(self.blocks(rows)?, tiling.threads(), shared);
        let mut reads = reads.to_vec();
        reads.extend(params.tables());
        let mut arguments: Vec<&dyn KernelValue> = vec![&params.value];
        arguments.extend(pointer_arguments(pointers));
        arguments.extend(flags.iter().map(|flag| flag as &dyn KernelValue));
        let kernel = (&function, shape);
        // SAFETY: the arguments of the entry, as its callers below give them; the plan's jobs lie
        // inside their buffers.
        unsafe {
            self.context
                .launch(what, kernel, &reads, writes, &arguments)
        }
    }
}

/// Forward: starts or continues a softmax, and leaves it in the carry or finishes it.
pub(crate) fn forward(
    context: &LaunchContext,
    job: &Job,
    inputs: DeviceInputs<'_>,
    state: SoftmaxState<'_, Buffer>,
) -> Result<()> {
    if job.queries == 0 {
        return Ok(());
    }
    let dtype = inputs.dtype();
    let launch = MmaLaunch::new(context, job, MmaKernel::Forward, dtype)?;
    let memory = SoftmaxMemory::new(state, dtype)?;
    let mut reads = inputs.memory()?.map(|memory| &**memory).to_vec();
    let mut pointers = addresses(&reads);
    pointers.extend(memory.pointers());
    reads.extend(memory.reads());
    // The arguments of `mma_forward`: q, k, v, acc, m, l, out, lse, starts, finishes.
    launch.run(
        "attention",
        (job.queries, 3),
        (&reads, &memory.writes()),
        (&pointers, &[memory.starts.into(), memory.finishes.into()]),
    )
}

/// Backward: dk and dv by key rows, then dq by query rows.
pub(crate) fn backward(
    context: &LaunchContext,
    job: &Job,
    inputs: DeviceInputs<'_>,
    gradients: BackwardOperands<'_>,
) -> Result<()> {
    if job.queries == 0 || job.keys == 0 {
        return Ok(());
    }
    let dtype = inputs.dtype();
    let memory = gradients.into_memory(dtype)?;
    let mut reads = inputs.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(memory.upstream()?);
    let inputs = addresses(&reads);

    // The arguments of `mma_backward_keys`: q, k, v, dout, lse, delta, dk, dv.
    let launch = MmaLaunch::new(context, job, MmaKernel::BackwardKeys, dtype)?;
    let writes = [&*memory.dk, &*memory.dv];
    let pointers = [inputs.clone(), addresses(&writes)].concat();
    for &parts in launch.tiling.parts() {
        launch.run(
            "gradients of keys",
            (job.keys, parts),
            (&reads, &writes),
            (&pointers, &[]),
        )?;
    }

    // The arguments of `mma_backward_queries`: q, k, v, dout, lse, delta, dq.
    let launch = MmaLaunch::new(context, job, MmaKernel::BackwardQueries, dtype)?;
    let writes = [&*memory.dq];
    let pointers = [inputs, addresses(&writes)].concat();
    launch.run(
        "gradients of queries",
        (job.queries, 3),
        (&reads, &writes),
        (&pointers, &[]),
    )
}
