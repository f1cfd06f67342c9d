//! All ranks as threads of this process.
//!
//! The embedded default: no launcher, no network. Ranks and their buffers outlive a call, so the
//! second call with the same plan allocates nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use encke_core::kernel::Kernel;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::survival::Epoch;
use encke_core::plan::{Plan, Request};
use encke_core::tensor::View;

use crate::cache::{CacheStats, Plans, Recent};
use crate::call::{Outcome, admit, check_inputs, conclude, guarded};
use crate::error::{RankError, RingError};
use crate::fault::{Doomed, Fault};
use crate::memory::{self, RankMemory};
use crate::rank::Rank;
use crate::survive::survive;
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
    faults: Vec<Fault>,
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
            faults: Vec::new(),
            state: Mutex::new(State {
                plans: Plans::new(PLANS),
                idle: Recent::new(POOLS),
                stats: CacheStats::default(),
            }),
        }
    }

    /// A drill: in every call that has redundancy, ranks die as told.
    pub fn with_faults(mut self, faults: Vec<Fault>) -> ThreadRing<K> {
        self.faults = faults;
        self
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

    /// Carries out a request on whole tensors: a thread a rank, or the caller's where there is one.
    pub fn run(
        &self,
        request: &Request,
        inputs: &[(Role, View<'_>)],
    ) -> Result<Outcome, RingError> {
        let plan = self.plan(request)?;
        check_inputs(&plan, inputs)?;
        let mut ranks = self.ranks(&plan)?;
        let Ended { events, deaths } = self.drive(&plan, &mut ranks, inputs)?;
        let died = |rank: &mut Rank<K>| {
            let number = rank.plan().rank;
            deaths.iter().any(|(dead, _)| *dead == number)
        };
        let dead: Vec<Rank<K>> = ranks.extract_if(.., died).collect();
        let memory = |rank: &Rank<K>| self.memory(rank, ranks.len(), request);
        let memory = ranks.iter().map(memory).collect();
        let mut outcome = Outcome::collect(&self.kernel, &plan, &mut ranks, events, memory)?;
        if dead.is_empty() {
            self.state().idle.put(plan, ranks);
        }
        outcome.mourn(deaths, dead.iter().map(Rank::pairs).sum());
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
        plan: &Arc<Plan>,
        ranks: &mut [Rank<K>],
        inputs: &[(Role, View<'_>)],
    ) -> Result<Ended, RingError> {
        let origin = Instant::now();
        let endpoints = endpoints(ranks.len(), self.deadline);
        let observer = endpoints.first().map(Endpoint::observer);
        let ended = match ranks {
            // One rank needs no thread of its own: starting it would take as long as a short call.
            [rank] => {
                let alone = endpoints.into_iter();
                alone
                    .map(|endpoint| self.live(plan, rank, endpoint, inputs, origin))
                    .collect()
            }
            ranks => self.live_together(plan, ranks, endpoints, inputs, origin)?,
        };
        let first = observer.and_then(|observer| observer.failure());
        let survives = plan.request().redundancy > 0;
        Ended::new(ended, first.map(|(rank, _)| rank), survives)
    }

    /// Every rank on a thread of its own; how each ended.
    fn live_together(
        &self,
        plan: &Arc<Plan>,
        ranks: &mut [Rank<K>],
        endpoints: Vec<Endpoint<K::Buffer>>,
        inputs: &[(Role, View<'_>)],
        origin: Instant,
    ) -> Result<Vec<Result<Vec<Event>, RankError>>, RingError> {
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (rank, endpoint) in ranks.iter_mut().zip(endpoints) {
                let number = rank.plan().rank;
                let hub = endpoint.observer();
                let work = move || self.live(plan, rank, endpoint, inputs, origin);
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
        })
    }

    /// The life of one rank. However it ends, the others learn of it.
    fn live(
        &self,
        plan: &Arc<Plan>,
        rank: &mut Rank<K>,
        mut endpoint: Endpoint<K::Buffer>,
        inputs: &[(Role, View<'_>)],
        origin: Instant,
    ) -> Result<Vec<Event>, RankError> {
        let number = rank.plan().rank;
        let mut recorder = Recorder::new(number, origin);
        let survives = plan.request().redundancy > 0;
        let hub = endpoint.observer();
        let result = guarded(|| {
            let loans = admit(&self.kernel, rank, inputs, &mut recorder)?;
            if !survives {
                return rank.run_on(&self.kernel, &loans, &mut endpoint, &mut recorder);
            }
            let mut endpoint = Doomed::new(number, endpoint, &self.faults);
            let (mut epoch, recorder) = (Epoch::first(plan), &mut recorder);
            let stay = &mut |_: &Rank<K>| Ok(());
            survive(
                &self.kernel,
                rank,
                &mut epoch,
                loans,
                &mut endpoint,
                recorder,
                stay,
            )
        });
        match &result {
            Err(error) if survives && error.is_death() => hub.bury(number),
            Err(error) if !error.is_consequence() => hub.fail(number, error.to_string()),
            _ => {}
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

/// How the ranks of a call ended that has a result.
struct Ended {
    events: Vec<Event>,
    deaths: Vec<(usize, RankError)>,
}

impl Ended {
    /// Where a call `survives`, deaths do not matter once everyone else has come to the end;
    /// anything else is the failure that came `first`.
    fn new(
        ended: Vec<Result<Vec<Event>, RankError>>,
        first: Option<usize>,
        survives: bool,
    ) -> Result<Ended, RingError> {
        let finished = survives && ended.iter().any(Result::is_ok);
        let fatal = |ended: &Result<_, RankError>| matches!(ended, Err(e) if !e.is_death());
        if !finished || ended.iter().any(fatal) {
            let deaths = Vec::new();
            return conclude(ended, first).map(|events| Ended { events, deaths });
        }
        let (mut events, mut deaths) = (Vec::new(), Vec::new());
        for (rank, ended) in ended.into_iter().enumerate() {
            match ended {
                Ok(noted) => events.extend(noted),
                Err(error) => deaths.push((rank, error)),
            }
        }
        Ok(Ended { events, deaths })
    }
}
