//! Gradients on Hopper: bf16 and f16, with TMA and wgmma.
//!
//! The decision here: one kernel for both kinds of summation. In a fixed order, the warp that adds
//! dQ to memory waits for a semaphore, so sums are bitwise repeatable; otherwise it does not wait.
//! Nothing else differs.

use std::f64::consts::LOG2_E;
use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use encke_core::DType;
use encke_core::job::{Job, Operand};

use super::hopper_backward_variants::{BackwardMode, BackwardVariant};
use super::hopper_ranges;
use super::key_heads::{dq, heads, key_head_offsets, packed};
use super::row_dims::RowDims;
use super::{KernelValue, LaunchContext, grid, grid_jobs};
use crate::abi;
use crate::allocation::DeviceAllocation;
use crate::arguments::KernelArgument;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::masked_job::{JobFeatures, pieces, pieces_with_keys, slope_words};
use crate::operands::{BackwardMemory, BackwardOperands, DeviceInputs, Rounds};
use crate::program::Program;
use crate::tensor_map::{self, Extents, TensorMap};

/// The compute capability: only Hopper has wgmma.
const CAPABILITY: (i32, i32) = (9, 0);
/// Threads of a block: one producer warpgroup, two consumer warpgroups.
const THREADS: u32 = 384;
/// Rows per block of `backward_rows`.
const ROWS: usize = 256;
/// Words of `control` before the semaphores, as in backward.cuh.
const SEMAPHORES: usize = 2;
/// What happens to the sums of dK and dV, as in hopper_backward.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stores {
    Added = 0,
    Stored = 1,
    Rounded = 2,
    Continued = 3,
}

/// P in f16 is stored times 2^14, as in backward.cuh.
const HALF_SHIFT: i32 = 14;

/// The kernel's `BackwardRows`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BackwardRows {
    job: abi::JobParams,
    q: u64,
    dout: u64,
    lse: u64,
    delta: u64,
    dense_lse: u64,
    dense_delta: u64,
    control: u64,
    padded: i32,
    delta_gain: f32,
    first_blocks: u64,
    key_tiles: i32,
    tile_keys: i32,
    pieces: u64,
    key_rows: u64,
    end_blocks: u64,
    count_pieces: i32,
    tile: i32,
    key_lead: i32,
    shift: i32,
    distances: u64,
}

// SAFETY: plain numbers in C layout, no padding.
unsafe impl DeviceRepr for BackwardRows {}

/// The kernel's `HopperBackward`.
#[repr(C)]
#[derive(Clone, Copy)]
struct HopperBackward {
    job: abi::JobParams,
    dk: u64,
    dv: u64,
    lse: u64,
    delta: u64,
    key_heads: u64,
    query_heads: u64,
    control: u64,
    key_head_count: i32,
    key_tiles: i32,
    padded: i32,
    fixed_order: i32,
    exponent: f32,
    dp_gain: f32,
    dq_gain: f32,
    dk_gain: f32,
    dv_gain: f32,
    tiles: i32,
    first_blocks: u64,
    stores: i32,
    stagger: i32,
    key_rows: u64,
    end_blocks: u64,
    query_blocks: i32,
    transform: [f32; 2],
    query_position_step: i32,
    slopes: u64,
    distances: u64,
}

// SAFETY: plain numbers in C layout; padding is an explicit field.
unsafe impl DeviceRepr for HopperBackward {}

/// The tiling of a job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackwardLaunch {
    variant: &'static BackwardVariant,
    padded: usize,
    key_tiles: usize,
    tiles: usize,
    mode: BackwardMode,
    /// The step of queries' positions; only slopes need it.
    query_position_step: i32,
    /// Of a job on a grid: rows of a tile with the sign of its part, and where its keys are
    /// (`BackwardRows` in backward_rows.cu); otherwise zeros.
    place: [i32; 3],
}

/// The tiling of a job; None if this kernel does not support it.
pub(crate) fn plan(device: &Device, job: &Job, dtype: DType) -> Option<BackwardLaunch> {
    if device.capability() != CAPABILITY || !matches!(dtype, DType::Bf16 | DType::F16) {
        return None;
    }
    plan_any_gpu(job, dtype)
}

/// The same without looking at the GPU.
fn plan_any_gpu(job: &Job, dtype: DType) -> Option<BackwardLaunch> {
    let dims = RowDims::of(job);
    let features = JobFeatures::of(job);
    let mode = BackwardMode {
        windowed: JobFeatures::only_ranges(job),
        scales_dq: gains(job, dtype).1 != 1.0,
        softcap: features.softcap,
        slopes: features.slopes,
        grid_tile: job.tiles.map_or(0, |tiles| tiles.tile),
    };
    let variant = BackwardVariant::choose(dims, mode)?;
    let [query_position_step, _] = hopper_ranges::position_steps(job, &pieces(job))?;
    let (rows, keys) = (
        extents(job, dims.keys, job.queries),
        extents(job, dims.keys, job.keys),
    );
    let (outs, values) = (
        extents(job, dims.values, job.queries),
        extents(job, dims.values, job.keys),
    );
    let dout = cell_rows(&job.cells, job.value_dim);
    let supported = (mode.windowed || JobFeatures::is_causal_or_full(job))
        && job.queries > 0
        && job.keys > 0
        && job.heads > 0
        && tensor_map::fits(&job.q, &rows)
        && tensor_map::fits(&dout, &outs)
        && tensor_map::fits(&job.k, &keys)
        && tensor_map::fits(&job.values(), &values)
        && tensor_map::fits(dq(job), &rows);
    let key_tiles = job.keys.div_ceil(variant.keys);
    let tiles = key_tiles * key_head_offsets(job).len() * job.segments * job.batch;
    i32::try_from(tiles).ok().filter(|_| supported)?;
    let place = match job.tiles {
        None => [0; 3],
        Some(tiles) => {
            let [lead, shift] = grid_jobs::narrow_place(tiles.key, tiles.query, tiles.tile)?;
            [grid_jobs::signed_tile(tiles), lead, shift]
        }
    };
    let padded = job.queries.next_multiple_of(variant.queries);
    let dense = (job.batch * job.segments * job.heads * padded).div_ceil(ROWS);
    i32::try_from(dense).ok()?;
    Some(BackwardLaunch {
        variant,
        padded,
        key_tiles,
        tiles,
        mode,
        query_position_step,
        place,
    })
}

impl BackwardLaunch {
    /// Rows of the dense arrays.
    fn rows(&self, job: &Job) -> usize {
        job.batch * job.segments * job.heads * self.padded
    }

    /// Blocks of queries by which the starts of successive tiles of keys are staggered. In a fixed
    /// order, staggered tiles wrap around, so each waits for all others of its head, and all must
    /// run at once. Tiles of programs with ranges are not staggered, whatever the job's mask is.
    fn stagger(&self, job: &Job, fixed_order: bool, multiprocessors: usize) -> usize {
        let same_start = job.mask.is_some() || self.mode.windowed || job.tiles.is_some();
        match !same_start && (!fixed_order || 2 * self.key_tiles <= multiprocessors) {
            true => self.padded / self.variant.queries / self.key_tiles,
            false => 0,
        }
    }

    /// Words of `control`: the semaphores, the first block of each tile of keys, and an end; the
    /// end of each tile's blocks (with ranges of keys, or on a grid); with ranges of keys also the
    /// queries that see each key.
    fn control_words(&self, job: &Job) -> usize {
        match self.mode.windowed {
            true => {
                let slopes = usize::from(self.mode.slopes);
                self.distance_words(job) + slopes * self.key_tiles * self.variant.keys
            }
            false => self.semaphore_words(job) + 2 * self.key_tiles + 1,
        }
    }

    /// Words of `control` before the queries that see each key: an even number.
    fn key_row_words(&self, job: &Job) -> usize {
        let before = self.semaphore_words(job) + 2 * self.key_tiles + 1;
        before.next_multiple_of(2)
    }

    /// Words of `control` before the distances of keys, which slopes need.
    fn distance_words(&self, job: &Job) -> usize {
        self.key_row_words(job) + 2 * self.key_tiles * self.variant.keys
    }

    /// Words of `control` before the first blocks.
    fn semaphore_words(&self, job: &Job) -> usize {
        SEMAPHORES + self.rows(job) / self.variant.queries
    }
}

/// Workspace of a job; 0 if this kernel does not support it.
pub(crate) fn workspace_bytes(device: &Device, job: &Job, dtype: DType) -> usize {
    plan(device, job, dtype).map_or(0, |launch| {
        4 * (2 * launch.rows(job) + launch.control_words(job))
    })
}

fn extents(job: &Job, dim: usize, rows: usize) -> Extents {
    Extents {
        dim,
        rows,
        segments: job.segments,
        batch: job.batch,
    }
}

/// Cells as rows of `dim` elements.
fn cell_rows(cells: &Operand, dim: usize) -> Operand {
    Operand {
        offset: cells.offset * dim,
        batch: cells.batch * dim,
        segment: cells.segment * dim,
        row: cells.row * dim,
        heads: cells.heads.iter().map(|head| head * dim).collect(),
    }
}

/// Factors of dS, of dQ and dK, and of P.
///
/// dS includes the scale, so that dQ needs no multiplication; but not in f16, where small values
/// underflow, nor where the scale is far from 1.
///
/// On a grid the factor of sums is a power of two, so that they can be continued exactly.
fn gains(job: &Job, dtype: DType) -> (f64, f64, f64) {
    let moderate = (2f64.powi(-20)..2f64.powi(20)).contains(&job.scale.abs());
    if job.tiles.is_some() && (dtype == DType::F16 || !moderate) {
        let (fraction, power) = grid_jobs::as_power_of_two(job.scale);
        let of_p = if dtype == DType::F16 {
            2f64.powi(-HALF_SHIFT)
        } else {
            1.0
        };
        return (fraction, power, of_p);
    }
    match dtype {
        DType::F16 => (1.0, job.scale, 2f64.powi(-HALF_SHIFT)),
        _ if moderate => (job.scale, 1.0, 1.0),
        _ => (1.0, job.scale, 1.0),
    }
}

/// Whether a job adds to every element of dk and dv, of so many elements, exactly once.
pub(crate) fn covers(job: &Job, elements: [usize; 2]) -> bool {
    let rows = job.batch * job.segments * job.keys * key_head_offsets(job).len();
    [job.dim, job.value_dim].map(|dim| rows * dim) == elements
}

/// What is done with the sums of dK and dV: they are stored where that is as good as adding them to
/// zeros, and rounded where the buffers are of the keys' type.
/// On a grid they continue what is in memory.
fn stores(job: &Job, dtype: DType, memory: &BackwardMemory<'_>) -> Result<Stores> {
    let (dk, dv, of) = (&memory.dk, &memory.dv, memory.key_gradients);
    let whole = covers(job, [dk, dv].map(|memory| memory.bytes() / of.bytes()));
    let zeros = whole && DeviceAllocation::take_all_pending_zero_fills([dk, dv]);
    match (zeros, of == dtype.sum()) {
        (false, true) if job.tiles.is_some() => Ok(Stores::Continued),
        (false, true) => Ok(Stores::Added),
        (true, true) => Ok(Stores::Stored),
        (true, false) => Ok(Stores::Rounded),
        (false, false) => Err(Error::Unsupported {
            what: format!(
                "adding to key gradients of type {of}; sums are {}",
                dtype.sum()
            ),
        }),
    }
}

/// One job: the common arguments of its two kernels.
struct HopperBackwardCall<'a> {
    context: &'a LaunchContext,
    job: &'a Job,
    launch: &'a BackwardLaunch,
    params: KernelArgument<abi::JobParams>,
    /// The pieces of a job with ranges of keys, and their number.
    pieces: Option<(Arc<DeviceAllocation>, usize)>,
    program: Program,
    /// lse and delta of padded rows, contiguous.
    dense: DeviceAllocation,
    control: DeviceAllocation,
    inputs: [&'a DeviceAllocation; 3],
    upstream: [&'a DeviceAllocation; 3],
    dtype: DType,
}

/// Adds the job's contributions to dq, dk and dv; bitwise repeatable if `fixed_order`.
pub(crate) fn backward(
    context: &LaunchContext,
    job: &Job,
    launch: &BackwardLaunch,
    fixed_order: bool,
    inputs: DeviceInputs<'_>,
    gradients: BackwardOperands<'_>,
) -> Result<()> {
    let memory = gradients.into_memory(inputs.dtype(), Rounds::Allowed)?;
    backward_into(context, job, launch, fixed_order, inputs, &memory)
}

/// The same into memory that several jobs add to.
pub(crate) fn backward_into(
    context: &LaunchContext,
    job: &Job,
    launch: &BackwardLaunch,
    fixed_order: bool,
    inputs: DeviceInputs<'_>,
    memory: &BackwardMemory<'_>,
) -> Result<()> {
    let (device, dtype) = (&context.device, inputs.dtype());
    let mut params = context.tables.job(device, job)?;
    let mut pieces = None;
    if launch.mode.windowed {
        params.value.causal = 1; // rows see different keys
        let (words, count) = pieces_with_keys(job);
        pieces = Some((context.tables.get(device, words)?, count));
    }
    let call = HopperBackwardCall {
        context,
        job,
        launch,
        params,
        pieces,
        program: {
            let variant = &launch.variant;
            variant.program(RowDims::of(job), dtype, launch.mode)
        },
        dense: DeviceAllocation::new(device, 8 * launch.rows(job))?,
        control: DeviceAllocation::new(device, 4 * launch.control_words(job))?,
        inputs: inputs.memory()?.map(|memory| &**memory),
        upstream: memory.upstream()?,
        dtype,
    };
    call.control.zero_fill();
    call.rows()?;
    call.gradients(fixed_order, memory)
}

impl HopperBackwardCall<'_> {
    /// The addresses of lse and delta in `dense`.
    fn dense(&self) -> (u64, u64) {
        let first = self.dense.pointer();
        (first, first + 4 * self.launch.rows(self.job) as u64)
    }

    fn first_blocks(&self) -> u64 {
        self.control.pointer() + 4 * self.launch.semaphore_words(self.job) as u64
    }

    /// The addresses of the ends of tiles' blocks, of the queries that see each key, and of the
    /// distances of keys.
    fn ranges(&self) -> [u64; 3] {
        let (launch, control) = (self.launch, self.control.pointer());
        let ends = self.first_blocks() + 4 * (launch.key_tiles as u64 + 1);
        let words = [
            launch.key_row_words(self.job),
            launch.distance_words(self.job),
        ];
        let [key_rows, distances] = words.map(|words| control + 4 * words as u64);
        [ends, key_rows, distances]
    }

    /// Launches `backward_rows`, which prepares lse and delta.
    fn rows(&self) -> Result<()> {
        let (device, launch) = (&self.context.device, self.launch);
        let ([q, ..], [dout, lse, delta]) = (self.inputs, self.upstream);
        let (in_ds, _, of_p) = gains(self.job, self.dtype);
        let (dense_lse, dense_delta) = self.dense();
        let [end_blocks, key_rows, distances] = self.ranges();
        let params = BackwardRows {
            job: self.params.value,
            q: q.pointer(),
            dout: dout.pointer(),
            lse: lse.pointer(),
            delta: delta.pointer(),
            dense_lse,
            dense_delta,
            control: self.control.pointer(),
            padded: launch.padded as i32,
            delta_gain: (in_ds * of_p) as f32,
            first_blocks: self.first_blocks(),
            key_tiles: launch.key_tiles as i32,
            tile_keys: launch.variant.keys as i32,
            pieces: self.pieces.as_ref().map_or(0, |(table, _)| table.pointer()),
            key_rows,
            end_blocks,
            count_pieces: self.pieces.as_ref().map_or(0, |(_, count)| *count) as i32,
            tile: launch.place[0],
            key_lead: launch.place[1],
            shift: launch.place[2],
            distances,
        };
        let function = device.function(&self.program, "backward_rows", 0)?;
        let mut reads = vec![q, dout, lse, delta];
        reads.extend(self.params.tables());
        reads.extend(self.pieces.as_ref().map(|(table, _)| &**table));
        let writes = [&self.dense, &self.control];
        let shape = grid(launch.rows(self.job).div_ceil(ROWS), ROWS as u32, 0);
        let what = "rows of a backward pass";
        let (context, kernel) = (self.context, (&function, shape));
        // SAFETY: the argument of `backward_rows`; the plan's jobs lie inside their buffers.
        unsafe { context.launch(what, kernel, &reads, &writes, &[&params]) }
    }

    /// Launches `hopper_backward`, which computes the gradients.
    fn gradients(&self, fixed_order: bool, memory: &BackwardMemory<'_>) -> Result<()> {
        let (device, job, launch) = (&self.context.device, self.job, self.launch);
        let tables = &self.context.tables;
        let (mut key_heads, query_heads) = heads(job);
        let key_head_count = key_heads.len();
        key_heads.push([query_heads.len() as i32, 0]);
        let key_heads = tables.get(device, packed(&key_heads))?;
        let query_heads = tables.get(device, packed(&query_heads))?;
        let (dk, dv) = (&memory.dk, &memory.dv);
        let stores = stores(job, self.dtype, memory)?;
        let slopes = slope_words(job).map(|words| tables.get(device, words));
        let slopes = slopes.transpose()?;
        let softcap = job.transform.as_ref().and_then(|of| of.softcap);
        let softcap = softcap.unwrap_or(1.0);
        let (in_ds, of_sums, of_p) = gains(job, self.dtype);
        let (lse, delta) = self.dense();
        let [end_blocks, key_rows, distances] = self.ranges();
        let params = HopperBackward {
            job: self.params.value,
            dk: dk.pointer(),
            dv: dv.pointer(),
            lse,
            delta,
            key_heads: key_heads.pointer(),
            query_heads: query_heads.pointer(),
            control: self.control.pointer(),
            key_head_count: key_head_count as i32,
            key_tiles: launch.key_tiles as i32,
            padded: launch.padded as i32,
            fixed_order: fixed_order.into(),
            exponent: (job.scale * LOG2_E) as f32,
            dp_gain: (job.gain * in_ds * of_p) as f32,
            dq_gain: of_sums as f32,
            dk_gain: of_sums as f32,
            dv_gain: (job.gain * of_p) as f32,
            tiles: launch.tiles as i32,
            first_blocks: self.first_blocks(),
            stores: stores as i32,
            stagger: launch.stagger(job, fixed_order, device.multiprocessors() as usize) as i32,
            key_rows,
            end_blocks,
            query_blocks: (launch.padded / launch.variant.queries) as i32,
            transform: [softcap * LOG2_E, 2.0 * job.scale * LOG2_E / softcap].map(|x| x as f32),
            query_position_step: launch.query_position_step,
            slopes: slopes.as_ref().map_or(0, |table| table.pointer()),
            distances,
        };
        let maps = self.maps(&memory.dq)?;
        let shared = launch.variant.shared_bytes(RowDims::of(job), launch.mode);
        let function = device.function(&self.program, "hopper_backward", shared)?;
        let [q, k, v] = self.inputs;
        let mut reads = vec![q, k, v, self.upstream[0], &self.dense];
        reads.extend([&*key_heads, &*query_heads]);
        reads.extend(self.params.tables());
        reads.extend(slopes.as_deref());
        let writes = [&*memory.dq, &**dk, &**dv, &self.control];
        let blocks = launch.tiles.min(device.multiprocessors() as usize);
        let shape = grid(blocks, THREADS, shared);
        let mut arguments: Vec<&dyn KernelValue> = Vec::new();
        arguments.extend(maps.iter().map(|map| map as &dyn KernelValue));
        arguments.push(&params);
        let (context, kernel) = (self.context, (&function, shape));
        // SAFETY: the arguments of `hopper_backward`; the plan's jobs lie inside their buffers.
        unsafe { context.launch("gradients", kernel, &reads, &writes, &arguments) }
    }

    /// The tensor maps of q, dout, k, v and dq.
    fn maps(&self, to: &DeviceAllocation) -> Result<[TensorMap; 5]> {
        let (job, variant, dtype) = (self.job, self.launch.variant, self.dtype);
        let ([q, k, v], [dout, ..]) = (self.inputs, self.upstream);
        let cells = cell_rows(&job.cells, job.value_dim);
        let queries = |dtype, memory: &DeviceAllocation, operand: &Operand, dim| {
            let extents = extents(job, dim, job.queries);
            tensor_map::encode(dtype, memory, operand, &extents, variant.queries)
        };
        let keys = |memory: &DeviceAllocation, operand: &Operand, dim| {
            let extents = extents(job, dim, job.keys);
            tensor_map::encode(dtype, memory, operand, &extents, variant.keys)
        };
        Ok([
            queries(dtype, q, &job.q, job.dim)?,
            queries(dtype, dout, &cells, job.value_dim)?,
            keys(k, &job.k, job.dim)?,
            keys(v, &job.values(), job.value_dim)?,
            queries(DType::F32, to, dq(job), job.dim)?,
        ])
    }
}

#[cfg(test)]
mod tests {
    use encke_core::job::ScoreTransform;

    use super::super::key_heads::tests::job;
    use super::*;

    #[test]
    fn only_tiles_of_programs_without_ranges_are_staggered() {
        let plain = Job {
            mask: None,
            queries: 1024,
            keys: 512,
            ..job(128)
        };
        let stagger = |job: &Job| {
            let launch = plan_any_gpu(job, DType::Bf16).expect("a supported job");
            launch.stagger(job, true, 132)
        };
        assert_eq!(stagger(&plain), 4);
        let transform = Some(ScoreTransform {
            softcap: Some(30.0),
            slopes: None,
        });
        assert_eq!(stagger(&Job { transform, ..plain }), 0);
    }

    #[test]
    fn jobs_are_tiled_by_keys_and_by_blocks_of_queries() {
        let launch = plan_any_gpu(&job(128), DType::Bf16).expect("a supported job");
        assert_eq!((launch.tiles, launch.padded), (2 * 3, 256));
        assert_eq!(launch.semaphore_words(&job(128)), 2 + 4 * 4);
        assert_eq!(launch.control_words(&job(128)), 2 + 4 * 4 + 2 * 3 + 1);
        assert!(plan_any_gpu(&job(264), DType::Bf16).is_none(), "too wide");
        assert!(
            plan_any_gpu(&job(60), DType::Bf16).is_none(),
            "rows of 120 bytes"
        );
    }
}
