//! What a ring keeps between calls: plans by request, ranks and their buffers by plan, and the
//! memory of dropped outputs.
//!
//! All of it is bounded: the least recently used entry is dropped first. Keys are whole requests,
//! compared field by field, so a cached plan never serves a request that differs in anything but
//! the seed of its dropout, on which nothing in a plan depends.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::tensor_pool::TensorPool;
use encke_core::kernel::Kernel;
use encke_core::plan::{Plan, Request};

use crate::rank::Rank;

/// How much a ring keeps between calls at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct CacheLimits {
    /// Plans.
    pub plans: usize,
    /// Plans whose ranks keep their buffers.
    pub pools: usize,
    /// Bytes of all those buffers; the latest call's buffers are kept even if they exceed it. The
    /// same limit applies, separately, to the memory of dropped outputs.
    pub pool_bytes: usize,
}

impl Default for CacheLimits {
    fn default() -> CacheLimits {
        CacheLimits {
            plans: 64,
            // A forward and a backward pass of two shapes.
            pools: 4,
            pool_bytes: 4 << 30,
        }
    }
}

/// Cache hits and misses, and what the caches hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct CacheStats {
    /// Calls whose plan was cached.
    pub plan_hits: usize,
    /// Calls whose plan had to be made.
    pub plan_misses: usize,
    /// Calls whose ranks and buffers were cached.
    pub buffer_hits: usize,
    /// Calls that had to allocate theirs.
    pub buffer_misses: usize,
    /// Plans cached now.
    pub plans: usize,
    /// Plans whose ranks keep their buffers now.
    pub pools: usize,
    /// Bytes of those buffers.
    pub pool_bytes: usize,
    /// Bytes of dropped outputs, kept for later outputs.
    pub pooled_bytes: usize,
}

impl CacheStats {
    /// The fraction of calls whose plan was cached.
    pub fn plan_hit_rate(&self) -> f64 {
        rate(self.plan_hits, self.plan_misses)
    }

    /// The fraction of calls whose buffers were cached.
    pub fn buffer_hit_rate(&self) -> f64 {
        rate(self.buffer_hits, self.buffer_misses)
    }
}

fn rate(hits: usize, misses: usize) -> f64 {
    match hits + misses {
        0 => 0.0,
        all => hits as f64 / all as f64,
    }
}

/// Values by key, most recently used first; the oldest is dropped when there are too many.
struct LruCache<K, V> {
    entries: VecDeque<(K, V)>,
    capacity: usize,
}

impl<K, V> LruCache<K, V> {
    fn new(capacity: usize) -> LruCache<K, V> {
        LruCache {
            entries: VecDeque::new(),
            capacity,
        }
    }

    /// Removes and returns a value.
    fn take(&mut self, is: impl Fn(&K) -> bool) -> Option<V> {
        let at = self.entries.iter().position(|(key, _)| is(key))?;
        self.entries.remove(at).map(|(_, value)| value)
    }

    /// Inserts a value as the most recent one.
    fn put(&mut self, key: K, value: V) {
        self.entries.push_front((key, value));
        self.entries.truncate(self.capacity);
    }
}

/// What one ring keeps between calls: plans by request, idle ranks with their buffers by plan, and
/// the memory of outputs that the caller has dropped.
pub(crate) struct RingCache<K: Kernel> {
    limits: CacheLimits,
    outputs: Arc<TensorPool>,
    entries: Mutex<CacheEntries<K>>,
}

struct CacheEntries<K: Kernel> {
    plans: LruCache<Request, Arc<Plan>>,
    ranks: LruCache<Arc<Plan>, Vec<Rank<K>>>,
    stats: CacheStats,
}

impl<K: Kernel> CacheEntries<K> {
    /// Bytes of the buffers of all idle ranks.
    fn buffer_bytes(&self) -> usize {
        let ranks = self.ranks.entries.iter().flat_map(|(_, ranks)| ranks);
        ranks.map(Rank::allocated_bytes).sum()
    }
}

impl<K: Kernel> RingCache<K> {
    pub fn new(limits: CacheLimits) -> RingCache<K> {
        let output_bytes = match limits.pools {
            0 => 0,
            _ => limits.pool_bytes,
        };
        RingCache {
            limits,
            outputs: Arc::new(TensorPool::new(output_bytes)),
            entries: Mutex::new(CacheEntries {
                plans: LruCache::new(limits.plans),
                ranks: LruCache::new(limits.pools),
                stats: CacheStats::default(),
            }),
        }
    }

    fn entries(&self) -> MutexGuard<'_, CacheEntries<K>> {
        // No panic can leave an entry half changed.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn limits(&self) -> CacheLimits {
        self.limits
    }

    /// Memory of dropped outputs, for the outputs of later calls.
    pub fn outputs(&self) -> &Arc<TensorPool> {
        &self.outputs
    }

    /// Hit counts, and what is kept now.
    pub fn stats(&self) -> CacheStats {
        let entries = self.entries();
        CacheStats {
            plans: entries.plans.entries.len(),
            pools: entries.ranks.entries.len(),
            pool_bytes: entries.buffer_bytes(),
            pooled_bytes: self.outputs.bytes(),
            ..entries.stats
        }
    }

    /// The plan for a request: cached, or made and cached.
    pub fn plan(&self, request: &Request) -> encke_core::Result<Arc<Plan>> {
        let mut entries = self.entries();
        let CacheEntries { plans, stats, .. } = &mut *entries;
        let key = request.clone().with_seed(0);
        let mut plan = match plans.take(|of| *of == key) {
            Some(plan) => {
                stats.plan_hits += 1;
                plan
            }
            None => {
                let plan = Arc::new(Plan::new(request.clone())?);
                stats.plan_misses += 1;
                plan
            }
        };
        if let Some(dropout) = request.dropout
            && plan.request().dropout != request.dropout
        {
            plan = Arc::new(plan.with_seed(dropout.seed()));
        }
        plans.put(key, Arc::clone(&plan));
        Ok(plan)
    }

    /// Idle ranks of an earlier call with this plan, with their buffers, and with its seed.
    pub fn take_ranks(&self, plan: &Arc<Plan>) -> Option<Vec<Rank<K>>> {
        let mut entries = self.entries();
        let mut ranks = entries.ranks.take(|key| key.differs_in_seed_alone(plan));
        match ranks {
            Some(_) => entries.stats.buffer_hits += 1,
            None => entries.stats.buffer_misses += 1,
        }
        if let Some(dropout) = plan.request().dropout {
            let ranks = ranks.iter_mut().flatten();
            ranks.for_each(|rank| rank.set_seed(dropout.seed()));
        }
        ranks
    }

    /// Keeps ranks for the next call with their plan. Drops the least recently used ones until all
    /// buffers together take at most `max_bytes`; the ranks just given are kept in any case.
    pub fn put_ranks(&self, plan: Arc<Plan>, ranks: Vec<Rank<K>>, max_bytes: usize) {
        let mut entries = self.entries();
        entries.ranks.put(plan, ranks);
        while entries.ranks.entries.len() > 1 && entries.buffer_bytes() > max_bytes {
            entries.ranks.entries.pop_back();
        }
    }
}
