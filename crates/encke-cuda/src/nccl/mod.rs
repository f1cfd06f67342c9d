//! Hops between GPUs over NCCL.
//!
//! `bindings.rs` is the library as it is loaded at run time, `communicator.rs` one rank's membership
//! in a group of ranks, `transport.rs` the wire. Everything is asked for without blocking, so that
//! every wait has a deadline and ends in a typed error.

mod bindings;
mod communicator;
mod transport;

pub use bindings::{Nccl, UniqueId};
pub use transport::NcclTransport;
