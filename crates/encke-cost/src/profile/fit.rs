//! From timed jobs to the terms of a speed: a linear model of a job's time.

use encke_core::DType;
use encke_core::job::Job;

use crate::job_costs::{
    flops_per_pair, has_few_instances, instances, is_strided, longest_task, query_rows, row_bytes,
    tiled_pairs,
};
use crate::least_squares::nonnegative_least_squares;
use crate::machine::Speed;
use crate::statistics::median;

/// What a job's time is linear in: operations, operations at the diagonal, bytes, jobs, operations
/// of jobs with few instances, instances, and operations on strided rows.
pub(super) type Features = [f64; 7];

/// The features of a job.
pub(super) fn features(job: &Job, dtype: DType, tile: [usize; 2], backward: bool) -> Features {
    let each = f64::from(flops_per_pair(backward)) * job.dim as f64;
    let operations = tiled_pairs(job, tile) * each;
    let only = |condition: bool, feature: f64| if condition { feature } else { 0.0 };
    [
        operations,
        only(job.mask.is_some(), query_rows(job) as f64 * each),
        row_bytes(job, dtype, backward),
        1.0,
        only(has_few_instances(job), operations),
        instances(job) as f64,
        only(is_strided(job), operations),
    ]
}

/// The linear model: seconds of each unit of each feature.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeModel(Features);

impl TimeModel {
    /// The model with the least error on features and their seconds.
    pub fn fit(samples: &[(Features, f64)]) -> TimeModel {
        TimeModel(nonnegative_least_squares(samples))
    }

    /// The predicted seconds of a job with these features.
    pub fn seconds(&self, features: &Features) -> f64 {
        let terms = features.iter().zip(&self.0);
        terms.map(|(feature, each)| feature * each).sum()
    }

    /// The seconds of each job, whatever its size.
    pub fn job_s(&self) -> f64 {
        self.0[3]
    }

    /// The speed that the coefficients amount to.
    pub fn speed(&self, tile: [usize; 2], task_share: f64) -> Speed {
        let [
            operation_s,
            diagonal_s,
            byte_s,
            _,
            few_s,
            instance_s,
            strided_s,
        ] = self.0;
        let by_operation = |seconds: f64| seconds / operation_s.max(1e-18);
        Speed {
            flops: 1.0 / operation_s.max(1e-18),
            diagonal_keys: by_operation(diagonal_s),
            // A coefficient of 0 becomes a finite rate that costs next to nothing.
            row_bytes_per_s: 1.0 / byte_s.max(1e-18),
            few_instances_slowdown: by_operation(few_s),
            strided_slowdown: by_operation(strided_s),
            ring_slowdown: 0.0,
            tile,
            instance_s,
            task_rows: 0.0,
            task_share,
        }
    }
}

/// The median relative error of models on the samples of both passes that they are fitted to.
pub(super) fn misfit(samples: impl Fn(bool) -> Vec<(Features, f64)>) -> f64 {
    let errors = [false, true].into_iter().flat_map(|backward| {
        let samples = samples(backward);
        let model = TimeModel::fit(&samples);
        let error = move |(features, seconds): (Features, f64)| {
            (model.seconds(&features) / seconds - 1.0).abs()
        };
        samples.into_iter().map(error)
    });
    median(&errors.collect::<Vec<f64>>())
}

/// Explains by two figures why jobs take longer alone than concurrently: a launch latency, which is
/// returned, and the queries of a task ([`Speed::task_rows`]). `alone` has jobs, their seconds on
/// all cores, and their seconds alone.
pub(super) fn fit_alone(speed: Speed, alone: &[(&Job, f64, f64)]) -> (Speed, f64) {
    let steps = (0..=32).map(|step| 2f64.powf(f64::from(step) / 2.0));
    let candidates = [0.0].into_iter().chain(steps);
    let tried = candidates.map(|task_rows| {
        let speed = Speed { task_rows, ..speed };
        let limited = |job: &Job, all_cores_s: f64| {
            all_cores_s / speed.worker_share(longest_task(job, task_rows))
        };
        // The latency that minimises the squared relative errors.
        let terms = alone.iter().map(|&(job, all_cores_s, alone_s)| {
            let left = (alone_s - limited(job, all_cores_s)) / alone_s;
            (left / alone_s, 1.0 / (alone_s * alone_s))
        });
        let (left, weight) = terms.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
        let latency_s = if weight > 0.0 {
            (left / weight).max(0.0)
        } else {
            0.0
        };
        let error: f64 = alone
            .iter()
            .map(|&(job, all_cores_s, alone_s)| {
                ((latency_s + limited(job, all_cores_s)) / alone_s)
                    .ln()
                    .powi(2)
            })
            .sum();
        (error, speed, latency_s)
    });
    let best = tried.min_by(|(a, ..), (b, ..)| a.total_cmp(b));
    let (_, speed, latency_s) = best.expect("there are candidates");
    (speed, latency_s)
}
