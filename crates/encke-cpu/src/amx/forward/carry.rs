//! Into scratch memory and back: queries and their carry, keys and values.

use std::arch::x86_64::*;

use super::super::number::Number;
use super::super::pack::{self, Sign, Source, WIDTH};
use super::super::softmax::{Lanes, Running};
use super::super::tiles::{ROW_BYTES, SLAB_BYTES, TILE_BYTES};
use super::super::vector::{splat, transpose};
use super::{Packed, Run, Task, Tile};
use crate::target::{After, Rows, ended};

impl<N: Number> Run<'_, N> {
    /// Reads a tile's queries and carry.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn load(&self, task: &Task<'_>, i: usize, tile: &mut Tile, scratch: *mut u8) {
        let job = self.job;
        let (batch, segment, first) = (task.batch, task.segment, tile.first);
        let source = Source {
            numbers: self.q,
            dim: job.dim,
            count: tile.count,
            address: |row: usize| Some(job.q.at(batch, segment, first + row, tile.head)),
        };
        let slabs = self.queries(i, scratch);
        // SAFETY: the region of queries has this many slabs.
        unsafe { pack::lanes(&source, Sign::of(job.scale), slabs) };
        let visible = |lane: usize| job.visible(first + lane.min(tile.count - 1));
        tile.least = visible(0); // positions rise
        tile.most = visible(WIDTH - 1);
        tile.running = Running {
            m: Lanes([f32::NEG_INFINITY; 32]),
            l: Lanes([0.0; 32]),
            visible: Lanes(std::array::from_fn(|lane| visible(lane) as i32)),
        };
        let Some(carry) = &self.target.before else {
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
                tile.running.m.0[lane] = carry.m.read(cell, 1)[0];
                tile.running.l.0[lane] = carry.l.read(cell, 1)[0];
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
                        // SAFETY: the task owns its cells; the mask ends where the row does.
                        unsafe {
                            let row = carry.acc.read(cell * job.dim + 16 * part, channels);
                            *r = _mm512_maskz_loadu_epi32(mask as u16, row.as_ptr().cast());
                        }
                    }
                }
                transpose(&mut r);
                for (row, r) in r.into_iter().enumerate() {
                    // SAFETY: the region of sums has this slab.
                    unsafe { _mm512_store_si512(to.add(row * ROW_BYTES).cast(), r) };
                }
            }
        }
    }

    /// Writes a tile's carry, or its end.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn store(&self, task: &Task<'_>, i: usize, tile: &Tile, scratch: *mut u8) {
        let job = self.job;
        let cell = |lane: usize| {
            job.cells
                .at(task.batch, task.segment, tile.first + lane, tile.head)
        };
        let mut factors = [1.0; WIDTH];
        for (lane, factor) in factors[..tile.count].iter_mut().enumerate() {
            let (m, l) = (tile.running.m.0[lane], tile.running.l.0[lane]);
            // SAFETY: the task owns its cells.
            unsafe {
                match &self.target.after {
                    After::Carry(carry) => {
                        carry.m.row(cell(lane), 1)[0] = m;
                        carry.l.row(cell(lane), 1)[0] = l;
                    }
                    After::End { lse, gain, .. } => {
                        let of_row;
                        (*factor, of_row) = ended(m, l, *gain);
                        lse.row(cell(lane), 1)[0] = of_row;
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
                        // SAFETY: the task owns its cells; the mask ends where the row does.
                        unsafe {
                            match &self.target.after {
                                After::Carry(carry) => {
                                    let to = carry.acc.row(at, channels).as_mut_ptr();
                                    _mm512_mask_storeu_ps(to, mask as u16, column);
                                }
                                After::End { out, .. } => {
                                    let ended = _mm512_mul_ps(column, splat(factors[row]));
                                    end(out, at, channels, ended);
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    /// Packs keys and values from `first` on.
    ///
    /// # Safety
    /// As for [`Run::task`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack(
        &self,
        task: &Task<'_>,
        first: usize,
        count: usize,
        scratch: *mut u8,
    ) -> Packed {
        let job = self.job;
        let mut broken = 0;
        for step in 0..count.div_ceil(WIDTH) {
            let start = first + step * WIDTH;
            let address = |row: usize| {
                let head = task.heads[0];
                Some(job.k.at(task.batch, task.segment, start + row, head))
            };
            let source = |numbers| Source {
                numbers,
                dim: job.dim,
                count: WIDTH.min(first + count - start),
                address,
            };
            let slabs = |region: usize| self.block(region, step * WIDTH, scratch);
            // SAFETY: the regions have this many slabs.
            unsafe {
                pack::rows(&source(self.k), slabs(self.layout.keys));
                let odd = pack::columns(&source(self.v), slabs(self.layout.values));
                broken |= u64::from(odd) << step;
            }
        }
        Packed {
            first,
            count,
            broken,
        }
    }
}

/// Rounds up to 16 numbers of a finished row into their place.
///
/// # Safety
/// No other task has this row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn end(out: &Rows<'_>, at: usize, channels: usize, numbers: __m512) {
    // SAFETY: the caller's promise; the mask ends where the row does.
    unsafe {
        if let Rows::Bf16(out) = out {
            // To nearest, ties to even; a NaN must not be rounded into an infinity.
            let bits = _mm512_castps_si512(numbers);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let broken = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(numbers, numbers);
            let rounded = _mm512_mask_mov_epi32(rounded, broken, _mm512_set1_epi32(0x7fc0));
            let to = out.row(at, channels).as_mut_ptr();
            let mask = ((1u32 << channels) - 1) as u16;
            _mm512_mask_cvtepi32_storeu_epi16(to.cast(), mask, rounded);
        } else {
            let mut row = [0.0f32; 16];
            _mm512_storeu_ps(row.as_mut_ptr(), numbers);
            out.write(at, &row[..channels]);
        }
    }
}
