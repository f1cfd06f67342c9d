//! The caches of plans and buffers stay bounded when sequence lengths change.

use encke_core::naive::NaiveKernel;
use encke_core::plan::Request;
use encke_core::plan::program::Role;
use encke_core::sharding::Sharding;
use encke_core::{DType, Pattern, Shape};
use encke_ring::{CacheLimits, CacheStats, ThreadRing};

use crate::support::{CallTensors, DEADLINE};

/// Runs calls of these lengths one after the other; returns the cache statistics after each.
fn calls(limits: CacheLimits, lengths: impl Iterator<Item = usize>) -> Vec<CacheStats> {
    let ring = ThreadRing::new(NaiveKernel, DEADLINE).with_limits(limits);
    let call = |tokens: usize| {
        let shape = Shape::new(1, tokens, 2, 1, 4).unwrap();
        let sharding = Sharding::contiguous(3).unwrap();
        let request = Request::new(shape, Pattern::dense(), sharding, DType::F64);
        let tensors = CallTensors::random(&shape, 1);
        let inputs = [
            (Role::Q, tensors.q.view()),
            (Role::K, tensors.k.view()),
            (Role::V, tensors.v.view()),
        ];
        ring.run(&request, &inputs).unwrap();
        ring.stats()
    };
    lengths.map(call).collect()
}

#[test]
fn caches_stay_bounded_over_many_lengths() {
    let limits = CacheLimits {
        plans: 7,
        pools: 3,
        pool_bytes: 40_000,
    };
    // 150 calls of 50 lengths, none twice within the last eleven; then two lengths in alternation.
    let changing = (0..150).map(|i| 20 + i * 11 % 50);
    let steady = (0..50).map(|i| 30 + i % 2);
    let stats = calls(limits, changing.chain(steady));
    let alone = calls(limits, [69].into_iter())[0].pool_bytes;
    assert!(alone > 0);
    for stats in &stats {
        assert!(stats.plans <= 7 && stats.pools <= 3, "{stats:?}");
        assert!(
            stats.pool_bytes <= limits.pool_bytes.max(alone),
            "{stats:?}"
        );
    }
    let (changed, end) = (stats[149], stats[199]);
    assert_eq!(
        (changed.plan_hits, changed.buffer_hits),
        (0, 0),
        "{changed:?}"
    );
    assert_eq!(end.plan_misses - changed.plan_misses, 2, "{end:?}");
    assert_eq!(end.buffer_hits - changed.buffer_hits, 48, "{end:?}");
    assert!((end.plan_hit_rate() - 48.0 / 200.0).abs() < 1e-12);
}

#[test]
fn the_latest_buffers_are_kept_even_beyond_the_limit() {
    let limits = CacheLimits {
        pool_bytes: 1,
        ..CacheLimits::default()
    };
    let stats = calls(limits, [40, 41, 41, 40].into_iter());
    assert!(stats.iter().all(|stats| stats.pools == 1), "{stats:?}");
    let hits: Vec<usize> = stats.iter().map(|stats| stats.buffer_hits).collect();
    assert_eq!(hits, [0, 0, 1, 1]);
}
