//! A timer for MPI calls that may block: `MPI_Init` waits for a process that died at the start, and
//! a cut link can hold the first message to a process, or a failure notice, inside the library
//! indefinitely.
//!
//! The decision here: a blocked MPI call cannot be interrupted, and memory that it may still read
//! cannot be freed, so the only remedy is to report the error and end the process. The owner of the
//! process supplies that handler.

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::MpiError;

/// Makes the error of a call from the time it has blocked.
pub type TimeoutError = Box<dyn FnOnce(Duration) -> MpiError + Send>;

/// A call with a time limit.
struct WatchedCall {
    start: Instant,
    limit: Duration,
    error: TimeoutError,
}

#[derive(Default)]
struct WatchdogState {
    call: Option<WatchedCall>,
    timed_out: bool,
    stopped: bool,
}

/// Ends the process, through its handler, if a call blocks.
pub struct Watchdog {
    shared: Arc<(Mutex<WatchdogState>, Condvar)>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchdog").finish_non_exhaustive()
    }
}

impl Watchdog {
    /// Starts the watchdog's thread. It calls `timed_out` at most once.
    pub fn start(timed_out: impl FnOnce(MpiError) + Send + 'static) -> io::Result<Watchdog> {
        let shared = Arc::default();
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("encke-watchdog".to_string());
        thread.spawn(move || {
            if let Some(error) = watch(&watched) {
                timed_out(error);
            }
        })?;
        Ok(Watchdog { shared })
    }

    /// Starts the timer: [`Watchdog::disarm`] must follow within `limit`.
    pub fn arm(&self, limit: Duration, error: impl FnOnce(Duration) -> MpiError + Send + 'static) {
        let (start, error) = (Instant::now(), Box::new(error));
        self.update(|state| {
            state.call = Some(WatchedCall {
                start,
                limit,
                error,
            })
        });
    }

    /// Stops the timer. Never returns if it has run out: the handler is about to end the process.
    pub fn disarm(&self) {
        let mut timed_out = false;
        self.update(|state| {
            state.call = None;
            timed_out = state.timed_out;
        });
        if timed_out {
            loop {
                std::thread::park();
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut WatchdogState)) {
        let (state, changed) = &*self.shared;
        change(&mut state.lock().unwrap_or_else(PoisonError::into_inner));
        changed.notify_one();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.update(|state| state.stopped = true);
    }
}

/// Waits until a call exceeds its limit, and returns its error; `None` when the watchdog is
/// dropped.
fn watch((state, changed): &(Mutex<WatchdogState>, Condvar)) -> Option<MpiError> {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    while !state.stopped {
        let left = state
            .call
            .as_ref()
            .map(|call| call.limit.saturating_sub(call.start.elapsed()));
        state = match left {
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(Duration::ZERO) => {
                let call = state.call.take()?;
                state.timed_out = true;
                return Some((call.error)(call.start.elapsed()));
            }
            Some(left) => {
                let woken = changed.wait_timeout(state, left);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    fn late(waited: Duration) -> MpiError {
        MpiError::Blocked {
            call: "a call",
            limit: waited,
        }
    }

    #[test]
    fn a_call_that_exceeds_its_limit_is_reported_once() {
        let (sender, errors) = channel();
        let watchdog = Watchdog::start(move |error| sender.send(error).unwrap()).unwrap();
        watchdog.arm(Duration::from_millis(20), late);
        let error = errors.recv().unwrap();
        let least = Duration::from_millis(20);
        assert!(matches!(error, MpiError::Blocked { limit, .. } if limit >= least));
        watchdog.arm(Duration::ZERO, late);
        let again = errors.recv_timeout(Duration::from_millis(50));
        assert_eq!(again, Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_call_that_returns_in_time_is_not_reported() {
        let (sender, errors) = channel();
        let watchdog = Watchdog::start(move |error| sender.send(error).unwrap()).unwrap();
        for _ in 0..100 {
            watchdog.arm(Duration::from_secs(60), late);
        }
        watchdog.arm(Duration::from_secs(60), late);
        watchdog.disarm();
        let silent = errors.recv_timeout(Duration::from_millis(50));
        assert_eq!(silent, Err(RecvTimeoutError::Timeout));
        drop(watchdog);
        assert!(errors.recv().is_err(), "its thread ends with the watchdog");
    }
}
