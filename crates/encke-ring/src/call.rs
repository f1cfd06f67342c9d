//! One call, whoever drives its ranks: what it takes, what it returns, and what each rank held.
//!
//! Threads and simulator share this, so that the same inputs are refused, the same rows are
//! collected and the same bytes are reported by both.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::program::{RankPlan, Role};
use encke_core::plan::{Pass, Plan};
use encke_core::tensor::{Tensor, View};
use encke_core::transport::Moved;
use encke_core::{DType, Error};

use crate::error::{RankError, RingError};
use crate::memory::RankMemory;
use crate::rank::{Loans, Rank};
use crate::trace::{Activity, Event, Recorder, Trace};

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
    /// (query, key) pairs that were computed, by ranks that died too.
    pub pairs: u128,
    /// The ranks that died and were survived, and how.
    pub deaths: Vec<(usize, RankError)>,
}

impl Outcome {
    /// Collects the outputs of ranks that have carried out their programs.
    pub fn collect<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        ranks: &mut [Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
    ) -> Result<Outcome, RingError> {
        let tokens = plan.request().shape.tokens;
        Outcome::collect_rows(kernel, plan, tokens, ranks, events, memory)
    }

    /// The same where the ranks' ports name the rows of a shard, which has so many.
    pub fn collect_rows<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        rows: usize,
        ranks: &mut [Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
    ) -> Result<Outcome, RingError> {
        let mut tensors = Vec::new();
        for (role, dims, dtype) in outputs_of(plan, rows) {
            // Where every rank has all of an output, the first one's word is as good as any.
            let everything = |rank: &Rank<K>| {
                let of = rank.plan().outputs.iter().find(|port| port.role == role);
                of.filter(|port| port.runs.iter().map(|r| r.count).sum::<usize>() == dims[1])
                    .map(|port| rank.plan().buffers[port.buffer.0].dtype)
            };
            let whole = ranks.iter().position(|rank| everything(rank).is_some());
            if let Some(rank) = whole.map(|at| &mut ranks[at])
                && everything(rank) == Some(dtype)
            {
                let given = rank.surrender(kernel, role);
                let given = given.map_err(|source| failed(rank.plan(), source))?;
                if let Some(data) = given {
                    tensors.push((role, Tensor::from_data(data, dims)?));
                    continue;
                }
            }
            let mut tensor = Tensor::zeros(dtype, dims);
            for rank in whole.map_or(&*ranks, |at| std::slice::from_ref(&ranks[at])) {
                let stored = rank.store(kernel, role, &mut tensor);
                stored.map_err(|source| failed(rank.plan(), source))?;
            }
            tensors.push((role, tensor));
        }
        Ok(Outcome {
            tensors,
            trace: Trace { events },
            memory,
            plan: Arc::clone(plan),
            pairs: ranks.iter().map(Rank::pairs).sum(),
            deaths: Vec::new(),
        })
    }

    /// Adds the ranks that died on the way, and what they had computed.
    pub fn mourn(&mut self, deaths: Vec<(usize, RankError)>, pairs: u128) {
        self.deaths.extend(deaths);
        self.pairs += pairs;
    }

    /// Takes an output.
    pub fn take(&mut self, role: Role) -> Option<Tensor> {
        let at = self.tensors.iter().position(|(r, _)| *r == role)?;
        Some(self.tensors.swap_remove(at).1)
    }

    /// The outputs, by name.
    pub fn tensors(&self) -> &[(Role, Tensor)] {
        &self.tensors
    }
}

/// A rank with all its buffers, or how its kernel refused them.
pub fn recruit<K: Kernel>(kernel: &K, plan: &Plan, rank: usize) -> Result<Rank<K>, RingError> {
    let program = plan.rank(rank)?;
    Rank::new(kernel, program).map_err(|source| RingError::Rank {
        rank,
        source: RankError::Kernel { round: 0, source },
        others: Vec::new(),
    })
}

/// Begins a call of a rank: inputs are read in place where they lie as the rank would hold them,
/// and the rows of the others are copied in.
pub fn admit<'a, K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    inputs: &[(Role, View<'a>)],
    recorder: &mut Recorder,
) -> Result<Loans<'a>, RankError> {
    let begin = Instant::now();
    let loans = rank.admit(kernel, inputs);
    let loans = loans.map_err(|source| RankError::Kernel { round: 0, source })?;
    recorder.note(0, Activity::Load, begin, Moved::default());
    Ok(loans)
}

/// Copies a rank's rows of every input in.
pub fn load<K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    inputs: &[(Role, View<'_>)],
    recorder: &mut Recorder,
) -> Result<(), RankError> {
    let begin = Instant::now();
    for (role, view) in inputs {
        let loaded = rank.load(kernel, *role, view);
        loaded.map_err(|source| RankError::Kernel { round: 0, source })?;
    }
    recorder.note(0, Activity::Load, begin, Moved::default());
    Ok(())
}

/// Runs a rank's work; a panic in it is an error like any other.
pub fn guarded<R>(work: impl FnOnce() -> Result<R, RankError>) -> Result<R, RankError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(RankError::Panic {
            message: words(panic.as_ref()),
        })
    })
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

/// The tensors a plan takes, with their names and shapes.
pub fn inputs(plan: &Plan) -> Vec<(Role, &'static str, [usize; 4])> {
    inputs_of(plan, plan.request().shape.tokens)
}

/// The same where only so many rows are given.
fn inputs_of(plan: &Plan, rows: usize) -> Vec<(Role, &'static str, [usize; 4])> {
    let shape = &plan.request().shape;
    let of = |heads: usize, dim: usize| [shape.batch, rows, heads, dim];
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

/// The tensors a plan returns where only so many rows are wanted, with their shapes and types.
fn outputs_of(plan: &Plan, rows: usize) -> Vec<(Role, [usize; 4], DType)> {
    let request = plan.request();
    let shape = &request.shape;
    let of = |heads: usize, dim: usize| [shape.batch, rows, heads, dim];
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

/// Refuses inputs that are missing or of another shape than the plan was made for.
pub fn check_inputs(plan: &Plan, given: &[(Role, View<'_>)]) -> Result<(), RingError> {
    check_rows(plan, plan.request().shape.tokens, given)
}

/// The same where only so many rows are given.
pub fn check_rows(plan: &Plan, rows: usize, given: &[(Role, View<'_>)]) -> Result<(), RingError> {
    for (role, tensor, expected) in inputs_of(plan, rows) {
        let given = given.iter().find(|(r, _)| *r == role);
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

/// All events, or the failure that came `first` with how the other ranks ended.
pub fn conclude(
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
