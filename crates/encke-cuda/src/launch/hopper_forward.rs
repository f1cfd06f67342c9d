//! Attention forward on Hopper: bf16 and f16, with TMA and wgmma.

use std::sync::Arc;

use cudarc::driver::{DeviceRepr, PushKernelArg};
use encke_core::DType;
use encke_core::job::{Job, JobTiles, Operand, TilePart};

use super::chain::{Chain, KvChunk};
use super::hopper_ranges::{self, RangeTiles};
use super::hopper_tiles::{self, KeyVisibility, NarrowMask, TileParams};
use super::hopper_tilings::{self, ForwardMode, GridJob, MAX_CHUNKS, Tiling};
use super::row_dims::RowDims;
use super::{LaunchContext, grid};
use crate::allocation::DeviceAllocation;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::masked_job::{JobFeatures, slope_words};
use crate::operands::SoftmaxMemory;
use crate::program::Program;
use crate::tensor_map::{self, Extents, TensorMap};

/// The compute capability: only Hopper has wgmma.
const CAPABILITY: (i32, i32) = (9, 0);

/// The programs that tests compile ahead of time: all tilings at their own head dimensions and at
/// others with padded rows, each macro with both values.
pub(crate) fn programs() -> Vec<Program> {
    let mode = |dtype, causal, (load_carry, store_carry), negative| ForwardMode {
        dtype,
        causal,
        load_carry,
        store_carry,
        negative,
        windowed: false,
        softcap: false,
        slopes: false,
        grid_tile: 0,
    };
    let (whole, first, last, middle) = ((false, false), (false, true), (true, false), (true, true));
    let mut all = Vec::new();
    for tiling in hopper_tilings::TILINGS {
        let full = |dtype, ends, negative| mode(dtype, false, ends, negative);
        all.push(tiling.program(tiling.dims, full(DType::Bf16, whole, false)));
        all.push(tiling.program(tiling.dims, full(DType::F16, middle, true)));
        all.push(tiling.program(tiling.dims, full(DType::Bf16, last, false)));
        if tiling.causal {
            let causal = |dtype, ends, negative| mode(dtype, true, ends, negative);
            all.push(tiling.program(tiling.dims, causal(DType::Bf16, middle, false)));
            all.push(tiling.program(tiling.dims, causal(DType::Bf16, first, false)));
            all.push(tiling.program(tiling.dims.less(16), causal(DType::F16, whole, true)));
            all.push(tiling.program(tiling.dims.less(16), causal(DType::F16, last, true)));
        }
        if hopper_ranges::supports(tiling) {
            let windowed = |dtype, ends, negative| ForwardMode {
                windowed: true,
                ..mode(dtype, true, ends, negative)
            };
            all.push(tiling.program(tiling.dims, windowed(DType::Bf16, whole, false)));
            all.push(tiling.program(tiling.dims, windowed(DType::F16, middle, true)));
            all.push(tiling.program(tiling.dims.less(16), windowed(DType::Bf16, first, false)));
            all.push(tiling.program(tiling.dims.less(16), windowed(DType::F16, last, false)));
            let transforms = [(true, false), (false, true), (true, true)].into_iter();
            for (softcap, slopes) in transforms.filter(|(softcap, _)| !softcap || tiling.caps()) {
                let transformed = |dtype, ends| ForwardMode {
                    softcap,
                    slopes,
                    ..windowed(dtype, ends, false)
                };
                all.push(tiling.program(tiling.dims, transformed(DType::Bf16, whole)));
                all.push(tiling.program(tiling.dims, transformed(DType::F16, middle)));
            }
        }
    }
    for (keys, values) in [(64, 128), (128, 64)] {
        let dims = RowDims { keys, values };
        for tiling in hopper_tilings::candidates(dims, true, true) {
            all.push(tiling.program(dims, mode(DType::Bf16, true, whole, false)));
            all.push(tiling.program(dims, mode(DType::F16, true, last, true)));
        }
    }
    all.extend(grid_programs());
    all
}

/// Those for jobs on a grid.
fn grid_programs() -> Vec<Program> {
    let mut all = Vec::new();
    for dim in [64, 128, 192, 256] {
        for (tile, dtype) in [(512, DType::Bf16), (128, DType::F16)] {
            for tiling in hopper_tilings::grid_candidates(dim, tile, GridJob::CausalWhole) {
                let mut usual = hopper_tilings::grid_candidates(dim, tile, GridJob::Other);
                let usual = usual.any(|of| of == tiling);
                let kinds = [(false, false), (true, false), (true, true)];
                for (causal, windowed) in kinds {
                    if windowed && !hopper_ranges::supports(tiling) {
                        continue;
                    }
                    let ends = [(false, true), (true, true), (false, false), (true, false)];
                    for (load_carry, store_carry) in ends {
                        let whole = causal && !windowed && !load_carry && !store_carry;
                        if !usual && !whole {
                            continue;
                        }
                        let mode = ForwardMode {
                            dtype,
                            causal,
                            load_carry,
                            store_carry,
                            negative: dtype == DType::F16,
                            windowed,
                            softcap: false,
                            slopes: false,
                            grid_tile: tile,
                        };
                        all.push(tiling.program(RowDims::same(dim), mode));
                    }
                }
            }
        }
    }
    all
}

/// The tiling of a job.
struct ForwardLaunch {
    tiling: &'static Tiling,
    causal: bool,
    tiles: TileParams,
    /// The tiles of a job whose queries see ranges of keys.
    ranges: Option<RangeTiles>,
}

/// Whether this kernel supports a job.
pub(crate) fn supports(device: &Device, job: &Job, dtype: DType) -> bool {
    match JobFeatures::only_ranges(job) {
        true => is_laid_out(device, job, dtype) && hopper_ranges::fits(job),
        false => plan(device, job, &[], dtype, (false, false)).is_some(),
    }
}

/// Whether a job has a type, sizes and a layout that this kernel supports.
fn is_laid_out(device: &Device, job: &Job, dtype: DType) -> bool {
    let [q, k, v] = extents(job);
    let largest = RowDims::same(hopper_tilings::MAX_DIM);
    device.capability() == CAPABILITY
        && matches!(dtype, DType::Bf16 | DType::F16)
        && RowDims::of(job).fit(largest)
        && job.queries > 0
        && job.keys > 0
        && tensor_map::fits(&job.q, &q)
        && tensor_map::fits(&job.k, &k)
        && tensor_map::fits(&job.values(), &v)
}

/// The tiling of a job whose further chunks have `rest` keys each; None if this kernel does not
/// support it. `carry`: it loads or leaves a carry; `whole`: as in `Chain`.
fn plan(
    device: &Device,
    job: &Job,
    rest: &[usize],
    dtype: DType,
    (carry, whole): (bool, bool),
) -> Option<ForwardLaunch> {
    if !is_laid_out(device, job, dtype) {
        return None;
    }
    if let Some(tiles) = job.tiles {
        return plan_on_grid(device, job, tiles, (carry, whole));
    }
    if JobFeatures::only_ranges(job) {
        let (tiling, ranges) = hopper_ranges::choose(job, carry)?;
        return of_ranges(job, tiling, ranges);
    }
    if !JobFeatures::is_causal_or_full(job) {
        return None;
    }
    let mask = match hopper_tiles::visibility(job) {
        KeyVisibility::All => None,
        KeyVisibility::Causal(mask) => Some(mask),
        KeyVisibility::TooLarge => return None,
    };
    let multiprocessors = device.multiprocessors() as usize;
    let (causal, keys) = (mask.is_some(), rest.iter().sum());
    let tiling = hopper_tilings::choose(job, keys, causal, carry, multiprocessors)?;
    let tiles = TileParams::new(job, rest, tiling, mask)?;
    Some(ForwardLaunch {
        tiling,
        causal,
        tiles,
        ranges: None,
    })
}

/// The launch of a job whose queries see ranges of keys.
fn of_ranges(job: &Job, tiling: &'static Tiling, ranges: RangeTiles) -> Option<ForwardLaunch> {
    let tiles = TileParams::new(job, &[], tiling, None)?;
    Some(ForwardLaunch {
        tiling,
        causal: true,
        tiles: tiles.of_list(&ranges)?,
        ranges: Some(ranges),
    })
}

/// The tiling of a job on a grid, whose queries begin with a tile of it or are in one; otherwise as
/// `plan`.
fn plan_on_grid(
    device: &Device,
    job: &Job,
    tiles: JobTiles,
    (carry, whole): (bool, bool),
) -> Option<ForwardLaunch> {
    if JobFeatures::only_ranges(job) {
        let (tiling, ranges) = hopper_ranges::choose_on_grid(job, tiles)?;
        return of_ranges(job, tiling, ranges);
    }
    // Under a causal mask no query sees keys after its own tile.
    let (causal, mask) = match hopper_tiles::visibility(job) {
        KeyVisibility::All => (false, NarrowMask::of_grid(tiles, whole)?),
        KeyVisibility::Causal(mask) => (true, mask),
        KeyVisibility::TooLarge => return None,
    };
    let multiprocessors = device.multiprocessors() as usize;
    let of = match (causal, tiles.part) {
        (true, _) if !carry => GridJob::CausalWhole,
        (true, _) | (false, TilePart::All) => GridJob::Other,
        (false, _) => GridJob::WithinTiles,
    };
    let tiling = hopper_tilings::choose_on_grid(job, tiles.tile, of, multiprocessors)?;
    let params = TileParams::new(job, &[], tiling, Some(mask))?;
    let even = !causal && (whole || tiles.part == TilePart::All);
    Some(ForwardLaunch {
        tiling,
        causal,
        tiles: if even { params.in_turn() } else { params },
        ranges: None,
    })
}

/// The extents of q, k and v.
fn extents(job: &Job) -> [Extents; 3] {
    let of = |dim, rows| Extents {
        dim,
        rows,
        segments: job.segments,
        batch: job.batch,
    };
    [
        of(job.dim, job.queries),
        of(job.dim, job.keys),
        of(job.value_dim, job.keys),
    ]
}

/// Whether a job writes every cell of a carry's acc.
fn fills(job: &Job, starts: bool, acc: &DeviceAllocation) -> bool {
    let cells = job.batch * job.segments * job.queries * job.heads;
    let seen = JobFeatures::is_causal_or_full(job) && job.visible(0).end > 0;
    (starts || seen) && cells * job.value_dim * DType::F32.bytes() == acc.bytes()
}

/// Whether a job finishes every cell of out, and so of lse.
fn finishes_all(job: &Job, dtype: DType, out: &DeviceAllocation) -> bool {
    let cells = job.batch * job.segments * job.queries * job.heads;
    JobFeatures::is_causal_or_full(job) && cells * job.value_dim * dtype.bytes() == out.bytes()
}

/// The kernel's `KvChunkMaps`.
#[repr(C)]
struct KvChunkMaps {
    k: [TensorMap; MAX_CHUNKS],
    v: [TensorMap; MAX_CHUNKS],
}

// SAFETY: maps in C layout, passed by value as each of them may be.
unsafe impl DeviceRepr for KvChunkMaps {}

impl KvChunkMaps {
    /// The maps of all chunks. Unused entries repeat the first: they must be valid maps.
    fn encode(chain: &Chain, tiling: &Tiling) -> Result<KvChunkMaps> {
        let first = chain.first();
        let map = |memory: &DeviceAllocation, operand: &Operand, extents: &Extents| {
            tensor_map::encode(chain.dtype, memory, operand, extents, tiling.keys)
        };
        let maps = |chunk: &KvChunk| -> Result<[TensorMap; 2]> {
            let [_, k, v] = extents(&chunk.job);
            let values = chunk.job.values();
            Ok([
                map(&chunk.k, &chunk.job.k, &k)?,
                map(&chunk.v, &values, &v)?,
            ])
        };
        let [k, v] = maps(first)?;
        let mut all = KvChunkMaps {
            k: [k; MAX_CHUNKS],
            v: [v; MAX_CHUNKS],
        };
        for (at, chunk) in chain.rest().iter().enumerate() {
            [all.k[at + 1], all.v[at + 1]] = maps(chunk)?;
        }
        Ok(all)
    }
}

/// Forward: starts or continues a softmax, and leaves it in the carry or finishes it.
pub(crate) fn forward(
    context: &LaunchContext,
    chain: &Chain,
    memory: &SoftmaxMemory,
) -> Result<()> {
    let (device, dtype, job) = (&context.device, chain.dtype, &chain.first().job);
    let rest: Vec<usize> = chain.rest().iter().map(|chunk| chunk.job.keys).collect();
    // Chunks are multiples of the block size of the tilings for a carry.
    let carry = !(memory.starts && memory.finishes && rest.is_empty());
    let plan = plan(device, job, &rest, dtype, (carry, chain.whole));
    let plan = plan.ok_or_else(|| Error::Unsupported {
        what: format!("a job of {dtype} that is not laid out for tensor maps"),
    })?;
    let params = context.tables.job(device, job)?;
    let features = JobFeatures::of(job);
    let mode = ForwardMode {
        dtype,
        causal: plan.causal,
        load_carry: !memory.starts,
        store_carry: !memory.finishes,
        negative: job.scale < 0.0,
        windowed: plan.ranges.is_some(),
        softcap: features.softcap,
        slopes: features.slopes,
        grid_tile: job.tiles.map_or(0, |tiles| tiles.tile),
    };
    let list = plan.ranges.as_ref().map(RangeTiles::words);
    let list = list.map(|words| context.tables.get(device, words));
    let list = list.transpose()?;
    let slopes = slope_words(job).map(|words| context.tables.get(device, words));
    let slopes = slopes.transpose()?;
    let address = |table: &Option<Arc<DeviceAllocation>>| table.as_ref().map_or(0, |x| x.pointer());
    let tiles = plan.tiles.at(address(&list), address(&slopes));
    let tiling = plan.tiling;
    let dims = RowDims::of(job);
    let shared = tiling.shared_bytes(dims, mode);
    let program = tiling.program(dims, mode);
    let function = device.function(&program, "hopper_forward", shared)?;
    let blocks = tiles.blocks(device.multiprocessors() as usize);
    let shape = grid(blocks, tiling.threads(), shared);

    let [q_extents, ..] = extents(job);
    let q_map = tensor_map::encode(dtype, &chain.q, &job.q, &q_extents, tiling.rows())?;
    let kv_maps = KvChunkMaps::encode(chain, tiling)?;
    let values = chain.first().v.pointer();
    let mut reads = chain.memory();
    reads.extend(params.tables());
    reads.extend([&list, &slopes].into_iter().flatten().map(|table| &**table));
    reads.extend(memory.reads());
    let writes = memory.writes();
    // Sums that a job on a grid continues are read.
    let overwrites = memory.starts || mode.grid_tile == 0;
    if mode.store_carry && overwrites && fills(job, memory.starts, writes[0]) {
        // The kernel overwrites rows whose carry is empty, so a pending fill is not needed.
        let unread = if memory.starts { 3 } else { 1 };
        writes[..unread]
            .iter()
            .for_each(|written| written.cancel_fill());
    }
    if !mode.store_carry && finishes_all(job, dtype, writes[0]) {
        // Rows that see no key get zeros and -inf from the kernel, too.
        writes.iter().for_each(|written| written.cancel_fill());
    }
    let outputs = memory.pointers();
    device.attend(&reads, &writes, &context.counters, |stream, counter| {
        let mut launch = stream.launch_builder(&function);
        launch.arg(&q_map).arg(&kv_maps);
        launch.arg(&params.value).arg(&tiles).arg(&values);
        for pointer in &outputs {
            launch.arg(pointer);
        }
        launch.arg(&counter);
        // SAFETY: the arguments of `hopper_forward`; the plan's jobs lie inside their buffers.
        unsafe { launch.launch(shape) }.map(|_| ())
    })
}
