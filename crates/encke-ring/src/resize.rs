//! Moves sharded tensors from one sharding to another.
//!
//! [`Resize`] has decided which rows move where; a rank runs that as any other program. Every
//! driver of ranks makes them, gives them their old shards and collects the new ones here.

use encke_core::kernel::Kernel;
use encke_core::plan::resize::{Resize, ResizeTensor};
use encke_core::tensor::{Tensor, View};
use encke_core::{DType, Error};

use crate::call::check_dims;
use crate::error::{RankError, RingError};
use crate::memory::RankMemory;
use crate::outcome::failed;
use crate::rank::{BorrowedInputs, Rank};
use crate::sharded::{Sharded, all_rows};
use crate::trace::Trace;

/// What a resize returned.
#[derive(Debug)]
pub struct Resized {
    /// The tensors, in the order of the call.
    pub tensors: Vec<Sharded>,
    /// What happened, by place.
    pub trace: Trace,
    /// The memory of each place.
    pub memory: Vec<RankMemory>,
}

/// Refuses tensors that do not have the old sharding.
pub fn check_tensors(resize: &Resize, tensors: &[&Sharded]) -> Result<(), RingError> {
    for tensor in tensors {
        let tokens = tensor.dims()[1];
        if !tensor.positions().is_all() {
            let queries = tokens;
            let tokens = tensor.positions().tokens();
            return Err(Error::FewerQueries { queries, tokens }.into());
        }
        if tensor.sharding() != resize.from() || tokens != resize.tokens() {
            return Err(RingError::Sharding {
                tensor: "a tensor to be resized",
                got: tensor.sharding().clone(),
                expected: resize.from().clone(),
            });
        }
    }
    Ok(())
}

/// Refuses shards that are not the old shards of a place.
pub(crate) fn check_shards(
    resize: &Resize,
    place: usize,
    tensors: &[([usize; 4], DType)],
    shards: &[View<'_>],
) -> Result<(), RingError> {
    let expected = match place < resize.from().ranks() {
        true => tensors,
        false => &[],
    };
    check_dims("the list of shards", &[shards.len()], &[expected.len()])?;
    let rows = resize
        .from()
        .rows(resize.tokens(), place.min(resize.from().ranks() - 1));
    for (shard, ([b, _, h, d], _)) in shards.iter().zip(expected) {
        check_dims("a shard to be resized", &shard.dims(), &[*b, rows, *h, *d])?;
    }
    Ok(())
}

/// The rank of a place, without buffers.
pub(crate) fn idle_rank<K: Kernel>(
    resize: &Resize,
    place: usize,
    tensors: &[([usize; 4], DType)],
) -> Rank<K> {
    let moving = tensors
        .iter()
        .map(|([batch, _, heads, dim], dtype)| ResizeTensor {
            batch: *batch,
            width: heads * dim,
            dtype: *dtype,
        });
    Rank::idle(resize.program(place, &moving.collect::<Vec<_>>()))
}

fn sizes(tensors: &[&Sharded]) -> Vec<([usize; 4], DType)> {
    let sizes = tensors.iter().map(|tensor| (tensor.dims(), tensor.dtype()));
    sizes.collect()
}

/// The ranks of all places, without buffers.
pub fn idle_ranks<K: Kernel>(resize: &Resize, tensors: &[&Sharded]) -> Vec<Rank<K>> {
    let sizes = sizes(tensors);
    let places = 0..resize.place_count();
    places
        .map(|place| idle_rank(resize, place, &sizes))
        .collect()
}

/// Gives a rank its old shards, which it reads in place if it can.
pub fn bind_inputs<'a, K: Kernel>(
    kernel: &K,
    rank: &mut Rank<K>,
    shard: impl Fn(usize) -> View<'a>,
) -> Result<BorrowedInputs<'a>, RankError> {
    let bound = rank.bind_inputs(kernel, |index, _, _| {
        let shard = shard(index);
        Some((shard, all_rows(shard.dims()[1])))
    });
    bound.map_err(RankError::before_start)
}

/// The new shards that a rank holds, one of each tensor.
pub(crate) fn new_shards<K: Kernel>(
    kernel: &K,
    resize: &Resize,
    rank: &Rank<K>,
    tensors: &[([usize; 4], DType)],
) -> Result<Vec<Tensor>, RingError> {
    let plan = rank.plan();
    let new_rank = resize.new_rank(plan.rank);
    let rows = new_rank.map_or(0, |rank| resize.to().rows(resize.tokens(), rank));
    let shard = |(port, ([b, _, h, d], dtype)): (_, &([usize; 4], DType))| {
        let port: &encke_core::plan::program::Port = port;
        let mut shard = Tensor::try_zeros(*dtype, [*b, rows, *h, *d])?;
        let stored = kernel.download(rank.buffer(port.buffer), &all_rows(rows), &mut shard);
        stored.map_err(|source| failed(plan, source))?;
        Ok(shard)
    };
    plan.outputs.iter().zip(tensors).map(shard).collect()
}

/// The tensors in the new sharding, from the ranks of all places.
pub fn collect<K: Kernel>(
    kernel: &K,
    resize: &Resize,
    ranks: &[Rank<K>],
    tensors: &[&Sharded],
) -> Result<Vec<Sharded>, RingError> {
    let sizes = sizes(tensors);
    let mut shards: Vec<Vec<Tensor>> = tensors.iter().map(|_| Vec::new()).collect();
    for &place in resize.places() {
        let new = new_shards(kernel, resize, &ranks[place], &sizes)?;
        shards
            .iter_mut()
            .zip(new)
            .for_each(|(shards, shard)| shards.push(shard));
    }
    let sharded = shards.into_iter();
    sharded
        .map(|shards| Ok(Sharded::from_shards(shards, resize.to())?))
        .collect()
}
