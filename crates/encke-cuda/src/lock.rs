//! Mutexes of this crate: what they guard is valid at every moment, so a panic of another thread
//! does not make it useless.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after another thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
