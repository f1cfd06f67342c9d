//! Jobs of the same queries whose keys lie in several allocations: one launch.
//!
//! A ring delivers keys one parcel after the other, and every job that continues a softmax loads
//! and stores the state of each of its tiles. Where several parcels are present, their jobs form a
//! chain of chunks, and a tile loops over the keys of all of them.

use std::ops::Range;
use std::sync::Arc;

use encke_core::DType;
use encke_core::job::{Job, JobTiles, Operand, TilePart};

use super::hopper_tiles::{KeyVisibility, visibility};
use super::hopper_tilings::{MAX_CHUNKS, carry_block_keys};
use super::row_dims::RowDims;
use crate::allocation::DeviceAllocation;
use crate::error::Result;
use crate::masked_job::JobFeatures;
use crate::operands::DeviceInputs;

/// A job, and the memory of its keys and values.
#[derive(Clone)]
pub(crate) struct KvChunk {
    pub job: Job,
    pub k: Arc<DeviceAllocation>,
    pub v: Arc<DeviceAllocation>,
}

/// Chunks of one launch.
pub(crate) struct Chain {
    pub dtype: DType,
    pub q: Arc<DeviceAllocation>,
    /// Only the first may have a mask or a partial block of keys.
    chunks: Vec<KvChunk>,
    /// Whether queries meet all keys of a job on a grid, those up to their own tile first, as its
    /// part has it, and then the others.
    pub whole: bool,
}

/// Whether a job can only be the first chunk of a chain: it has a mask or a partial block.
fn must_be_first(job: &Job) -> bool {
    let block = carry_block_keys(RowDims::of(job));
    let whole = block.is_some_and(|block| job.keys.is_multiple_of(block));
    visibility(job) != KeyVisibility::All || !whole
}

impl Chain {
    /// A chain of one chunk.
    pub fn new(job: &Job, inputs: DeviceInputs<'_>) -> Result<Chain> {
        let [q, k, v] = inputs.memory()?.map(Arc::clone);
        let job = job.clone();
        Ok(Chain {
            dtype: inputs.dtype(),
            q,
            chunks: vec![KvChunk { job, k, v }],
            whole: false,
        })
    }

    /// The first chunk, whose mask is that of the chain.
    pub fn first(&self) -> &KvChunk {
        &self.chunks[0]
    }

    /// The chunks after the first.
    pub fn rest(&self) -> &[KvChunk] {
        &self.chunks[1..]
    }

    /// Joins the keys after a query's own tile to those up to it: true if `after` has them, and
    /// nothing else differs.
    pub fn join_on_grid(&mut self, after: &Chain) -> bool {
        let (own, other) = (&self.chunks[0], &after.chunks[0]);
        let part = |part| own.job.tiles.map(|tiles| JobTiles { part, ..tiles });
        let same = Arc::ptr_eq(&self.q, &after.q)
            && Arc::ptr_eq(&own.k, &other.k)
            && Arc::ptr_eq(&own.v, &other.v)
            && self.dtype == after.dtype;
        let expected = Job {
            tiles: part(TilePart::AfterOwn),
            ..own.job.clone()
        };
        let joins = same
            && !self.whole
            && own.job.mask.is_none()
            && own.job.tiles == part(TilePart::UpToOwn)
            && other.job == expected;
        self.whole |= joins;
        joins
    }

    /// Whether it has as many chunks as a launch allows.
    pub fn is_full(&self) -> bool {
        self.chunks.len() == MAX_CHUNKS
    }

    /// Whether `other` has the same queries and its chunks can be appended.
    pub fn can_join(&self, other: &Chain) -> bool {
        let (own, job) = (&self.first().job, &other.first().job);
        let queries = |job: &Job| (job.batch, job.segments, job.queries, job.heads);
        let same_queries = Arc::ptr_eq(&self.q, &other.q)
            && self.dtype == other.dtype
            && queries(own) == queries(job)
            && RowDims::of(own) == RowDims::of(job)
            && (&own.q, &own.cells, &own.k.heads) == (&job.q, &job.cells, &job.k.heads)
            && (own.scale, own.gain) == (job.scale, job.gain);
        let room = self.chunks.len() + other.chunks.len() <= MAX_CHUNKS;
        // The tiles of a job with ranges of keys are listed for it alone.
        let plain = [own, job].into_iter().all(JobFeatures::is_causal_or_full);
        same_queries && room && plain && !(must_be_first(own) && must_be_first(job))
    }

    /// Appends the chunks of a chain that it [`can_join`](Chain::can_join).
    pub fn join(&mut self, mut other: Chain) {
        if must_be_first(&other.first().job) {
            std::mem::swap(&mut self.chunks, &mut other.chunks);
        }
        self.chunks.append(&mut other.chunks);
    }

    /// The memory it reads.
    pub fn memory(&self) -> Vec<&DeviceAllocation> {
        let keys = self.chunks.iter().flat_map(|chunk| [&*chunk.k, &*chunk.v]);
        std::iter::once(&*self.q).chain(keys).collect()
    }

    /// Whether it reads this memory.
    pub fn reads(&self, memory: &DeviceAllocation) -> bool {
        let mut own = self.memory().into_iter();
        own.any(|own| std::ptr::eq(own.root(), memory.root()))
    }

    /// Whether it is launched before `memory` becomes the receive buffer of the next parcel, on a
    /// ring through the host. A hop through the host takes long, so present keys are computed
    /// meanwhile: the rank's own, and the first parcel. Later parcels are computed in pairs: a
    /// chain that reads the second of two is launched before both receive buffers are reposted, and
    /// other ranks compute while these are filled.
    pub fn must_launch_before(&self, memory: &DeviceAllocation, round: usize) -> bool {
        let mut chunks = self.chunks.iter();
        let through_host = chunks.any(|chunk| chunk.k.was_received_through_host());
        round < 2 || !through_host || self.reads(memory)
    }

    /// Whether all the memory it reads is still usable.
    pub fn is_usable(&self) -> bool {
        self.memory().into_iter().all(DeviceAllocation::is_usable)
    }

    /// Whether it provably shares no cell with `other`.
    pub fn is_disjoint_from(&self, other: &Chain) -> bool {
        are_disjoint(&self.first().job, &other.first().job)
    }

    /// Itself, cut at the row boundaries of `other` if the rows of `other` lie inside its own.
    pub fn cut(self, other: &Chain) -> Vec<Chain> {
        match cuts(&self.first().job, &other.first().job) {
            None => vec![self],
            Some(parts) => parts.iter().map(|part| self.of_queries(part)).collect(),
        }
    }

    fn of_queries(&self, rows: &Range<usize>) -> Chain {
        let chunks = self.chunks.iter().map(|chunk| KvChunk {
            job: chunk.job.of_queries(rows.clone()),
            ..chunk.clone()
        });
        Chain {
            dtype: self.dtype,
            q: Arc::clone(&self.q),
            chunks: chunks.collect(),
            whole: self.whole,
        }
    }
}

/// The rows of two jobs' cells, if both lie on the same grid.
fn both_rows(own: &Job, other: &Job) -> Option<[Range<usize>; 2]> {
    let ((own_grid, own), (grid, other)) = (rows(own)?, rows(other)?);
    (own_grid == grid).then_some([own, other])
}

/// Whether two jobs provably have no cell in common.
fn are_disjoint(own: &Job, other: &Job) -> bool {
    let all = both_rows(own, other);
    all.is_some_and(|[own, of]| own.end <= of.start || of.end <= own.start)
}

/// The query rows of a job before, inside and after those of `other`; None if `other` has others.
fn cuts(own: &Job, other: &Job) -> Option<Vec<Range<usize>>> {
    let [own, of] = both_rows(own, other)?;
    if of.start < own.start || own.end < of.end {
        return None;
    }
    let (start, end) = (of.start - own.start, of.end - own.start);
    let parts = [0..start, start..end, end..own.len()];
    Some(parts.into_iter().filter(|part| !part.is_empty()).collect())
}

/// A grid of cell rows: the row stride, the offset of row 0, the batch stride, and the heads.
type CellGrid<'a> = (usize, usize, usize, &'a [usize]);

/// The grid of a job's cells, and its rows on it.
fn rows(job: &Job) -> Option<(CellGrid<'_>, Range<usize>)> {
    let Operand {
        offset,
        batch,
        row,
        heads,
        ..
    } = &job.cells;
    if *row == 0 || job.segments != 1 || heads.iter().max()? >= row {
        return None;
    }
    let first = offset / row;
    let rows = first..first + job.queries;
    let entry = if job.batch == 1 { 0 } else { *batch };
    let inside = job.batch == 1 || (entry.is_multiple_of(*row) && rows.end * row <= entry);
    inside.then_some(((*row, offset % row, entry, &**heads), rows))
}

#[cfg(test)]
mod tests {
    use super::super::hopper_tiles::tests::{causal, job};
    use super::*;

    #[test]
    fn jobs_with_a_mask_or_a_partial_block_must_be_first() {
        assert!(!must_be_first(&job(8, 256, 1, None)));
        assert!(!must_be_first(&job(8, 256, 1, Some(causal(300, 1, 0, 1)))));
        assert!(must_be_first(&job(8, 256, 1, Some(causal(0, 1, 0, 1)))));
        assert!(must_be_first(&job(8, 257, 1, None)));
    }

    /// A job on `queries` rows of cells of four heads, from row `first` on.
    fn at(first: usize, queries: usize, batch: usize) -> Job {
        let mut job = job(queries, 8, 4, None);
        job.cells.row = 4;
        job.cells.heads = (0..4).collect();
        job.cells.offset = first * 4;
        (job.batch, job.cells.batch) = (batch, 4 * 100);
        job
    }

    #[test]
    fn cells_of_other_rows_are_disjoint() {
        for batch in [1, 3] {
            assert!(are_disjoint(&at(0, 50, batch), &at(50, 50, batch)));
            assert!(are_disjoint(&at(60, 40, batch), &at(0, 60, batch)));
            assert!(!are_disjoint(&at(0, 51, batch), &at(50, 50, batch)));
        }
        // These rows reach into the next batch entry.
        assert!(!are_disjoint(&at(60, 50, 2), &at(0, 60, 2)));
        let mut other = at(50, 50, 1);
        other.cells.heads = (0..8).collect();
        assert!(!are_disjoint(&at(0, 50, 1), &other));
    }

    #[test]
    fn a_job_is_cut_at_the_row_boundaries_of_another() {
        let of = |own: (usize, usize), other: (usize, usize)| {
            cuts(&at(own.0, own.1, 1), &at(other.0, other.1, 1))
        };
        assert_eq!(of((10, 50), (30, 10)), Some(vec![0..20, 20..30, 30..50]));
        assert_eq!(of((10, 50), (10, 20)), Some(vec![0..20, 20..50]));
        assert_eq!(of((10, 50), (10, 50)).map(|all| all.len()), Some(1));
        assert_eq!(of((10, 50), (5, 20)), None);
        assert_eq!(of((10, 50), (50, 20)), None);
    }
}
