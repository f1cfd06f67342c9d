//! Who computes what: workers that take the longest task that is left.
//!
//! The decision here: workers count tasks down from a shared counter. Rayon's own splitting would
//! give the first half of a list to one thread and the second to another, and then an order from
//! long to short is the worst there is.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls of this process that compute at the moment: ranks that are threads share their pool.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// A call's share of the threads, as long as it computes.
#[derive(Debug)]
pub(crate) struct Share {
    calls: usize,
}

impl Share {
    /// Begins to compute.
    pub fn new() -> Share {
        Share {
            calls: 1 + CALLS.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// How many tasks the call should have for the threads of the current pool to end together;
    /// fewer where others keep them busy, because what tasks share is done for each. What a task
    /// computes for a row does not depend on how many there are.
    pub fn tasks(&self) -> usize {
        match rayon::current_num_threads() {
            1 => 1,
            threads => (4 * threads).div_ceil(self.calls),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tasks that are handed out in their order.
pub(crate) struct Queue<'a, K> {
    tasks: &'a [K],
    next: AtomicUsize,
}

impl<'a, K> Queue<'a, K> {
    /// The next task, while there is one.
    pub fn take(&self) -> Option<&'a K> {
        self.tasks.get(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// Runs tasks on the threads of the current pool; each thread has one call of `worker`, which
/// takes tasks until there are none. What a task computes must not depend on who runs it.
pub(crate) fn run<K: Sync>(tasks: &[K], worker: impl Fn(&Queue<'_, K>) + Sync) {
    let queue = Queue {
        tasks,
        next: AtomicUsize::new(0),
    };
    match rayon::current_num_threads().min(tasks.len()) {
        0 => {}
        1 => worker(&queue),
        workers => rayon::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|_| worker(&queue));
            }
        }),
    }
}
