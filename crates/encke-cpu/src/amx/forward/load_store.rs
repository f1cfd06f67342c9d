//! Loads queries, their carry, keys and values into scratch memory, and stores the results.

use std::arch::x86_64::*;

use super::super::element::TileElement;
use super::super::pack::{self, RowSource, Sign, WIDTH};
use super::super::softmax::{Lanes, TileSoftmax, VisibleKeys};
use super::super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES};
use super::super::vector::splat;
use super::call::{AmxForwardCall, AmxForwardTile, PackedKeys};
use super::tasks::AmxForwardTask;
use crate::target::{ForwardOutput, OutputRows, normalizer};
use crate::transpose::sixteen_registers;

impl<N: TileElement> AmxForwardCall<'_, N> {
    /// Packs a tile's queries and loads its carry.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn load_tile(
        &self,
        task: &AmxForwardTask<'_>,
        i: usize,
        tile: &mut AmxForwardTile,
        scratch: *mut u8,
    ) {
        let job = self.job;
        let (batch, segment, first) = (task.batch, task.segment, tile.first);
        let source = RowSource {
            elements: self.q,
            dim: job.dim,
            count: tile.count,
            address: |row: usize| Some(job.q.at(batch, segment, first + row, tile.head)),
        };
        let slabs = self.queries(i, scratch);
        // SAFETY: the region of queries has this many slabs.
        let found = unsafe { pack::lanes(&source, Sign::of(job.scale), slabs) };
        tile.huge = u32::from(found.huge);
        // Lanes without a query repeat the last one, so that they need no mask.
        let last = tile.count - 1;
        let keys = VisibleKeys::new(|lane| {
            let row = first + lane.min(last);
            let visible = task.piece.visible(row);
            match &job.tiles {
                None => visible,
                Some(tiles) => tiles.visible(row, visible),
            }
        });
        [tile.seen, tile.common] = keys.bounds();
        tile.softmax = TileSoftmax {
            m: Lanes([f32::NEG_INFINITY; 32]),
            l: Lanes([0.0; 32]),
            keys,
        };
        let Some(carry) = &self.target.previous else {
            for slab in 0..2 * self.steps {
                let at = self.sums(i, scratch).wrapping_add(slab * SLAB_BYTES);
                // SAFETY: the region of sums has this slab.
                unsafe { at.write_bytes(0, SLAB_BYTES) };
            }
            return;
        };
        for lane in 0..tile.count {
            let cell = job.cells.at(batch, segment, first + lane, tile.head);
            // SAFETY: the task owns its cells.
            unsafe {
                tile.softmax.m.0[lane] = carry.m.read(cell, 1)[0];
                tile.softmax.l.0[lane] = carry.l.read(cell, 1)[0];
            }
        }
        for part in 0..2 * self.steps {
            for half in 0..2 {
                let slab = self.sums(i, scratch);
                let slab = slab.wrapping_add((part / 2 * 2 + half) * SLAB_BYTES);
                let to = slab.wrapping_add(part % 2 * TILE_BYTES);
                let mut r = [_mm512_setzero_si512(); 16];
                let channels = job.dim.saturating_sub(16 * part).min(16);
                let mask = (1u32 << channels) - 1;
                for (lane, r) in r.iter_mut().enumerate() {
                    let row = 16 * half + lane;
                    if row < tile.count && channels > 0 {
                        let cell = job.cells.at(batch, segment, first + row, tile.head);
                        // SAFETY: the task owns its cells; the mask ends where the row ends.
                        unsafe {
                            let row = carry.acc.read(cell * job.dim + 16 * part, channels);
                            *r = _mm512_maskz_loadu_epi32(mask as u16, row.as_ptr().cast());
                        }
                    }
                }
                sixteen_registers(&mut r);
                for (row, r) in r.into_iter().enumerate() {
                    // SAFETY: the region of sums has this slab.
                    unsafe { _mm512_store_si512(to.add(row * ROW_BYTES).cast(), r) };
                }
            }
        }
    }

    /// Stores a tile's carry, or its normalized output and lse.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn store_tile(
        &self,
        task: &AmxForwardTask<'_>,
        i: usize,
        tile: &AmxForwardTile,
        scratch: *mut u8,
    ) {
        let job = self.job;
        let cell = |lane: usize| {
            job.cells
                .at(task.batch, task.segment, tile.first + lane, tile.head)
        };
        let mut factors = [1.0; WIDTH];
        for (lane, factor) in factors[..tile.count].iter_mut().enumerate() {
            let (m, l) = (tile.softmax.m.0[lane], tile.softmax.l.0[lane]);
            // SAFETY: the task owns its cells.
            unsafe {
                match &self.target.output {
                    ForwardOutput::Carry(carry) => {
                        carry.m.row(cell(lane), 1)[0] = m;
                        carry.l.row(cell(lane), 1)[0] = l;
                    }
                    ForwardOutput::Final { lse, gain, .. } => {
                        (*factor, lse.row(cell(lane), 1)[0]) = normalizer(m, l, *gain);
                    }
                }
            }
        }
        for slab in 0..2 * self.steps {
            let at = self.sums(i, scratch).wrapping_add(slab * SLAB_BYTES);
            // SAFETY: the region of sums has this slab.
            let halves = unsafe { pack::transpose_sums(at) };
            for (half, columns) in halves.into_iter().enumerate() {
                let channel = slab / 2 * WIDTH + 16 * half;
                let channels = job.dim.saturating_sub(channel).min(16);
                let mask = (1u32 << channels) - 1;
                for (lane, column) in columns.into_iter().enumerate() {
                    let row = slab % 2 * 16 + lane;
                    if row < tile.count && channels > 0 {
                        let at = cell(row) * job.dim + channel;
                        // SAFETY: the task owns its cells; the mask ends where the row ends.
                        unsafe {
                            match &self.target.output {
                                ForwardOutput::Carry(carry) => {
                                    let to = carry.acc.row(at, channels).as_mut_ptr();
                                    _mm512_mask_storeu_ps(to, mask as u16, column);
                                }
                                ForwardOutput::Final { out, .. } => {
                                    let row = _mm512_mul_ps(column, splat(factors[row]));
                                    store_output(out, at, channels, row);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// Packs keys and values `first` to `end`, 32 at a time.
    ///
    /// # Safety
    /// As for [`AmxForwardCall::run_task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack_keys(
        &self,
        task: &AmxForwardTask<'_>,
        packed: &mut PackedKeys,
        first: usize,
        end: usize,
        scratch: *mut u8,
    ) {
        let job = self.job;
        for start in (first..end).step_by(WIDTH) {
            let address = |row: usize| {
                let head = task.heads[0];
                Some(job.k.at(task.batch, task.segment, start + row, head))
            };
            let source = |elements| RowSource {
                elements,
                dim: job.dim,
                count: WIDTH.min(end - start),
                address,
            };
            let at = (start - packed.origin) % self.layout.packed_keys;
            let slabs = |region: usize| self.packed(region, at, scratch);
            let bit = 1 << (at / WIDTH);
            // SAFETY: the regions have this many slabs.
            unsafe {
                let found = pack::rows(&source(self.k), slabs(self.layout.keys));
                packed.huge = packed.huge & !bit | if found.huge { bit } else { 0 };
                let found = pack::columns(&source(self.v), slabs(self.layout.values));
                packed.nonfinite = packed.nonfinite & !bit | if found.nonfinite { bit } else { 0 };
            }
        }
        packed.end = end;
    }
}

/// Rounds up to 16 elements of an output row and stores them.
///
/// # Safety
/// No other task has this row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store_output(out: &OutputRows<'_>, at: usize, channels: usize, elements: __m512) {
    let mask = ((1u32 << channels) - 1) as u16;
    // SAFETY: the caller's promise; the mask ends where the row ends.
    unsafe {
        if let OutputRows::F32(out) = out {
            _mm512_mask_storeu_ps(out.row(at, channels).as_mut_ptr(), mask, elements);
        } else if let OutputRows::Bf16(out) = out {
            // Round to nearest, ties to even; rounding must not turn a NaN into an infinity.
            let bits = _mm512_castps_si512(elements);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(elements, elements);
            let rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
            let to = out.row(at, channels).as_mut_ptr();
            _mm512_mask_cvtepi32_storeu_epi16(to.cast(), mask, rounded);
        } else {
            let mut row = [0.0f32; 16];
            _mm512_storeu_ps(row.as_mut_ptr(), elements);
            out.write(at, &row[..channels]);
        }
    }
}
