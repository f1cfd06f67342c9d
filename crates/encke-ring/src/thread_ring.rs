//! All ranks as threads of this process.
//!
//! The embedded default: no launcher, no network. Ranks and their buffers outlive a call, so the
//! second call with the same plan allocates nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use encke_core::kernel::Kernel;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::{Plan, Request};
use encke_core::tensor::View;

use crate::cache::{CacheStats, Plans, Recent};
use crate::call::{Outcome, admit, check_inputs, conclude, guarded};
use crate::error::{RankError, RingError};
use crate::memory::{self, RankMemory};
use crate::rank::Rank;
use crate::threads::{Endpoint, endpoints};
use crate::trace::{Event, Recorder};

/// How many plans are remembered.
const PLANS: usize = 64;
/// How many plans keep their buffers: a forward and a backward of two shapes.
const POOLS: usize = 4;

/// Ranks as threads of this process.
pub struct ThreadRing<K: Kernel> {
    kernel: K,
    deadline: Duration,
    state: Mutex<State<K>>,
}

struct State<K: Kernel> {
    plans: Plans,
    idle: Recent<Arc<Plan>, Vec<Rank<K>>>,
    stats: CacheStats,
}

impl<K: Kernel> ThreadRing<K> {
    /// A ring on one kernel. No exchange waits longer than `deadline` for another rank.
    pub fn new(kernel: K, deadline: Duration) -> ThreadRing<K> {
        ThreadRing {
            kernel,
            deadline,
            state: Mutex::new(State {
                plans: Plans::new(PLANS),
                idle: Recent::new(POOLS),
                stats: CacheStats::default(),
            }),
        }
    }

    /// The kernel.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// The kernel back; everything kept is given up.
    pub fn into_kernel(self) -> K {
        self.kernel
    }

    /// How often plans and buffers were found rather than made.
    pub fn stats(&self) -> CacheStats {
        self.state().stats
    }

    /// The plan for a request, from the cache if it is there.
    pub fn plan(&self, request: &Request) -> Result<Arc<Plan>, RingError> {
        let mut state = self.state();
        let State { plans, stats, .. } = &mut *state;
        Ok(plans.get(request, stats)?)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State<K>> {
        // A panic elsewhere cannot leave the caches half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out a request on whole tensors, one thread a rank.
    pub fn run(
        &self,
        request: &Request,
        inputs: &[(Role, View<'_>)],
    ) -> Result<Outcome, RingError> {
        let plan = self.plan(request)?;
        check_inputs(&plan, inputs)?;
        let mut ranks = self.ranks(&plan)?;
        let events = self.drive(&mut ranks, inputs)?;
        let memory = |rank: &Rank<K>| self.memory(rank, ranks.len(), request);
        let memory = ranks.iter().map(memory).collect();
        let outcome = Outcome::collect(&self.kernel, &plan, &mut ranks, events, memory)?;
        self.state().idle.put(plan, ranks);
        Ok(outcome)
    }

    /// Ranks with their buffers: those of an earlier call with this plan, or new ones.
    fn ranks(&self, plan: &Arc<Plan>) -> Result<Vec<Rank<K>>, RingError> {
        let mut state = self.state();
        if let Some((_, ranks)) = state.idle.take(|key| Arc::ptr_eq(key, plan)) {
            state.stats.buffer_hits += 1;
            return Ok(ranks);
        }
        state.stats.buffer_misses += 1;
        drop(state);
        let rank = |rank: usize| Ok(Rank::idle(plan.rank(rank)?));
        (0..plan.ranks()).map(rank).collect()
    }

    /// Runs every rank to its end and collects what they noted, or how they failed.
    fn drive(
        &self,
        ranks: &mut [Rank<K>],
        inputs: &[(Role, View<'_>)],
    ) -> Result<Vec<Event>, RingError> {
        let origin = Instant::now();
        let endpoints = endpoints(ranks.len(), self.deadline);
        let observer = endpoints.first().map(Endpoint::observer);
        let ended: Vec<Result<Vec<Event>, RankError>> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (rank, mut endpoint) in ranks.iter_mut().zip(endpoints) {
                let number = rank.plan().rank;
                let hub = endpoint.observer();
                let work = move || self.live(rank, &mut endpoint, inputs, origin);
                let named = std::thread::Builder::new().name(format!("encke-rank-{number}"));
                match named.spawn_scoped(scope, work) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        // Those already running are told, so that the scope can end.
                        hub.fail(number, error.to_string());
                        return Err(RingError::Thread {
                            rank: number,
                            reason: error.to_string(),
                        });
                    }
                }
            }
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().expect("a rank catches its own panics")
            };
            Ok(threads.into_iter().map(join).collect())
        })?;
        let first = observer.and_then(|observer| observer.failure());
        conclude(ended, first.map(|(rank, _)| rank))
    }

    /// The life of one rank's thread. However it ends, the others learn of it.
    fn live(
        &self,
        rank: &mut Rank<K>,
        endpoint: &mut Endpoint<K::Buffer>,
        inputs: &[(Role, View<'_>)],
        origin: Instant,
    ) -> Result<Vec<Event>, RankError> {
        let mut recorder = Recorder::new(rank.plan().rank, origin);
        let result = guarded(|| {
            let loans = admit(&self.kernel, rank, inputs, &mut recorder)?;
            rank.run_on(&self.kernel, &loans, endpoint, &mut recorder)
        });
        if let Err(error) = &result
            && !error.is_consequence()
        {
            endpoint.observer().fail(recorder.rank(), error.to_string());
        }
        result.map(|()| recorder.finish())
    }

    /// Planned and allocated bytes of a rank. Ranks share the kernel, and with it the workspace.
    fn memory(&self, rank: &Rank<K>, ranks: usize, request: &Request) -> RankMemory {
        let mut ledger = rank.ledger().clone();
        let share = self.kernel.scratch_bytes().div_ceil(ranks);
        ledger.hold(rank.plan().rounds.len(), Component::Workspace, share);
        let planned = memory::planned(&self.kernel, rank.plan(), ranks, request);
        RankMemory {
            rank: rank.plan().rank,
            planned,
            lent_bytes: rank.lent_bytes(),
            allocated_bytes: rank.allocated_bytes(),
            ledger,
        }
    }
}
