//! Messages between GPUs over NCCL.
//!
//! `bindings.rs` is the library loaded at run time, `communicator.rs` one rank's communicator,
//! `transport.rs` the transport. All calls are non-blocking, so that every wait has a deadline and
//! ends in a typed error.

mod bindings;
mod communicator;
mod transport;

pub use bindings::{Nccl, UniqueId};
pub use transport::NcclTransport;
