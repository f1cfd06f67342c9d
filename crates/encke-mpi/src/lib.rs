//! Processes as ranks.
//!
//! [`launcher`] knows whether somebody started several of us; it needs no MPI. With the feature
//! `mpi` there is also a `World`, the processes of one launch, and a `Wire`, a
//! [`Transport`](encke_core::transport::Transport) between them. Nothing here knows attention.
//!
//! The decision that shaped it: every wait is a loop of tests with a deadline, on a thread of its
//! own, so that messages move while the rank computes and no call of MPI can hang a rank. (MPI's own
//! beginning and end are the exceptions: they cannot be tested for.)

pub mod launcher;

#[cfg(feature = "mpi")]
mod alarm;
#[cfg(feature = "mpi")]
mod error;
#[cfg(feature = "mpi")]
mod flight;
#[cfg(feature = "mpi")]
mod survivors;
#[cfg(feature = "mpi")]
mod sys;
#[cfg(feature = "mpi")]
mod wire;
#[cfg(feature = "mpi")]
mod world;

#[cfg(feature = "mpi")]
pub use error::MpiError;
#[cfg(feature = "mpi")]
pub use wire::Wire;
#[cfg(feature = "mpi")]
pub use world::World;
