//! One rank of several, with its rows of every sequence.
//!
//! The caller brings the transport, so threads and processes share this code.

use std::sync::Arc;

use anyhow::{Result, bail};
use encke::{Data, ShardAttention, Transport};
use encke_candle::{Attention, ShardBackend};

use crate::settings::TrainingConfig;
use crate::trainer::{ReplicaGroup, Trainer};
use crate::training_run::RunInputs;

/// One rank of the attention; an error if some rank would have no rows.
pub fn shard(settings: &TrainingConfig, rank: usize, ranks: usize) -> Result<ShardAttention> {
    let ring = encke::Attention::builder().pattern(settings.pattern()?);
    let ring = ring.ranks(ranks).sharding(settings.cut(ranks)?);
    let shard = ring.bits(settings.bits()?).build_shard(rank)?;
    let tokens = settings.tokens;
    let idle = |rank: &usize| shard.sharding().rows(tokens, *rank) == 0;
    if let Some(idle) = (0..ranks).find(idle) {
        bail!("--tokens {tokens} leaves rank {idle} of {ranks} without a row; use fewer ranks");
    }
    Ok(shard)
}

/// A rank's trainer. `begin` is called with the transport before each pass.
pub fn trainer<T: Transport<Data> + Send + 'static>(
    settings: &TrainingConfig,
    inputs: &RunInputs,
    shard: ShardAttention,
    (transport, begin): (T, fn(&mut T)),
    group: Box<dyn ReplicaGroup>,
) -> Result<Trainer> {
    let runs = shard.sharding().runs(settings.tokens, shard.rank());
    let rows = runs.into_iter().flat_map(|run| run.tokens()).collect();
    let blocks = settings.blocks(Some(shard.sharding()))?;
    let backend = ShardBackend::new(shard, settings.tokens, transport, begin);
    let attention = Attention::from_backend(Arc::new(backend));
    let (text, resumed) = (Arc::clone(&inputs.text), inputs.resumed.as_ref());
    Trainer::new(
        settings.clone(),
        text,
        attention,
        (rows, blocks),
        Some(group),
        resumed,
    )
}
