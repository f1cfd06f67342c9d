//! A timer for MPI calls that should return at once but may block: a cut link can hold the first
//! message to a process, or a failure notice, inside the library indefinitely.
//!
//! The decision here: a blocked MPI call cannot be interrupted, and memory that it may still read
//! cannot be freed, so the only remedy is to report the error and end the process. The owner of the
//! process supplies that handler; without one nothing is watched.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use encke_core::transport::TransportError;

/// Makes the error of a call from the time it has blocked.
pub type TimeoutError = Box<dyn FnOnce(Duration) -> TransportError + Send>;

/// A call with a time limit.
struct WatchedCall {
    start: Instant,
    limit: Duration,
    error: TimeoutError,
}

#[derive(Default)]
struct WatchdogState {
    call: Option<WatchedCall>,
    stopped: bool,
}

/// Ends the process, through its handler, if a call blocks.
#[derive(Default)]
pub struct Watchdog {
    shared: Option<Arc<(Mutex<WatchdogState>, Condvar)>>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let watches = self.shared.is_some();
        f.debug_struct("Watchdog").field("on", &watches).finish()
    }
}

impl Watchdog {
    /// Starts the watchdog's thread. It calls `timed_out` at most once.
    pub fn start(
        timed_out: impl FnOnce(TransportError) + Send + 'static,
    ) -> std::io::Result<Watchdog> {
        let shared = Arc::default();
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("encke-watchdog".to_string());
        thread.spawn(move || {
            if let Some(error) = watch(&watched) {
                timed_out(error);
            }
        })?;
        Ok(Watchdog {
            shared: Some(shared),
        })
    }

    /// Starts the timer: [`Watchdog::disarm`] must follow within `limit`.
    pub fn arm(
        &self,
        limit: Duration,
        error: impl FnOnce(Duration) -> TransportError + Send + 'static,
    ) {
        let (start, error) = (Instant::now(), Box::new(error));
        self.update(|state| {
            state.call = Some(WatchedCall {
                start,
                limit,
                error,
            })
        });
    }

    /// Stops the timer.
    pub fn disarm(&self) {
        self.update(|state| state.call = None);
    }

    fn update(&self, change: impl FnOnce(&mut WatchdogState)) {
        let Some(shared) = &self.shared else { return };
        change(&mut shared.0.lock().unwrap_or_else(PoisonError::into_inner));
        shared.1.notify_one();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.update(|state| state.stopped = true);
    }
}

/// Waits until a call exceeds its limit, and returns its error; `None` when the watchdog is
/// dropped.
fn watch((state, changed): &(Mutex<WatchdogState>, Condvar)) -> Option<TransportError> {
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

    fn late(waited: Duration) -> TransportError {
        TransportError::Deadline {
            rank: 1,
            peer: 2,
            round: 3,
            waited,
            limit: Duration::from_millis(20),
        }
    }

    #[test]
    fn a_call_that_exceeds_its_limit_is_reported_once() {
        let (sender, errors) = channel();
        let watchdog = Watchdog::start(move |error| sender.send(error).unwrap()).unwrap();
        watchdog.arm(Duration::from_millis(20), late);
        let error = errors.recv().unwrap();
        let long = |waited: &Duration| *waited >= Duration::from_millis(20);
        assert!(matches!(error, TransportError::Deadline { waited, .. } if long(&waited)));
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

    #[test]
    fn without_a_handler_nothing_is_watched() {
        let watchdog = Watchdog::default();
        watchdog.arm(Duration::ZERO, late);
        watchdog.disarm();
    }
}
