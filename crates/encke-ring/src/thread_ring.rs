//! All ranks as threads of this process.
//!
//! The embedded default: no launcher, no network. Ranks and their buffers outlive a call, so the
//! second call with the same plan allocates nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::tensor_pool::TensorPool;
use encke_core::kernel::Kernel;
use encke_core::plan::membership::Epoch;
use encke_core::plan::program::Role;
use encke_core::plan::resize::Resize;
use encke_core::plan::{Plan, Request};
use encke_core::tensor::View;

use crate::cache::{CacheLimits, CacheStats, Plans, Recent};
use crate::call::{Given, Outcome, bind_inputs, conclude, guarded};
use crate::error::{RankError, RingError};
use crate::fault_injector::{Fault, FaultInjector};
use crate::memory::{self, RankMemory};
use crate::rank::Rank;
use crate::resize::{self, Resized};
use crate::sharded::Sharded;
use crate::survive::survive;
use crate::threads::{Endpoint, endpoints};
use crate::trace::{Event, Recorder, Trace};

/// Ranks as threads of this process.
pub struct ThreadRing<K: Kernel> {
    kernel: K,
    deadline: Duration,
    faults: Vec<Fault>,
    limits: CacheLimits,
    spare: Arc<TensorPool>,
    state: Mutex<State<K>>,
}

/// How a rank's thread ended: with what it noted, or with what went wrong.
pub type Life = Result<Vec<Event>, RankError>;

struct State<K: Kernel> {
    plans: Plans,
    idle: Recent<Arc<Plan>, Vec<Rank<K>>>,
    stats: CacheStats,
}

impl<K: Kernel> State<K> {
    fn new(limits: CacheLimits) -> State<K> {
        State {
            plans: Plans::new(limits.plans),
            idle: Recent::new(limits.pools),
            stats: CacheStats::default(),
        }
    }
}

/// Where outputs leave their memory: nowhere, where nothing is to be kept.
fn spare(limits: CacheLimits) -> Arc<TensorPool> {
    let most = match limits.pools {
        0 => 0,
        _ => limits.pool_bytes,
    };
    Arc::new(TensorPool::new(most))
}

/// Bytes that the ranks of a plan hold on to.
fn bytes_of<K: Kernel>(ranks: &[Rank<K>]) -> usize {
    ranks.iter().map(Rank::allocated_bytes).sum()
}

impl<K: Kernel> ThreadRing<K> {
    /// A ring on one kernel. No exchange waits longer than `deadline` for another rank.
    pub fn new(kernel: K, deadline: Duration) -> ThreadRing<K> {
        let limits = CacheLimits::default();
        ThreadRing {
            kernel,
            deadline,
            faults: Vec::new(),
            limits,
            spare: spare(limits),
            state: Mutex::new(State::new(limits)),
        }
    }

    /// Keeps no more than this between calls; what was kept is given up.
    pub fn with_limits(mut self, limits: CacheLimits) -> ThreadRing<K> {
        self.limits = limits;
        self.spare = spare(limits);
        self.state = Mutex::new(State::new(limits));
        self
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
        let state = self.state();
        CacheStats {
            plans: state.plans.len(),
            pools: state.idle.len(),
            pool_bytes: state.idle.weight(|ranks| bytes_of(ranks)),
            pooled_bytes: self.spare.bytes(),
            ..state.stats
        }
    }

    /// What is kept between calls at most.
    pub fn limits(&self) -> CacheLimits {
        self.limits
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
        let tokens = request.shape.tokens;
        let (kernel, spare) = (&self.kernel, &self.spare);
        self.call(
            request,
            Given::Whole(inputs),
            |plan, ranks, events, memory| {
                Outcome::collect_rows(kernel, plan, tokens, ranks, events, memory, spare)
            },
        )
    }

    /// The same on tensors that lie in shards, and with results that do.
    pub fn run_shards(
        &self,
        request: &Request,
        inputs: &[(Role, &Sharded)],
    ) -> Result<Outcome<Sharded>, RingError> {
        self.call(
            request,
            Given::Shards(inputs),
            |plan, ranks, events, memory| {
                Outcome::collect_shards(&self.kernel, plan, ranks, events, memory)
            },
        )
    }

    /// Carries out a request, and has its outputs collected.
    fn call<T>(
        &self,
        request: &Request,
        given: Given<'_, '_>,
        collect: impl FnOnce(
            &Arc<Plan>,
            &mut [Rank<K>],
            Vec<Event>,
            Vec<RankMemory>,
        ) -> Result<Outcome<T>, RingError>,
    ) -> Result<Outcome<T>, RingError> {
        let plan = self.plan(request)?;
        given.check(&plan)?;
        let mut ranks = self.ranks(&plan)?;
        let Ended { events, deaths } = self.drive(&plan, &mut ranks, given)?;
        let died = |rank: &mut Rank<K>| {
            let number = rank.plan().rank;
            deaths.iter().any(|(dead, _)| *dead == number)
        };
        let dead: Vec<Rank<K>> = ranks.extract_if(.., died).collect();
        let memory = memory::of_ranks(&self.kernel, &ranks, request);
        let mut outcome = collect(&plan, &mut ranks, events, memory)?;
        if dead.is_empty() {
            let mut state = self.state();
            state.idle.put(plan, ranks);
            let most = self.limits.pool_bytes;
            state.idle.lighten(most, |ranks| bytes_of(ranks));
        }
        outcome.record_deaths(deaths, dead.iter().map(Rank::pairs).sum());
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
        given: Given<'_, '_>,
    ) -> Result<Ended, RingError> {
        let origin = Instant::now();
        let (ended, first) = on_threads(ranks, self.deadline, |rank, endpoint| {
            self.live(plan, rank, endpoint, given, origin)
        })?;
        let survives = plan.request().redundancy > 0;
        Ended::new(ended, first, survives)
    }

    /// Moves tensors from one sharding to another, one thread a place.
    pub fn resize(&self, resize: &Resize, tensors: &[&Sharded]) -> Result<Resized, RingError> {
        resize::check_tensors(resize, tensors)?;
        let mut ranks = resize::recruits(resize, tensors);
        let origin = Instant::now();
        let (ended, first) = on_threads(&mut ranks, self.deadline, |rank, mut endpoint| {
            let number = rank.plan().rank;
            let mut recorder = Recorder::new(number, origin);
            let hub = endpoint.observer();
            let result = guarded(|| {
                let loans = resize::bind_inputs(&self.kernel, rank, tensors)?;
                rank.run_on(&self.kernel, &loans, &mut endpoint, &mut recorder)
            });
            if let Err(error) = &result
                && !error.is_consequence()
            {
                hub.fail(number, error.to_string());
            }
            result.map(|()| recorder.finish())
        })?;
        let events = conclude(ended, first)?;
        Ok(Resized {
            tensors: resize::collect(&self.kernel, resize, &ranks, tensors)?,
            trace: Trace { events },
            memory: ranks.iter().map(memory::of_buffers).collect(),
        })
    }

    /// The life of one rank. However it ends, the others learn of it.
    fn live(
        &self,
        plan: &Arc<Plan>,
        rank: &mut Rank<K>,
        mut endpoint: Endpoint<K::Buffer>,
        given: Given<'_, '_>,
        origin: Instant,
    ) -> Life {
        let number = rank.plan().rank;
        let mut recorder = Recorder::new(number, origin);
        let survives = plan.request().redundancy > 0;
        let hub = endpoint.observer();
        let result = guarded(|| {
            let fitted = rank.refit(&self.kernel, &self.spare);
            fitted.map_err(|source| RankError::Kernel { round: 0, source })?;
            let loans = bind_inputs(&self.kernel, rank, given, &mut recorder)?;
            if !survives {
                return rank.run_on(&self.kernel, &loans, &mut endpoint, &mut recorder);
            }
            let mut endpoint = FaultInjector::new(number, endpoint, &self.faults);
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
}

/// Runs every rank on a thread of its own, with an end of what connects them, where no exchange waits
/// longer than `deadline`: how each ended, and which failed first.
pub fn on_threads<K: Kernel>(
    ranks: &mut [Rank<K>],
    deadline: Duration,
    life: impl Fn(&mut Rank<K>, Endpoint<K::Buffer>) -> Life + Sync,
) -> Result<(Vec<Life>, Option<usize>), RingError> {
    let endpoints = endpoints(ranks.len(), deadline);
    let observer = endpoints.first().map(Endpoint::observer);
    let ended = match ranks {
        // One rank needs no thread of its own: starting it would take as long as a short call.
        [rank] => endpoints
            .into_iter()
            .map(|endpoint| life(rank, endpoint))
            .collect(),
        ranks => live_together(ranks, endpoints, &life)?,
    };
    let first = observer.and_then(|observer| observer.failure());
    Ok((ended, first.map(|(rank, _)| rank)))
}

/// Every rank on a thread of its own; how each ended.
fn live_together<K: Kernel>(
    ranks: &mut [Rank<K>],
    endpoints: Vec<Endpoint<K::Buffer>>,
    life: &(impl Fn(&mut Rank<K>, Endpoint<K::Buffer>) -> Life + Sync),
) -> Result<Vec<Life>, RingError> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, endpoint) in ranks.iter_mut().zip(endpoints) {
            let number = rank.plan().rank;
            let hub = endpoint.observer();
            let work = move || life(rank, endpoint);
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

/// How the ranks of a call ended that has a result.
struct Ended {
    events: Vec<Event>,
    deaths: Vec<(usize, RankError)>,
}

impl Ended {
    /// Where a call `survives`, deaths do not matter once everyone else has come to the end;
    /// anything else is the failure that came `first`.
    fn new(ended: Vec<Life>, first: Option<usize>, survives: bool) -> Result<Ended, RingError> {
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
