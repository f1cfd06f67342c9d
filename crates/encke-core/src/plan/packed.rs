//! Packing: the jobs of many documents become one job whose mask lists them.
//!
//! A rank's documents lie side by side in its rows, so their jobs differ only in rows and
//! positions. One job for all of them is one call of the kernel.

use std::ops::Range;

use crate::job::{Job, Mask, Operand, Piece};

/// Joins jobs whose query rows follow one another, and whose keys come in the same order, into jobs
/// with a mask of pieces. The order of jobs that are not joined does not change.
pub(super) fn pack_documents(jobs: Vec<Job>) -> Vec<Job> {
    let mut packed = Vec::new();
    let mut open: Option<OpenJob> = None;
    for job in jobs {
        let rows = open.as_ref().and_then(|open| open.rows_of(&job));
        match (&mut open, rows) {
            (Some(open), Some(rows)) => open.push(&job, rows),
            _ => {
                packed.extend(open.take().map(OpenJob::close));
                open = Some(OpenJob::new(job));
            }
        }
    }
    packed.extend(open.map(OpenJob::close));
    packed
}

/// A job to which pieces are added.
struct OpenJob {
    first: Job,
    pieces: Vec<Piece>,
}

impl OpenJob {
    fn new(first: Job) -> OpenJob {
        let pieces = vec![piece(&first, 0..first.queries, 0..first.keys)];
        OpenJob { first, pieces }
    }

    /// The query and key rows of `next`, counted from those of the first job; None if it cannot be
    /// a piece of it.
    fn rows_of(&self, next: &Job) -> Option<[Range<usize>; 2]> {
        let (job, last) = (&self.first, self.pieces.last()?);
        let sizes = |of: &Job| (of.batch, of.segments, of.heads, of.dim, of.value_dim);
        let same = sizes(job) == sizes(next)
            && job.segments == 1
            && (job.scale, job.gain) == (next.scale, next.gain)
            && job.transform == next.transform
            // A job has the coins of one document.
            && job.dropout.is_none()
            && next.dropout.is_none()
            && !matches!(next.mask, Some(Mask::Documents(_)));
        if !same {
            return None;
        }
        let queries = last.queries.end;
        let ahead = [(&job.q, &next.q), (&job.cells, &next.cells)];
        let optional = [(&job.delta, &next.delta), (&job.dq, &next.dq)];
        if optional
            .iter()
            .any(|(own, next)| own.is_some() != next.is_some())
        {
            return None;
        }
        let optional = optional
            .into_iter()
            .filter_map(|(own, next)| own.as_ref().zip(next.as_ref()));
        let follows =
            |(own, next): (&Operand, &Operand)| rows_between(own, next, job.batch) == Some(queries);
        let keys = rows_between(&job.k, &next.k, job.batch)?;
        let fits = ahead.into_iter().chain(optional).all(follows) && keys >= last.keys.end;
        fits.then(|| [queries..queries + next.queries, keys..keys + next.keys])
    }

    fn push(&mut self, job: &Job, [queries, keys]: [Range<usize>; 2]) {
        self.pieces.push(piece(job, queries, keys));
    }

    fn close(self) -> Job {
        let ends = self.pieces.last().map(|of| (of.queries.end, of.keys.end));
        match ends.filter(|_| self.pieces.len() > 1) {
            None => self.first,
            Some((queries, keys)) => Job {
                queries,
                keys,
                mask: Some(Mask::Documents(self.pieces.into())),
                ..self.first
            },
        }
    }
}

fn piece(job: &Job, queries: Range<usize>, keys: Range<usize>) -> Piece {
    let band = match &job.mask {
        Some(Mask::Band(band)) => Some(*band),
        _ => None,
    };
    Piece {
        queries,
        keys,
        band,
    }
}

/// How many rows after the first row of `own` the first row of `next` is; None if they are not rows
/// of one operand.
fn rows_between(own: &Operand, next: &Operand, batch: usize) -> Option<usize> {
    let same = own.row == next.row
        && own.row > 0
        && (batch == 1 || own.batch == next.batch)
        && own.heads == next.heads;
    let elements = next.offset.checked_sub(own.offset).filter(|_| same)?;
    elements.is_multiple_of(own.row).then(|| elements / own.row)
}
