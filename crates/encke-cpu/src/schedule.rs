//! Distribution of tasks over threads: each worker takes the longest task that is left.
//!
//! The decision here: workers take tasks from one shared counter. Rayon's own splitting would give
//! the first half of the list to one thread and the second half to another, which balances worst
//! when the list is sorted from long to short.

use std::sync::atomic::{AtomicUsize, Ordering};

use encke_core::job::Job;

/// Kernel calls that are running in this process: ranks that are threads share one pool.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// A running kernel call, counted until it is dropped.
#[derive(Debug)]
pub(crate) struct ActiveCall {
    calls: usize,
}

impl ActiveCall {
    /// Registers a call that starts now.
    pub fn new() -> ActiveCall {
        ActiveCall {
            calls: 1 + CALLS.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// How many tasks the call should have so that the threads of the pool finish together.
    /// Fewer while other calls use the pool, because each task repeats the packing of its keys. The
    /// result of a row does not depend on the number of tasks.
    pub fn task_target(&self) -> usize {
        match encke_pool::threads() {
            1 => 1,
            threads => (4 * threads).div_ceil(self.calls),
        }
    }
}

impl Drop for ActiveCall {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tasks, handed out in order.
pub(crate) struct TaskQueue<'a, K> {
    tasks: &'a [K],
    next: AtomicUsize,
}

impl<'a, K> TaskQueue<'a, K> {
    /// The next task, if any is left.
    pub fn take(&self) -> Option<&'a K> {
        self.tasks.get(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// Runs tasks on the threads of the pool. Each thread calls `worker` once, which takes
/// tasks until none is left. The result of a task must not depend on the thread that runs it.
pub(crate) fn run<K: Sync>(tasks: &[K], worker: impl Fn(&TaskQueue<'_, K>) + Sync) {
    let queue = TaskQueue {
        tasks,
        next: AtomicUsize::new(0),
    };
    match encke_pool::threads().min(tasks.len()) {
        0 => {}
        1 => worker(&queue),
        workers => encke_pool::install(|| {
            rayon::scope(|scope| {
                for _ in 0..workers {
                    scope.spawn(|_| worker(&queue));
                }
            })
        }),
    }
}

/// Query heads grouped by the key head they read, which is identified by its address.
pub(crate) fn head_groups(job: &Job) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for head in 0..job.heads {
        let same = |group: &&mut Vec<usize>| job.k.heads[group[0]] == job.k.heads[head];
        match groups.iter_mut().find(same) {
            Some(group) => group.push(head),
            None => groups.push(vec![head]),
        }
    }
    groups
}

/// Every (batch, segment) of a job.
pub(crate) fn batch_segments(job: &Job) -> impl Iterator<Item = (usize, usize)> + use<> {
    let segments = job.segments;
    (0..job.batch).flat_map(move |batch| (0..segments).map(move |segment| (batch, segment)))
}
