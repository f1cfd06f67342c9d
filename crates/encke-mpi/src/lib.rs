//! Processes as ranks, over MPI.
//!
//! [`launcher`] detects whether a launcher started several processes; it needs no MPI. With the
//! feature `mpi` there are also `MpiWorld`, the processes of one launch, and `MpiTransport`, a
//! [`Transport`](encke_core::transport::Transport) between them. Nothing here depends on attention.
//!
//! The decision that shaped it: every wait is a loop of `MPI_Test` with a deadline, on a thread of
//! its own, so that messages progress while the rank computes and no blocking call of MPI can hang
//! a rank. A watchdog, which runs before MPI does, ends a process whose call does not return.

pub mod launcher;

#[cfg(feature = "mpi")]
mod connect;
#[cfg(any(feature = "mpi", test))]
mod error;
#[cfg(feature = "mpi")]
mod exchange;
#[cfg(feature = "mpi")]
mod failure_listener;
#[cfg(feature = "mpi")]
mod membership;
#[cfg(feature = "mpi")]
mod sys;
#[cfg(feature = "mpi")]
mod transport;
#[cfg(any(feature = "mpi", test))]
mod watchdog;
#[cfg(any(feature = "mpi", test))]
mod wire_format;
#[cfg(feature = "mpi")]
mod world;

#[cfg(any(feature = "mpi", test))]
pub use error::MpiError;
#[cfg(feature = "mpi")]
pub use sys::exit_at_once;
#[cfg(feature = "mpi")]
pub use transport::MpiTransport;
#[cfg(feature = "mpi")]
pub use world::MpiWorld;
