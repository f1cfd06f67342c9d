//! Gradients on Hopper: bf16 and f16, through tensor maps and wgmma.
//!
//! The decision here: one kernel for both orders of addition. What adds dQ to memory either waits
//! for its turn, so that sums come out the same bit by bit, or does not wait; nothing else differs.

use cudarc::driver::{DeviceRepr, PushKernelArg};
use encke_core::DType;
use encke_core::job::{Job, Operand};

use super::hopper_variants::{VARIANTS, Variant};
use super::{LaunchContext, grid};
use crate::abi;
use crate::device::Device;
use crate::error::Result;
use crate::jobs::Told;
use crate::memory::Memory;
use crate::operands::{Gradient, GradientTargets, Operands};
use crate::program::Program;
use crate::tensor_map::{self, Extents, TensorMap};

/// The GPUs it is for: wgmma is Hopper's alone.
const CAPABILITY: (i32, i32) = (9, 0);
/// Threads of a block: one warpgroup that moves, two that multiply.
const THREADS: u32 = 384;
/// Rows one block of `backward_rows` takes.
const ROWS: usize = 256;
/// Words of control before the turns, as in backward.cuh.
const TURNS: usize = 2;
/// P in half precision is stored times 2^14, as in backward.cuh.
const HALF_SHIFT: i32 = 14;

/// The kernel's `BackwardRows`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    job: abi::Job,
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
}

// SAFETY: plain numbers in C layout, no padding.
unsafe impl DeviceRepr for Rows {}

/// The kernel's `HopperBackward`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Backward {
    job: abi::Job,
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
    blank: i32,
    spread: i32,
}

// SAFETY: plain numbers in C layout; what would be padding is a field.
unsafe impl DeviceRepr for Backward {}

/// What was decided about a job before it is launched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    variant: &'static Variant,
    padded: usize,
    key_tiles: usize,
    tiles: usize,
}

/// How the job would be run; None where it is not for this kernel.
pub(crate) fn choice(device: &Device, job: &Job, dtype: DType) -> Option<Choice> {
    if device.capability() != CAPABILITY || !matches!(dtype, DType::Bf16 | DType::F16) {
        return None;
    }
    cut(job)
}

/// The same, whatever the GPU.
fn cut(job: &Job) -> Option<Choice> {
    let variant = VARIANTS.iter().find(|variant| job.dim <= variant.dim)?;
    let (rows, keys) = (extents(job, job.queries), extents(job, job.keys));
    let dout = wide(&job.cells, job.dim);
    let able = job.queries > 0
        && job.keys > 0
        && job.heads > 0
        && tensor_map::fits(&job.q, &rows)
        && tensor_map::fits(&dout, &rows)
        && tensor_map::fits(&job.k, &keys)
        && tensor_map::fits(dq(job), &rows);
    let key_tiles = job.keys.div_ceil(variant.keys);
    let tiles = key_tiles * heads(job).0.len() * job.segments * job.batch;
    i32::try_from(tiles).ok().filter(|_| able)?;
    let padded = job.queries.next_multiple_of(variant.queries);
    let dense = (job.batch * job.segments * job.heads * padded).div_ceil(ROWS);
    i32::try_from(dense).ok()?;
    Some(Choice {
        variant,
        padded,
        key_tiles,
        tiles,
    })
}

impl Choice {
    /// Rows of the dense arrays.
    fn rows(&self, job: &Job) -> usize {
        job.batch * job.segments * job.heads * self.padded
    }

    /// Words of control: the turns, and behind them the first block of each tile of keys, and an
    /// end.
    fn words(&self, job: &Job) -> usize {
        self.turns(job) + self.key_tiles + 1
    }

    /// Words of control before the first blocks.
    fn turns(&self, job: &Job) -> usize {
        TURNS + self.rows(job) / self.variant.queries
    }
}

/// Bytes of memory a job needs beside its operands; 0 where it is not for this kernel.
pub(crate) fn workspace_bytes(device: &Device, job: &Job, dtype: DType) -> usize {
    choice(device, job, dtype).map_or(0, |choice| 4 * (2 * choice.rows(job) + choice.words(job)))
}

fn extents(job: &Job, rows: usize) -> Extents {
    Extents {
        dim: job.dim,
        rows,
        segments: job.segments,
        batch: job.batch,
    }
}

fn dq(job: &Job) -> &Operand {
    job.dq.as_ref().unwrap_or(&job.q)
}

/// Cells of `dim` numbers each.
fn wide(cells: &Operand, dim: usize) -> Operand {
    Operand {
        offset: cells.offset * dim,
        batch: cells.batch * dim,
        segment: cells.segment * dim,
        row: cells.row * dim,
        heads: cells.heads.iter().map(|head| head * dim).collect(),
    }
}

/// The kernel's `key_heads` and `query_heads`, pairs of 32-bit numbers in one of 64.
fn heads(job: &Job) -> (Vec<[i32; 2]>, Vec<[i32; 4]>) {
    let place =
        |operand: &Operand, head: usize| (operand.heads[head] / tensor_map::unit(operand)) as i32;
    let mut shares: Vec<usize> = Vec::new();
    for &share in job.k.heads.iter().take(job.heads) {
        if !shares.contains(&share) {
            shares.push(share);
        }
    }
    let (mut key_heads, mut query_heads) = (Vec::new(), Vec::new());
    for share in shares {
        let members = (0..job.heads).filter(|&head| job.k.heads[head] == share);
        let unit = tensor_map::unit(&job.k);
        key_heads.push([query_heads.len() as i32, (share / unit) as i32]);
        query_heads.extend(members.map(|head| {
            [
                head as i32,
                place(&job.q, head),
                place(&job.cells, head),
                place(dq(job), head),
            ]
        }));
    }
    (key_heads, query_heads)
}

/// A table of pairs as the device holds it.
fn words<const N: usize>(table: &[[i32; N]]) -> Vec<i64> {
    let numbers: Vec<i32> = table.iter().flatten().copied().collect();
    numbers
        .chunks(2)
        .map(|pair| i64::from(pair[0] as u32) | i64::from(pair[1]) << 32)
        .collect()
}

/// What scores and sums are multiplied with: (in dS, of dQ and dK, of P).
///
/// dS carries the scale itself, so that dQ needs no multiplication; but not in half precision,
/// which has no room for small numbers, nor where the scale is far from 1.
fn gains(job: &Job, dtype: DType) -> (f64, f64, f64) {
    let moderate = (2f64.powi(-20)..2f64.powi(20)).contains(&job.scale.abs());
    match dtype {
        DType::F16 => (1.0, job.scale, 2f64.powi(-HALF_SHIFT)),
        _ if moderate => (job.scale, 1.0, 1.0),
        _ => (1.0, job.scale, 1.0),
    }
}

/// Whether a job adds to every number of a buffer of gradients of keys, each in one place.
fn covers(job: &Job, key_heads: usize, memory: &Memory) -> bool {
    let rows = job.batch * job.segments * job.keys * key_heads;
    rows * job.dim * DType::F32.bytes() == memory.bytes()
}

/// One job on its way: what both of its kernels are told.
struct Call<'a> {
    site: &'a LaunchContext,
    job: &'a Job,
    choice: &'a Choice,
    told: Told<abi::Job>,
    program: Program,
    /// lse and delta, dense.
    dense: Memory,
    control: Memory,
    operands: [&'a Memory; 3],
    upstream: [&'a Memory; 3],
    dtype: DType,
}

/// Adds the job's share of dq, dk and dv; bit by bit the same every time where `fixed_order`.
pub(crate) fn backward(
    site: &LaunchContext,
    job: &Job,
    choice: &Choice,
    fixed_order: bool,
    operands: Operands<'_>,
    gradient: Gradient<'_>,
) -> Result<()> {
    let (device, dtype) = (&site.device, operands.dtype());
    let targets = gradient.own(dtype)?;
    let call = Call {
        site,
        job,
        choice,
        told: site.tables.job(device, job)?,
        program: choice.variant.program(job.dim, dtype),
        dense: Memory::new(device, 8 * choice.rows(job))?,
        control: Memory::new(device, 4 * choice.words(job))?,
        operands: operands.memory()?.map(|memory| &**memory),
        upstream: targets.upstream()?,
        dtype,
    };
    call.control.clear()?;
    call.rows()?;
    call.gradients(fixed_order, &targets)
}

impl Call<'_> {
    /// Where lse and delta lie, dense.
    fn dense(&self) -> (u64, u64) {
        let first = self.dense.pointer();
        (first, first + 4 * self.choice.rows(self.job) as u64)
    }

    /// How many blocks of queries after the one before it a tile of keys begins. They go round, so
    /// each waits for all others of its head: these must be at work at once.
    fn spread(&self, fixed_order: bool) -> usize {
        let (choice, all) = (self.choice, self.site.device.processors() as usize);
        match fixed_order && self.job.causal.is_none() && 2 * choice.key_tiles <= all {
            true => choice.padded / choice.variant.queries / choice.key_tiles,
            false => 0,
        }
    }

    fn first_blocks(&self) -> u64 {
        self.control.pointer() + 4 * self.choice.turns(self.job) as u64
    }

    /// What comes before the gradients: `backward_rows`.
    fn rows(&self) -> Result<()> {
        let (device, choice) = (&self.site.device, self.choice);
        let ([q, ..], [dout, lse, delta]) = (self.operands, self.upstream);
        let (in_ds, _, of_p) = gains(self.job, self.dtype);
        let (dense_lse, dense_delta) = self.dense();
        let told = Rows {
            job: self.told.value,
            q: q.pointer(),
            dout: dout.pointer(),
            lse: lse.pointer(),
            delta: delta.pointer(),
            dense_lse,
            dense_delta,
            control: self.control.pointer(),
            padded: choice.padded as i32,
            delta_gain: (in_ds * of_p) as f32,
            first_blocks: self.first_blocks(),
            key_tiles: choice.key_tiles as i32,
            tile_keys: choice.variant.keys as i32,
        };
        let function = device.function(&self.program, "backward_rows", 0)?;
        let mut reads = vec![q, dout, lse, delta];
        reads.extend(self.told.tables());
        let writes = [&self.dense, &self.control];
        let shape = grid(choice.rows(self.job).div_ceil(ROWS), ROWS as u32, 0);
        let what = "rows of a backward pass";
        device.enqueue(device.compute(), what, &reads, &writes, |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&told);
            // SAFETY: the argument of `backward_rows`; the plan's jobs lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        })
    }

    /// The gradients themselves: `hopper_backward`.
    fn gradients(&self, fixed_order: bool, targets: &GradientTargets<'_>) -> Result<()> {
        let (device, job, choice) = (&self.site.device, self.job, self.choice);
        let tables = &self.site.tables;
        let (mut key_heads, query_heads) = heads(job);
        let key_head_count = key_heads.len();
        key_heads.push([query_heads.len() as i32, 0]);
        let key_heads = tables.get(device, words(&key_heads))?;
        let query_heads = tables.get(device, words(&query_heads))?;
        // What nobody has written to yet is written, not added to.
        let (dk, dv) = (&targets.dk, &targets.dv);
        let whole = [dk, dv].map(|memory| covers(job, key_head_count, memory));
        let blank = whole == [true; 2] && Memory::take_all_blank([dk, dv]);
        let (in_ds, of_sums, of_p) = gains(job, self.dtype);
        let (lse, delta) = self.dense();
        let told = Backward {
            job: self.told.value,
            dk: dk.pointer(),
            dv: dv.pointer(),
            lse,
            delta,
            key_heads: key_heads.pointer(),
            query_heads: query_heads.pointer(),
            control: self.control.pointer(),
            key_head_count: key_head_count as i32,
            key_tiles: choice.key_tiles as i32,
            padded: choice.padded as i32,
            fixed_order: fixed_order.into(),
            exponent: (job.scale * std::f64::consts::LOG2_E) as f32,
            dp_gain: (job.gain * in_ds * of_p) as f32,
            dq_gain: of_sums as f32,
            dk_gain: of_sums as f32,
            dv_gain: (job.gain * of_p) as f32,
            tiles: choice.tiles as i32,
            first_blocks: self.first_blocks(),
            blank: blank.into(),
            spread: self.spread(fixed_order) as i32,
        };
        let maps = self.maps(&targets.dq)?;
        let shared = choice.variant.shared_bytes(job.dim);
        let function = device.function(&self.program, "hopper_backward", shared)?;
        let [q, k, v] = self.operands;
        let mut reads = vec![q, k, v, self.upstream[0], &self.dense];
        reads.extend([&*key_heads, &*query_heads]);
        reads.extend(self.told.tables());
        let writes = [&*targets.dq, &**dk, &**dv, &self.control];
        let blocks = choice.tiles.min(device.processors() as usize);
        let shape = grid(blocks, THREADS, shared);
        device.enqueue(device.compute(), "gradients", &reads, &writes, |stream| {
            let mut launch = stream.launch_builder(&function);
            for map in &maps {
                launch.arg(map);
            }
            launch.arg(&told);
            // SAFETY: the arguments of `hopper_backward`; the plan's jobs lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        })
    }

    /// The maps of q, dout, k, v and dq.
    fn maps(&self, to: &Memory) -> Result<[TensorMap; 5]> {
        let (job, variant, dtype) = (self.job, self.choice.variant, self.dtype);
        let ([q, k, v], [dout, ..]) = (self.operands, self.upstream);
        let wide = wide(&job.cells, job.dim);
        let queries = |dtype, memory: &Memory, operand: &Operand| {
            let extents = extents(job, job.queries);
            tensor_map::encode(dtype, memory, operand, &extents, variant.queries)
        };
        let keys = |memory: &Memory| {
            let extents = extents(job, job.keys);
            tensor_map::encode(dtype, memory, &job.k, &extents, variant.keys)
        };
        Ok([
            queries(dtype, q, &job.q)?,
            queries(dtype, dout, &wide)?,
            keys(k)?,
            keys(v)?,
            queries(DType::F32, to, dq(job))?,
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(heads: &[usize]) -> Operand {
        Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row: 512,
            heads: heads.into(),
        }
    }

    fn job(dim: usize) -> Job {
        Job {
            batch: 1,
            segments: 1,
            queries: 200,
            keys: 300,
            heads: 4,
            dim,
            q: operand(&[0, 128, 256, 384]),
            k: operand(&[128, 0, 128, 0]),
            cells: operand(&[0, 1, 2, 3]),
            dq: None,
            causal: None,
            scale: 0.125,
            gain: 1.0,
        }
    }

    #[test]
    fn query_heads_stand_with_their_key_head() {
        let (key_heads, query_heads) = heads(&job(128));
        assert_eq!(key_heads, [[0, 1], [2, 0]]);
        assert_eq!(
            query_heads,
            [[0, 0, 0, 0], [2, 2, 2, 2], [1, 1, 1, 1], [3, 3, 3, 3]]
        );
        assert_eq!(words(&[[1, -1]]), [-4_294_967_295]);
    }

    #[test]
    fn jobs_are_cut_into_tiles_of_keys_and_blocks_of_queries() {
        let choice = cut(&job(128)).expect("a job for this kernel");
        assert_eq!((choice.tiles, choice.padded), (2 * 3, 256));
        assert_eq!(choice.turns(&job(128)), 2 + 4 * 4);
        assert_eq!(choice.words(&job(128)), 2 + 4 * 4 + 3 + 1);
        assert!(cut(&job(264)).is_none(), "too wide");
        assert!(cut(&job(60)).is_none(), "rows of 120 bytes");
    }
}
