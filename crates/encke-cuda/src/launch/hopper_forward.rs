//! Attention forward on Hopper: bf16 and f16, through tensor maps and wgmma.

use cudarc::driver::{DeviceRepr, PushKernelArg};
use encke_core::DType;
use encke_core::job::Job;

use super::chain::Chain;
use super::hopper_tiles::{self, Mask, Seen, Tiles};
use super::hopper_tilings::{self, LINKS, Mode, Tiling};
use super::{LaunchContext, grid};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::operands::Targets;
use crate::program::Program;
use crate::tensor_map::{self, Extents, TensorMap};

/// The GPUs it is for: wgmma is Hopper's alone.
const CAPABILITY: (i32, i32) = (9, 0);

/// Every program that is compiled ahead of time in tests: all tilings at their own head dimension,
/// and one where rows are padded, in both directions of every choice.
pub(crate) fn programs() -> Vec<Program> {
    let mode = |dtype, causal, (before, after), negative| Mode {
        dtype,
        causal,
        before,
        after,
        negative,
    };
    let (all_at_once, first, last, between) =
        ((false, false), (false, true), (true, false), (true, true));
    let mut all = Vec::new();
    for tiling in hopper_tilings::TILINGS {
        let full = |dtype, ends, negative| mode(dtype, false, ends, negative);
        all.push(tiling.program(tiling.dim, full(DType::Bf16, all_at_once, false)));
        all.push(tiling.program(tiling.dim, full(DType::F16, between, true)));
        all.push(tiling.program(tiling.dim, full(DType::Bf16, last, false)));
        if tiling.causal {
            let causal = |dtype, ends, negative| mode(dtype, true, ends, negative);
            all.push(tiling.program(tiling.dim, causal(DType::Bf16, between, false)));
            all.push(tiling.program(tiling.dim, causal(DType::Bf16, first, false)));
            all.push(tiling.program(tiling.dim - 16, causal(DType::F16, all_at_once, true)));
            all.push(tiling.program(tiling.dim - 16, causal(DType::F16, last, true)));
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
    choice(device, job, &[], dtype, false).is_some()
}

/// How the job would be run, with `further` keys of other links; None where it is not for this
/// kernel.
fn choice(
    device: &Device,
    job: &Job,
    further: &[usize],
    dtype: DType,
    carry: bool,
) -> Option<Choice> {
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
    let (causal, keys) = (mask.is_some(), further.iter().sum());
    let tiling = hopper_tilings::choose(job, keys, causal, carry, processors)?;
    let tiles = Tiles::new(job, further, tiling, mask)?;
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
fn fills(job: &Job, begins: bool, acc: &Memory) -> bool {
    let cells = job.batch * job.segments * job.queries * job.heads;
    (begins || job.visible(0) > 0) && cells * job.dim * DType::F32.bytes() == acc.bytes()
}

/// The kernel's `Links`.
#[repr(C)]
struct Links {
    k: [TensorMap; LINKS],
    v: [TensorMap; LINKS],
}

// SAFETY: maps in C layout, passed by value as each of them may be.
unsafe impl DeviceRepr for Links {}

impl Links {
    /// The maps of all links. Those there are not are never used, but must be something.
    fn encode(chain: &Chain, tiling: &Tiling) -> Result<Links> {
        let first = chain.first();
        let map = |memory: &Memory, job: &Job| {
            let (_, extents) = extents(job);
            tensor_map::encode(chain.dtype, memory, &job.k, &extents, tiling.keys)
        };
        let mut links = Links {
            k: [map(&first.k, &first.job)?; LINKS],
            v: [map(&first.v, &first.job)?; LINKS],
        };
        for (at, link) in chain.further().iter().enumerate() {
            links.k[at + 1] = map(&link.k, &link.job)?;
            links.v[at + 1] = map(&link.v, &link.job)?;
        }
        Ok(links)
    }
}

/// Forward: from a carry or from nothing, into the carry or to the end.
pub(crate) fn forward(site: &LaunchContext, chain: &Chain, targets: &Targets) -> Result<()> {
    let (device, dtype, job) = (&site.device, chain.dtype, &chain.first().job);
    let further: Vec<usize> = chain.further().iter().map(|link| link.job.keys).collect();
    // Links are whole blocks of the tilings for a carry.
    let carry = !(targets.begins && targets.ends && further.is_empty());
    let choice = choice(device, job, &further, dtype, carry);
    let choice = choice.ok_or_else(|| Error::Unsupported {
        what: format!("a job of {dtype} that is not laid out for tensor maps"),
    })?;
    let told = site.tables.job(device, job)?;
    let mode = Mode {
        dtype,
        causal: choice.mask.is_some(),
        before: !targets.begins,
        after: !targets.ends,
        negative: job.scale < 0.0,
    };
    let tiling = choice.tiling;
    let shared = tiling.shared_bytes(job.dim.next_multiple_of(16), mode.carry());
    let program = tiling.program(job.dim, mode);
    let function = device.function(&program, "hopper_forward", shared)?;
    let blocks = choice.tiles.blocks(device.processors() as usize);
    let shape = grid(blocks, tiling.threads(), shared);

    let (q_extents, _) = extents(job);
    let q_map = tensor_map::encode(dtype, &chain.q, &job.q, &q_extents, tiling.rows())?;
    let links = Links::encode(chain, tiling)?;
    let values = chain.first().v.pointer();
    let mut reads = chain.memory();
    reads.extend(told.tables());
    reads.extend(targets.reads());
    let writes = targets.writes();
    if mode.after && fills(job, targets.begins, writes[0]) {
        // Rows that had nothing are written, whatever lies there.
        let unread = if targets.begins { 3 } else { 1 };
        for memory in &writes[..unread] {
            memory.take_blank();
        }
    }
    let outputs = targets.pointers();
    device.attend(&reads, &writes, &site.counters, |stream, counter| {
        let mut launch = stream.launch_builder(&function);
        launch.arg(&q_map).arg(&links);
        launch.arg(&told.value).arg(&choice.tiles).arg(&values);
        for pointer in &outputs {
            launch.arg(pointer);
        }
        launch.arg(&counter);
        // SAFETY: the arguments of `hopper_forward`; the plan's jobs lie inside their buffers.
        unsafe { launch.launch(shape) }.map(|_| ())
    })
}
