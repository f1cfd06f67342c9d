//! What a job is to the cost model: the quantities that its time is a function of.
//!
//! The same functions predict a job ([`rank_costs`](crate::rank_costs)) and fit a device to
//! measured ones ([`profile`](crate::profile)). An *instance* is one attention of one head in one
//! segment of one batch entry.

use encke_core::DType;
use encke_core::job::Job;

use crate::machine::MANY_INSTANCES;

/// Floating-point operations for each (query, key) pair and channel.
pub(crate) fn flops_per_pair(backward: bool) -> u32 {
    if backward { 10 } else { 4 }
}

/// The instances of a job.
pub(crate) fn instances(job: &Job) -> usize {
    job.batch * job.segments * job.heads
}

/// Whether a job has too few instances to run at full speed on some devices.
pub(crate) fn has_few_instances(job: &Job) -> bool {
    instances(job) < MANY_INSTANCES
}

/// Whether the rows of a job are strided, as those of a dilated branch are in their own rank's
/// buffers: its keys or its queries, whichever did not arrive packed.
pub(crate) fn is_strided(job: &Job) -> bool {
    let row = job.heads * job.dim;
    job.k.row > row || job.q.row > row
}

/// The queries of all instances of a job.
pub(crate) fn query_rows(job: &Job) -> usize {
    instances(job) * job.queries
}

/// The share of a job that its longest task is, where a task is `task_rows` queries of an instance.
/// Under a causal mask the last queries have the most keys.
pub(crate) fn longest_task(job: &Job, task_rows: f64) -> f64 {
    let tasks = match task_rows > 0.0 {
        true => (job.queries as f64 / task_rows).max(1.0),
        false => return 0.0,
    };
    let of_instance = match job.mask {
        Some(_) => 1.0 - (1.0 - 1.0 / tasks).powi(2),
        None => 1.0 / tasks,
    };
    of_instance / instances(job).max(1) as f64
}

/// The bytes of a job's rows: stored tensors read once, accumulators read and written.
pub(crate) fn row_bytes(job: &Job, dtype: DType, backward: bool) -> f64 {
    let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
    let each = instances(job) * job.dim;
    let (queries, keys) = (job.queries * each, job.keys * each);
    let bytes = match backward {
        // q and dout are read, dq is accumulated; k and v are read, dk and dv are accumulated.
        true => queries * (2 * stored + 2 * sum) + keys * (2 * stored + 4 * sum),
        false => queries * (stored + 2 * sum) + keys * 2 * stored,
    };
    bytes as f64
}

/// The pairs of a job whose rows are padded to tiles of this many queries and keys.
pub(crate) fn tiled_pairs(job: &Job, [queries, keys]: [usize; 2]) -> f64 {
    let padding = |rows: usize, tile: usize| {
        let padded = rows.next_multiple_of(tile.max(1));
        padded as f64 / rows.max(1) as f64
    };
    job.pairs() as f64 * padding(job.queries, queries) * padding(job.keys, keys)
}

/// Masked pairs at the diagonal that cost time, `keys` for each query: at most all masked pairs.
pub(crate) fn diagonal_pairs(job: &Job, keys: f64) -> f64 {
    if job.mask.is_none() {
        return 0.0;
    }
    let rows = instances(job) as f64 * job.queries as f64;
    let masked = rows * job.keys as f64 - job.pairs() as f64;
    (rows * keys).min(masked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::plan::program::Task;
    use encke_core::plan::rings::Rotating;
    use encke_core::plan::{Pass, Plan, Request};
    use encke_core::sharding::{Cut, Sharding};
    use encke_core::{MixingGradient, Mode, OffsetRule, Pattern, Shape};

    #[test]
    fn partial_tiles_cost_as_much_as_full_ones() {
        let shape = Shape::new(1, 85, 2, 2, 64).unwrap();
        let sharding = Sharding::new(1, Cut::Contiguous).unwrap();
        let request = Request::new(shape, Pattern::dense(), sharding, DType::Bf16);
        let program = Plan::new(request).unwrap().rank(0).unwrap();
        let tasks = program.rounds.iter().flat_map(|round| &round.meanwhile);
        let mut jobs = tasks.filter_map(|task| match task {
            Task::Forward { job, .. } | Task::Attend { job, .. } => Some(job),
            _ => None,
        });
        let job = jobs.next().expect("one attention");
        for (tile, rows) in [
            ([1, 1], [85, 85]),
            ([32, 1], [96, 85]),
            ([32, 48], [96, 96]),
            ([128, 85], [128, 85]),
        ] {
            let expected = (2 * rows[0] * rows[1]) as f64;
            assert!((tiled_pairs(job, tile) - expected).abs() < 1e-6, "{tile:?}");
        }
    }

    #[test]
    fn dilated_rows_are_strided_whichever_tensor_rotates() {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        for (dilation, expected) in [(1, false), (4, true)] {
            for rotating in [Rotating::Keys, Rotating::Queries] {
                let pattern = Pattern::dilated(&[256], &[dilation], mode).unwrap();
                let shape = Shape::new(1, 256, 4, 4, 64).unwrap();
                let sharding = Sharding::new(2, Cut::Contiguous).unwrap();
                let mut request = Request::new(shape, pattern, sharding, DType::F32);
                request.pass = Pass::Backward { dlse: false };
                request.schedule = request.schedule.with_backward(rotating);
                let program = Plan::new(request).unwrap().rank(0).unwrap();
                let tasks = program.rounds.iter().flat_map(|round| &round.meanwhile);
                let jobs = tasks.filter_map(|task| match task {
                    Task::Backward { job, .. } => Some(is_strided(job)),
                    _ => None,
                });
                let strided: Vec<bool> = jobs.collect();
                assert!(strided.len() > 1, "jobs on own and on received rows");
                assert!(
                    strided.iter().all(|is| *is == expected),
                    "{rotating:?} {strided:?}"
                );
            }
        }
    }
}
