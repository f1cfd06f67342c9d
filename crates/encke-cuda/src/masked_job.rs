//! Jobs with masks, score transforms, dropout or values of another width, as kernel arguments.
//!
//! The decision here: a mask is a list of pieces (documents, or the whole job), and a kernel's tile
//! of rows lies in one of them. The list of tiles is made here, longest first, so that one launch
//! computes a whole packed batch without a tail of long documents. Jobs that need none of this have
//! programs of their own, which know nothing of it.

use std::cmp::Reverse;
use std::f64::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;

use encke_core::job::{Band, Job, Mask, Window};

use crate::abi::{JobParams, MaskParams, MaskedJobParams, PIECE_WORDS};
use crate::allocation::DeviceAllocation;
use crate::arguments::{KernelArgument, TableCache, to_i32};
use crate::device::Device;
use crate::error::Result;
use crate::launch::KernelValue;
use crate::program::Program;

/// Further than any position, and small enough to be added to one.
const UNBOUNDED: i64 = 1 << 62;

/// Which rows a kernel's tiles consist of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TileRows {
    /// Queries; tiles stream keys.
    Queries,
    /// Keys; tiles stream queries.
    Keys,
}

/// What tensor core programs are compiled for, beside dimensions and types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct JobFeatures {
    /// Anything but a dense or causal job with plain scores; also a step of a job on a grid, so
    /// that a row meets one program whatever its mask is.
    pub masked: bool,
    pub softcap: bool,
    pub slopes: bool,
    pub dropout: bool,
}

impl JobFeatures {
    /// Those of a job.
    pub fn of(job: &Job) -> JobFeatures {
        let transform = job.transform.as_ref();
        JobFeatures {
            masked: !job.is_plain() || job.tiles.is_some(),
            softcap: transform.is_some_and(|of| of.softcap.is_some()),
            slopes: transform.is_some_and(|of| of.slopes.is_some()),
            dropout: job.dropout.is_some(),
        }
    }

    /// Whether queries see ranges of keys, and the job has no more than transformed scores beside.
    pub fn only_ranges(job: &Job) -> bool {
        job.dropout.is_none() && !JobFeatures::is_causal_or_full(job)
    }

    /// Whether the job has no other mask than a causal one, plain scores and no dropout; values may
    /// have another length than keys.
    pub fn is_causal_or_full(job: &Job) -> bool {
        let plain = job.transform.is_none() && job.dropout.is_none();
        plain && (job.mask.is_none() || job.causal().is_some())
    }

    /// The program with the macros of these features.
    pub fn define(&self, program: Program) -> Program {
        let all = [
            ("MASKED", self.masked),
            ("SOFTCAP", self.softcap),
            ("SLOPES", self.slopes),
            ("DROPOUT", self.dropout),
        ];
        let present = all.into_iter().filter(|(_, present)| *present);
        present.fold(program, |program, (name, _)| program.define(name, 1))
    }
}

/// A job as the argument of a kernel with tiles of rows.
pub(crate) enum JobArgument {
    /// For programs without masks.
    Plain(KernelArgument<JobParams>, usize),
    /// For programs with `MASKED`.
    Masked(KernelArgument<MaskedJobParams>),
}

impl JobArgument {
    /// The value to pass.
    pub fn value(&self) -> &dyn KernelValue {
        match self {
            JobArgument::Plain(argument, _) => &argument.value,
            JobArgument::Masked(argument) => &argument.value,
        }
    }

    /// The job without its mask.
    pub fn job(&self) -> &JobParams {
        match self {
            JobArgument::Plain(argument, _) => &argument.value,
            JobArgument::Masked(argument) => &argument.value.job,
        }
    }

    /// The tables, which the launch reads.
    pub fn tables(&self) -> Vec<&DeviceAllocation> {
        match self {
            JobArgument::Plain(argument, _) => argument.tables().collect(),
            JobArgument::Masked(argument) => argument.tables().collect(),
        }
    }

    /// Tiles of one (batch entry, segment, head).
    pub fn tiles(&self) -> usize {
        match self {
            JobArgument::Plain(_, tiles) => *tiles,
            JobArgument::Masked(argument) => argument.value.mask.count_tiles as usize,
        }
    }
}

/// The slopes of a job's heads as the Hopper kernels read them: in base 2, f32 in the low half of
/// each word. None without slopes.
pub(crate) fn slope_words(job: &Job) -> Option<Vec<i64>> {
    let slopes = job.transform.as_ref()?.slopes.as_ref()?;
    let word = |slope: &f64| i64::from(((slope * LOG2_E) as f32).to_bits());
    Some(slopes.iter().map(word).collect())
}

/// Query rows that see only some key rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PieceRows {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    pub band: Band,
}

impl PieceRows {
    fn new(queries: Range<usize>, keys: Range<usize>, band: Option<Band>) -> PieceRows {
        let everything = Band {
            window: Window::ALL,
            ..Band::causal((0, 1), (0, 1))
        };
        PieceRows {
            queries,
            keys,
            band: band.unwrap_or(everything),
        }
    }

    /// The words of its table.
    fn words(&self) -> [i64; PIECE_WORDS] {
        let Band {
            query,
            query_step,
            key,
            key_step,
            window,
        } = self.band;
        let limit = |limit: Option<usize>| limit.map_or(UNBOUNDED, |limit| limit as i64);
        let pair = |rows: &Range<usize>| rows.start as i64 | (rows.end as i64) << 32;
        [
            query as i64,
            query_step.max(1) as i64,
            key as i64,
            key_step.max(1) as i64,
            limit(window.left),
            limit(window.right),
            pair(&self.queries),
            pair(&self.keys),
        ]
    }

    /// The tiles of `size` rows, each with the number of rows that it streams.
    fn tiles(&self, rows: TileRows, size: usize) -> impl Iterator<Item = (i64, usize)> {
        let (band, owned, streamed) = match rows {
            TileRows::Queries => (self.band, self.queries.len(), self.keys.len()),
            // Seen from the keys, queries and keys change places.
            TileRows::Keys => {
                let window = Window {
                    left: self.band.window.right,
                    right: self.band.window.left,
                };
                let band = Band {
                    query: self.band.key,
                    query_step: self.band.key_step,
                    key: self.band.query,
                    key_step: self.band.query_step,
                    window,
                };
                (band, self.keys.len(), self.queries.len())
            }
        };
        (0..owned.div_ceil(size)).map(move |tile| {
            let (first, last) = (tile * size, ((tile + 1) * size).min(owned) - 1);
            let start = band.visible(first, streamed).start;
            let end = band.visible(last, streamed).end;
            (tile as i64, end.saturating_sub(start))
        })
    }
}

/// The pieces of a job. Together they have every query: one that sees nothing must be written, too.
pub(crate) fn pieces(job: &Job) -> Vec<PieceRows> {
    let (queries, keys) = (0..job.queries, 0..job.keys);
    let listed = match &job.mask {
        None => return vec![PieceRows::new(queries, keys, None)],
        Some(Mask::Band(band)) => return vec![PieceRows::new(queries, keys, Some(*band))],
        Some(Mask::Documents(listed)) => listed,
    };
    let mut all = Vec::with_capacity(listed.len());
    let mut next = 0;
    for piece in listed.iter() {
        if next < piece.queries.start {
            all.push(PieceRows::new(next..piece.queries.start, 0..0, None));
        }
        next = piece.queries.end;
        let (queries, keys) = (piece.queries.clone(), piece.keys.clone());
        all.push(PieceRows::new(queries, keys, piece.band));
    }
    if next < job.queries {
        all.push(PieceRows::new(next..job.queries, 0..0, None));
    }
    all
}

/// The tiles of all pieces, as words of a table: those that stream most rows first.
fn tile_list(pieces: &[PieceRows], rows: TileRows, size: usize) -> Vec<i64> {
    let mut all: Vec<(i64, usize)> = Vec::new();
    for (piece, of) in pieces.iter().enumerate() {
        let tiles = of.tiles(rows, size);
        all.extend(tiles.map(|(tile, streamed)| ((piece as i64) << 32 | tile, streamed)));
    }
    all.sort_by_key(|(_, streamed)| Reverse(*streamed));
    all.into_iter().map(|(entry, _)| entry).collect()
}

/// The tiles of `size` queries of a job, in one (batch entry, segment, head): their number, and the
/// most keys that one of them streams.
pub(crate) fn query_tiles(job: &Job, size: usize) -> (usize, usize) {
    let pieces = pieces(job);
    let tiles = pieces
        .iter()
        .flat_map(|of| of.tiles(TileRows::Queries, size));
    tiles.fold((0, 0), |(count, most), (_, keys)| {
        (count + 1, most.max(keys))
    })
}

/// The pieces of a job that have keys, as a table, and their number.
pub(crate) fn pieces_with_keys(job: &Job) -> (Vec<i64>, usize) {
    let pieces = pieces(job).into_iter();
    let with_keys: Vec<PieceRows> = pieces.filter(|piece| !piece.keys.is_empty()).collect();
    let words = with_keys.iter().flat_map(PieceRows::words).collect();
    (words, with_keys.len())
}

impl TableCache {
    /// A job as the argument of a kernel with tiles of `size` rows.
    pub fn job_argument(
        &self,
        device: &Arc<Device>,
        job: &Job,
        rows: TileRows,
        size: usize,
    ) -> Result<JobArgument> {
        let plain = self.job(device, job)?;
        if !JobFeatures::of(job).masked {
            let count = match rows {
                TileRows::Queries => job.queries,
                TileRows::Keys => job.keys,
            };
            return Ok(JobArgument::Plain(plain, count.div_ceil(size)));
        }
        let KernelArgument { value, mut tables } = plain;
        let mut table = |values: Vec<i64>| -> Result<u64> {
            let table = self.get(device, values)?;
            let pointer = table.pointer();
            tables.push(table);
            Ok(pointer)
        };
        let pieces = pieces(job);
        let list = tile_list(&pieces, rows, size);
        let count_tiles = to_i32(list.len(), "tiles of a job")?;
        let transform = job.transform.as_ref();
        let slopes = transform.and_then(|transform| transform.slopes.as_ref());
        let slopes = slopes.map(|slopes| slopes.iter().map(|x| x.to_bits() as i64).collect());
        let dropout = job.dropout.as_ref();
        let coin_heads = dropout.map(|of| of.heads.iter().map(|&head| head as i64).collect());
        let mut mask = MaskParams {
            v: value.k,
            pieces: table(pieces.iter().flat_map(PieceRows::words).collect())?,
            tiles: table(list)?,
            slopes: slopes.map_or(Ok(0), &mut table)?,
            coin_heads: coin_heads.map_or(Ok(0), &mut table)?,
            softcap: transform.and_then(|of| of.softcap).unwrap_or(0.0),
            kept: dropout.map_or(0.0, |of| of.dropout.gain()),
            first_token: dropout.map_or(0, |of| of.first_token as i64),
            segment_step: dropout.map_or(0, |of| of.segment_step as i64),
            document: dropout.map_or(0, |of| of.document as i64),
            all_heads: dropout.map_or(0, |of| of.all_heads as i64),
            threshold: dropout.map_or(0, |of| of.dropout.threshold()),
            seed: dropout.map_or([0; 2], |of| of.dropout.seed_words()),
            count_tiles,
            value_dim: to_i32(job.value_dim, "elements in a row")?,
        };
        if job.value_dim != job.dim {
            mask.v = self.operand(device, &job.values(), &mut tables)?;
        }
        let value = MaskedJobParams { job: value, mask };
        Ok(JobArgument::Masked(KernelArgument { value, tables }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn causal(window: Window) -> Band {
        Band {
            window,
            ..Band::causal((0, 1), (0, 1))
        }
    }

    #[test]
    fn the_longest_tiles_of_all_documents_come_first() {
        let band = Some(causal(Window::CAUSAL));
        let pieces = [
            PieceRows::new(0..100, 0..100, band),
            PieceRows::new(100..400, 100..400, band),
        ];
        let list = tile_list(&pieces, TileRows::Queries, 128);
        let longest = [1 << 32 | 2, 1 << 32 | 1, 1 << 32, 0];
        assert_eq!(list, longest);
        // The first keys are seen by most queries.
        let list = tile_list(&pieces, TileRows::Keys, 128);
        assert_eq!(list, [1 << 32, 1 << 32 | 1, 0, 1 << 32 | 2]);
    }

    #[test]
    fn a_tile_streams_the_rows_of_its_window() {
        let window = Window {
            left: Some(31),
            right: Some(0),
        };
        let piece = PieceRows::new(0..1024, 0..1024, Some(causal(window)));
        let streamed = |rows| piece.tiles(rows, 64).map(|(_, rows)| rows).collect();
        let queries: Vec<usize> = streamed(TileRows::Queries);
        assert_eq!((queries[0], queries[1], queries[15]), (64, 95, 95));
        let keys: Vec<usize> = streamed(TileRows::Keys);
        assert_eq!((keys[0], keys[1], keys[15]), (95, 95, 64));
    }
}
