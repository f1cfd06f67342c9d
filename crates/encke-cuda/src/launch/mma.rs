//! Attention with mma.sync: bf16 and f16 on every GPU from Ampere on, forward and backward.
//!
//! Always repeatable: no two blocks add to the same number, so nothing depends on their order.

use cudarc::driver::PushKernelArg;
use encke_core::DType;
use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::mma_tiles::{self, DIM, Half, TILINGS, Tiling};
use super::{LaunchContext, grid};
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::operands::{Gradient, Operands, Targets};
use crate::program::Program;

/// The first GPUs with these instructions.
const CAPABILITY: (i32, i32) = (8, 0);

/// Whether a job is for these kernels.
pub(crate) fn takes(device: &Device, job: &Job, dtype: DType) -> bool {
    device.capability() >= CAPABILITY && matches!(dtype, DType::Bf16 | DType::F16) && job.dim <= DIM
}

/// Programs to compile ahead of time in tests: every tiling on a GPU that gets it, with types and
/// alignments alternating, and every kernel once for the newer GPUs.
pub(crate) fn programs() -> Vec<(Program, (i32, i32))> {
    let mut all = Vec::new();
    for (index, tiling) in TILINGS.iter().enumerate() {
        let dtype = [DType::Bf16, DType::F16][index / 2 % 2];
        let gets = |shared| mma_tiles::choose(tiling.half, tiling.dim, shared) == Some(tiling);
        let capability = [(232_448, (9, 0)), (166_912, (8, 0)), (101_376, (8, 9))]
            .into_iter()
            .find(|(shared, _)| gets(*shared));
        for &parts in tiling.parts() {
            let program = tiling.program(dtype, index % 3 != 2, parts);
            all.extend(capability.map(|(_, capability)| (program, capability)));
        }
        if tiling.dim == 128 && gets(232_448) {
            all.push((tiling.program(DType::Bf16, true, 3), (10, 0)));
        }
        if tiling.dim == 64 && gets(101_376) {
            all.push((tiling.program(DType::F16, true, 3), (12, 0)));
        }
    }
    all
}

/// One kernel for one job.
struct Launch<'a> {
    site: &'a LaunchContext,
    job: &'a Job,
    tiling: &'static Tiling,
    dtype: DType,
}

impl<'a> Launch<'a> {
    fn new(site: &'a LaunchContext, job: &'a Job, half: Half, dtype: DType) -> Result<Launch<'a>> {
        let shared = site.device.shared_bytes();
        let tiling =
            mma_tiles::choose(half, job.dim, shared).ok_or_else(|| Error::Unsupported {
                what: format!(
                    "a head dimension of {} in {dtype} on {}: the limit is {DIM}",
                    job.dim,
                    site.device.name()
                ),
            })?;
        Ok(Launch {
            site,
            job,
            tiling,
            dtype,
        })
    }

    /// Blocks for `rows` rows of every place.
    fn blocks(&self, rows: usize) -> Result<usize> {
        let places = self.job.heads * self.job.segments * self.job.batch;
        let blocks = rows.div_ceil(self.tiling.rows()) * places;
        match i32::try_from(blocks) {
            Ok(_) => Ok(blocks),
            Err(_) => Err(Error::Unsupported {
                what: format!(
                    "{blocks} tiles in one job: the limit is {}; cut it into more ranks",
                    i32::MAX
                ),
            }),
        }
    }

    /// Enqueues it over `rows` rows, with these pointers after the job, and numbers after those.
    fn run(
        &self,
        what: &str,
        (rows, parts): (usize, u32),
        (reads, writes): (&[&Memory], &[&Memory]),
        (pointers, numbers): (&[u64], &[i32]),
    ) -> Result<()> {
        let (device, tiling) = (&self.site.device, self.tiling);
        let told = self.site.tables.job(device, self.job)?;
        let program = tiling.program(self.dtype, mma_tiles::aligned(self.job), parts);
        let shared = tiling.shared_bytes();
        let function = device.function(&program, tiling.entry(), shared)?;
        let shape = grid(self.blocks(rows)?, tiling.threads(), shared);
        let mut reads = reads.to_vec();
        reads.extend(told.tables());
        device.enqueue(device.compute(), what, &reads, writes, |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&told.value);
            for pointer in pointers {
                launch.arg(pointer);
            }
            for number in numbers {
                launch.arg(number);
            }
            // SAFETY: the arguments of the entry, as its callers below give them; the plan's jobs
            // lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        })
    }
}

fn pointers(memory: &[&Memory]) -> Vec<u64> {
    memory.iter().map(|x| x.pointer()).collect()
}

/// Forward: from a carry or from nothing, into the carry or to the end.
pub(crate) fn forward(
    site: &LaunchContext,
    job: &Job,
    operands: Operands<'_>,
    state: SoftmaxState<'_, Buffer>,
) -> Result<()> {
    if job.queries == 0 {
        return Ok(());
    }
    let dtype = operands.dtype();
    let launch = Launch::new(site, job, Half::Forward, dtype)?;
    let targets = Targets::new(state, dtype)?;
    let mut reads = operands.memory()?.map(|memory| &**memory).to_vec();
    let mut all = pointers(&reads);
    all.extend(targets.pointers());
    reads.extend(targets.reads());
    // The arguments of `mma_forward`: q, k, v, acc, m, l, out, lse, whether it begins and ends.
    launch.run(
        "attention",
        (job.queries, 3),
        (&reads, &targets.writes()),
        (&all, &[targets.begins.into(), targets.ends.into()]),
    )
}

/// Backward: dk and dv by key rows, then dq by query rows.
pub(crate) fn backward(
    site: &LaunchContext,
    job: &Job,
    operands: Operands<'_>,
    gradient: Gradient<'_>,
) -> Result<()> {
    if job.queries == 0 || job.keys == 0 {
        return Ok(());
    }
    let dtype = operands.dtype();
    let targets = gradient.own(dtype)?;
    let mut reads = operands.memory()?.map(|memory| &**memory).to_vec();
    reads.extend(targets.upstream()?);
    let inputs = pointers(&reads);

    // The arguments of `mma_backward_keys`: q, k, v, dout, lse, delta, dk, dv.
    let launch = Launch::new(site, job, Half::Keys, dtype)?;
    let writes = [&*targets.dk, &*targets.dv];
    let all = [inputs.clone(), pointers(&writes)].concat();
    for &parts in launch.tiling.parts() {
        launch.run(
            "gradients of keys",
            (job.keys, parts),
            (&reads, &writes),
            (&all, &[]),
        )?;
    }

    // The arguments of `mma_backward_queries`: q, k, v, dout, lse, delta, dq.
    let launch = Launch::new(site, job, Half::Queries, dtype)?;
    let writes = [&*targets.dq];
    let all = [inputs, pointers(&writes)].concat();
    launch.run(
        "gradients of queries",
        (job.queries, 3),
        (&reads, &writes),
        (&all, &[]),
    )
}
