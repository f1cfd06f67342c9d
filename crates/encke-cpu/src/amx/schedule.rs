//! Runs tasks on threads whose tiles are configured.

use super::scratch::PagePool;
use super::tiles::TileUnit;
use crate::schedule;

/// Runs tasks in their order on the threads of the current pool. Each thread has its own scratch
/// memory of `bytes` bytes. The result of a task must not depend on the thread that runs it.
pub fn run<T: TileUnit, K: Sync>(
    pool: &PagePool,
    bytes: usize,
    tasks: &[K],
    work: impl Fn(&K, *mut u8) + Sync,
) {
    assert!(T::available(), "{} tiles are not available here", T::NAME);
    schedule::run(tasks, |queue| {
        pool.with(|scratch| {
            let scratch = scratch.reserve(bytes);
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
