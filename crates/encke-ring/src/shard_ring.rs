//! One rank of a ring whose other ranks are elsewhere, with its shard as tensors of the caller.
//!
//! Not a launcher and not a wire: whoever started the processes brings a [`Transport`] between
//! them, and every process makes the same calls in the same order. Plans and buffers outlive a
//! call, as in [`ThreadRing`](crate::ThreadRing).
//!
//! The decision here: a call that failed keeps its buffers for ever. A wire that has given up may
//! still be at them, and memory that is lost with a failed call is cheaper than memory that is
//! written to after it was given back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::tensor_pool::TensorPool;
use encke_core::kernel::Kernel;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::{Plan, Queries, Request};
use encke_core::tensor::View;
use encke_core::transport::Transport;

use crate::cache::{CacheLimits, CacheStats, Plans, Recent};
use crate::call::{Given, Outcome, bind_inputs, check_rows, guarded};
use crate::error::{RankError, RingError};
use crate::memory::{RankMemory, planned};
use crate::rank::Rank;
use crate::trace::Recorder;

/// How many plans are remembered.
const PLANS: usize = 64;
/// How many plans keep their buffers: a forward and a backward of two shapes.
const POOLS: usize = 4;

/// One rank, with what it keeps between calls.
pub struct ShardRing<K: Kernel> {
    kernel: K,
    rank: usize,
    spare: Arc<TensorPool>,
    state: Mutex<State<K>>,
}

struct State<K: Kernel> {
    plans: Plans,
    idle: Recent<Arc<Plan>, Rank<K>>,
    stats: CacheStats,
}

impl<K: Kernel> ShardRing<K> {
    /// The rank of this number, on a kernel.
    pub fn new(kernel: K, rank: usize) -> ShardRing<K> {
        ShardRing {
            kernel,
            rank,
            spare: Arc::new(TensorPool::new(CacheLimits::default().pool_bytes)),
            state: Mutex::new(State {
                plans: Plans::new(PLANS),
                idle: Recent::new(POOLS),
                stats: CacheStats::default(),
            }),
        }
    }

    /// Its number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The kernel.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// How often plans and buffers were found rather than made.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            pooled_bytes: self.spare.bytes(),
            ..self.state().stats
        }
    }

    /// The plan for a request, from the cache if it is there.
    pub fn plan(&self, request: &Request) -> Result<Arc<Plan>, RingError> {
        let mut state = self.state();
        let State { plans, stats, .. } = &mut *state;
        Ok(plans.get(request, stats)?)
    }

    fn state(&self) -> MutexGuard<'_, State<K>> {
        // A panic elsewhere cannot leave the caches half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out this rank's part of a request on its shard: tensors `[b, rows, h, d]`, with rows
    /// in the order of [`Sharding::runs`](encke_core::sharding::Sharding::runs). So are the results.
    pub fn run(
        &self,
        request: &Request,
        inputs: &[(Role, View<'_>)],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Outcome, RingError> {
        check_request(request)?;
        let plan = self.plan(request)?;
        let rows = request.sharding.rows(request.shape.tokens, self.rank);
        check_rows(&plan, rows, inputs)?;
        let mut rank = self.recruit(&plan)?;
        let mut recorder = Recorder::new(self.rank, Instant::now());
        let ran = guarded(|| {
            let fitted = rank.refit(&self.kernel, &self.spare);
            fitted.map_err(|source| RankError::Kernel { round: 0, source })?;
            let loans = bind_inputs(&self.kernel, &mut rank, Given::Whole(inputs), &mut recorder)?;
            rank.run_on(&self.kernel, &loans, transport, &mut recorder)
        });
        if let Err(source) = ran {
            std::mem::forget(rank);
            return Err(RingError::Rank {
                rank: self.rank,
                source,
                others: Vec::new(),
            });
        }
        let memory = vec![self.memory(&rank, request)];
        let (kernel, ranks) = (&self.kernel, std::slice::from_mut(&mut rank));
        let events = recorder.finish();
        let spare = &self.spare;
        let outcome = Outcome::collect_rows(kernel, &plan, rows, ranks, events, memory, spare)?;
        self.state().idle.put(plan, rank);
        Ok(outcome)
    }

    /// This rank with its buffers: those of an earlier call with this plan, or none yet.
    fn recruit(&self, plan: &Arc<Plan>) -> Result<Rank<K>, RingError> {
        let mut state = self.state();
        if let Some((_, rank)) = state.idle.take(|key| Arc::ptr_eq(key, plan)) {
            state.stats.buffer_hits += 1;
            return Ok(rank);
        }
        state.stats.buffer_misses += 1;
        drop(state);
        Ok(Rank::idle(plan.rank(self.rank)?.on_shard()))
    }

    fn memory(&self, rank: &Rank<K>, request: &Request) -> RankMemory {
        let mut ledger = rank.ledger().clone();
        let scratch = self.kernel.scratch_bytes();
        ledger.hold(rank.plan().rounds.len(), Component::Workspace, scratch);
        RankMemory {
            rank: self.rank,
            planned: planned(&self.kernel, rank.plan(), 1, request),
            lent_bytes: rank.lent_bytes(),
            allocated_bytes: rank.allocated_bytes(),
            ledger,
        }
    }
}

/// Refuses what a rank with nothing but its own rows cannot do.
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
