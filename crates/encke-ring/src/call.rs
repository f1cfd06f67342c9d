//! The tensors of a call: which ones a plan takes and returns, and which the caller gave.
//!
//! Every driver of ranks shares this, so that all of them refuse the same inputs.

use std::time::Instant;

use encke_core::kernel::Kernel;
use encke_core::plan::program::{Port, Role};
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::Run;
use encke_core::tensor::View;
use encke_core::transport::Moved;
use encke_core::{DType, Error};

use crate::error::{RankError, RingError};
use crate::rank::{BorrowedInputs, Rank};
use crate::sequence::RowPositions;
use crate::shard_call::ShardInput;
use crate::sharded::{Sharded, all_rows};
use crate::trace::{Activity, Recorder};

/// The inputs of a call.
#[derive(Debug, Clone, Copy)]
pub enum CallInputs<'g, 'a> {
    /// Whole tensors, of which each rank takes its rows.
    Whole(&'g [(Role, View<'a>)]),
    /// Sharded tensors, of which each rank takes its shard.
    Shards(&'g [(Role, &'a Sharded)]),
}

impl<'a> CallInputs<'_, 'a> {
    /// The tensor that holds the rows of a port, and which of its rows they are. `shard` is the
    /// rank whose tokens the port holds.
    fn rows(&self, port: &Port, shard: usize) -> Option<(View<'a>, Vec<Run>)> {
        match self {
            CallInputs::Whole(tensors) => {
                let found = tensors.iter().find(|(role, _)| *role == port.role);
                found.map(|(_, view)| (*view, port.runs.clone()))
            }
            CallInputs::Shards(tensors) => {
                let found = tensors.iter().find(|(role, _)| *role == port.role);
                let shard = found.map(|(_, tensor)| tensor.shard(shard));
                shard.map(|shard| (shard.view(), all_rows(shard.dims()[1])))
            }
        }
    }

    /// Refuses inputs that are missing, or whose shape or sharding is not the plan's.
    pub fn check(&self, plan: &Plan) -> Result<(), RingError> {
        match self {
            CallInputs::Whole(tensors) => check_inputs(plan, tensors),
            CallInputs::Shards(tensors) => check_shards(plan, tensors),
        }
    }

    /// Gives a rank its inputs: it reads them in place where their layout is that of its buffers,
    /// and copies the others.
    pub fn bind<K: Kernel>(
        &self,
        kernel: &K,
        rank: &mut Rank<K>,
    ) -> Result<BorrowedInputs<'a>, RankError> {
        let bound = rank.bind_inputs(kernel, |_, port, shard| self.rows(port, shard));
        bound.map_err(RankError::before_start)
    }
}

impl<'a, K: Kernel> ShardInput<'a, K> for CallInputs<'_, 'a> {
    type Error = RingError;

    fn load(
        &mut self,
        kernel: &K,
        _: &Request,
        rank: &mut Rank<K>,
    ) -> Result<BorrowedInputs<'a>, RingError> {
        let bound = self.bind(kernel, rank);
        bound.map_err(|source| RingError::of_rank(rank.plan().rank, source))
    }
}

/// A rank of a plan with all its buffers allocated.
pub fn new_rank<K: Kernel>(kernel: &K, plan: &Plan, rank: usize) -> Result<Rank<K>, RingError> {
    let allocated = Rank::new(kernel, plan.rank(rank)?);
    allocated.map_err(|source| RingError::of_rank(rank, RankError::before_start(source)))
}

/// Copies a rank's rows of every input into its buffers.
pub fn load_inputs<K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    inputs: &[(Role, View<'_>)],
    recorder: &mut Recorder,
) -> Result<(), RankError> {
    let start = Instant::now();
    for (role, view) in inputs {
        let loaded = rank.load(kernel, *role, view);
        loaded.map_err(RankError::before_start)?;
    }
    recorder.record(0, Activity::Load, start, Moved::default());
    Ok(())
}

/// How many rows the tensors of a call have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallRows {
    /// Rows of q, out, lse and their gradients.
    pub queries: usize,
    /// Rows of k, v and their gradients.
    pub keys: usize,
}

impl From<usize> for CallRows {
    /// A query for each of these keys.
    fn from(tokens: usize) -> CallRows {
        CallRows {
            queries: tokens,
            keys: tokens,
        }
    }
}

impl CallRows {
    /// The rows of whole tensors.
    pub fn whole(plan: &Plan) -> CallRows {
        let shape = &plan.request().shape;
        CallRows {
            queries: shape.queries,
            keys: shape.tokens,
        }
    }

    /// The rows of one rank's shards.
    pub fn of_shard(plan: &Plan, rank: usize) -> CallRows {
        CallRows {
            queries: plan.shards().query_rows(rank),
            keys: plan.shards().rows(rank),
        }
    }
}

/// The tensors a plan takes, with their names and shapes.
pub fn inputs(plan: &Plan) -> Vec<(Role, &'static str, [usize; 4])> {
    inputs_of(plan, CallRows::whole(plan))
}

/// The same where the tensors have these rows.
fn inputs_of(plan: &Plan, rows: CallRows) -> Vec<(Role, &'static str, [usize; 4])> {
    let shape = &plan.request().shape;
    let queries = |heads: usize, dim: usize| [shape.batch, rows.queries, heads, dim];
    let keys = |dim: usize| [shape.batch, rows.keys, shape.kv_heads, dim];
    let (out, lse) = (
        queries(plan.slots(), shape.value_dim),
        queries(plan.slots(), 1),
    );
    let mut inputs = vec![
        (Role::Q, "q", queries(shape.heads, shape.dim)),
        (Role::K, "k", keys(shape.dim)),
        (Role::V, "v", keys(shape.value_dim)),
    ];
    if let Pass::Backward { dlse } = plan.request().pass {
        inputs.extend([
            (Role::Out, "out", out),
            (Role::Lse, "lse", lse),
            (Role::Dout, "dout", out),
        ]);
        inputs.extend(dlse.then_some((Role::Dlse, "dlse", lse)));
    }
    if plan.request().pass == Pass::BackwardByBranch {
        let delta = queries(plan.delta_slots(), 1);
        inputs.extend([
            (Role::Lse, "lse", lse),
            (Role::Dout, "dout", out),
            (Role::Delta, "delta", delta),
        ]);
    }
    inputs
}

/// The tensors a plan returns, with their shapes and types.
pub fn outputs(plan: &Plan) -> Vec<(Role, [usize; 4], DType)> {
    outputs_of(plan, CallRows::whole(plan))
}

/// The same where the tensors have these rows.
pub(crate) fn outputs_of(plan: &Plan, rows: CallRows) -> Vec<(Role, [usize; 4], DType)> {
    let request = plan.request();
    let shape = &request.shape;
    let queries = |heads: usize, dim: usize| [shape.batch, rows.queries, heads, dim];
    let keys = |dim: usize| [shape.batch, rows.keys, shape.kv_heads, dim];
    match request.pass {
        Pass::Forward => {
            let out = queries(plan.slots(), shape.value_dim);
            let lse = queries(plan.slots(), 1);
            vec![
                (Role::Out, out, request.out_dtype()),
                (Role::Lse, lse, request.dtype.sum()),
            ]
        }
        Pass::Backward { .. } | Pass::BackwardByBranch => vec![
            (Role::Dq, queries(shape.heads, shape.dim), request.dtype),
            (Role::Dk, keys(shape.dim), request.dtype),
            (Role::Dv, keys(shape.value_dim), request.dtype),
        ],
    }
}

/// Refuses inputs that are missing, or whose shape is not the plan's.
pub fn check_inputs(plan: &Plan, given: &[(Role, View<'_>)]) -> Result<(), RingError> {
    check_rows(plan, CallRows::whole(plan), given)
}

/// The same where the tensors have these rows.
pub fn check_rows(
    plan: &Plan,
    rows: CallRows,
    given: &[(Role, View<'_>)],
) -> Result<(), RingError> {
    for (role, tensor, expected) in inputs_of(plan, rows) {
        let view = find(given, role)?;
        check_dims(tensor, &view.dims(), &expected)?;
    }
    Ok(())
}

/// The positions of the rows of a tensor of a call.
pub(crate) fn positions_of(role: Role, request: &Request) -> Result<RowPositions, Error> {
    let tokens = request.shape.tokens;
    match role {
        Role::K | Role::V | Role::Dk | Role::Dv => Ok(RowPositions::all(tokens)),
        _ => {
            let positions = request.positions();
            RowPositions::queries(tokens, positions.start, positions.len())
        }
    }
}

/// Refuses sharded tensors that are missing, or whose shape or sharding is not the plan's.
/// Replicated queries have no shards.
fn check_shards(plan: &Plan, given: &[(Role, &Sharded)]) -> Result<(), RingError> {
    let request = plan.request();
    let sharding = &request.sharding;
    if request.queries == Queries::Replicated && plan.ranks() > 1 {
        return Err(RingError::ReplicatedShards);
    }
    for (role, tensor, expected) in inputs(plan) {
        let sharded = find(given, role)?;
        check_dims(tensor, &sharded.dims(), &expected)?;
        if sharded.sharding() != sharding {
            return Err(RingError::Sharding {
                tensor,
                got: sharded.sharding().clone(),
                expected: sharding.clone(),
            });
        }
        let expected = positions_of(role, request)?;
        if *sharded.positions() != expected {
            return Err(RingError::Positions {
                tensor,
                got: sharded.positions().clone(),
                expected,
            });
        }
    }
    Ok(())
}

fn find<T>(given: &[(Role, T)], role: Role) -> Result<&T, RingError> {
    let found = given.iter().find(|(of, _)| *of == role);
    let (_, tensor) = found.ok_or(RingError::MissingInput { role })?;
    Ok(tensor)
}

pub(crate) fn check_dims(
    tensor: &'static str,
    got: &[usize],
    expected: &[usize],
) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::ShapeMismatch {
        tensor,
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}
