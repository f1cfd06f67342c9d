//! Jobs on the grid of `bits = invariant` (specification, section 12), for GPUs.
//!
//! Nothing is launched here. The decision: a row's bits must not depend on how its call is cut into
//! jobs, so what computes a job follows from the call alone, never from the size of a job or from
//! what its mask happens to hide. Hopper's kernels take a whole job in the order of the grid; the
//! others take it step by step, all steps with the program for masks.

use encke_core::DType;
use encke_core::job::{Band, Job, JobTiles, Mask, TilePart, Window};

use super::hopper_tilings::MAX_DIM;
use crate::device::Device;
use crate::masked_job::PieceRows;

/// The compute capability of Hopper's kernels.
const CAPABILITY: (i32, i32) = (9, 0);
/// Rows of the largest block of these kernels that ends with a tile of the grid.
const BLOCK: usize = 128;

/// Whether Hopper's forward kernel takes the jobs of this one's call.
pub(crate) fn on_hopper(device: &Device, job: &Job, dtype: DType) -> bool {
    device.capability() == CAPABILITY && suits_hopper(job, dtype)
}

/// Whether the backward kernel does. It continues sums of gradients exactly, and so not through a
/// gain that is no power of two.
pub(crate) fn backward_on_hopper(device: &Device, job: &Job, dtype: DType) -> bool {
    on_hopper(device, job, dtype) && is_power_of_two(job.gain)
}

fn suits_hopper(job: &Job, dtype: DType) -> bool {
    let halves = matches!(dtype, DType::Bf16 | DType::F16);
    let plain = job.transform.is_none() && job.dropout.is_none();
    let dims = job.dim == job.value_dim && job.dim.is_multiple_of(8) && job.dim <= MAX_DIM;
    let whole = |tiles: JobTiles| tiles.tile.is_multiple_of(BLOCK);
    halves && plain && dims && job.tiles.is_some_and(whole)
}

fn is_power_of_two(x: f64) -> bool {
    let exponent = x.abs().log2().round();
    exponent.abs() < 100.0 && x.abs() == 2f64.powi(exponent as i32)
}

/// A factor as one of at least a half and below 1, and a power of two.
pub(crate) fn as_power_of_two(x: f64) -> (f64, f64) {
    if x == 0.0 || !x.is_finite() {
        return (x, 1.0);
    }
    // Within the range of f32.
    let exponent = x.abs().log2().floor() as i32 + 1;
    let power = 2f64.powi(exponent.clamp(-100, 100));
    (x / power, power)
}

/// The steps of a job on a grid, each with whether it starts the softmax of its queries. They are
/// on a grid, too, so that kernels know them.
pub(crate) fn steps(job: &Job, starts: bool) -> impl Iterator<Item = (Job, bool)> + '_ {
    let tiles = job.tiles.map(|tiles| JobTiles {
        query: 0,
        key: 0,
        part: TilePart::All,
        ..tiles
    });
    let steps = job.forward_steps(starts);
    steps.map(move |(step, starts)| (Job { tiles, ..step }, starts))
}

/// A job in parts whose queries begin with a tile of the grid or are in one.
pub(crate) fn aligned_parts(job: &Job) -> Vec<Job> {
    let cut = job.tiles.map_or(0, |tiles| {
        (tiles.query.next_multiple_of(tiles.tile) - tiles.query).min(job.queries)
    });
    let parts = [0..cut, cut..job.queries].into_iter();
    let parts = parts.filter(|rows| !rows.is_empty());
    parts.map(|rows| job.of_queries(rows)).collect()
}

/// The pieces of a job: the queries of a tile of the grid, with the keys of its part.
pub(crate) fn pieces(job: &Job, tiles: JobTiles) -> Vec<PieceRows> {
    let band = match &job.mask {
        Some(Mask::Band(band)) => *band,
        None => Band {
            window: Window::ALL,
            ..Band::causal((0, 1), (0, 1))
        },
        Some(Mask::Documents(_)) => unreachable!("a job on a grid has one document"),
    };
    let mut all = Vec::new();
    let mut start = 0;
    while start < job.queries {
        let before = tiles.query + start;
        let end = ((before / tiles.tile + 1) * tiles.tile - tiles.query).min(job.queries);
        let keys = tiles.visible(start, 0..job.keys);
        all.push(PieceRows {
            queries: start..end,
            band: Band {
                query: band.query + start * band.query_step,
                key: band.key + keys.start * band.key_step,
                ..band
            },
            keys,
        });
        start = end;
    }
    all
}

/// A number of rows modulo those of a tile, and what must be added to it and to numbers of rows on
/// `other`'s side; None if they do not fit into 32 bits.
pub(crate) fn narrow_place(of: usize, other: usize, tile: usize) -> Option<[i32; 2]> {
    let lead = of % tile;
    let shift = i64::try_from(of - lead).ok()? - i64::try_from(other).ok()?;
    let narrow = i32::try_from(shift).ok().filter(|x| x.abs() < 1 << 30)?;
    Some([i32::try_from(lead).ok()?, narrow])
}

/// Rows of a tile, negative for the keys after a query's own tile, and 0 for all keys.
pub(crate) fn signed_tile(tiles: JobTiles) -> i32 {
    match tiles.part {
        TilePart::All => 0,
        TilePart::UpToOwn => tiles.tile as i32,
        TilePart::AfterOwn => -(tiles.tile as i32),
    }
}

#[cfg(test)]
mod tests {
    use super::super::hopper_tiles::tests::job;
    use super::*;

    fn on_grid(queries: usize, keys: usize, query: usize, key: usize, part: TilePart) -> Job {
        let mut job = job(queries, keys, 1, None);
        job.tiles = Some(JobTiles {
            tile: 128,
            query,
            key,
            part,
        });
        job
    }

    #[test]
    fn parts_begin_with_a_tile_or_are_in_one() {
        let rows = |query: usize, queries: usize| -> Vec<usize> {
            let parts = aligned_parts(&on_grid(queries, 8, query, 0, TilePart::All));
            parts.iter().map(|part| part.queries).collect()
        };
        assert_eq!(rows(0, 500), [500]);
        assert_eq!(rows(256, 100), [100]);
        assert_eq!(rows(300, 500), [84, 416]);
        assert_eq!(rows(300, 50), [50]);
    }

    #[test]
    fn pieces_show_what_the_job_shows() {
        let band = Band {
            window: Window {
                left: Some(150),
                right: Some(200),
            },
            ..Band::causal((300, 1), (256, 1))
        };
        for part in [TilePart::All, TilePart::UpToOwn, TilePart::AfterOwn] {
            let mut job = on_grid(500, 600, 300, 256, part);
            job.mask = Some(Mask::Band(band));
            let tiles = job.tiles.expect("it is on a grid");
            let mut rows = 0;
            for piece in pieces(&job, tiles) {
                for i in piece.queries.clone() {
                    let seen = piece
                        .band
                        .visible(i - piece.queries.start, piece.keys.len());
                    let seen = piece.keys.start + seen.start..piece.keys.start + seen.end;
                    let expected = job.visible(i);
                    let same = seen == expected || seen.is_empty() && expected.is_empty();
                    assert!(same, "row {i} of {part:?}: {seen:?}, not {expected:?}");
                    rows += 1;
                }
            }
            assert_eq!(rows, job.queries);
        }
    }

    #[test]
    fn factors_are_fractions_of_powers_of_two() {
        for x in [1.0, 0.125, 3.0, -0.088, 1e-30, 7e20] {
            let (fraction, power) = as_power_of_two(x);
            assert_eq!(fraction * power, x);
            assert!((0.5..1.0).contains(&fraction.abs()) && is_power_of_two(power));
        }
        assert_eq!(as_power_of_two(0.0), (0.0, 1.0));
        assert!(is_power_of_two(1.0) && is_power_of_two(0.25));
        assert!(!is_power_of_two(3.0) && !is_power_of_two(0.0));
    }
}
