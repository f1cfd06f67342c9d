//! A ring changes its size: tensors in shards go from one sharding to another.
//!
//! Whoever drives the ranks, threads or the simulator, they are recruited and their rows collected
//! here. What moves where was decided by [`Resize`]; a rank carries it out as any other program.

use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::resize::{Moving, Resize};
use encke_core::tensor::Tensor;

use crate::error::{RankError, RingError};
use crate::memory::RankMemory;
use crate::rank::{BorrowedInputs, Rank};
use crate::sharded::{Sharded, all_rows};
use crate::trace::Trace;

/// What a resize did.
#[derive(Debug)]
pub struct Resized {
    /// The tensors, in the order they were given in.
    pub tensors: Vec<Sharded>,
    /// What happened, by place.
    pub trace: Trace,
    /// What each place held meanwhile.
    pub memory: Vec<RankMemory>,
}

/// Refuses tensors that do not lie as the resize begins.
pub fn check_tensors(resize: &Resize, tensors: &[&Sharded]) -> Result<(), RingError> {
    for tensor in tensors {
        let tokens = tensor.dims()[1];
        if tensor.sharding() != resize.from() || tokens != resize.tokens() {
            return Err(RingError::Sharding {
                tensor: "a tensor that is to move",
                got: tensor.sharding().clone(),
                expected: resize.from().clone(),
            });
        }
    }
    Ok(())
}

/// The ranks of all places, with nothing allocated yet.
pub fn recruits<K: Kernel>(resize: &Resize, tensors: &[&Sharded]) -> Vec<Rank<K>> {
    let moving: Vec<Moving> = tensors.iter().map(|tensor| tensor.moving()).collect();
    let places = 0..resize.places_in_all();
    places
        .map(|place| Rank::idle(resize.program(place, &moving)))
        .collect()
}

/// Gives a rank its old rows, where they lie if they can be read there.
pub fn bind_inputs<'a, K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    tensors: &[&'a Sharded],
) -> Result<BorrowedInputs<'a>, RankError> {
    let place = rank.plan().rank;
    let loans = rank.admit_rows(kernel, |index, _, _| {
        let shard = tensors[index].shard(place);
        Some((shard.view(), all_rows(shard.dims()[1])))
    });
    loans.map_err(|source| RankError::Kernel { round: 0, source })
}

/// The tensors as the ranks now hold them.
pub fn collect<K: Kernel>(
    kernel: &K,
    resize: &Resize,
    ranks: &[Rank<K>],
    tensors: &[&Sharded],
) -> Result<Vec<Sharded>, RingError> {
    let collected = tensors.iter().enumerate().map(|(index, tensor)| {
        let [b, n, h, d] = tensor.dims();
        let shard = |rank: usize| -> Result<Tensor, RingError> {
            let of = &ranks[resize.places()[rank]];
            let rows = resize.to().rows(n, rank);
            let mut shard = Tensor::zeros(tensor.dtype(), [b, rows, h, d]);
            let buffer = of.buffer(of.plan().outputs[index].buffer);
            let stored = kernel.download(buffer, &all_rows(rows), &mut shard);
            stored.map_err(|source| failed(of, source))?;
            Ok(shard)
        };
        let shards = (0..resize.to().ranks()).map(shard);
        let shards = shards.collect::<Result<Vec<Tensor>, RingError>>()?;
        Ok(Sharded::from_shards(shards, resize.to())?)
    });
    collected.collect()
}

fn failed<K: Kernel>(rank: &Rank<K>, source: KernelError) -> RingError {
    RingError::Rank {
        rank: rank.plan().rank,
        source: RankError::Kernel {
            round: rank.plan().rounds.len(),
            source,
        },
        others: Vec::new(),
    }
}
