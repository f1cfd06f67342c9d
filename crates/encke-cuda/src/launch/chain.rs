//! Jobs of the same queries with several pieces of memory as their keys: one launch.
//!
//! A ring brings keys one parcel after the other, and every job that a softmax is carried through
//! begins and ends each of its tiles again. Where parcels are there at once, their jobs are links of
//! a chain, and a tile walks through all of them.

use std::ops::Range;
use std::sync::Arc;

use encke_core::DType;
use encke_core::job::{Job, Operand};

use super::hopper_tiles::{Seen, seen};
use super::hopper_tilings::{LINKS, carried_keys};
use crate::error::Result;
use crate::memory::Memory;
use crate::operands::Operands;

/// A job, and the memory of its keys and values.
#[derive(Clone)]
pub(crate) struct Link {
    pub job: Job,
    pub k: Arc<Memory>,
    pub v: Arc<Memory>,
}

/// Links that one launch takes.
pub(crate) struct Chain {
    pub dtype: DType,
    pub q: Arc<Memory>,
    /// The first may have a mask, or keys that are no whole blocks; the others are seen whole.
    links: Vec<Link>,
}

/// Whether a job can only be the first link of a chain.
fn leads(job: &Job) -> bool {
    let whole = carried_keys(job.dim).is_some_and(|block| job.keys.is_multiple_of(block));
    seen(job) != Seen::All || !whole
}

impl Chain {
    /// A chain of one.
    pub fn new(job: &Job, operands: Operands<'_>) -> Result<Chain> {
        let [q, k, v] = operands.memory()?.map(Arc::clone);
        let job = job.clone();
        Ok(Chain {
            dtype: operands.dtype(),
            q,
            links: vec![Link { job, k, v }],
        })
    }

    /// The first link, whose mask is that of the chain.
    pub fn first(&self) -> &Link {
        &self.links[0]
    }

    /// The links behind the first.
    pub fn further(&self) -> &[Link] {
        &self.links[1..]
    }

    /// Whether it takes no more links.
    pub fn is_full(&self) -> bool {
        self.links.len() == LINKS
    }

    /// Whether another one is of the same queries, and this one takes its links.
    pub fn takes(&self, other: &Chain) -> bool {
        let (own, job) = (&self.first().job, &other.first().job);
        let queries = |job: &Job| (job.batch, job.segments, job.queries, job.heads, job.dim);
        let alike = Arc::ptr_eq(&self.q, &other.q)
            && self.dtype == other.dtype
            && queries(own) == queries(job)
            && (&own.q, &own.cells, &own.k.heads) == (&job.q, &job.cells, &job.k.heads)
            && (own.scale, own.gain) == (job.scale, job.gain);
        let room = self.links.len() + other.links.len() <= LINKS;
        alike && room && !(leads(own) && leads(job))
    }

    /// Takes the links of another one that it [`takes`](Chain::takes).
    pub fn join(&mut self, mut other: Chain) {
        if leads(&other.first().job) {
            std::mem::swap(&mut self.links, &mut other.links);
        }
        self.links.append(&mut other.links);
    }

    /// What it reads.
    pub fn memory(&self) -> Vec<&Memory> {
        let keys = self.links.iter().flat_map(|link| [&*link.k, &*link.v]);
        std::iter::once(&*self.q).chain(keys).collect()
    }

    /// Whether it reads this memory.
    pub fn reads(&self, memory: &Memory) -> bool {
        let mut own = self.memory().into_iter();
        own.any(|own| std::ptr::eq(own.whole(), memory.whole()))
    }

    /// Whether it waits no longer when this memory is handed in for the next parcel of a ring through
    /// the host. That parcel takes its time, so what is there to compute meanwhile is computed: own
    /// keys, and the first parcel. The others go in pairs: when the second of two is read, both
    /// places are handed in, and while they are filled other ranks compute.
    pub fn leaves(&self, memory: &Memory, round: usize) -> bool {
        let travelled = |link: &Link| link.k.has_travelled();
        round < 2 || !self.links.iter().any(travelled) || self.reads(memory)
    }

    /// Whether everything it reads may still be read.
    pub fn is_usable(&self) -> bool {
        self.memory().into_iter().all(Memory::is_usable)
    }

    /// Whether no cell of its is one of another's, as far as is plain to see.
    pub fn is_apart_from(&self, other: &Chain) -> bool {
        are_apart(&self.first().job, &other.first().job)
    }

    /// The same cut where the rows of another one begin and end, if that has some of its rows.
    pub fn cut(self, other: &Chain) -> Vec<Chain> {
        match cuts(&self.first().job, &other.first().job) {
            None => vec![self],
            Some(parts) => parts.iter().map(|part| self.of_queries(part)).collect(),
        }
    }

    fn of_queries(&self, rows: &Range<usize>) -> Chain {
        let links = self.links.iter().map(|link| Link {
            job: link.job.of_queries(rows.clone()),
            ..link.clone()
        });
        Chain {
            dtype: self.dtype,
            q: Arc::clone(&self.q),
            links: links.collect(),
        }
    }
}

/// The rows of two jobs' cells, if they are counted in the same grid.
fn both_rows(own: &Job, other: &Job) -> Option<[Range<usize>; 2]> {
    let ((own_grid, own), (grid, other)) = (rows(own)?, rows(other)?);
    (own_grid == grid).then_some([own, other])
}

/// Whether two jobs have no cell in common, as far as is plain to see.
fn are_apart(own: &Job, other: &Job) -> bool {
    let all = both_rows(own, other);
    all.is_some_and(|[own, of]| own.end <= of.start || of.end <= own.start)
}

/// The query rows of a job before, among and behind those of another one; None where that has others.
fn cuts(own: &Job, other: &Job) -> Option<Vec<Range<usize>>> {
    let [own, of] = both_rows(own, other)?;
    if of.start < own.start || own.end < of.end {
        return None;
    }
    let (start, end) = (of.start - own.start, of.end - own.start);
    let parts = [0..start, start..end, end..own.len()];
    Some(parts.into_iter().filter(|part| !part.is_empty()).collect())
}

/// What rows of cells are counted in: the step from row to row, where the first one lies, the step
/// from batch entry to batch entry, and heads.
type Grid<'a> = (usize, usize, usize, &'a [usize]);

/// The rows of a job's cells.
fn rows(job: &Job) -> Option<(Grid<'_>, Range<usize>)> {
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
    fn masks_and_tails_lead() {
        assert!(!leads(&job(8, 256, 1, None)));
        assert!(!leads(&job(8, 256, 1, Some(causal(300, 1, 0, 1)))));
        assert!(leads(&job(8, 256, 1, Some(causal(0, 1, 0, 1)))));
        assert!(leads(&job(8, 257, 1, None)));
    }

    /// A job on so many rows of cells of four heads, from the first one on.
    fn at(first: usize, queries: usize, batch: usize) -> Job {
        let mut job = job(queries, 8, 4, None);
        job.cells.row = 4;
        job.cells.heads = (0..4).collect();
        job.cells.offset = first * 4;
        (job.batch, job.cells.batch) = (batch, 4 * 100);
        job
    }

    #[test]
    fn cells_of_other_rows_are_apart() {
        for batch in [1, 3] {
            assert!(are_apart(&at(0, 50, batch), &at(50, 50, batch)));
            assert!(are_apart(&at(60, 40, batch), &at(0, 60, batch)));
            assert!(!are_apart(&at(0, 51, batch), &at(50, 50, batch)));
        }
        // Rows that reach into the next batch entry.
        assert!(!are_apart(&at(60, 50, 2), &at(0, 60, 2)));
        let mut other = at(50, 50, 1);
        other.cells.heads = (0..8).collect();
        assert!(!are_apart(&at(0, 50, 1), &other));
    }

    #[test]
    fn a_job_is_cut_where_the_rows_of_another_begin_and_end() {
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
