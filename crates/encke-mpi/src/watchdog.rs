//! A second pair of eyes on calls of MPI that ought to return at once and may not: a link that is cut
//! can hold the first message to somebody, or the news of a failure, inside the library for ever.
//!
//! The decision here: nobody can be called back from inside MPI, and memory that it may still read
//! cannot be given back, so all that is left is to say what is wrong and to end the process. Whoever
//! owns the process says how; without him nothing is watched.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use encke_core::transport::TransportError;

/// What is said when time is up.
pub type Verdict = Box<dyn FnOnce(Duration) -> TransportError + Send>;

#[derive(Default)]
struct Watched {
    /// Since when, for how long, and what it means if that was not enough.
    now: Option<(Instant, Duration, Verdict)>,
    over: bool,
}

type Shared = Arc<(Mutex<Watched>, Condvar)>;

/// Looks at the clock for a thread that cannot.
#[derive(Default)]
pub struct Watchdog {
    shared: Option<Shared>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let watches = self.shared.is_some();
        f.debug_struct("Watchdog").field("on", &watches).finish()
    }
}

impl Watchdog {
    /// Begins to watch; `bark` is called once at most, on a thread of its own.
    pub fn start(bark: impl FnOnce(TransportError) + Send + 'static) -> std::io::Result<Watchdog> {
        let shared = Shared::default();
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("encke-watchdog".to_string());
        thread.spawn(move || {
            if let Some(error) = watch(&seen) {
                bark(error);
            }
        })?;
        Ok(Watchdog {
            shared: Some(shared),
        })
    }

    /// From now on something must be over within `limit`.
    pub fn expect(
        &self,
        limit: Duration,
        verdict: impl FnOnce(Duration) -> TransportError + Send + 'static,
    ) {
        self.set(Some((Instant::now(), limit, Box::new(verdict))));
    }

    /// It is over.
    pub fn relax(&self) {
        self.set(None);
    }

    fn set(&self, now: Option<(Instant, Duration, Verdict)>) {
        let Some(shared) = &self.shared else { return };
        let mut watched = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.now = now;
        shared.1.notify_one();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let Some(shared) = &self.shared else { return };
        let mut watched = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.over = true;
        shared.1.notify_one();
    }
}

/// Waits until something took too long, and says what; nothing when there is nothing more to watch.
fn watch((watched, changed): &(Mutex<Watched>, Condvar)) -> Option<TransportError> {
    let mut watched = watched.lock().unwrap_or_else(PoisonError::into_inner);
    while !watched.over {
        let left = watched.now.as_ref().map(|(since, limit, _)| {
            let waited = since.elapsed();
            limit.saturating_sub(waited)
        });
        watched = match left {
            None => changed
                .wait(watched)
                .unwrap_or_else(PoisonError::into_inner),
            Some(Duration::ZERO) => {
                let (since, _, verdict) = watched.now.take()?;
                return Some(verdict(since.elapsed()));
            }
            Some(left) => {
                let woken = changed.wait_timeout(watched, left);
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
    fn what_takes_too_long_is_said_once() {
        let (tell, told) = channel();
        let dog = Watchdog::start(move |error| tell.send(error).unwrap()).unwrap();
        dog.expect(Duration::from_millis(20), late);
        let error = told.recv().unwrap();
        let long = |waited: &Duration| *waited >= Duration::from_millis(20);
        assert!(matches!(error, TransportError::Deadline { waited, .. } if long(&waited)));
        dog.expect(Duration::ZERO, late);
        let again = told.recv_timeout(Duration::from_millis(50));
        assert_eq!(again, Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn what_is_over_in_time_is_not_said() {
        let (tell, told) = channel();
        let dog = Watchdog::start(move |error| tell.send(error).unwrap()).unwrap();
        for _ in 0..100 {
            dog.expect(Duration::from_secs(60), late);
        }
        dog.expect(Duration::from_secs(60), late);
        dog.relax();
        let silent = told.recv_timeout(Duration::from_millis(50));
        assert_eq!(silent, Err(RecvTimeoutError::Timeout));
        drop(dog);
        assert!(told.recv().is_err(), "it ends with the one it watches for");
    }

    #[test]
    fn without_an_owner_nothing_is_watched() {
        let dog = Watchdog::default();
        dog.expect(Duration::ZERO, late);
        dog.relax();
    }
}
