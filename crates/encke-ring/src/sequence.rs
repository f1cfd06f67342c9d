//! Splits a sequence into shards, and gathers shards into a sequence.

use encke_core::host;
use encke_core::sharding::{Run, Sharding};
use encke_core::tensor::{Tensor, View};
use encke_core::{Error, Result};

/// The shard of every rank, `[b, rows, h, d]`, in rank order. Rows of a shard are in the order of
/// [`Sharding::runs`].
pub fn split_sequence(sequence: &View<'_>, sharding: &Sharding) -> Result<Vec<Tensor>> {
    let [b, n, h, d] = sequence.dims();
    sharding.check(n)?;
    let shard = |rank: usize| {
        let mut shard = Tensor::try_zeros(sequence.dtype(), [b, sharding.rows(n, rank), h, d])?;
        host::upload(sequence, &sharding.runs(n, rank), shard.data_mut());
        Ok(shard)
    };
    (0..sharding.ranks()).map(shard).collect()
}

/// The sequence with these shards.
pub fn gather_sequence(shards: &[Tensor], sharding: &Sharding) -> Result<Tensor> {
    if shards.len() != sharding.ranks() {
        return Err(Error::PartitionRanks {
            firsts: shards.len(),
            ranks: sharding.ranks(),
        });
    }
    let [b, _, h, d] = shards[0].dims();
    let n = shards.iter().map(|shard| shard.dims()[1]).sum();
    sharding.check(n)?;
    let mut sequence = Tensor::try_zeros(shards[0].dtype(), [b, n, h, d])?;
    for (rank, shard) in shards.iter().enumerate() {
        let runs: Vec<Run> = sharding.runs(n, rank);
        let expected = [b, runs.iter().map(|run| run.count).sum(), h, d];
        if shard.dims() != expected {
            return Err(Error::ShapeMismatch {
                tensor: "a shard",
                got: shard.dims().to_vec(),
                expected: expected.to_vec(),
            });
        }
        host::download(shard.data(), &runs, &mut sequence);
    }
    Ok(sequence)
}
