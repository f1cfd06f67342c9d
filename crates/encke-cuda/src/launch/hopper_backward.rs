//! Gradients on Hopper: bf16 and f16, through tensor maps and wgmma.
//!
//! The decision here: one kernel for both orders of addition. What adds dQ to memory either waits
//! for its turn, so that sums come out the same bit by bit, or does not wait; nothing else differs.

use cudarc::driver::{DeviceRepr, PushKernelArg};
use encke_core::DType;
use encke_core::job::{Job, Operand};

use super::hopper_variants::{VARIANTS, Variant};
use super::{Site, grid};
use crate::abi;
use crate::device::Device;
use crate::error::Result;
use crate::memory::Memory;
use crate::operands::{Gradient, Operands};
use crate::tensor_map::{self, Extents};

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
    pad: u32,
}

// SAFETY: plain numbers in C layout; what would be padding is a field.
unsafe impl DeviceRepr for Backward {}

/// What was decided about a job before it is launched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    variant: &'static Variant,
    padded: usize,
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
    let tiles = job.keys.div_ceil(variant.keys) * heads(job).0.len() * job.segments * job.batch;
    i32::try_from(tiles).ok().filter(|_| able)?;
    let padded = job.queries.next_multiple_of(variant.queries);
    let dense = (job.batch * job.segments * job.heads * padded).div_ceil(ROWS);
    i32::try_from(dense).ok()?;
    Some(Choice {
        variant,
        padded,
        tiles,
    })
}

impl Choice {
    /// Rows of the dense arrays.
    fn rows(&self, job: &Job) -> usize {
        job.batch * job.segments * job.heads * self.padded
    }

    /// Words of control.
    fn words(&self, job: &Job) -> usize {
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

/// Adds the job's share of dq, dk and dv; bit by bit the same every time where `fixed_order`.
pub(crate) fn backward(
    site: &Site,
    job: &Job,
    choice: &Choice,
    fixed_order: bool,
    operands: Operands<'_>,
    gradient: Gradient<'_>,
) -> Result<()> {
    let (device, dtype, variant) = (&site.device, operands.dtype(), choice.variant);
    let told = site.tables.job(device, job)?;
    let targets = gradient.own(dtype)?;
    let [q, k, v] = operands.memory()?;
    let [dout, lse, delta] = targets.upstream()?;

    let (mut key_heads, query_heads) = heads(job);
    let key_head_count = key_heads.len() as i32;
    key_heads.push([query_heads.len() as i32, 0]);
    let key_heads = site.tables.get(device, words(&key_heads))?;
    let query_heads = site.tables.get(device, words(&query_heads))?;
    let rows = choice.rows(job);
    let dense = Memory::new(device, 8 * rows)?;
    let control = Memory::new(device, 4 * choice.words(job))?;
    control.clear()?;

    let (in_ds, of_sums, of_p) = gains(job, dtype);
    let padded = choice.padded as i32;
    let (dense_lse, dense_delta) = (dense.pointer(), dense.pointer() + 4 * rows as u64);
    let shared = variant.shared_bytes(job.dim);
    let program = variant.program(job.dim, dtype);

    let first = Rows {
        job: told.value,
        q: q.pointer(),
        dout: dout.pointer(),
        lse: lse.pointer(),
        delta: delta.pointer(),
        dense_lse,
        dense_delta,
        control: control.pointer(),
        padded,
        delta_gain: (in_ds * of_p) as f32,
    };
    let function = device.function(&program, "backward_rows", 0)?;
    let mut reads = vec![q, dout, lse, delta];
    reads.extend(told.tables());
    let writes = [&dense, &control];
    let shape = grid(rows.div_ceil(ROWS), ROWS as u32, 0);
    device.enqueue(
        device.compute(),
        "rows of a backward pass",
        &reads,
        &writes,
        |stream| {
            let mut launch = stream.launch_builder(&function);
            launch.arg(&first);
            // SAFETY: the argument of `backward_rows`; the plan's jobs lie inside their buffers.
            unsafe { launch.launch(shape) }.map(|_| ())
        },
    )?;

    let second = Backward {
        job: told.value,
        dk: targets.dk.pointer(),
        dv: targets.dv.pointer(),
        lse: dense_lse,
        delta: dense_delta,
        key_heads: key_heads.pointer(),
        query_heads: query_heads.pointer(),
        control: control.pointer(),
        key_head_count,
        key_tiles: job.keys.div_ceil(variant.keys) as i32,
        padded,
        fixed_order: fixed_order.into(),
        exponent: (job.scale * std::f64::consts::LOG2_E) as f32,
        dp_gain: (job.gain * in_ds * of_p) as f32,
        dq_gain: of_sums as f32,
        dk_gain: of_sums as f32,
        dv_gain: (job.gain * of_p) as f32,
        pad: 0,
    };
    let wide = wide(&job.cells, job.dim);
    let (q_extents, k_extents) = (extents(job, job.queries), extents(job, job.keys));
    let of_queries = variant.queries;
    let maps = [
        tensor_map::encode(dtype, q.pointer(), &job.q, &q_extents, of_queries)?,
        tensor_map::encode(dtype, dout.pointer(), &wide, &q_extents, of_queries)?,
        tensor_map::encode(dtype, k.pointer(), &job.k, &k_extents, variant.keys)?,
        tensor_map::encode(dtype, v.pointer(), &job.k, &k_extents, variant.keys)?,
        tensor_map::encode(
            DType::F32,
            targets.dq.pointer(),
            dq(job),
            &q_extents,
            of_queries,
        )?,
    ];
    let function = device.function(&program, "hopper_backward", shared)?;
    let mut reads = vec![q, k, v, dout, &dense, &*key_heads, &*query_heads];
    reads.extend(told.tables());
    let writes = [&*targets.dq, &*targets.dk, &*targets.dv, &control];
    let shape = grid(choice.tiles, THREADS, shared);
    device.enqueue(device.compute(), "gradients", &reads, &writes, |stream| {
        let mut launch = stream.launch_builder(&function);
        for map in &maps {
            launch.arg(map);
        }
        launch.arg(&second);
        // SAFETY: the arguments of `hopper_backward`; the plan's jobs lie inside their buffers.
        unsafe { launch.launch(shape) }.map(|_| ())
    })
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
        assert_eq!(choice.words(&job(128)), 2 + 4 * 4);
        assert!(cut(&job(264)).is_none(), "too wide");
        assert!(cut(&job(60)).is_none(), "rows of 120 bytes");
    }
}
