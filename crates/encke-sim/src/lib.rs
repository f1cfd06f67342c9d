//! All ranks of a ring on one thread.
//!
//! There is no attention in this crate: it drives the very [`Rank`](encke_ring::Rank) that rings of
//! threads drive, so what it shows of memory, time and faults is what they would do.
#![forbid(unsafe_code)]

pub mod fault_config;
pub mod fault_outcome;
pub mod fault_run;
pub mod fit;
pub mod lockstep;
mod mail;
pub mod profile;
pub mod sample;
mod survivors;
pub mod wire;
