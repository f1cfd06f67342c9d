//! One call, whoever drives its ranks: what it takes, what it returns, and what each rank held.
//!
//! Threads and simulator share this, so that the same inputs are refused, the same rows are
//! collected and the same bytes are reported by both.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crate::tensor_pool::TensorPool;
use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::program::{Port, RankPlan, Role};
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::Run;
use encke_core::tensor::{Tensor, View};
use encke_core::transport::Moved;
use encke_core::{DType, Error};

use crate::error::{RankError, RingError};
use crate::memory::RankMemory;
use crate::rank::{BorrowedInputs, Rank};
use crate::sharded::{Sharded, all_rows};
use crate::trace::{Activity, Event, Recorder, Trace};

/// What a call is given: whole tensors, of which each rank takes its rows, or tensors that lie in
/// the ranks' shards already.
#[derive(Debug, Clone, Copy)]
pub enum Given<'g, 'a> {
    /// Whole tensors.
    Whole(&'g [(Role, View<'a>)]),
    /// Tensors in shards.
    Shards(&'g [(Role, &'a Sharded)]),
}

impl<'a> Given<'_, 'a> {
    /// Where the rows of a port are whose tokens are those of `shard`.
    fn rows(&self, port: &Port, shard: usize) -> Option<(View<'a>, Vec<Run>)> {
        match self {
            Given::Whole(tensors) => {
                let of = tensors.iter().find(|(role, _)| *role == port.role);
                of.map(|(_, view)| (*view, port.runs.clone()))
            }
            Given::Shards(tensors) => {
                let of = tensors.iter().find(|(role, _)| *role == port.role);
                let shard = of.map(|(_, tensor)| tensor.shard(shard));
                shard.map(|shard| (shard.view(), all_rows(shard.dims()[1])))
            }
        }
    }

    /// Refuses what is missing, or of another shape or sharding than the plan was made for.
    pub fn check(&self, plan: &Plan) -> Result<(), RingError> {
        match self {
            Given::Whole(tensors) => check_inputs(plan, tensors),
            Given::Shards(tensors) => check_shards(plan, tensors),
        }
    }
}

/// What a call returned beside its tensors' names: whole tensors, or [`Sharded`] ones.
#[derive(Debug)]
pub struct Outcome<T = Tensor> {
    tensors: Vec<(Role, T)>,
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
        Outcome::collect_rows(kernel, plan, tokens, ranks, events, memory, &Arc::default())
    }

    /// The same where the ranks' ports name rows of a shard, which has so many, or of the whole;
    /// with a home for the outputs' memory.
    pub fn collect_rows<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        rows: usize,
        ranks: &mut [Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
        spare: &Arc<TensorPool>,
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
                let given = rank.take_output(kernel, role);
                let given = given.map_err(|source| failed(rank.plan(), source))?;
                if let Some(data) = given {
                    let tensor = Tensor::from_data(data, dims)?;
                    let mark = Some(rank.mark(role));
                    tensors.push((role, tensor.recycle_into(spare, mark)));
                    continue;
                }
            }
            let from = whole.map_or(&*ranks, |at| std::slice::from_ref(&ranks[at]));
            let stored: usize = from.iter().map(|rank| rank.rows_of(role)).sum();
            let mark = whole.map(|at| ranks[at].mark(role));
            let (mut tensor, clean) = match stored == dims[1] {
                true => to_be_written(spare, dtype, dims, mark)?,
                false => (Tensor::zeros(dtype, dims), false),
            };
            for rank in from {
                let stored = match clean {
                    true => rank.store_again(kernel, role, &mut tensor),
                    false => rank.store(kernel, role, &mut tensor),
                };
                stored.map_err(|source| failed(rank.plan(), source))?;
            }
            tensors.push((role, tensor.recycle_into(spare, mark)));
        }
        Ok(Outcome::new(plan, ranks, tensors, events, memory))
    }
}

/// A tensor every number of which will be written: in memory that is there, or in new; and whether
/// what the owner of the `mark` does not write is zeros.
fn to_be_written(
    spare: &TensorPool,
    dtype: DType,
    dims: [usize; 4],
    mark: Option<u64>,
) -> Result<(Tensor, bool), RingError> {
    match spare.take(dtype, dims.iter().product(), mark) {
        Some(kept) => {
            let clean = mark.is_some() && kept.mark == mark;
            Ok((Tensor::from_data(kept.data, dims)?, clean))
        }
        None => Ok((Tensor::zeros(dtype, dims), mark.is_some())),
    }
}

impl Outcome<Sharded> {
    /// Collects the outputs of the same ranks as each of them holds them.
    pub fn collect_shards<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        ranks: &[Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
    ) -> Result<Outcome<Sharded>, RingError> {
        let sharding = &plan.request().sharding;
        let mut tensors = Vec::new();
        for (role, [b, n, h, d], dtype) in outputs_of(plan, plan.request().shape.tokens) {
            let shard = |shard: usize| -> Result<Tensor, RingError> {
                let rows = sharding.rows(n, shard);
                let mut tensor = Tensor::zeros(dtype, [b, rows, h, d]);
                // After a death another rank has its rows.
                for rank in ranks {
                    let own = |port: &&Port| {
                        port.role == role && rank.plan().buffers[port.buffer.0].shard == shard
                    };
                    if let Some(port) = rank.plan().outputs.iter().find(own) {
                        let buffer = rank.buffer(port.buffer);
                        let stored = kernel.download(buffer, &all_rows(rows), &mut tensor);
                        stored.map_err(|source| failed(rank.plan(), source))?;
                    }
                }
                Ok(tensor)
            };
            let shards = (0..sharding.ranks()).map(shard);
            let shards = shards.collect::<Result<Vec<Tensor>, RingError>>()?;
            tensors.push((role, Sharded::from_shards(shards, sharding)?));
        }
        Ok(Outcome::new(plan, ranks, tensors, events, memory))
    }
}

impl<T> Outcome<T> {
    fn new<K: Kernel>(
        plan: &Arc<Plan>,
        ranks: &[Rank<K>],
        tensors: Vec<(Role, T)>,
        events: Vec<Event>,
        memory: Vec<RankMemory>,
    ) -> Outcome<T> {
        Outcome {
            tensors,
            trace: Trace { events },
            memory,
            plan: Arc::clone(plan),
            pairs: ranks.iter().map(Rank::pairs).sum(),
            deaths: Vec::new(),
        }
    }

    /// Adds the ranks that died on the way, and what they had computed.
    pub fn record_deaths(&mut self, deaths: Vec<(usize, RankError)>, pairs: u128) {
        self.deaths.extend(deaths);
        self.pairs += pairs;
    }

    /// Takes an output.
    pub fn take(&mut self, role: Role) -> Option<T> {
        let at = self.tensors.iter().position(|(r, _)| *r == role)?;
        Some(self.tensors.swap_remove(at).1)
    }

    /// The outputs, by name.
    pub fn tensors(&self) -> &[(Role, T)] {
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
pub fn bind_inputs<'a, K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    given: Given<'_, 'a>,
    recorder: &mut Recorder,
) -> Result<BorrowedInputs<'a>, RankError> {
    let begin = Instant::now();
    let loans = rank.admit_rows(kernel, |_, port, shard| given.rows(port, shard));
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

/// The tensors a plan returns, with their shapes and types.
pub fn outputs(plan: &Plan) -> Vec<(Role, [usize; 4], DType)> {
    outputs_of(plan, plan.request().shape.tokens)
}

/// The same where only so many rows are wanted.
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

/// Refuses tensors in shards that are missing, of another shape, or of another sharding than the
/// ring's. Where every rank holds all queries, there are no shards of them.
fn check_shards(plan: &Plan, given: &[(Role, &Sharded)]) -> Result<(), RingError> {
    let Request {
        sharding, queries, ..
    } = plan.request();
    if *queries == Queries::Replicated && plan.ranks() > 1 {
        return Err(RingError::ReplicatedShards);
    }
    for (role, tensor, expected) in inputs(plan) {
        let given = given.iter().find(|(r, _)| *r == role);
        let (_, sharded) = given.ok_or(RingError::MissingInput { role })?;
        if sharded.dims() != expected {
            let mismatch = Error::ShapeMismatch {
                tensor,
                got: sharded.dims().to_vec(),
                expected: expected.to_vec(),
            };
            return Err(mismatch.into());
        }
        if sharded.sharding() != sharding {
            return Err(RingError::Sharding {
                tensor,
                got: sharded.sharding().clone(),
                expected: sharding.clone(),
            });
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
