//! The tiles of Hopper's forward kernel for jobs whose queries see ranges of keys: windows and
//! documents. Everything that a tile needs is computed here, once for each launch.

use encke_core::job::{Job, JobTiles};

use super::grid_jobs;
use super::hopper_tilings::{self, GridJob, Tiling};
use super::row_dims::RowDims;
use crate::masked_job::{JobFeatures, PieceRows, pieces};

/// Rows, keys and steps times rows at most, so that the kernel's sums stay below 2³¹.
const MOST: i64 = 1 << 28;
/// Further than any key.
const FAR: i64 = 1 << 29;

/// The tiles of one sequence, longest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RangeTiles {
    /// Twelve numbers for each tile, as `publish_listed` in hopper_tiles.cuh reads them.
    pub entries: Vec<[i32; 12]>,
    /// By how many keys the range of a row lies after that of the row before.
    pub step: i32,
    /// The steps of the positions of queries and of keys; only slopes need them.
    pub position_steps: [i32; 2],
}

/// What a piece's rows see: row i from `start + i * step` to `end + i * step`, as far as there are
/// keys.
struct NarrowRange {
    start: i64,
    end: i64,
    /// None if any will do, because every row sees every key.
    step: Option<i64>,
}

impl NarrowRange {
    /// No key at all.
    const NONE: NarrowRange = NarrowRange {
        start: 0,
        end: 0,
        step: None,
    };

    /// None if positions are not those of whole steps, or too large.
    fn new(piece: &PieceRows) -> Option<NarrowRange> {
        let band = &piece.band;
        let signed = |x: usize| i64::try_from(x).ok();
        let (query_step, key_step) = (
            signed(band.query_step.max(1))?,
            signed(band.key_step.max(1))?,
        );
        let lead = signed(band.query)?.checked_sub(signed(band.key)?)?;
        let limit = |limit: Option<usize>| limit.map(|limit| limit.min(1 << 60) as i64);
        let (left, right) = (limit(band.window.left), limit(band.window.right));
        let bounded = left.is_some() || right.is_some();
        let step = query_step / key_step;
        let whole = query_step % key_step == 0 || piece.queries.len() <= 1;
        let fits = step.checked_mul(piece.queries.len() as i64)? <= MOST;
        if bounded && !(whole && fits) {
            return None;
        }
        let end = right.map_or(FAR, |right| (lead + right).div_euclid(key_step) + 1);
        let start = left.map_or(-FAR, |left| -(left - lead).div_euclid(key_step));
        Some(NarrowRange {
            start: start.clamp(-FAR, FAR),
            end: end.clamp(-FAR, FAR),
            step: bounded.then_some(step),
        })
    }
}

/// The step of a job's ranges; None if the kernel cannot compute them.
fn step(job: &Job, all: &[PieceRows]) -> Option<i64> {
    let most = usize::try_from(MOST).ok()?;
    if job.queries > most || job.keys > most {
        return None;
    }
    let mut found = None;
    for piece in all.iter().filter(|piece| !piece.keys.is_empty()) {
        match (NarrowRange::new(piece)?.step, found) {
            (Some(step), Some(other)) if step != other => return None,
            (step, _) => found = step.or(found),
        }
    }
    Some(found.unwrap_or(1))
}

/// The steps of positions; None if they differ, or if distances are too large for the kernel. A
/// job without slopes needs no positions.
pub(crate) fn position_steps(job: &Job, all: &[PieceRows]) -> Option<[i32; 2]> {
    if !JobFeatures::of(job).slopes {
        return Some([1, 1]);
    }
    let mut found = None;
    for piece in all.iter().filter(|piece| !piece.keys.is_empty()) {
        let band = &piece.band;
        let steps = [band.query_step.max(1), band.key_step.max(1)];
        let last = [
            band.query + steps[0] * piece.queries.len(),
            band.key + steps[1] * piece.keys.len(),
        ];
        if found.is_some_and(|other| other != steps) || last.iter().any(|&at| at as i64 > MOST) {
            return None;
        }
        found = Some(steps);
    }
    let [query, key] = found.unwrap_or([1, 1]).map(i32::try_from);
    Some([query.ok()?, key.ok()?])
}

/// Whether the kernel can compute the ranges of a job.
pub(crate) fn fits(job: &Job) -> bool {
    let all = pieces(job);
    step(job, &all).is_some() && position_steps(job, &all).is_some()
}

/// Whether a tiling has registers for ranges.
pub(crate) fn supports(tiling: &Tiling) -> bool {
    tiling.causal && tiling.consumers <= 2
}

/// The tiling with the least work for a job, and its tiles.
pub(crate) fn choose(job: &Job, carry: bool) -> Option<(&'static Tiling, RangeTiles)> {
    let all = pieces(job);
    let step = step(job, &all)?;
    let softcap = JobFeatures::of(job).softcap;
    let of = |dims| {
        let tilings = hopper_tilings::candidates(dims, true, carry);
        tilings.filter(move |tiling| supports(tiling) && (!softcap || tiling.caps()))
    };
    // Where no tiling for rows of these lengths has registers, those of the longest rows do.
    let own = of(RowDims::of(job)).count() > 0;
    let longest = RowDims::same(hopper_tilings::MAX_DIM);
    let tilings = of(if own { RowDims::of(job) } else { longest });
    let position_steps = position_steps(job, &all)?;
    choose_among(tilings, &all, (step, position_steps))
}

/// The same for a job on a grid.
pub(crate) fn choose_on_grid(job: &Job, tiles: JobTiles) -> Option<(&'static Tiling, RangeTiles)> {
    let all = grid_jobs::pieces(job, tiles);
    let step = step(job, &all)?;
    let position_steps = position_steps(job, &all)?;
    let tilings = hopper_tilings::grid_candidates(job.dim, tiles.tile, GridJob::Other);
    choose_among(tilings, &all, (step, position_steps))
}

fn choose_among(
    tilings: impl Iterator<Item = &'static Tiling>,
    all: &[PieceRows],
    (step, position_steps): (i64, [i32; 2]),
) -> Option<(&'static Tiling, RangeTiles)> {
    let tiled = tilings.filter(|tiling| supports(tiling));
    let tiled = tiled.map(|tiling| (tiling, RangeTiles::new(all, step, position_steps, tiling)));
    tiled.min_by(|(x, of_x), (y, of_y)| {
        let cost = |tiling: &Tiling, tiles: &RangeTiles| tiles.cost(tiling);
        cost(x, of_x).total_cmp(&cost(y, of_y))
    })
}

impl RangeTiles {
    fn new(all: &[PieceRows], step: i64, position_steps: [i32; 2], tiling: &Tiling) -> RangeTiles {
        let mut entries = Vec::new();
        for piece in all {
            // A piece without keys may have any range, but its rows must be written.
            let range = NarrowRange::new(piece).unwrap_or(NarrowRange::NONE);
            let mut row = piece.queries.start;
            while row < piece.queries.end {
                entries.push(entry(piece, &range, step, tiling, row));
                row += tiling.rows();
            }
        }
        let blocks = |entry: &[i32; 12]| entry[1] - entry[3];
        entries.sort_by_key(|entry| std::cmp::Reverse(blocks(entry)));
        RangeTiles {
            entries,
            step: step as i32,
            position_steps,
        }
    }

    /// The work of all tiles, in keys times rows at full speed.
    fn cost(&self, tiling: &Tiling) -> f64 {
        let blocks: i64 = self.entries.iter().map(|x| i64::from(x[1] - x[3])).sum();
        let keys = blocks as f64 * tiling.keys as f64;
        let ends = self.entries.len() as f64 * tiling.overhead as f64;
        (keys + ends) * tiling.rows() as f64 / tiling.rate
    }

    /// The table of the kernel, two numbers in each word.
    pub fn words(&self) -> Vec<i64> {
        let numbers = self.entries.iter().flatten().copied().collect::<Vec<i32>>();
        let pairs = numbers.chunks_exact(2);
        pairs
            .map(|pair| i64::from(pair[0] as u32) | i64::from(pair[1]) << 32)
            .collect()
    }
}

/// The tile that begins at a row: the end of what it sees, the end of its blocks, how many of them
/// are masked at the end, its first block; the first block that is not masked at the start, the end
/// of its rows, its row, its position from that of the first key; the first key, all keys, and the
/// first row's end and start.
fn entry(
    piece: &PieceRows,
    range: &NarrowRange,
    step: i64,
    tiling: &Tiling,
    row: usize,
) -> [i32; 12] {
    let all = piece.keys.len() as i64;
    let last = (row + tiling.rows()).min(piece.queries.end) - 1;
    let ahead = (row - piece.queries.start) as i64 * step;
    let (end, start) = (range.end + ahead, range.start + ahead);
    // How far the position of the row lies after that of the piece's first key.
    let rows = row - piece.queries.start;
    let position = piece.band.query as i64 + (piece.band.query_step.max(1) * rows) as i64;
    let distance = position - piece.band.key as i64;
    let down = (last - row) as i64 * step;
    let clamp = |key: i64| key.clamp(0, all);
    let (keys, first) = (clamp(end + down), clamp(start));
    let block = tiling.keys as i64;
    let (blocks, begin) = match first < keys {
        true => ((keys + block - 1) / block, first / block),
        false => (0, 0),
    };
    let masked = blocks - (clamp(end) / block).min(blocks);
    let low = ((clamp(start + down) + block - 1) / block).min(blocks);
    [
        keys,
        blocks,
        masked,
        begin,
        low,
        piece.queries.end as i64,
        row as i64,
        distance,
        piece.keys.start as i64,
        all,
        end,
        start,
    ]
    .map(|number| number as i32)
}

#[cfg(test)]
mod tests {
    use encke_core::job::{Band, Mask, Piece, Window};

    use super::super::hopper_tiles::tests::job;
    use super::*;

    fn window(left: Option<usize>, right: Option<usize>) -> Band {
        Band {
            window: Window { left, right },
            ..Band::causal((0, 1), (0, 1))
        }
    }

    #[test]
    fn every_row_sees_the_keys_of_its_job() {
        let bands = [
            window(Some(100), Some(0)),
            window(Some(30), None),
            window(None, Some(17)),
            Band {
                query: 500,
                key: 77,
                query_step: 6,
                key_step: 3,
                ..window(Some(200), Some(40))
            },
        ];
        let mut masks: Vec<Mask> = bands.into_iter().map(Mask::Band).collect();
        let piece = |queries, keys, band| Piece {
            queries,
            keys,
            band,
        };
        masks.push(Mask::Documents(
            [
                piece(0..300, 10..310, Some(window(Some(64), Some(0)))),
                piece(320..321, 310..400, None),
                piece(321..700, 420..799, Some(window(None, Some(0)))),
            ]
            .into(),
        ));
        for mask in masks {
            let mut job = job(800, 800, 2, None);
            job.mask = Some(mask);
            let (tiling, tiles) = choose(&job, false).expect("whole steps");
            let mut rows = 0;
            for entry in &tiles.entries {
                let [
                    keys,
                    blocks,
                    masked,
                    begin,
                    low,
                    end,
                    row,
                    _,
                    first_key,
                    all,
                    end0,
                    start0,
                ] = entry.map(i64::from);
                for i in row..end.min(row + tiling.rows() as i64) {
                    let ahead = (i - row) * i64::from(tiles.step);
                    let clamp = |key: i64| key.clamp(0, all);
                    let (from, to) = (clamp(start0 + ahead), clamp(end0 + ahead));
                    let seen = job.visible(i as usize);
                    let expected = match seen.is_empty() {
                        true => 0..0,
                        false => seen.start as i64 - first_key..seen.end as i64 - first_key,
                    };
                    let got = if from < to { from..to } else { 0..0 };
                    assert_eq!(got, expected, "row {i} of {:?}", job.mask);
                    if got.is_empty() {
                        continue;
                    }
                    // Blocks hold all of it, and where it ends inside a block, that is masked.
                    let block = tiling.keys as i64;
                    assert!(begin * block <= from && to <= keys && keys <= blocks * block);
                    assert!((blocks - masked) * block <= to && from <= low * block);
                    rows += 1;
                }
            }
            let visible = (0..job.queries).filter(|&i| !job.visible(i).is_empty());
            assert_eq!(rows, visible.count());
        }
    }

    #[test]
    fn steps_that_differ_are_refused() {
        let mut job = job(8, 8, 1, None);
        let uneven = Band {
            query_step: 2,
            key_step: 3,
            ..window(Some(4), Some(0))
        };
        job.mask = Some(Mask::Band(uneven));
        assert!(!fits(&job));
    }

    #[test]
    fn rows_of_a_piece_without_keys_have_a_tile() {
        let uneven = Band {
            query_step: 3,
            key_step: 2,
            ..window(Some(5), Some(5))
        };
        let piece = |queries, keys| Piece {
            queries,
            keys,
            band: Some(uneven),
        };
        let mut job = job(40, 40, 2, None);
        job.mask = Some(Mask::Documents(
            [piece(0..1, 0..9), piece(1..30, 9..9), piece(30..31, 9..40)].into(),
        ));
        let (tiling, tiles) = choose(&job, true).expect("single rows have whole steps");
        let mut written = vec![0; job.queries];
        for entry in &tiles.entries {
            let (row, end) = (entry[6] as usize, entry[5] as usize);
            (row..end.min(row + tiling.rows())).for_each(|row| written[row] += 1);
        }
        assert_eq!(written, vec![1; job.queries]);
    }
}
