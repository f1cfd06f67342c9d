//! Attention with mma.sync: bf16 and f16 on every GPU from Ampere on, forward and backward.
//!
//! Always repeatable: no two blocks add to the same element, so their order does not matter.

use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::mma_tiles::{self, MAX_DIM, MmaKernel, MmaVariant, TILINGS};
use super::{KernelValue, LaunchContext, addresses, grid, pointer_arguments};
use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::masked_job::JobFeatures;
use crate::operands::{BackwardOperands, DeviceInputs, Rounds, SoftmaxMemory};
use crate::program::Program;

/// The first compute capability with these instructions.
const CAPABILITY: (i32, i32) = (8, 0);

/// Whether these kernels support a job.
pub(crate) fn supports(device: &Device, job: &Job, dtype: DType) -> bool {
    let halves = matches!(dtype, DType::Bf16 | DType::F16);
    let fits = job.dim <= MAX_DIM && job.value_dim <= MAX_DIM;
    device.capability() >= CAPABILITY && halves && fits
}

/// What masked programs are compiled for ahead of time.
const FEATURES: [JobFeatures; 2] = [
    JobFeatures {
        masked: true,
        softcap: false,
        slopes: false,
        dropout: false,
    },
    JobFeatures {
        masked: true,
        softcap: true,
        slopes: true,
        dropout: true,
    },
];

/// Programs that tests compile ahead of time: every tiling on a GPU that uses it, with types and
/// alignments alternating, plain and masked; every kernel once for the newer GPUs; and head
/// dimensions between those of the tilings, and of values that differ.
pub(crate) fn programs() -> Vec<(Program, (i32, i32))> {
    let mut all = Vec::new();
    for (index, tiling) in TILINGS.iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][index / 2 % 2];
        let (dims, plain) = ([tiling.dim; 2], JobFeatures::default());
        let used = |shared| {
            mma_tiles::choose(tiling.kernel, dims, plain, shared)
                .is_some_and(|variant| variant.tiling == *tiling)
        };
        let capability = [(232_448, (9, 0)), (166_912, (8, 0)), (101_376, (8, 9))]
            .into_iter()
            .find(|(shared, _)| used(*shared));
        let Some((_, capability)) = capability else {
            continue;
        };
        let mut push = |dims, features, capability| {
            let variant = MmaVariant::new(*tiling, dims, features);
            // Newer GPUs with 16-byte copies only: without them dq of 64 spills 24 bytes on 12.0.
            let aligned = index % 3 != 2 || capability >= (10, 0);
            for &parts in variant.parts() {
                let program = variant.program(dtype, aligned, parts);
                all.push((program, capability));
            }
        };
        push(dims, plain, capability);
        for features in FEATURES {
            push(dims, features, capability);
        }
        if used(232_448) && tiling.dim > 64 {
            let narrower = [tiling.dim - 16; 2];
            push(narrower, plain, capability);
            push([tiling.dim, tiling.dim / 2], FEATURES[0], capability);
            push([tiling.dim / 2, tiling.dim], FEATURES[1], capability);
        }
        if tiling.dim == 128 && used(232_448) {
            push(dims, FEATURES[0], (10, 0));
        }
        if tiling.dim == 64 && used(101_376) {
            push(dims, plain, (12, 0));
        }
    }
    all
}

/// One kernel for one job.
struct MmaLaunch<'a> {
    context: &'a LaunchContext,
    job: &'a Job,
    variant: MmaVariant,
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
        let (dims, features) = ([job.dim, job.value_dim], JobFeatures::of(job));
        let variant = mma_tiles::choose(kernel, dims, features, shared);
        let variant = variant.ok_or_else(|| Error::Unsupported {
            what: format!(
                "head dimensions of {} and {} in {dtype} on {}: the limit is {MAX_DIM}",
                job.dim,
                job.value_dim,
                context.device.name()
            ),
        })?;
        Ok(MmaLaunch {
            context,
            job,
            variant,
            dtype,
        })
    }

    /// Blocks for tiles of every (batch entry, segment, head).
    fn blocks(&self, tiles: usize) -> Result<usize> {
        let blocks = tiles * self.job.heads * self.job.segments * self.job.batch;
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

    /// Launches it. The kernel's arguments are the job, `pointers` and `flags`.
    fn run(
        &self,
        what: &str,
        parts: u32,
        (reads, writes): (&[&DeviceAllocation], &[&DeviceAllocation]),
        (pointers, flags): (&[u64], &[i32]),
    ) -> Result<()> {
        let (device, variant) = (&self.context.device, &self.variant);
        let tables = &self.context.tables;
        let (rows, size) = (variant.tiling.kernel.rows(), variant.tiling.rows());
        let params = tables.job_argument(device, self.job, rows, size)?;
        let blocks = self.blocks(params.tiles())?;
        if blocks == 0 {
            return Ok(()); // no document of a packed job has keys
        }
        let program = variant.program(self.dtype, mma_tiles::aligned(self.job), parts);
        let shared = variant.shared_bytes();
        let function = device.function(&program, variant.entry(), shared)?;
        let shape = grid(blocks, variant.tiling.threads(), shared);
        let mut reads = reads.to_vec();
        reads.extend(params.tables());
        let mut arguments: Vec<&dyn KernelValue> = vec![params.value()];
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
        3,
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
    let memory = gradients.into_memory(dtype, Rounds::Never)?;
    let mut reads = inputs.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(memory.upstream()?);
    let inputs = addresses(&reads);

    // The arguments of `mma_backward_keys`: q, k, v, dout, lse, delta, dk, dv.
    let launch = MmaLaunch::new(context, job, MmaKernel::BackwardKeys, dtype)?;
    let writes = [&*memory.dk, &*memory.dv];
    let pointers = [inputs.clone(), addresses(&writes)].concat();
    for &parts in launch.variant.parts() {
        launch.run(
            "gradients of keys",
            parts,
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
        3,
        (&reads, &writes),
        (&pointers, &[]),
    )
}
