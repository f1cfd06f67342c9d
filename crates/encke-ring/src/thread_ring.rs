//! All ranks as threads of this process.
//!
//! The embedded default: no launcher, no network. Ranks and their buffers outlive a call, so the
//! second call with the same plan allocates nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::program::{Component, RankPlan, Role};
use encke_core::plan::{Pass, Plan, Request};
use encke_core::tensor::{Tensor, View};
use encke_core::transport::Moved;
use encke_core::{DType, Error};
use std::collections::BTreeMap;

use crate::cache::{CacheStats, Plans, Recent};
use crate::error::{RankError, RingError};
use crate::rank::Rank;
use crate::threads::{Endpoint, endpoints};
use crate::trace::{Activity, Event, Recorder, Trace};

/// How many plans are remembered.
const PLANS: usize = 64;
/// How many plans keep their buffers: a forward and a backward of two shapes.
const POOLS: usize = 4;

/// What a call returned beside its tensors' names.
#[derive(Debug)]
pub struct Outcome {
    tensors: Vec<(Role, Tensor)>,
    /// What happened.
    pub trace: Trace,
    /// What each rank held.
    pub memory: Vec<RankMemory>,
    /// The plan that was carried out.
    pub plan: Arc<Plan>,
}

impl Outcome {
    /// Takes an output.
    pub fn take(&mut self, role: Role) -> Option<Tensor> {
        let at = self.tensors.iter().position(|(r, _)| *r == role)?;
        Some(self.tensors.swap_remove(at).1)
    }
}

/// Memory of one rank: planned, and counted from what was really allocated.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RankMemory {
    /// The rank.
    pub rank: usize,
    /// Bytes the plan lists, by what they are for, the kernel's workspace included.
    pub planned: BTreeMap<Component, usize>,
    /// Bytes its buffers really hold on to.
    pub allocated_bytes: usize,
}

impl RankMemory {
    /// All planned bytes.
    pub fn planned_bytes(&self) -> usize {
        self.planned.values().sum()
    }
}

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
        let memory = |rank: &Rank<K>| self.memory(rank, ranks.len(), request.dtype);
        let mut outcome = Outcome {
            tensors: Vec::new(),
            trace: Trace { events },
            memory: ranks.iter().map(memory).collect(),
            plan: Arc::clone(&plan),
        };
        for (role, dims, dtype) in outputs(&plan) {
            let mut tensor = Tensor::zeros(dtype, dims);
            // Where every rank has all of an output, the first one's word is as good as any.
            let everything = |rank: &Rank<K>| {
                let of = rank.plan().outputs.iter().find(|port| port.role == role);
                of.is_some_and(|port| port.runs.iter().map(|r| r.count).sum::<usize>() == dims[1])
            };
            let whole = ranks.iter().position(everything);
            for rank in whole.map_or(&ranks[..], |at| std::slice::from_ref(&ranks[at])) {
                let stored = rank.store(&self.kernel, role, &mut tensor);
                stored.map_err(|source| failed(rank.plan(), source))?;
            }
            outcome.tensors.push((role, tensor));
        }
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
        let rank = |rank: usize| {
            let program = plan.rank(rank)?;
            Rank::new(&self.kernel, program).map_err(|source| RingError::Rank {
                rank,
                source: RankError::Kernel { round: 0, source },
                others: Vec::new(),
            })
        };
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
        collect(ended, first.map(|(rank, _)| rank))
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
        let lived = catch_unwind(AssertUnwindSafe(|| {
            let begin = Instant::now();
            for (role, view) in inputs {
                let loaded = rank.load(&self.kernel, *role, view);
                loaded.map_err(|source| RankError::Kernel { round: 0, source })?;
            }
            recorder.note(0, Activity::Load, begin, Moved::default());
            rank.run(&self.kernel, endpoint, &mut recorder)
        }));
        let result = lived.unwrap_or_else(|panic| {
            Err(RankError::Panic {
                message: words(panic.as_ref()),
            })
        });
        if let Err(error) = &result
            && !error.is_consequence()
        {
            endpoint.observer().fail(recorder.rank(), error.to_string());
        }
        result.map(|()| recorder.finish())
    }

    /// Planned and allocated bytes of a rank. Ranks share the kernel, and with it the workspace.
    fn memory(&self, rank: &Rank<K>, ranks: usize, dtype: DType) -> RankMemory {
        let plan = rank.plan();
        let mut planned = plan.memory();
        let workspace = plan
            .jobs()
            .map(|job| self.kernel.workspace_bytes(job, dtype))
            .max();
        planned.insert(Component::Workspace, workspace.unwrap_or(0).div_ceil(ranks));
        RankMemory {
            rank: plan.rank,
            planned,
            allocated_bytes: rank.allocated_bytes(),
        }
    }
}

fn failed(plan: &RankPlan, source: KernelError) -> RingError {
    RingError::Rank {
        rank: plan.rank,
        source: RankError::Kernel {
            round: plan.rounds.len(),
            source,
        },
        others: Vec::new(),
    }
}

/// What a panic said.
fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string())
}

/// All events, or the failure that came first with those that followed from it.
fn collect(
    ended: Vec<Result<Vec<Event>, RankError>>,
    first: Option<usize>,
) -> Result<Vec<Event>, RingError> {
    let mut events = Vec::new();
    let mut errors = Vec::new();
    for (rank, result) in ended.into_iter().enumerate() {
        match result {
            Ok(noted) => events.extend(noted),
            Err(error) => errors.push((rank, error)),
        }
    }
    if errors.is_empty() {
        return Ok(events);
    }
    let at = errors.iter().position(|(rank, _)| Some(*rank) == first);
    let (rank, source) = errors.remove(at.unwrap_or(0));
    Err(RingError::Rank {
        rank,
        source,
        others: errors,
    })
}

/// The tensors a plan takes, with their shapes.
fn inputs_of(plan: &Plan) -> Vec<(Role, &'static str, [usize; 4])> {
    let shape = &plan.request().shape;
    let of = |heads: usize, dim: usize| [shape.batch, shape.tokens, heads, dim];
    let (q, kv) = (of(shape.heads, shape.dim), of(shape.kv_heads, shape.dim));
    let (out, lse) = (of(plan.slots(), shape.dim), of(plan.slots(), 1));
    let mut inputs = vec![(Role::Q, "q", q), (Role::K, "k", kv), (Role::V, "v", kv)];
    if let Pass::Backward { dlse } = plan.request().pass {
        inputs.extend([
            (Role::Out, "out", out),
            (Role::Lse, "lse", lse),
            (Role::Dout, "dout", out),
        ]);
        inputs.extend(dlse.then_some((Role::Dlse, "dlse", lse)));
    }
    inputs
}

/// The tensors a plan returns, with their shapes and types.
fn outputs(plan: &Plan) -> Vec<(Role, [usize; 4], DType)> {
    let request = plan.request();
    let shape = &request.shape;
    let of = |heads: usize, dim: usize| [shape.batch, shape.tokens, heads, dim];
    let (q, kv) = (of(shape.heads, shape.dim), of(shape.kv_heads, shape.dim));
    match request.pass {
        Pass::Forward => vec![
            (Role::Out, of(plan.slots(), shape.dim), request.out_dtype()),
            (Role::Lse, of(plan.slots(), 1), request.dtype.sum()),
        ],
        Pass::Backward { .. } => vec![
            (Role::Dq, q, request.dtype),
            (Role::Dk, kv, request.dtype),
            (Role::Dv, kv, request.dtype),
        ],
    }
}

fn check_inputs(plan: &Plan, inputs: &[(Role, View<'_>)]) -> Result<(), RingError> {
    for (role, tensor, expected) in inputs_of(plan) {
        let given = inputs.iter().find(|(r, _)| *r == role);
        let (_, view) = given.ok_or(RingError::MissingInput { role })?;
        if view.dims() != expected {
            let mismatch = Error::ShapeMismatch {
                tensor,
                got: view.dims().to_vec(),
                expected: expected.to_vec(),
            };
            return Err(mismatch.into());
        }
    }
    Ok(())
}
