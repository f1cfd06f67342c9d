//! A packed job computes every bit of each of its documents as a job of its own would, where the
//! suite says so.

use super::bench::KernelBench;
use super::case::{Case, CaseJob};
use super::failure::Failure;
use super::hidden::{same_carry, same_gradients};
use super::results::{CaseGradients, ForwardResults};
use crate::dtype::Data;
use crate::job::{Job, Mask, Piece};
use crate::kernel::{Carry, Kernel};

/// Compares the results of a case with those of jobs for each of its documents.
pub(super) fn separate<K: Kernel>(
    bench: &KernelBench<'_, K>,
    case: &Case,
    results: &ForwardResults,
    carry: &Carry<Data>,
    grown: &CaseGradients,
) -> Result<(), Failure> {
    if !bench.suite.document_bits {
        return Ok(());
    }
    let mut other = Case {
        parts: Vec::new(),
        ..case.clone()
    };
    // The part of the case that each part of the other one is from.
    let mut origins = Vec::new();
    for (i, part) in case.parts.iter().enumerate() {
        let jobs = match &part.job.mask {
            Some(Mask::Documents(pieces)) => {
                let filled = |piece: &&Piece| !piece.queries.is_empty() && !piece.keys.is_empty();
                let pieces = pieces.iter().filter(filled);
                pieces.map(|piece| job_of(&part.job, piece)).collect()
            }
            _ => vec![part.job.clone()],
        };
        origins.extend(jobs.iter().map(|_| i));
        other.parts.extend(jobs.into_iter().map(|job| CaseJob {
            job,
            ..part.clone()
        }));
    }
    if other.parts.len() == case.parts.len() {
        return Ok(()); // no documents, or one in each job
    }
    let what = "a job of its own for each document";
    same_carry(bench, what, carry, &bench.forward(&other)?, |_| false)?;
    let found = bench.backward(&other, results)?;
    let sum = bench.dtype.sum();
    let initial = |part: &CaseJob| [&part.dk, &part.dv].map(|of| Data::from_f64(sum, of));
    let mut keys: Vec<[Data; 2]> = case.parts.iter().map(initial).collect();
    for ((part, &origin), (dk, dv)) in other.parts.iter().zip(&origins).zip(&found.keys) {
        let [all_dk, all_dv] = &mut keys[origin];
        let touched = part.touched_keys();
        for i in (0..touched.len()).filter(|&i| touched[i]) {
            all_dk.set(i, dk.as_slice().get(i));
        }
        for i in (0..part.dv.len()).filter(|&i| touched[i * part.dk.len() / part.dv.len()]) {
            all_dv.set(i, dv.as_slice().get(i));
        }
    }
    let after = CaseGradients {
        dq: found.dq,
        keys: keys.into_iter().map(|[dk, dv]| (dk, dv)).collect(),
    };
    same_gradients(bench, what, grown, &after, |_| false, |_, _| false)
}

/// The job of one document.
fn job_of(job: &Job, piece: &Piece) -> Job {
    let mut own = job.of_queries(piece.queries.clone());
    own.k.offset += piece.keys.start * own.k.row;
    own.keys = piece.keys.len();
    own.mask = piece.band.map(Mask::Band);
    own
}
