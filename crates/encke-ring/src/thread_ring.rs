//! All ranks as threads of this process.
//!
//! The default for one machine: no launcher, no network. Ranks and their buffers outlive a call, so
//! the second call with the same plan allocates only its outputs, and not even those if earlier
//! outputs were dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::kernel::Kernel;
use encke_core::plan::membership::Epoch;
use encke_core::plan::program::Role;
use encke_core::plan::resize::Resize;
use encke_core::plan::{Plan, Request};
use encke_core::tensor::View;
use encke_core::transport::Moved;

use crate::cache::{CacheLimits, CacheStats, RingCache};
use crate::call::{CallInputs, CallRows};
use crate::error::{RankError, RingError};
use crate::fault_injector::{Fault, FaultInjector};
use crate::memory::{self, RankMemory};
use crate::outcome::Outcome;
use crate::rank::Rank;
use crate::rank_threads::{JoinedRanks, run_on_threads};
use crate::resize::{self, Resized};
use crate::sharded::Sharded;
use crate::survival::run_surviving;
use crate::trace::{Activity, Event, Trace};

/// Ranks as threads of this process.
pub struct ThreadRing<K: Kernel> {
    kernel: K,
    deadline: Duration,
    faults: Vec<Fault>,
    cache: RingCache<K>,
}

impl<K: Kernel> ThreadRing<K> {
    /// A ring on one kernel. No exchange waits longer than `deadline` for another rank.
    pub fn new(kernel: K, deadline: Duration) -> ThreadRing<K> {
        ThreadRing {
            kernel,
            deadline,
            faults: Vec::new(),
            cache: RingCache::new(CacheLimits::default()),
        }
    }

    /// Limits what is kept between calls, and drops what is kept now.
    pub fn with_limits(mut self, limits: CacheLimits) -> ThreadRing<K> {
        self.cache = RingCache::new(limits);
        self
    }

    /// Injects faults: in every call with redundancy, ranks die as listed.
    pub fn with_faults(mut self, faults: Vec<Fault>) -> ThreadRing<K> {
        self.faults = faults;
        self
    }

    /// The kernel.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Returns the kernel and drops everything that was kept.
    pub fn into_kernel(self) -> K {
        self.kernel
    }

    /// Cache hits and misses of plans and buffers.
    pub fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// How much is kept between calls at most.
    pub fn limits(&self) -> CacheLimits {
        self.cache.limits()
    }

    /// The plan for a request, cached if there is one.
    pub fn plan(&self, request: &Request) -> Result<Arc<Plan>, RingError> {
        Ok(self.cache.plan(request)?)
    }

    /// Computes a request on whole tensors, one thread for each rank. A single rank runs on the
    /// caller's thread.
    pub fn run(
        &self,
        request: &Request,
        inputs: &[(Role, View<'_>)],
    ) -> Result<Outcome, RingError> {
        let (kernel, pool) = (&self.kernel, self.cache.outputs());
        let inputs = CallInputs::Whole(inputs);
        self.call(request, inputs, |plan, ranks, events, memory| {
            let rows = CallRows::whole(plan);
            Outcome::collect_rows(kernel, plan, rows, ranks, events, memory, pool)
        })
    }

    /// Computes a request on sharded tensors; the results are sharded too.
    pub fn run_shards(
        &self,
        request: &Request,
        inputs: &[(Role, &Sharded)],
    ) -> Result<Outcome<Sharded>, RingError> {
        let inputs = CallInputs::Shards(inputs);
        self.call(request, inputs, |plan, ranks, events, memory| {
            Outcome::collect_shards(&self.kernel, plan, ranks, events, memory)
        })
    }

    /// Computes a request; `collect` makes the outcome from the ranks that finished.
    fn call<T>(
        &self,
        request: &Request,
        inputs: CallInputs<'_, '_>,
        collect: impl FnOnce(
            &Arc<Plan>,
            &mut [Rank<K>],
            Vec<Event>,
            Vec<RankMemory>,
        ) -> Result<Outcome<T>, RingError>,
    ) -> Result<Outcome<T>, RingError> {
        encke_pool::check()?;
        let plan = self.plan(request)?;
        inputs.check(&plan)?;
        let ranks = plan.ranks();
        if let Some(fault) = self.faults.iter().find(|fault| fault.rank >= ranks) {
            let rank = fault.rank;
            return Err(encke_core::Error::NoSuchRank { rank, ranks }.into());
        }
        let mut ranks = match self.cache.take_ranks(&plan) {
            Some(ranks) => ranks,
            None => {
                let rank = |rank: usize| Ok(Rank::idle(plan.rank(rank)?));
                let ranks = (0..plan.ranks()).map(rank);
                ranks.collect::<Result<_, RingError>>()?
            }
        };
        let JoinedRanks { events, deaths } = self.run_ranks(&plan, &mut ranks, inputs)?;
        let died = |rank: &mut Rank<K>| {
            let number = rank.plan().rank;
            deaths.iter().any(|(dead, _)| *dead == number)
        };
        let dead: Vec<Rank<K>> = ranks.extract_if(.., died).collect();
        let memory = memory::of_ranks(&self.kernel, &ranks, request);
        let mut outcome = collect(&plan, &mut ranks, events, memory)?;
        if dead.is_empty() {
            let max_bytes = self.limits().pool_bytes;
            self.cache.put_ranks(plan, ranks, max_bytes);
        }
        outcome.record_deaths(deaths, dead.iter().map(Rank::pairs).sum());
        Ok(outcome)
    }

    fn run_ranks(
        &self,
        plan: &Arc<Plan>,
        ranks: &mut [Rank<K>],
        inputs: CallInputs<'_, '_>,
    ) -> Result<JoinedRanks, RingError> {
        let (kernel, survives) = (&self.kernel, plan.request().redundancy > 0);
        run_on_threads(
            ranks,
            self.deadline,
            survives,
            |rank, mut endpoint, recorder| {
                let reused = rank.reuse_outputs(kernel, self.cache.outputs());
                reused.map_err(RankError::before_start)?;
                let start = Instant::now();
                let borrowed = inputs.bind(kernel, rank)?;
                recorder.record(0, Activity::Load, start, Moved::default());
                if !survives {
                    return rank.run_on(kernel, &borrowed, &mut endpoint, recorder);
                }
                let mut endpoint = FaultInjector::new(rank.plan().rank, endpoint, &self.faults);
                let mut epoch = Epoch::first(plan);
                // Outputs stay in the rank's buffers until all threads have been joined.
                let store = &mut |_: &Rank<K>| Ok(());
                run_surviving(
                    kernel,
                    rank,
                    &mut epoch,
                    borrowed,
                    &mut endpoint,
                    recorder,
                    store,
                )
            },
        )
    }

    /// Moves tensors from one sharding to another, one thread for each place.
    pub fn resize(&self, resize: &Resize, tensors: &[&Sharded]) -> Result<Resized, RingError> {
        encke_pool::check()?;
        resize::check_tensors(resize, tensors)?;
        let mut ranks = resize::idle_ranks(resize, tensors);
        let work = |rank: &mut Rank<K>, mut endpoint, recorder: &mut _| {
            let place = rank.plan().rank;
            let shard = |index: usize| tensors[index].shard(place).view();
            let borrowed = resize::bind_inputs(&self.kernel, rank, shard)?;
            rank.run_on(&self.kernel, &borrowed, &mut endpoint, recorder)
        };
        let JoinedRanks { events, .. } = run_on_threads(&mut ranks, self.deadline, false, work)?;
        Ok(Resized {
            tensors: resize::collect(&self.kernel, resize, &ranks, tensors)?,
            trace: Trace { events },
            memory: ranks.iter().map(memory::of_buffers).collect(),
        })
    }
}
