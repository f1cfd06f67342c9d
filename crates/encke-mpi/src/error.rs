//! How MPI itself can fail, apart from an exchange, which has the errors of every transport.

use encke_core::transport::TransportError;

/// Why there is no world, or no wire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MpiError {
    /// MPI was started before.
    #[error("MPI has been started in this process before; there is one world for each process")]
    Started,
    /// An MPI without threads.
    #[error(
        "{library} offers thread support {got}, and messages that move during the computation \
         need MPI_THREAD_SERIALIZED; use an MPI that was built with threads"
    )]
    Threads {
        /// What the library calls itself.
        library: String,
        /// What it offers.
        got: &'static str,
    },
    /// A call of MPI failed.
    #[error("{what} failed: {words}")]
    Call {
        /// What was tried.
        what: &'static str,
        /// What MPI said.
        words: String,
    },
    /// This MPI, or this launch, does not survive a death.
    #[error(
        "the death of a process cannot be survived here: {library} was not launched with ULFM; use \
         Open MPI 5 and mpirun --with-ft ulfm"
    )]
    NoUlfm {
        /// What the library calls itself.
        library: String,
    },
    /// An exchange failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}
