//! All ranks of a ring on one thread: measured memory, and fault injection.
//!
//! [`lockstep`] executes a plan round by round and [`profile`] reports the memory that each rank
//! held. [`fault_run`] executes a plan in virtual time over a [`network`] with injected faults
//! ([`fault_config`]), and [`fault_outcome`] decides whether the result is allowed. How long a plan
//! takes is not simulated here but in `encke-cost`.
//!
//! The decision here: no attention is computed in this crate. It drives the same
//! [`Rank`](encke_ring::Rank) as rings of threads do, so the memory and the errors that it shows
//! are those of real rings.
#![forbid(unsafe_code)]

pub mod fault_config;
pub mod fault_outcome;
pub mod fault_run;
mod inbox;
pub mod lockstep;
mod membership;
pub mod network;
pub mod power_law;
pub mod profile;
pub mod random_call;
mod recovery;
mod simulated_ring;
