//! Who computes what: head groups, and workers that take the longest task that is left.
//!
//! The decision here: workers count tasks down from a shared counter. Rayon's own splitting would
//! give the first half of a list to one thread and the second to another, and then an order from
//! long to short is the worst there is.

use std::sync::atomic::{AtomicUsize, Ordering};

use encke_core::job::Job;

use super::scratch::Pool;
use super::tiles::Tiles;

/// Query heads that read the same keys, told apart by the address of those.
pub(crate) fn groups(job: &Job) -> Vec<Vec<usize>> {
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
pub(crate) fn places(job: &Job) -> impl Iterator<Item = (usize, usize)> {
    let segments = job.segments;
    (0..job.batch).flat_map(move |batch| (0..segments).map(move |segment| (batch, segment)))
}

/// Runs tasks in their order on the threads of the current pool, each with scratch memory of its
/// thread. What a task computes must not depend on who runs it.
pub(crate) fn run<T: Tiles, K: Sync>(
    pool: &Pool,
    bytes: usize,
    tasks: &[K],
    work: impl Fn(&K, *mut u8) + Sync,
) {
    assert!(T::available(), "{} tiles are not available here", T::NAME);
    let next = AtomicUsize::new(0);
    let worker = || {
        pool.with(bytes, |scratch| {
            // SAFETY: the tiles are available.
            unsafe { T::configure() };
            while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                work(task, scratch);
            }
            // SAFETY: the tiles are available.
            unsafe { T::release() };
        });
    };
    match rayon::current_num_threads().min(tasks.len()) {
        0 => {}
        1 => worker(),
        workers => rayon::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|_| worker());
            }
        }),
    }
}
