//! Processes as ranks.
//!
//! [`launcher`] knows whether somebody started several of us; it needs no MPI. With the feature
//! `mpi` there is also a `MpiWorld`, the processes of one launch, and a `MpiTransport`, a
//! [`Transport`](encke_core::transport::Transport) between them. Nothing here knows attention.
//!
//! The decision that shaped it: every wait is a loop of tests with a deadline, on a thread of its
//! own, so that messages move while the rank computes and no wait of MPI's can hang a rank. A call
//! that ought not to wait and does is noticed by a watchdog. (MPI's own beginning is the exception.)

pub mod launcher;

#[cfg(feature = "mpi")]
mod alarm;
#[cfg(feature = "mpi")]
mod contact;
#[cfg(feature = "mpi")]
mod error;
#[cfg(feature = "mpi")]
mod flight;
#[cfg(feature = "mpi")]
mod survivors;
#[cfg(feature = "mpi")]
mod sys;
#[cfg(any(feature = "mpi", test))]
mod watchdog;
#[cfg(feature = "mpi")]
mod wire;
#[cfg(any(feature = "mpi", test))]
mod words;
#[cfg(feature = "mpi")]
mod world;

#[cfg(feature = "mpi")]
pub use error::MpiError;
#[cfg(feature = "mpi")]
pub use sys::leave;
#[cfg(feature = "mpi")]
pub use wire::MpiTransport;
#[cfg(feature = "mpi")]
pub use world::MpiWorld;
