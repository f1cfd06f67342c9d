//! The speed of computation: ranks with a device of their own, or ranks that share cores.
//!
//! Shared cores conserve work. The kernel has one worker thread for each core, and every rank has a
//! thread of its own for tasks that are not jobs; the scheduler gives each runnable thread an equal
//! part of the cores, never more than one core. Jobs of several ranks share the workers, and a job
//! too small for all of them leaves the rest to the others. A rank with a device of its own is the
//! same model with one core.

/// What a piece of work occupies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CoreUse {
    /// Nothing: it only takes time.
    Delay,
    /// The rank's own thread.
    OwnThread,
    /// At most this share of the workers.
    Workers(f64),
}

impl CoreUse {
    /// The share of the workers it can use.
    fn worker_share(self) -> f64 {
        match self {
            CoreUse::Workers(share) => share,
            _ => 0.0,
        }
    }
}

/// Work in progress.
#[derive(Debug, Clone, Copy)]
struct RunningWork {
    rank: usize,
    /// Seconds left if nothing else ran; for jobs, on all workers.
    left_s: f64,
    core_use: CoreUse,
}

/// The cores of one device or node.
#[derive(Debug, Clone, Default)]
struct CorePool {
    running: Vec<RunningWork>,
    /// The time at which each `left_s` was last updated.
    updated: f64,
    /// Incremented with every change: a [`PredictedEnd`] with an older version is void.
    version: u64,
}

/// All cores of a machine.
#[derive(Debug)]
pub(crate) struct Cores {
    pools: Vec<CorePool>,
    ranks_per_pool: usize,
    cores: f64,
}

/// The predicted end of the next work of a pool; void once the pool's version has changed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PredictedEnd {
    pub pool: usize,
    pub version: u64,
    pub at: f64,
}

impl Cores {
    /// One pool of `cores` cores for every `ranks_per_pool` ranks.
    pub fn new(ranks: usize, ranks_per_pool: usize, cores: usize) -> Cores {
        Cores {
            pools: vec![CorePool::default(); ranks.div_ceil(ranks_per_pool)],
            ranks_per_pool,
            cores: cores as f64,
        }
    }

    /// Starts work of a rank that takes `seconds` if nothing else runs (on all workers, for jobs).
    /// Returns the pool's next end.
    pub fn start(
        &mut self,
        now: f64,
        rank: usize,
        seconds: f64,
        core_use: CoreUse,
    ) -> PredictedEnd {
        let pool = rank / self.ranks_per_pool;
        self.advance(pool, now);
        self.pools[pool].running.push(RunningWork {
            rank,
            left_s: seconds,
            core_use,
        });
        self.predict_end(pool, now)
    }

    /// Ends the work that a prediction is about: its rank, and the pool's next end if more work
    /// runs. `None` if the prediction is void.
    pub fn end(&mut self, end: PredictedEnd) -> Option<(usize, Option<PredictedEnd>)> {
        let PredictedEnd { pool, version, at } = end;
        if self.pools[pool].version != version {
            return None;
        }
        self.advance(pool, at);
        let done = self.first_to_end(pool);
        let done = self.pools[pool].running.remove(done).rank;
        let more = !self.pools[pool].running.is_empty();
        Some((done, more.then(|| self.predict_end(pool, at))))
    }

    /// The present speed of each kind of work, as a fraction of its speed alone.
    fn speeds(&self, pool: usize) -> impl Fn(CoreUse) -> f64 + use<> {
        let running = || self.pools[pool].running.iter().map(|work| work.core_use);
        let threads = running().filter(|of| *of == CoreUse::OwnThread).count();
        let requested: f64 = running().map(CoreUse::worker_share).sum();
        let workers = self.cores * requested.min(1.0);
        let per_thread = (self.cores / (workers + threads as f64)).min(1.0);
        move |core_use| match core_use {
            CoreUse::Delay => 1.0,
            CoreUse::OwnThread => per_thread,
            CoreUse::Workers(share) => per_thread * share / requested.max(1.0),
        }
    }

    /// Subtracts the work done since the last update.
    fn advance(&mut self, pool: usize, now: f64) {
        let speed = self.speeds(pool);
        let CorePool {
            running, updated, ..
        } = &mut self.pools[pool];
        let passed = now - *updated;
        *updated = now;
        if passed > 0.0 {
            for work in running {
                work.left_s = (work.left_s - passed * speed(work.core_use)).max(0.0);
            }
        }
    }

    /// The index of the work that ends first at the present speeds; of equals, the first started.
    fn first_to_end(&self, pool: usize) -> usize {
        let speed = self.speeds(pool);
        let time = |work: &RunningWork| work.left_s / speed(work.core_use);
        let running = self.pools[pool].running.iter().enumerate();
        let first = running.min_by(|(_, a), (_, b)| time(a).total_cmp(&time(b)));
        first.expect("the pool has running work").0
    }

    fn predict_end(&mut self, pool: usize, now: f64) -> PredictedEnd {
        let speed = self.speeds(pool);
        let first = self.pools[pool].running[self.first_to_end(pool)];
        let left = first.left_s / speed(first.core_use);
        self.pools[pool].version += 1;
        PredictedEnd {
            pool,
            version: self.pools[pool].version,
            at: now + left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CoreUse, Cores};

    #[test]
    fn threads_and_workers_share_cores_and_delays_take_none() {
        let mut cores = Cores::new(3, 3, 2);
        cores.start(0.0, 0, 1.0, CoreUse::OwnThread);
        cores.start(0.0, 1, 4.0, CoreUse::Workers(1.0));
        let end = cores.start(0.0, 2, 1.0, CoreUse::Delay);
        // Two workers and a thread on two cores: two thirds of a core for each.
        assert_eq!(end.at, 1.0);
        let (rank, end) = cores.end(end).unwrap();
        let end = end.unwrap();
        assert_eq!(rank, 2);
        assert!((end.at - 1.5).abs() < 1e-12, "{end:?}");
        let (rank, end) = cores.end(end).unwrap();
        let end = end.unwrap();
        assert_eq!(rank, 0);
        // The job ran for 1.5 s at two thirds of its speed; alone it takes the 3 s that are left.
        assert!((end.at - 4.5).abs() < 1e-12, "{end:?}");
        // New work voids the predicted end.
        cores.start(2.0, 0, 1.0, CoreUse::Workers(1.0));
        assert_eq!(cores.end(end), None);
    }

    #[test]
    fn a_small_job_leaves_workers_to_others() {
        let mut cores = Cores::new(3, 3, 4);
        // Alone it uses a quarter of the workers: four times as long as on all of them.
        let end = cores.start(0.0, 0, 1.0, CoreUse::Workers(0.25));
        assert_eq!(end.at, 4.0);
        // Three quarters are left: the two jobs run in parallel as if each were alone.
        let end = cores.start(0.0, 1, 1.5, CoreUse::Workers(0.75));
        assert_eq!(end.at, 2.0);
        // The three request more than there is: each gets workers in proportion to its request.
        let end = cores.start(0.0, 2, 1.0, CoreUse::Workers(1.0));
        assert_eq!(end.at, 2.0);
        assert_eq!(cores.end(end).map(|(rank, _)| rank), Some(2));
    }
}
