//! The tiles of one job under a tiling, as the kernel is told them: how many, in which order, and the
//! mask, all in numbers of 32 bits.

use cudarc::driver::DeviceRepr;
use encke_core::job::{Causal, Job};

use super::hopper_tilings::{LINKS, Tiling};
use crate::tensor_map;

/// Bytes of keys and values that blocks may share at a time: half of the L2 cache, since others
/// want some of it too.
const CACHE_BYTES: usize = 32 << 20;

/// Row i sees the keys `0..=(lead + i·query_step) / key_step`: a mask in few bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mask {
    lead: i32,
    query_step: i32,
    key_step: i32,
}

/// What a job's mask comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Every row sees every key.
    All,
    /// Rows see different keys.
    Some(Mask),
    /// The mask needs larger numbers than the kernel has.
    TooFar,
}

/// The mask of a job. One that hides nothing is none.
pub(crate) fn seen(job: &Job) -> Seen {
    let Some(mask) = job.causal.filter(|_| job.visible(0) < job.keys) else {
        return Seen::All;
    };
    match narrow(&mask, job.queries) {
        Some(mask) => Seen::Some(mask),
        None => Seen::TooFar,
    }
}

fn narrow(mask: &Causal, queries: usize) -> Option<Mask> {
    let wide = |x: usize| i64::try_from(x).ok();
    let (mut lead, mut query_step, mut key_step) = (
        wide(mask.query)? - wide(mask.key)?,
        wide(mask.query_step)?,
        wide(mask.key_step)?,
    );
    if query_step % key_step == 0 {
        // The same rows, and no division on the device.
        lead = lead.div_euclid(key_step);
        query_step /= key_step;
        key_step = 1;
    }
    let last = query_step.checked_mul(wide(queries)?)?.checked_add(lead)?;
    i32::try_from(last).ok()?;
    Some(Mask {
        lead: i32::try_from(lead).ok()?,
        query_step: i32::try_from(query_step).ok()?,
        key_step: i32::try_from(key_step).ok()?,
    })
}

/// The kernel's `Tiles`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiles {
    count: u32,
    row_tiles: i32,
    places: i32,
    together: i32,
    mask: [i32; 3],
    q_shift: u32,
    q_inverse: u32,
    k_shift: u32,
    k_inverse: u32,
    from: [i32; LINKS],
}

// SAFETY: plain numbers in C layout, no padding.
unsafe impl DeviceRepr for Tiles {}

impl Tiles {
    /// How a job is numbered under a tiling, with `further` keys of the links behind its own; None
    /// where there are more tiles or keys than numbers.
    pub fn new(job: &Job, further: &[usize], tiling: &Tiling, mask: Option<Mask>) -> Option<Tiles> {
        let mut from = [0; LINKS];
        let mut before = 0;
        for (link, keys) in further.iter().enumerate().rev() {
            before += keys;
            from[link] = i32::try_from(before).ok()?;
        }
        let keys = before + job.keys;
        i32::try_from(keys).ok()?;
        let row_tiles = job.queries.div_ceil(tiling.rows());
        let places = job.batch * job.segments * job.heads;
        let count = i32::try_from(row_tiles.checked_mul(places)?).ok()?;
        let mut shares = job.k.heads.to_vec();
        shares.sort_unstable();
        shares.dedup();
        let sharing = job.heads / shares.len().max(1);
        let fitting = CACHE_BYTES / (4 * keys * job.dim).max(1);
        let (q_shift, q_inverse) = inverse(tensor_map::unit(&job.q));
        let (k_shift, k_inverse) = inverse(tensor_map::unit(&job.k));
        let mask = mask.map_or([0, 0, 1], |mask| {
            [mask.lead, mask.query_step, mask.key_step]
        });
        Some(Tiles {
            count: count as u32,
            row_tiles: row_tiles as i32,
            places: places as i32,
            together: (fitting * sharing).clamp(1, places) as i32,
            mask,
            q_shift,
            q_inverse,
            k_shift,
            k_inverse,
            from,
        })
    }

    /// How many blocks of the grid can be at work on them.
    pub fn blocks(&self, processors: usize) -> usize {
        (self.count as usize).min(processors)
    }
}

/// Shift and inverse: `(x >> shift)·inverse` modulo 2³² is x divided by the unit, for its multiples.
fn inverse(unit: usize) -> (u32, u32) {
    let shift = unit.trailing_zeros();
    let odd = (unit >> shift) as u32;
    // Newton: each step doubles the bits that are right, and an odd number is its own inverse
    // modulo 8.
    let inverse = (0..4).fold(odd, |x, _| {
        x.wrapping_mul(2u32.wrapping_sub(odd.wrapping_mul(x)))
    });
    (shift, inverse)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use encke_core::job::Operand;

    pub(crate) fn job(queries: usize, keys: usize, heads: usize, causal: Option<Causal>) -> Job {
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
            q: operand.clone(),
            k: operand.clone(),
            cells: operand,
            dq: None,
            causal,
            scale: 1.0,
            gain: 1.0,
        }
    }

    pub(crate) fn causal(query: usize, query_step: usize, key: usize, key_step: usize) -> Causal {
        Causal {
            query,
            query_step,
            key,
            key_step,
        }
    }

    /// What the kernel computes from a mask.
    fn visible(mask: &Mask, i: usize, keys: usize) -> usize {
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
            let Seen::Some(mask) = seen(&job) else {
                panic!("{query} {key} hides something");
            };
            for i in 0..job.queries {
                assert_eq!(visible(&mask, i, job.keys), job.visible(i), "row {i}");
            }
        }
    }

    #[test]
    fn a_mask_that_hides_nothing_is_none_and_one_too_far_is_refused() {
        assert_eq!(seen(&job(8, 8, 1, Some(causal(50, 1, 3, 2)))), Seen::All);
        assert_eq!(seen(&job(8, 8, 1, None)), Seen::All);
        let far = job(8, 8, 1, Some(causal(0, 1, 1 << 40, 1)));
        assert_eq!(seen(&far), Seen::TooFar);
    }

    #[test]
    fn links_are_numbered_from_the_last_one() {
        let tiling = &super::super::hopper_tilings::TILINGS[0];
        let of = |further: &[usize]| Tiles::new(&job(8, 9, 1, None), further, tiling, None);
        let from = |further: &[usize]| of(further).map(|tiles| tiles.from);
        assert_eq!(from(&[]), Some([0; LINKS]));
        let mut three = [0; LINKS];
        (three[0], three[1]) = (384, 128);
        assert_eq!(from(&[256, 128]), Some(three));
        assert_eq!(from(&[i32::MAX as usize]), None);
    }

    #[test]
    fn units_are_divided_out_without_division() {
        for unit in [8, 64, 96, 120, 640, 12_345 * 8] {
            let (shift, inverse) = inverse(unit);
            for count in [0usize, 1, 7, 1000, 1 << 20] {
                let share = (count * unit) as u64;
                assert_eq!(
                    ((share >> shift) as u32).wrapping_mul(inverse),
                    count as u32
                );
            }
        }
    }
}
