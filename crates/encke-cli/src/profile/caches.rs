//! What is kept between calls: plans and buffers of a run whose lengths change all the time.
//!
//! The calls are real ones, on threads, of lengths that go up and down between half of the tokens and
//! all of them, each of them twice in a row, as a training run with batches of many lengths has it.

use anyhow::{Result, ensure};
use encke::explain::bytes;
use encke::{Attention, Builder, CacheStats, Kernel, Request, Shape};
use encke_cost::BenchmarkInputs;

use crate::table::Table;
use crate::terminal::{Paint, bar};

/// Lengths, of which each is called twice.
const LENGTHS: usize = 24;

/// Makes the calls, and says what was found, what had to be made and what is held. `build` gives them
/// a device.
pub fn words<K: Kernel>(
    paint: Paint,
    request: &Request,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<String> {
    let builder = Attention::builder()
        .pattern(request.pattern.clone())
        .ranks(request.sharding.ranks())
        .sharding(request.sharding.cut().clone())
        .queries(request.queries);
    let attention = build(builder)?;
    let (mut most, tokens) = (CacheStats::default(), request.shape.tokens);
    let progress = bar(LENGTHS);
    for at in 0..LENGTHS {
        // Seven steps through the lengths, so that none comes again soon.
        let part = at * 7 % LENGTHS;
        let shape = Shape {
            tokens: (tokens / 2 + tokens * part / (2 * LENGTHS)).max(1),
            ..request.shape
        };
        let rehearsal = BenchmarkInputs::new(&Request {
            shape,
            ..request.clone()
        })?;
        for _ in 0..2 {
            let [q, k, v] = rehearsal.inputs();
            attention.forward(&q, &k, &v)?;
            let stats = attention.stats();
            most.plans = most.plans.max(stats.plans);
            most.pools = most.pools.max(stats.pools);
            most.pool_bytes = most.pool_bytes.max(stats.pool_bytes);
            most.pooled_bytes = most.pooled_bytes.max(stats.pooled_bytes);
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let (stats, limits) = (attention.stats(), attention.limits());
    ensure!(
        most.plans <= limits.plans && most.pools <= limits.pools,
        "the caches have outgrown their limits: {most:?}, {limits:?}"
    );
    let title = format!("kept between {} calls of {LENGTHS} lengths", 2 * LENGTHS);
    let mut table = Table::new(
        2,
        ["", "found", "made", "hit rate", "kept at most", "limit"],
    );
    table.row([
        "plans".to_string(),
        stats.plan_hits.to_string(),
        stats.plan_misses.to_string(),
        format!("{:.0} %", 100.0 * stats.plan_hit_rate()),
        most.plans.to_string(),
        limits.plans.to_string(),
    ]);
    table.row([
        "buffers, by plan".to_string(),
        stats.buffer_hits.to_string(),
        stats.buffer_misses.to_string(),
        format!("{:.0} %", 100.0 * stats.buffer_hit_rate()),
        format!("{} with {}", most.pools, bytes(most.pool_bytes)),
        format!("{} with {}", limits.pools, bytes(limits.pool_bytes)),
    ]);
    table.row([
        "outputs, dropped".to_string(),
        String::new(),
        String::new(),
        String::new(),
        bytes(most.pooled_bytes),
        bytes(limits.pool_bytes),
    ]);
    Ok(format!("\n{}\n{table}", paint.bold(&title)))
}
