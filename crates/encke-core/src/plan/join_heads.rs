//! Joining heads: jobs of different phases of a branch become one job of all their heads.
//!
//! The heads of a dilated branch select rows that differ in their first row only, so their jobs
//! differ in where each head begins. An operand has an offset for each head: one job for all of
//! them is one call of the kernel, with enough work to fill a device.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::job::{Band, Job, Mask, Operand, ScoreTransform};
use crate::pattern::Lane;

/// Joins jobs of lanes that differ only in their heads and in where these begin. A job moves
/// forward to the one it joins, but never before another job with a cell of its lane's heads, so
/// that the jobs of a cell keep their order.
pub(super) fn join_heads<'a>(jobs: impl IntoIterator<Item = (&'a Lane, Job)>) -> Vec<Job> {
    // Each job, with the slots of the heads of its lanes.
    let mut joined: Vec<(BTreeSet<usize>, Job)> = Vec::new();
    for (lane, job) in jobs {
        let slots = lane.heads.iter().map(|head| head.slot);
        let shares = |of: &(BTreeSet<usize>, Job)| slots.clone().any(|slot| of.0.contains(&slot));
        let before = joined.iter().rposition(shares).map_or(0, |at| at + 1);
        let mut others = joined[before..].iter_mut();
        match others.find_map(|(of, own)| Some((of, join(own, &job)?, own))) {
            Some((of, all, own)) => {
                *own = all;
                of.extend(slots);
            }
            None => joined.push((slots.collect(), job)),
        }
    }
    joined.into_iter().map(|(_, job)| job).collect()
}

/// One job of two; None if they differ in more than their heads, or if rows of the one might be
/// rows of the other.
fn join(own: &Job, next: &Job) -> Option<Job> {
    if !differ_in_heads_only(own, next) {
        return None;
    }
    let optional = |own: &Option<Operand>, next: &Option<Operand>| {
        let both = own.as_ref().zip(next.as_ref());
        both.map(|(own, next)| with_heads(own, next))
    };
    let slopes = |own: &Arc<[f64]>| {
        let next = next.transform.iter().flat_map(|of| of.slopes.as_deref());
        own.iter().chain(next.flatten()).copied().collect()
    };
    let transform = own.transform.as_ref().map(|of| ScoreTransform {
        softcap: of.softcap,
        slopes: of.slopes.as_ref().map(slopes),
    });
    let job = Job {
        heads: own.heads + next.heads,
        q: with_heads(&own.q, &next.q),
        k: with_heads(&own.k, &next.k),
        cells: with_heads(&own.cells, &next.cells),
        delta: optional(&own.delta, &next.delta),
        dq: optional(&own.dq, &next.dq),
        transform,
        ..own.clone()
    };
    job.writes_apart().then_some(job)
}

fn differ_in_heads_only(job: &Job, next: &Job) -> bool {
    let sizes = |of: &Job| {
        let rows = (of.batch, of.segments, of.queries, of.keys);
        (rows, of.dim, of.value_dim, of.tiles)
    };
    let strides = |of: &Operand| (of.batch, of.segment, of.row);
    let operands = |of: &Job| {
        let optional = [&of.delta, &of.dq].map(|of| of.as_ref().map(strides));
        ([&of.q, &of.k, &of.cells].map(strides), optional)
    };
    sizes(job) == sizes(next)
        && operands(job) == operands(next)
        && (job.scale, job.gain) == (next.scale, next.gain)
        && softcap_and_slopes(job) == softcap_and_slopes(next)
        && see_alike(&job.mask, &next.mask)
        // A job has the coins of one document, at the positions of its mask.
        && job.dropout.is_none()
        && next.dropout.is_none()
}

/// An operand with the heads of another one that differs from it in its offset and heads only.
fn with_heads(own: &Operand, next: &Operand) -> Operand {
    let offset = own.offset.min(next.offset);
    let heads = [own, next].into_iter();
    let heads = heads.flat_map(|of| of.heads.iter().map(|head| of.offset - offset + head));
    Operand {
        offset,
        heads: heads.collect(),
        ..own.clone()
    }
}

fn softcap_and_slopes(job: &Job) -> Option<(Option<f64>, bool)> {
    let transform = job.transform.as_ref();
    transform.map(|of| (of.softcap, of.slopes.is_some()))
}

/// Whether two masks show the same rows at the same distances.
fn see_alike(one: &Option<Mask>, other: &Option<Mask>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(Mask::Band(one)), Some(Mask::Band(other))) => {
            let steps = |of: &Band| (of.query_step, of.key_step, of.window);
            let ahead = |of: &Band| of.query as i128 - of.key as i128;
            steps(one) == steps(other) && ahead(one) == ahead(other)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::job::Job;
    use crate::plan::{Plan, Request};
    use crate::sharding::Sharding;
    use crate::{DType, MixingGradient, Mode, OffsetRule, Pattern, Shape};

    /// The forward jobs of rank 0 with all branches mixed.
    fn jobs(tokens: usize, heads: usize, ranks: usize, branches: &[[usize; 2]]) -> Vec<Job> {
        let shape = Shape::new(1, tokens, heads, heads, 2).expect("a shape");
        let sharding = Sharding::contiguous(ranks).expect("ranks");
        let [lengths, rates] = [0, 1].map(|i| branches.iter().map(|of| of[i]).collect::<Vec<_>>());
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        let pattern = Pattern::dilated(&lengths, &rates, mode).expect("a pattern");
        let plan = Plan::new(Request::new(shape, pattern, sharding, DType::F32)).expect("a plan");
        let program = plan.rank(0).expect("a rank");
        let tasks = program.rounds.iter().flat_map(|round| &round.meanwhile);
        tasks.filter_map(|task| task.job().cloned()).collect()
    }

    #[test]
    fn phases_of_equal_length_are_one_job_and_others_are_not() {
        let heads = |jobs: &[Job]| -> Vec<(usize, usize)> {
            jobs.iter().map(|job| (job.heads, job.queries)).collect()
        };
        // The second branch has 4 phases of 16 rows, with 2 heads each. The first one has every
        // cell, and comes last.
        let even = jobs(64, 8, 1, &[[64, 1], [64, 4]]);
        assert_eq!(heads(&even), [(8, 16), (8, 64)]);
        // Of 66 tokens, two phases have one row more.
        let uneven = jobs(66, 8, 1, &[[66, 1], [66, 4]]);
        assert_eq!(heads(&uneven), [(4, 17), (4, 16), (8, 66)]);
        // On a ring, also with the keys of another rank.
        let ring = jobs(64, 8, 2, &[[64, 4]]);
        assert_eq!(heads(&ring), [(8, 8), (8, 8)]);
    }

    #[test]
    fn every_head_keeps_its_rows() {
        let all = jobs(64, 8, 1, &[[64, 4]]);
        let [job] = &all[..] else {
            panic!("{} jobs", all.len())
        };
        for head in 0..8 {
            // Rows have 8 heads of 2 elements, and head h begins at token h % 4.
            let at = job.q.at(0, 0, 0, head);
            let (token, own) = (at / 16, at % 16 / 2);
            assert_eq!(token, own % 4);
            assert_eq!(job.k.at(0, 0, 0, head), at);
            assert_eq!(job.cells.at(0, 0, 0, head), token * 8 + own);
            assert_eq!(job.q.at(0, 0, 3, head), at + 3 * 4 * 16);
        }
    }

    #[test]
    fn jobs_of_a_cell_keep_their_order() {
        // Segments of 32 tokens, and a last one of 2: its job comes after the others.
        let all = jobs(34, 2, 1, &[[32, 2], [34, 2]]);
        let sizes: Vec<_> = all.iter().map(|job| (job.heads, job.queries)).collect();
        assert_eq!(sizes, [(2, 16), (2, 1), (2, 17)]);
    }
}
