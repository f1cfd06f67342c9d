//! One rank of a ring whose other ranks are elsewhere, on tensors of the caller.
//!
//! Not a launcher and not a transport: the program that started the processes provides a
//! [`Transport`] between them, and every process makes the same calls in the same order. Plans and
//! buffers outlive a call, as in [`ThreadRing`](crate::ThreadRing).
//!
//! The decision here: a call that failed leaks its buffers. A transport that has given up may still
//! write to them, and leaked memory is cheaper than a write to memory that was freed.

use std::sync::Arc;
use std::time::Instant;

use encke_core::DType;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::resize::Resize;
use encke_core::plan::{Plan, Queries, Request};
use encke_core::tensor::{Tensor, View};
use encke_core::transport::Transport;

use crate::cache::{CacheLimits, CacheStats, RingCache};
use crate::call::{CallInputs, CallRows, check_rows};
use crate::error::{RankError, RingError, catch_panic};
use crate::outcome::Outcome;
use crate::rank::Rank;
use crate::resize;
use crate::shard_call::ShardCall;
use crate::trace::Recorder;

/// One rank, and what it keeps between calls.
pub struct ShardRing<K: Kernel> {
    kernel: K,
    rank: usize,
    cache: RingCache<K>,
}

impl<K: Kernel> ShardRing<K> {
    /// Rank `rank`, on a kernel.
    pub fn new(kernel: K, rank: usize) -> ShardRing<K> {
        ShardRing {
            kernel,
            rank,
            cache: RingCache::new(CacheLimits::default()),
        }
    }

    /// The number of the rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The kernel.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Cache hits and misses of plans and buffers.
    pub fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// The plan for a request, cached if there is one.
    pub fn plan(&self, request: &Request) -> Result<Arc<Plan>, RingError> {
        Ok(self.cache.plan(request)?)
    }

    /// Computes this rank's part of a request on its shard: tensors `[b, rows, h, d]`, with rows in
    /// the order of [`Sharding::runs`](encke_core::sharding::Sharding::runs). So are the results.
    pub fn run(
        &self,
        request: &Request,
        inputs: &[(Role, View<'_>)],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Outcome, RingError> {
        encke_pool::check()?;
        check_request(request)?;
        let plan = self.plan(request)?;
        let rows = CallRows::of_shard(&plan, self.rank);
        check_rows(&plan, rows, inputs)?;
        let idle = self
            .cache
            .take_ranks(&plan)
            .and_then(|mut ranks| ranks.pop());
        let mut rank = match idle {
            Some(rank) => rank,
            None => Rank::idle(plan.rank(self.rank)?.on_shard()),
        };
        let reused = catch_panic(|| {
            let reused = rank.reuse_outputs(&self.kernel, self.cache.outputs());
            reused.map_err(RankError::before_start)
        });
        reused.map_err(|source| RingError::of_rank(self.rank, source))?;
        let mut call = ShardCall::on_rank(&self.kernel, &plan, rank);
        let loaded = call.load(&mut CallInputs::Whole(inputs));
        let failed = |source| RingError::of_rank(self.rank, source);
        if let Err(error) = loaded.and_then(|()| call.run(transport).map_err(failed)) {
            std::mem::forget(call);
            return Err(error);
        }
        let (rank, report) = call.into_parts();
        let (mut ranks, memory) = (vec![rank], vec![report.memory]);
        let (events, pool) = (report.events, self.cache.outputs());
        let kernel = &self.kernel;
        let outcome = Outcome::collect_rows(kernel, &plan, rows, &mut ranks, events, memory, pool)?;
        // No limit on the bytes: a forward and a backward pass both need theirs again.
        self.cache.put_ranks(plan, ranks, usize::MAX);
        Ok(outcome)
    }

    /// Moves this rank's shards of some tensors from one sharding to another, as the place of this
    /// rank's number. `tensors` lists the dimensions of the whole tensors and their types; `shards`
    /// are this place's old shards, none where it was not part of the old ring. Returns its new
    /// shards, none where it is not part of the new ring.
    pub fn resize(
        &self,
        resize: &Resize,
        tensors: &[([usize; 4], DType)],
        shards: &[View<'_>],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Vec<Tensor>, RingError> {
        encke_pool::check()?;
        resize::check_shards(resize, self.rank, tensors, shards)?;
        let mut rank = resize::idle_rank(resize, self.rank, tensors);
        let mut recorder = Recorder::new(self.rank, Instant::now());
        let ran = catch_panic(|| {
            let borrowed = resize::bind_inputs(&self.kernel, &mut rank, |index| shards[index])?;
            rank.run_on(&self.kernel, &borrowed, transport, &mut recorder)
        });
        if let Err(source) = ran {
            std::mem::forget(rank);
            return Err(RingError::of_rank(self.rank, source));
        }
        match resize.new_rank(self.rank) {
            Some(_) => resize::new_shards(&self.kernel, resize, &rank, tensors),
            None => Ok(Vec::new()),
        }
    }
}

/// Refuses requests that need more than this rank's rows.
fn check_request(request: &Request) -> Result<(), RingError> {
    if request.queries == Queries::Replicated {
        return Err(RingError::Elsewhere {
            what: "holding all queries",
            hint: "use sharded queries",
        });
    }
    if request.redundancy > 0 {
        return Err(RingError::Elsewhere {
            what: "keeping the inputs of other ranks",
            hint: "use a redundancy of 0",
        });
    }
    Ok(())
}
