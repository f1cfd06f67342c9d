//! One rank of several: its rows of every sequence, and its end of a ring.
//!
//! Where the others are, and what the transport is, is decided elsewhere: threads and processes are
//! the same training.

use std::sync::Arc;

use anyhow::{Result, bail};
use encke::{Cut, Data, ShardAttention, Transport};
use encke_candle::{Attention, ShardBackend};

use crate::course::Ready;
use crate::settings::Settings;
use crate::training::{Company, Training};

/// A rank's part of the attention, where every rank has something to do.
pub fn shard(settings: &Settings, rank: usize, ranks: usize) -> Result<ShardAttention> {
    let ring = encke::Attention::builder().pattern(settings.pattern()?);
    // Even work for every rank, since attention is causal.
    let shard = ring.ranks(ranks).sharding(Cut::Zigzag).build_shard(rank)?;
    let tokens = settings.tokens;
    let idle = |rank: &usize| shard.sharding().rows(tokens, *rank) == 0;
    if let Some(idle) = (0..ranks).find(idle) {
        bail!("--tokens {tokens} leaves rank {idle} of {ranks} without a row; use fewer ranks");
    }
    Ok(shard)
}

/// A rank's training. `begin` is what its transport is told before each pass.
pub fn training<T: Transport<Data> + Send + 'static>(
    settings: &Settings,
    ready: &Ready,
    shard: ShardAttention,
    (transport, begin): (T, fn(&mut T)),
    company: Box<dyn Company>,
) -> Result<Training> {
    let runs = shard.sharding().runs(settings.tokens, shard.rank());
    let rows = runs.into_iter().flat_map(|run| run.tokens()).collect();
    let ring = ShardBackend::new(shard, settings.tokens, transport, begin);
    let attention = Attention::from_backend(Arc::new(ring));
    let text = Arc::clone(&ready.text);
    let mut training = Training::new(settings.clone(), text, attention, rows, Some(company))?;
    if let Some(from) = &ready.resumed {
        training.resume(from)?;
    }
    Ok(training)
}
