//! Who computes what: head groups, and workers whose tiles are configured.

use encke_core::job::Job;

use super::scratch::Pool;
use super::tiles::Tiles;
use crate::schedule;

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
    schedule::run(tasks, |queue| {
        pool.with(bytes, |scratch| {
            // SAFETY: the tiles are available.
            unsafe { T::configure() };
            while let Some(task) = queue.take() {
                work(task, scratch);
            }
            // SAFETY: the tiles are available.
            unsafe { T::release() };
        });
    });
}
