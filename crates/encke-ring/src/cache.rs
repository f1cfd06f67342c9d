//! Plans kept by what they were made from, and buffers kept by the plan they belong to.
//!
//! Both are bounded: what was used longest ago goes first.

use std::collections::VecDeque;
use std::sync::Arc;

use encke_core::plan::{Plan, Request};

/// What is kept between calls at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct CacheLimits {
    /// Plans.
    pub plans: usize,
    /// Plans whose ranks keep their buffers.
    pub pools: usize,
    /// Bytes of all those buffers. The latest call's are kept in any case: the next one like it
    /// would have to have them. And, beside them, bytes of outputs that their owners have dropped.
    pub pool_bytes: usize,
}

impl Default for CacheLimits {
    fn default() -> CacheLimits {
        CacheLimits {
            plans: 64,
            // A forward and a backward of two shapes.
            pools: 4,
            pool_bytes: 4 << 30,
        }
    }
}

/// How often the caches helped, and what they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct CacheStats {
    /// Plans found.
    pub plan_hits: usize,
    /// Plans made.
    pub plan_misses: usize,
    /// Calls whose ranks and buffers were found.
    pub buffer_hits: usize,
    /// Calls that had to allocate theirs.
    pub buffer_misses: usize,
    /// Plans kept now.
    pub plans: usize,
    /// Plans whose ranks keep their buffers now.
    pub pools: usize,
    /// Bytes of those buffers.
    pub pool_bytes: usize,
    /// Bytes of outputs that their owners have dropped, kept for the next ones.
    pub pooled_bytes: usize,
}

impl CacheStats {
    /// The part of calls whose plan was found.
    pub fn plan_hit_rate(&self) -> f64 {
        rate(self.plan_hits, self.plan_misses)
    }

    /// The part of calls whose buffers were found.
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

/// Values kept by key, the latest first.
#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    entries: VecDeque<(K, V)>,
    most: usize,
}

impl<K, V> Recent<K, V> {
    pub fn new(most: usize) -> Recent<K, V> {
        Recent {
            entries: VecDeque::new(),
            most,
        }
    }

    /// Takes the value out.
    pub fn take(&mut self, is: impl Fn(&K) -> bool) -> Option<(K, V)> {
        let at = self.entries.iter().position(|(key, _)| is(key))?;
        self.entries.remove(at)
    }

    /// Puts a value in as the latest.
    pub fn put(&mut self, key: K, value: V) {
        self.entries.push_front((key, value));
        self.entries.truncate(self.most);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// What all of them weigh.
    pub fn weight(&self, of: impl Fn(&V) -> usize) -> usize {
        self.entries.iter().map(|(_, value)| of(value)).sum()
    }

    /// Drops the oldest until the others weigh no more than this, or only the latest is left.
    pub fn lighten(&mut self, most: usize, of: impl Fn(&V) -> usize) {
        while self.entries.len() > 1 && self.weight(&of) > most {
            self.entries.pop_back();
        }
    }
}

/// Plans by request.
#[derive(Debug)]
pub(crate) struct Plans {
    recent: Recent<Request, Arc<Plan>>,
}

impl Plans {
    pub fn len(&self) -> usize {
        self.recent.len()
    }

    pub fn new(most: usize) -> Plans {
        Plans {
            recent: Recent::new(most),
        }
    }

    /// The plan for a request: found, or made and kept.
    pub fn get(
        &mut self,
        request: &Request,
        stats: &mut CacheStats,
    ) -> encke_core::Result<Arc<Plan>> {
        let plan = match self.recent.take(|key| key == request) {
            Some((_, plan)) => {
                stats.plan_hits += 1;
                plan
            }
            None => {
                let plan = Arc::new(Plan::new(request.clone())?);
                stats.plan_misses += 1;
                plan
            }
        };
        self.recent.put(request.clone(), Arc::clone(&plan));
        Ok(plan)
    }
}
