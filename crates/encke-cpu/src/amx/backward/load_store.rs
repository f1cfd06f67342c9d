//! Packs queries and keys into scratch memory, and adds their gradients to dq, dk and dv.

use std::arch::x86_64::*;

use encke_core::job::Operand;

use super::super::element::TileElement;
use super::super::gradient::QueryStats;
use super::super::pack::{self, RowSource, Sign, WIDTH};
use super::super::softmax::{Lanes, VisibleKeys};
use super::super::tiles::{ROW_BYTES, SLAB_BYTES};
use super::call::{AmxBackwardCall, AmxBackwardTile, PackedKeyBlock};
use super::chain::AmxBackwardTask;
use crate::shared::SharedRows;

/// The distance in rows at which rows of dk and dv are prefetched.
const PREFETCH_ROWS: usize = 6;

impl<N: TileElement> AmxBackwardCall<'_, N> {
    /// Packs the queries of a task, and loads their lse and delta.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack_queries<'s>(
        &self,
        task: &AmxBackwardTask<'_>,
        scratch: *mut u8,
    ) -> &'s mut [AmxBackwardTile] {
        let (job, inputs) = (self.job, &self.inputs);
        let (head, rows) = (task.head, &task.queries);
        let count = rows.len().div_ceil(WIDTH);
        assert!(count <= self.layout.tiles);
        let states = scratch
            .wrapping_add(self.layout.states)
            .cast::<AmxBackwardTile>();
        // SAFETY: the region is that large, aligned to a page, and any bits are a tile.
        let tiles = unsafe { std::slice::from_raw_parts_mut(states, count) };
        for (i, tile) in tiles.iter_mut().enumerate() {
            let first = rows.start + i * WIDTH;
            let count = WIDTH.min(rows.end - first);
            let at = |operand: &Operand| -> [usize; WIDTH] {
                std::array::from_fn(|lane| {
                    let row = first + lane.min(count - 1);
                    operand.at(task.batch, task.segment, row, head)
                })
            };
            let cells = at(&job.cells);
            // A query with no visible key at all contributes nothing, even if its row is not
            // finite.
            let live: [bool; WIDTH] = std::array::from_fn(|lane| {
                lane < count && inputs.lse[cells[lane]] != f32::NEG_INFINITY
            });
            let keys = VisibleKeys::new(|lane| match live[lane] {
                true => task.piece.visible(first + lane),
                false => 0..0,
            });
            let per_lane = |elements: &[f32], cells: [usize; WIDTH]| {
                Lanes(std::array::from_fn(|lane| match live[lane] {
                    true => elements[cells[lane]],
                    false => 0.0,
                }))
            };
            tile.stats = QueryStats {
                lse: per_lane(inputs.lse, cells),
                delta: per_lane(inputs.delta, at(job.delta())),
                keys,
            };
            (tile.first, tile.count, tile.dq_started) = (first, count, 0);
            [tile.seen, tile.common] = keys.bounds();
            let q = RowSource {
                elements: inputs.q,
                dim: job.dim,
                count,
                address: |lane: usize| {
                    live[lane].then(|| job.q.at(task.batch, task.segment, first + lane, head))
                },
            };
            let dout = RowSource {
                elements: inputs.dout,
                dim: job.dim,
                count,
                address: |lane: usize| live[lane].then(|| cells[lane] * job.dim),
            };
            let bytes = i * self.steps * N::STACK_BYTES;
            let slabs = |region: usize| scratch.wrapping_add(region + bytes);
            // SAFETY: the regions have this many slabs.
            unsafe {
                let found = pack::lanes(&q, Sign::of(job.scale), slabs(self.layout.q_lanes));
                tile.huge = u32::from(found.huge);
                pack::lanes(&dout, Sign::Plus, slabs(self.layout.dout_lanes));
                tile.nonfinite = [
                    pack::pairs(&q, slabs(self.layout.q_pairs)),
                    pack::pairs(&dout, slabs(self.layout.dout_pairs)),
                ]
                .map(|found| u32::from(found.nonfinite));
            }
        }
        tiles
    }

    /// Packs a block of keys and values.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack_keys(
        &self,
        task: &AmxBackwardTask<'_>,
        start: usize,
        count: usize,
        scratch: *mut u8,
    ) -> PackedKeyBlock {
        let job = self.job;
        let (mut huge, mut nonfinite) = (false, false);
        for step in 0..count.div_ceil(WIDTH) {
            let first = start + step * WIDTH;
            let source = |elements| RowSource {
                elements,
                dim: job.dim,
                count: WIDTH.min(start + count - first),
                address: |row: usize| {
                    let head = task.heads[0];
                    Some(job.k.at(task.batch, task.segment, first + row, head))
                },
            };
            let bytes = step * self.steps * N::STACK_BYTES;
            let slabs = |region: usize| scratch.wrapping_add(region + bytes);
            // SAFETY: the regions have this many slabs.
            unsafe {
                huge |= pack::rows(&source(self.inputs.k), slabs(self.layout.k_rows)).huge;
                pack::rows(&source(self.inputs.v), slabs(self.layout.v_rows));
                let found = pack::columns(&source(self.inputs.k), slabs(self.layout.k_columns));
                nonfinite |= found.nonfinite;
            }
        }
        PackedKeyBlock {
            start,
            count,
            huge,
            nonfinite,
        }
    }

    /// Adds the sums of dk and dv of a block to their rows.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn add_dk_dv(
        &self,
        task: &AmxBackwardTask<'_>,
        keys: PackedKeyBlock,
        scratch: *mut u8,
    ) {
        let job = self.job;
        for (sums, factor, target) in [
            (self.layout.dk, job.scale as f32, self.dk),
            (self.layout.dv, job.gain as f32, self.dv),
        ] {
            for row in 0..keys.count {
                let head = task.heads[0];
                let address = |row| job.k.at(task.batch, task.segment, keys.start + row, head);
                let at = address(row);
                if row + PREFETCH_ROWS < keys.count {
                    target.prefetch(address(row + PREFETCH_ROWS), job.dim);
                }
                for part in 0..job.dim.div_ceil(16) {
                    let slab = row / WIDTH * 2 * self.steps + part;
                    let from = sums + slab * SLAB_BYTES + row % WIDTH * ROW_BYTES;
                    // SAFETY: the slab lies in its region, and the task owns the row.
                    unsafe {
                        let sum = _mm512_load_ps(scratch.add(from).cast());
                        add(target, at, part, job.dim, factor, sum);
                    }
                }
            }
        }
    }

    /// Adds the sums of dq of the packed queries to their rows.
    ///
    /// # Safety
    /// As for [`AmxBackwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn add_dq(
        &self,
        task: &AmxBackwardTask<'_>,
        tiles: &[AmxBackwardTile],
        scratch: *mut u8,
    ) {
        let job = self.job;
        let target: &Operand = job.dq.as_ref().unwrap_or(&job.q);
        let address = |row: usize| target.at(task.batch, task.segment, row, task.head);
        // Rows of the next tile are prefetched meanwhile.
        let share = WIDTH.div_ceil(2 * self.steps);
        let last = tiles.last().map_or(0, |tile| tile.first + tile.count);
        for (i, tile) in tiles
            .iter()
            .enumerate()
            .filter(|(_, tile)| tile.dq_started != 0)
        {
            for slab in 0..2 * self.steps {
                let next = tile.first + WIDTH + slab * share;
                for row in (next..next + share).take_while(|row| *row < last) {
                    self.dq.prefetch(address(row), job.dim);
                }
                let from = self.layout.dq + (i * 2 * self.steps + slab) * SLAB_BYTES;
                // SAFETY: the slab lies in its region.
                let halves = unsafe { pack::transpose_sums(scratch.wrapping_add(from)) };
                for (half, columns) in halves.into_iter().enumerate() {
                    let part = slab / 2 * 2 + half;
                    for (lane, column) in columns.into_iter().enumerate() {
                        let lane = slab % 2 * 16 + lane;
                        if tile.stats.keys.ends.0[lane] == 0 || part * 16 >= job.dim {
                            continue;
                        }
                        let at = address(tile.first + lane);
                        // SAFETY: the task owns the row.
                        unsafe { add(self.dq, at, part, job.dim, job.scale as f32, column) };
                    }
                }
            }
        }
    }
}

/// Adds factor · sum to 16 channels, from channel 16 · part on, of the row at `at`.
///
/// # Safety
/// The calling task owns the row.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add(
    target: SharedRows<'_, f32>,
    at: usize,
    part: usize,
    dim: usize,
    factor: f32,
    sum: __m512,
) {
    let channels = (dim - 16 * part).min(16);
    let mask = ((1u32 << channels) - 1) as u16;
    // SAFETY: the caller owns the row, and the mask ends where the row ends.
    unsafe {
        let row = target.row(at + 16 * part, channels).as_mut_ptr();
        let old = _mm512_maskz_loadu_ps(mask, row);
        let new = _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), old);
        _mm512_mask_storeu_ps(row, mask, new);
    }
}
