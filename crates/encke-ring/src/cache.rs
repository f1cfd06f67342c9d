//! Plans kept by what they were made from, and buffers kept by the plan they belong to.
//!
//! Both are bounded: what was used longest ago goes first.

use std::collections::VecDeque;
use std::sync::Arc;

use encke_core::plan::{Plan, Request};

/// How often the caches helped.
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
}

/// Plans by request.
#[derive(Debug)]
pub(crate) struct Plans {
    recent: Recent<Request, Arc<Plan>>,
}

impl Plans {
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
