//! Attention forward on Hopper: bf16 and f16, through tensor maps and wgmma.

use cudarc::driver::PushKernelArg;
use encke_core::DType;
use encke_core::job::Job;

use super::hopper_tiles::{self, Mask, Seen, Tiles};
use super::hopper_tilings::{self, Mode, Tiling};
use super::{Site, grid};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::operands::{Ends, Operands};
use crate::program::Program;
use crate::tensor_map::{self, Extents};

/// The GPUs it is for: wgmma is Hopper's alone.
const CAPABILITY: (i32, i32) = (9, 0);

/// Every program that is compiled ahead of time in tests: all tilings at their own head dimension,
/// and one where rows are padded, in both directions of every choice.
pub(crate) fn programs() -> Vec<Program> {
    let mode = |dtype, causal, carry, negative| Mode {
        dtype,
        causal,
        carry,
        negative,
    };
    let mut all = Vec::new();
    for tiling in hopper_tilings::TILINGS {
        all.push(tiling.program(tiling.dim, mode(DType::Bf16, false, false, false)));
        all.push(tiling.program(tiling.dim, mode(DType::F16, false, true, true)));
        if tiling.causal {
            all.push(tiling.program(tiling.dim, mode(DType::Bf16, true, true, false)));
            all.push(tiling.program(tiling.dim - 16, mode(DType::F16, true, false, true)));
        }
    }
    all
}

/// What was decided about a job before it is launched.
struct Choice {
    tiling: &'static Tiling,
    mask: Option<Mask>,
    tiles: Tiles,
}

/// Whether this kernel computes a job.
pub(crate) fn takes(device: &Device, job: &Job, dtype: DType) -> bool {
    choice(device, job, dtype, false).is_some()
}

/// How the job would be run; None where it is not for this kernel.
fn choice(device: &Device, job: &Job, dtype: DType, carry: bool) -> Option<Choice> {
    let (q, k) = extents(job);
    let able = device.capability() == CAPABILITY
        && matches!(dtype, DType::Bf16 | DType::F16)
        && job.dim <= hopper_tilings::DIM
        && job.queries > 0
        && job.keys > 0
        && tensor_map::fits(&job.q, &q)
        && tensor_map::fits(&job.k, &k);
    if !able {
        return None;
    }
    let mask = match hopper_tiles::seen(job) {
        Seen::All => None,
        Seen::Some(mask) => Some(mask),
        Seen::TooFar => return None,
    };
    let processors = device.processors() as usize;
    let tiling = hopper_tilings::choose(job, mask.is_some(), carry, processors)?;
    let tiles = Tiles::new(job, tiling, mask)?;
    Some(Choice {
        tiling,
        mask,
        tiles,
    })
}

/// What q and k span.
fn extents(job: &Job) -> (Extents, Extents) {
    let of = |rows| Extents {
        dim: job.dim,
        rows,
        segments: job.segments,
        batch: job.batch,
    };
    (of(job.queries), of(job.keys))
}

/// Whether a job leaves something in every cell of a carry's acc.
fn fills(job: &Job, acc: &Memory) -> bool {
    let cells = job.batch * job.segments * job.queries * job.heads;
    job.visible(0) > 0 && cells * job.dim * DType::F32.bytes() == acc.bytes()
}

/// Forward: into the carry, or to the end.
pub(crate) fn forward(
    site: &Site,
    job: &Job,
    operands: Operands<'_>,
    ends: Ends<'_>,
) -> Result<()> {
    let (device, dtype) = (&site.device, operands.dtype());
    let targets = ends.own()?;
    let choice = choice(device, job, dtype, !targets.end);
    let choice = choice.ok_or_else(|| Error::Unsupported {
        what: format!("a job of {dtype} that is not laid out for tensor maps"),
    })?;
    let told = site.tables.job(device, job)?;
    let mode = Mode {
        dtype,
        causal: choice.mask.is_some(),
        carry: !targets.end,
        negative: job.scale < 0.0,
    };
    let tiling = choice.tiling;
    let shared = tiling.shared_bytes(job.dim.next_multiple_of(16), mode.carry);
    let program = tiling.program(job.dim, mode);
    let function = device.function(&program, "hopper_forward", shared)?;
    let blocks = choice.tiles.blocks(device.processors() as usize);
    let shape = grid(blocks, tiling.threads(), shared);

    let mut reads = operands.memory()?.to_vec();
    let [q, k, v] = [reads[0], reads[1], reads[2]].map(|memory| memory.pointer());
    let (q_extents, k_extents) = extents(job);
    let maps = [
        tensor_map::encode(dtype, q, &job.q, &q_extents, tiling.rows())?,
        tensor_map::encode(dtype, k, &job.k, &k_extents, tiling.keys)?,
        tensor_map::encode(dtype, v, &job.k, &k_extents, tiling.keys)?,
    ];
    reads.extend(told.tables());
    let writes = targets.memory();
    if mode.carry && fills(job, writes[0]) {
        writes[0].take_blank(); // rows that had nothing are written, whatever lies there
    }
    let [acc, m, l, out, lse] = targets.pointers();
    let outputs = if targets.end {
        [out, lse, 0]
    } else {
        [acc, m, l]
    };
    device.attend(&reads, &writes, &site.counters, |stream, counter| {
        let mut launch = stream.launch_builder(&function);
        for map in &maps {
            launch.arg(map);
        }
        launch.arg(&told.value).arg(&choice.tiles).arg(&v);
        for pointer in &outputs {
            launch.arg(pointer);
        }
        launch.arg(&counter);
        // SAFETY: the arguments of `hopper_forward`; the plan's jobs lie inside their buffers.
        unsafe { launch.launch(shape) }.map(|_| ())
    })
}
