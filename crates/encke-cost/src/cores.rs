//! Who computes how fast: a device of its own, or cores that ranks share.
//!
//! Where ranks share cores, the work is what is conserved. The kernel has one worker for each core,
//! and every rank has a thread of its own for what is not a job; the system gives each of those
//! threads that has something to do an equal part of the cores, never more than one. Jobs of
//! several ranks share the workers, and one that is too small for all of them leaves some to the
//! others. A rank on a device of its own is the same with one core.

/// What somebody has under way, and what it takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Time alone.
    Delay,
    /// A thread of its own.
    Alone,
    /// The workers: at most this part of them.
    Spread(f64),
}

impl Kind {
    /// The part of the workers it can use.
    fn share(self) -> f64 {
        match self {
            Kind::Spread(share) => share,
            _ => 0.0,
        }
    }
}

/// Something under way.
#[derive(Debug, Clone, Copy)]
struct Active {
    rank: usize,
    /// Seconds it would take with all it can use, of workers with all of them.
    left_s: f64,
    kind: Kind,
}

/// The cores of one device or node.
#[derive(Debug, Clone, Default)]
struct Pool {
    active: Vec<Active>,
    /// The time up to which `left_s` is right.
    since: f64,
    /// Counts changes, so that an end foreseen before one is known to be void.
    stamp: u64,
}

/// All cores of a machine.
#[derive(Debug)]
pub(super) struct Cores {
    pools: Vec<Pool>,
    ranks_per_pool: usize,
    cores: f64,
}

/// An end that is foreseen: it counts if `stamp` is still the pool's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct End {
    pub pool: usize,
    pub stamp: u64,
    pub at: f64,
}

impl Cores {
    /// One pool for every `ranks_per_pool` ranks, with so many cores.
    pub fn new(ranks: usize, ranks_per_pool: usize, cores: usize) -> Cores {
        Cores {
            pools: vec![Pool::default(); ranks.div_ceil(ranks_per_pool)],
            ranks_per_pool,
            cores: cores as f64,
        }
    }

    /// A rank begins something that would take `seconds` with nothing else under way, on all
    /// workers if it is for them. Returns the pool's next end.
    pub fn begin(&mut self, now: f64, rank: usize, seconds: f64, kind: Kind) -> End {
        let pool = rank / self.ranks_per_pool;
        self.catch_up(pool, now);
        self.pools[pool].active.push(Active {
            rank,
            left_s: seconds,
            kind,
        });
        self.foresee(pool, now)
    }

    /// The rank that is done, if this end is not void, and the pool's next end, if there is one.
    pub fn end(&mut self, end: End) -> Option<(usize, Option<End>)> {
        let End { pool, stamp, at } = end;
        if self.pools[pool].stamp != stamp {
            return None;
        }
        self.catch_up(pool, at);
        let done = self.first_done(pool);
        let done = self.pools[pool].active.remove(done).rank;
        let more = !self.pools[pool].active.is_empty();
        Some((done, more.then(|| self.foresee(pool, at))))
    }

    /// How fast each kind of work goes, as a part of the seconds it was begun with.
    fn speeds(&self, pool: usize) -> impl Fn(Kind) -> f64 + use<> {
        let active = || self.pools[pool].active.iter().map(|active| active.kind);
        let threads = active().filter(|kind| *kind == Kind::Alone).count();
        let wanted: f64 = active().map(Kind::share).sum();
        let workers = self.cores * wanted.min(1.0);
        let each = (self.cores / (workers + threads as f64)).min(1.0);
        move |kind| match kind {
            Kind::Delay => 1.0,
            Kind::Alone => each,
            Kind::Spread(share) => each * share / wanted.max(1.0),
        }
    }

    fn catch_up(&mut self, pool: usize, now: f64) {
        let speed = self.speeds(pool);
        let Pool { active, since, .. } = &mut self.pools[pool];
        let passed = now - *since;
        *since = now;
        if passed > 0.0 {
            for one in active {
                one.left_s = (one.left_s - passed * speed(one.kind)).max(0.0);
            }
        }
    }

    /// The one that would be done first, the earliest begun of equals.
    fn first_done(&self, pool: usize) -> usize {
        let speed = self.speeds(pool);
        let time = |one: &Active| one.left_s / speed(one.kind);
        let active = self.pools[pool].active.iter().enumerate();
        let first = active.min_by(|(_, a), (_, b)| time(a).total_cmp(&time(b)));
        first.expect("somebody is under way").0
    }

    fn foresee(&mut self, pool: usize, now: f64) -> End {
        let speed = self.speeds(pool);
        let first = self.pools[pool].active[self.first_done(pool)];
        let left = first.left_s / speed(first.kind);
        self.pools[pool].stamp += 1;
        End {
            pool,
            stamp: self.pools[pool].stamp,
            at: now + left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cores, Kind};

    #[test]
    fn threads_and_workers_share_cores_and_delays_take_none() {
        let mut cores = Cores::new(3, 3, 2);
        cores.begin(0.0, 0, 1.0, Kind::Alone);
        cores.begin(0.0, 1, 4.0, Kind::Spread(1.0));
        let end = cores.begin(0.0, 2, 1.0, Kind::Delay);
        // Two workers and a thread on two cores: two thirds of a core for each.
        assert_eq!(end.at, 1.0);
        let (rank, end) = cores.end(end).unwrap();
        let end = end.unwrap();
        assert_eq!(rank, 2);
        assert!((end.at - 1.5).abs() < 1e-12, "{end:?}");
        let (rank, end) = cores.end(end).unwrap();
        let end = end.unwrap();
        assert_eq!(rank, 0);
        // The job has had 1.5 s at two thirds; alone it takes the 3 s that are left.
        assert!((end.at - 4.5).abs() < 1e-12, "{end:?}");
        // A change makes the end that was foreseen void.
        cores.begin(2.0, 0, 1.0, Kind::Spread(1.0));
        assert_eq!(cores.end(end), None);
    }

    #[test]
    fn a_small_job_leaves_workers_to_others() {
        let mut cores = Cores::new(3, 3, 4);
        // Alone, it has a quarter of the workers: four times as long as on all of them.
        let end = cores.begin(0.0, 0, 1.0, Kind::Spread(0.25));
        assert_eq!(end.at, 4.0);
        // Three quarters are left: two of the jobs go on side by side as if each were alone.
        let end = cores.begin(0.0, 1, 1.5, Kind::Spread(0.75));
        assert_eq!(end.at, 2.0);
        // There is not enough for all three: each gets its part of what it could use.
        let end = cores.begin(0.0, 2, 1.0, Kind::Spread(1.0));
        assert_eq!(end.at, 2.0);
        assert_eq!(cores.end(end).map(|(rank, _)| rank), Some(2));
    }
}
