//! The tiles of one job under a tiling as a kernel argument: their number, their order, and the
//! mask, all in 32-bit integers.

use std::f64::consts::LOG2_E;

use cudarc::driver::DeviceRepr;
use encke_core::job::{Band, Job, JobTiles};

use super::grid_jobs::{narrow_place, signed_tile};
use super::hopper_ranges::RangeTiles;
use super::hopper_tilings::{MAX_CHUNKS, Tiling};
use crate::tensor_map;

/// Bytes of keys and values that concurrent blocks share: half of the L2 cache, since other data
/// needs a part of it too.
const CACHE_BYTES: usize = 32 << 20;

/// Row i sees the keys `0..=(lead + i·query_step) / key_step`: a causal mask in 32-bit integers. Of
/// a job on a grid without a mask it has other meanings, as `TileParams` in hopper_tiles.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NarrowMask {
    lead: i32,
    query_step: i32,
    key_step: i32,
}

/// Which keys the rows of a job see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyVisibility {
    /// Every row sees every key.
    All,
    /// Rows see different keys.
    Causal(NarrowMask),
    /// The mask does not fit into 32-bit integers.
    TooLarge,
}

/// The visibility of a job. A mask that hides nothing counts as none.
pub(crate) fn visibility(job: &Job) -> KeyVisibility {
    let Some(mask) = job.causal().filter(|_| job.hides()) else {
        return KeyVisibility::All;
    };
    match narrow(&mask, job.queries) {
        Some(mask) => KeyVisibility::Causal(mask),
        None => KeyVisibility::TooLarge,
    }
}

impl NarrowMask {
    /// The keys that the grid shows the rows of a job without a mask, or their order if `whole`:
    /// all, those up to a row's own tile first. None if they do not fit.
    pub fn of_grid(tiles: JobTiles, whole: bool) -> Option<NarrowMask> {
        let [lead, shift] = narrow_place(tiles.query, tiles.key, tiles.tile)?;
        Some(NarrowMask {
            lead,
            query_step: shift,
            key_step: signed_tile(tiles) | i32::from(whole),
        })
    }
}

fn narrow(mask: &Band, queries: usize) -> Option<NarrowMask> {
    let signed = |x: usize| i64::try_from(x).ok();
    let (mut lead, mut query_step, mut key_step) = (
        signed(mask.query)? - signed(mask.key)?,
        signed(mask.query_step)?,
        signed(mask.key_step)?,
    );
    if query_step % key_step == 0 {
        // The same keys, without a division on the device.
        lead = lead.div_euclid(key_step);
        query_step /= key_step;
        key_step = 1;
    }
    let last = query_step
        .checked_mul(signed(queries)?)?
        .checked_add(lead)?;
    i32::try_from(last).ok()?;
    Some(NarrowMask {
        lead: i32::try_from(lead).ok()?,
        query_step: i32::try_from(query_step).ok()?,
        key_step: i32::try_from(key_step).ok()?,
    })
}

/// The kernel's `TileParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TileParams {
    count: u32,
    row_tiles: i32,
    sequences: i32,
    sequences_in_l2: i32,
    mask: [i32; 3],
    q_shift: u32,
    q_inverse: u32,
    k_shift: u32,
    k_inverse: u32,
    chunk_starts: [i32; MAX_CHUNKS],
    /// The device address of the tiles of a job with ranges of keys.
    list: u64,
    /// The device address of the slopes of the heads.
    slopes: u64,
    position_steps: [i32; 2],
    /// In base 2: the scale, the cap, and twice the scale over the cap.
    transform: [f32; 3],
    pad: i32,
}

// SAFETY: plain numbers in C layout, no padding.
unsafe impl DeviceRepr for TileParams {}

impl TileParams {
    /// The tiles of a job whose further chunks have `rest` keys each; None if the number of tiles
    /// or keys overflows.
    pub fn new(
        job: &Job,
        rest: &[usize],
        tiling: &Tiling,
        mask: Option<NarrowMask>,
    ) -> Option<TileParams> {
        let mut chunk_starts = [0; MAX_CHUNKS];
        let mut before = 0;
        for (chunk, keys) in rest.iter().enumerate().rev() {
            before += keys;
            chunk_starts[chunk] = i32::try_from(before).ok()?;
        }
        let keys = before + job.keys;
        i32::try_from(keys).ok()?;
        let row_tiles = job.queries.div_ceil(tiling.rows());
        let sequences = job.batch * job.segments * job.heads;
        let count = i32::try_from(row_tiles.checked_mul(sequences)?).ok()?;
        let mut head_offsets = job.k.heads.to_vec();
        head_offsets.sort_unstable();
        head_offsets.dedup();
        let heads_per_kv = job.heads / head_offsets.len().max(1);
        let kv_heads_in_l2 = CACHE_BYTES / (2 * keys * (job.dim + job.value_dim)).max(1);
        let (q_shift, q_inverse) = inverse(tensor_map::unit(&job.q));
        let (k_shift, k_inverse) = inverse(tensor_map::unit(&job.k));
        let transform = job.transform.as_ref();
        let softcap = transform.and_then(|of| of.softcap).unwrap_or(1.0);
        let scale = job.scale.abs() * LOG2_E;
        let mask = mask.map_or([0, 0, 1], |mask| {
            [mask.lead, mask.query_step, mask.key_step]
        });
        Some(TileParams {
            count: count as u32,
            row_tiles: row_tiles as i32,
            sequences: sequences as i32,
            sequences_in_l2: (kv_heads_in_l2 * heads_per_kv).clamp(1, sequences) as i32,
            mask,
            q_shift,
            q_inverse,
            k_shift,
            k_inverse,
            chunk_starts,
            list: 0,
            slopes: 0,
            position_steps: [1, 1],
            transform: [scale, softcap * LOG2_E, 2.0 * scale / softcap].map(|x| x as f32),
            pad: 0,
        })
    }

    /// The same for listed tiles of each sequence; None if their number overflows.
    pub fn of_list(self, ranges: &RangeTiles) -> Option<TileParams> {
        let count = ranges.entries.len();
        let all = i32::try_from(count.checked_mul(self.sequences as usize)?).ok()?;
        Some(TileParams {
            count: all as u32,
            row_tiles: i32::try_from(count).ok()?,
            mask: [0, ranges.step, 1],
            position_steps: ranges.position_steps,
            ..self
        })
    }

    /// The same for tiles of equal length, which need not come longest first: one sequence after
    /// another, so that tiles that run together read the keys of few.
    pub fn in_turn(self) -> TileParams {
        TileParams {
            sequences_in_l2: 1,
            ..self
        }
    }

    /// The same with the list and the slopes at these addresses.
    pub fn at(self, list: u64, slopes: u64) -> TileParams {
        TileParams {
            list,
            slopes,
            ..self
        }
    }

    /// Blocks of the persistent grid.
    pub fn blocks(&self, multiprocessors: usize) -> usize {
        (self.count as usize).min(multiprocessors)
    }
}

/// Shift and inverse: `(x >> shift)·inverse` modulo 2³² is x / unit for multiples x of the unit.
fn inverse(unit: usize) -> (u32, u32) {
    let shift = unit.trailing_zeros();
    let odd = (unit >> shift) as u32;
    // Newton's iteration doubles the correct bits in each step; an odd number is its own inverse
    // modulo 8.
    let inverse = (0..4).fold(odd, |x, _| {
        x.wrapping_mul(2u32.wrapping_sub(odd.wrapping_mul(x)))
    });
    (shift, inverse)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use encke_core::job::{Mask, Operand};

    pub(crate) fn job(queries: usize, keys: usize, heads: usize, causal: Option<Band>) -> Job {
        let operand = Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row: heads * 128,
            heads: (0..heads).map(|h| h * 128).collect(),
        };
        Job {
            batch: 1,
            segments: 1,
            queries,
            keys,
            heads,
            dim: 128,
            value_dim: 128,
            q: operand.clone(),
            k: operand.clone(),
            cells: operand,
            delta: None,
            dq: None,
            mask: causal.map(Mask::Band),
            transform: None,
            dropout: None,
            scale: 1.0,
            gain: 1.0,
            tiles: None,
        }
    }

    pub(crate) fn causal(query: usize, query_step: usize, key: usize, key_step: usize) -> Band {
        Band::causal((query, query_step), (key, key_step))
    }

    /// The keys that row `i` sees, as the kernel computes them.
    fn visible(mask: &NarrowMask, i: usize, keys: usize) -> usize {
        let ahead = i64::from(mask.lead) + i as i64 * i64::from(mask.query_step);
        match usize::try_from(ahead) {
            Ok(ahead) => (ahead / mask.key_step as usize + 1).min(keys),
            Err(_) => 0,
        }
    }

    #[test]
    fn a_narrow_mask_shows_the_same_keys() {
        for (query, query_step, key, key_step) in [
            (0, 1, 0, 1),
            (3, 2, 40, 3),
            (100, 6, 7, 3),
            (5, 4, 131, 2),
            (1 << 40, 1, (1 << 40) + 9, 1),
        ] {
            let job = job(70, 50, 2, Some(causal(query, query_step, key, key_step)));
            let KeyVisibility::Causal(mask) = visibility(&job) else {
                panic!("{query} {key} hides something");
            };
            for i in 0..job.queries {
                assert_eq!(visible(&mask, i, job.keys), job.visible(i).end, "row {i}");
            }
        }
    }

    #[test]
    fn a_mask_that_hides_nothing_counts_as_none_and_a_too_large_one_is_refused() {
        assert_eq!(
            visibility(&job(8, 8, 1, Some(causal(50, 1, 3, 2)))),
            KeyVisibility::All
        );
        assert_eq!(visibility(&job(8, 8, 1, None)), KeyVisibility::All);
        let far = job(8, 8, 1, Some(causal(0, 1, 1 << 40, 1)));
        assert_eq!(visibility(&far), KeyVisibility::TooLarge);
    }

    #[test]
    fn keys_are_numbered_from_the_last_chunk_on() {
        let tiling = &super::super::hopper_tilings::TILINGS[0];
        let of = |rest: &[usize]| TileParams::new(&job(8, 9, 1, None), rest, tiling, None);
        let from = |rest: &[usize]| of(rest).map(|tiles| tiles.chunk_starts);
        assert_eq!(from(&[]), Some([0; MAX_CHUNKS]));
        let mut three = [0; MAX_CHUNKS];
        (three[0], three[1]) = (384, 128);
        assert_eq!(from(&[256, 128]), Some(three));
        assert_eq!(from(&[i32::MAX as usize]), None);
    }

    #[test]
    fn multiples_of_a_unit_are_divided_without_division() {
        for unit in [8, 64, 96, 120, 640, 12_345 * 8] {
            let (shift, inverse) = inverse(unit);
            for count in [0usize, 1, 7, 1000, 1 << 20] {
                let offset = (count * unit) as u64;
                assert_eq!(
                    ((offset >> shift) as u32).wrapping_mul(inverse),
                    count as u32
                );
            }
        }
    }
}
