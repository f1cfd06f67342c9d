//! Failures of MPI itself. A failed exchange has the errors of every transport instead.

use std::time::Duration;

use encke_core::transport::TransportError;

/// Why MPI could not be started or used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// MPI was started before.
    #[error("MPI has been started in this process before; there is one world for each process")]
    Started,
    /// An MPI without thread support.
    #[error(
        "{library} offers thread support {got}, and messages that move during the computation \
         need MPI_THREAD_SERIALIZED; use an MPI that was built with threads"
    )]
    Threads {
        /// The name of the library.
        library: String,
        /// The thread support it offers.
        got: &'static str,
    },
    /// A call of MPI failed.
    #[error("{what} failed: {message}")]
    Call {
        /// What was attempted.
        what: &'static str,
        /// MPI's error message.
        message: String,
    },
    /// A call in which all processes meet has not returned.
    #[error(
        "{call} has not returned within {limit:?}: it waits for every process of the launch, and \
         one of them has died, is stuck, or is another program"
    )]
    Blocked {
        /// The call.
        call: &'static str,
        /// How long it may take.
        limit: Duration,
    },
    /// This MPI, or this launch, does not survive the death of a process.
    #[error(
        "the death of a process cannot be survived here: {library} was not launched with ULFM; use \
         Open MPI 5 and mpirun --with-ft ulfm"
    )]
    NoUlfm {
        /// The name of the library.
        library: String,
    },
    /// An exchange failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}
