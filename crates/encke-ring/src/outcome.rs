//! The result of a call: its tensors, and the trace, memory and deaths of its ranks.
//!
//! Every driver of ranks collects outputs here, so that the same rows are collected from the same
//! ranks in all of them. The decision here: an output that one rank holds completely is not
//! copied; the rank's buffer becomes the tensor.

use std::sync::Arc;

use crate::tensor_pool::TensorPool;
use encke_core::DType;
use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::Plan;
use encke_core::plan::program::{Port, RankPlan, Role};
use encke_core::tensor::Tensor;

use crate::call::{CallRows, outputs_of, positions_of};
use crate::error::{RankError, RingError};
use crate::memory::RankMemory;
use crate::rank::Rank;
use crate::sharded::{Sharded, all_rows};
use crate::trace::{Event, Trace};

/// What a call returned: whole tensors, or [`Sharded`] ones.
#[derive(Debug)]
pub struct Outcome<T = Tensor> {
    tensors: Vec<(Role, T)>,
    /// What the ranks did, and when.
    pub trace: Trace,
    /// The memory of each rank.
    pub memory: Vec<RankMemory>,
    /// The plan that was run.
    pub plan: Arc<Plan>,
    /// (query, key) pairs that were computed, including those of ranks that died.
    pub pairs: u128,
    /// The ranks that died and were survived, and how.
    pub deaths: Vec<(usize, RankError)>,
}

impl Outcome {
    /// Collects the outputs of ranks that have finished.
    pub fn collect<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        ranks: &mut [Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
    ) -> Result<Outcome, RingError> {
        let rows = CallRows::whole(plan);
        Outcome::collect_rows(kernel, plan, rows, ranks, events, memory, &Arc::default())
    }

    /// The same where the ranks' ports name these rows, of a shard or of the whole sequence.
    /// Outputs take their memory from `pool` and return it there when they are dropped.
    pub fn collect_rows<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        rows: CallRows,
        ranks: &mut [Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
        pool: &Arc<TensorPool>,
    ) -> Result<Outcome, RingError> {
        let mut tensors = Vec::new();
        for (role, dims, dtype) in outputs_of(plan, rows) {
            // The type of the output in a rank that holds all of it.
            let complete = |rank: &Rank<K>| {
                let port = rank.plan().outputs.iter().find(|port| port.role == role);
                port.filter(|port| port.runs.iter().map(|r| r.count).sum::<usize>() == dims[1])
                    .map(|port| rank.plan().buffers[port.buffer.0].dtype)
            };
            // Where several ranks hold all of an output, they hold the same bits.
            let whole = ranks.iter().position(|rank| complete(rank).is_some());
            if let Some(rank) = whole.map(|at| &mut ranks[at])
                && complete(rank) == Some(dtype)
            {
                let taken = rank.take_output(kernel, role);
                let taken = taken.map_err(|source| failed(rank.plan(), source))?;
                if let Some(data) = taken {
                    let tensor = Tensor::from_data(data, dims)?;
                    let mark = Some(rank.mark(role));
                    tensors.push((role, tensor.recycle_into(pool, mark)));
                    continue;
                }
            }
            let from = whole.map_or(&*ranks, |at| std::slice::from_ref(&ranks[at]));
            let stored: usize = from.iter().map(|rank| rank.rows_of(role)).sum();
            let mark = whole.map(|at| ranks[at].mark(role));
            let (mut tensor, zeroed) = match stored == dims[1] {
                true => to_overwrite(pool, dtype, dims, mark)?,
                false => (Tensor::try_zeros(dtype, dims)?, false),
            };
            for rank in from {
                let stored = match zeroed {
                    true => rank.store_nonzero(kernel, role, &mut tensor),
                    false => rank.store(kernel, role, &mut tensor),
                };
                stored.map_err(|source| failed(rank.plan(), source))?;
            }
            tensors.push((role, tensor.recycle_into(pool, mark)));
        }
        Ok(Outcome::new(plan, ranks, tensors, events, memory))
    }
}

/// A tensor whose every element will be written, in pooled memory or in new memory; and true if the
/// elements that the rank with this `mark` never writes are zeros already.
fn to_overwrite(
    pool: &TensorPool,
    dtype: DType,
    dims: [usize; 4],
    mark: Option<u64>,
) -> Result<(Tensor, bool), RingError> {
    match pool.take(dtype, dims.iter().product(), mark) {
        Some(kept) => {
            let zeroed = mark.is_some() && kept.mark == mark;
            Ok((Tensor::from_data(kept.data, dims)?, zeroed))
        }
        None => Ok((Tensor::try_zeros(dtype, dims)?, mark.is_some())),
    }
}

impl Outcome<Sharded> {
    /// Collects the outputs of ranks that have finished, one shard for each rank of the sharding.
    pub fn collect_shards<K: Kernel>(
        kernel: &K,
        plan: &Arc<Plan>,
        ranks: &[Rank<K>],
        events: Vec<Event>,
        memory: Vec<RankMemory>,
    ) -> Result<Outcome<Sharded>, RingError> {
        let sharding = &plan.request().sharding;
        let mut tensors = Vec::new();
        for (role, [b, _, h, d], dtype) in outputs_of(plan, CallRows::whole(plan)) {
            let positions = positions_of(role, plan.request())?;
            let shard = |shard: usize| -> Result<Tensor, RingError> {
                let rows = positions.rows(sharding, shard);
                let mut tensor = Tensor::try_zeros(dtype, [b, rows, h, d])?;
                // After a death, another rank holds the dead rank's shard.
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
            let sharded = Sharded::from_shards_at(shards, sharding, positions)?;
            tensors.push((role, sharded));
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

    /// Adds ranks that died, and the pairs that they had computed.
    pub fn record_deaths(&mut self, deaths: Vec<(usize, RankError)>, pairs: u128) {
        self.deaths.extend(deaths);
        self.pairs += pairs;
    }

    /// Takes an output.
    pub fn take(&mut self, role: Role) -> Option<T> {
        let at = self.tensors.iter().position(|(r, _)| *r == role)?;
        Some(self.tensors.swap_remove(at).1)
    }

    /// The outputs.
    pub fn tensors(&self) -> &[(Role, T)] {
        &self.tensors
    }
}

/// A kernel error after the last round.
pub(crate) fn failed(plan: &RankPlan, source: KernelError) -> RingError {
    let round = plan.rounds.len();
    RingError::of_rank(plan.rank, RankError::Kernel { round, source })
}
