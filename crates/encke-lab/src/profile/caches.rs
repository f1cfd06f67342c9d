//! The caches between calls: plans and buffers of calls whose sequence length changes.
//!
//! The calls run on threads, with lengths between half of the tokens and all of them, each length
//! twice in a row, as in a training run with batches of many lengths.

use anyhow::{Result, ensure};
use encke::{Attention, Builder, CacheLimits, CacheStats, Kernel, Request};
use encke_cost::BenchmarkInputs;

use super::measure::builder;
use crate::device::{ComputeDevice, open_gpu};
use crate::terminal::bar;

/// Lengths, of which each is called twice.
const LENGTHS: usize = 24;

/// Hits, misses and sizes of the caches.
#[derive(Debug)]
pub struct CacheProfile {
    /// Different lengths; each was called twice.
    pub lengths: usize,
    /// Hits and misses of all calls.
    pub stats: CacheStats,
    /// The largest sizes after any call.
    pub peak: CacheStats,
    /// The limits of the caches.
    pub limits: CacheLimits,
}

/// Calls attention with changing lengths on the ring of a request.
pub fn measure_caches(request: &Request, device: ComputeDevice) -> Result<CacheProfile> {
    match device {
        ComputeDevice::Cpu => measure(request, |of| Ok(of.build()?)),
        ComputeDevice::Cuda(index) => measure(request, |of| Ok(of.build_on(open_gpu(index)?)?)),
    }
}

fn measure<K: Kernel>(
    request: &Request,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<CacheProfile> {
    let attention = build(builder(request))?;
    let (mut peak, tokens) = (CacheStats::default(), request.shape.tokens);
    let progress = bar(LENGTHS);
    for at in 0..LENGTHS {
        // Every seventh length in turn, so that none comes again soon.
        let part = at * 7 % LENGTHS;
        let tokens = (tokens / 2 + tokens * part / (2 * LENGTHS)).max(1);
        let shape = request.shape.with_tokens(tokens);
        let rehearsal = BenchmarkInputs::new(&Request {
            shape,
            ..request.clone()
        })?;
        for _ in 0..2 {
            let [q, k, v] = rehearsal.inputs();
            attention.forward(&q, &k, &v)?;
            let stats = attention.stats();
            peak.plans = peak.plans.max(stats.plans);
            peak.pools = peak.pools.max(stats.pools);
            peak.pool_bytes = peak.pool_bytes.max(stats.pool_bytes);
            peak.pooled_bytes = peak.pooled_bytes.max(stats.pooled_bytes);
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let (stats, limits) = (attention.stats(), attention.limits());
    ensure!(
        peak.plans <= limits.plans && peak.pools <= limits.pools,
        "the caches exceed their limits: {peak:?}, {limits:?}"
    );
    Ok(CacheProfile {
        lengths: LENGTHS,
        stats,
        peak,
        limits,
    })
}
