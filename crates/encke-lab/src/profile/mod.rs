//! Memory profiles: the bytes that ranks allocate, compared with the plan, by ring size.
//!
//! The decision here: every number called measured comes from the ledgers of a run in this process;
//! nothing is extrapolated from another ring size.

mod caches;
mod files;
mod measure;
mod policies;
#[cfg(feature = "mpi")]
pub mod processes;

pub use caches::{CacheProfile, measure_caches};
pub use files::{write_csv, write_json};
pub use measure::{PassProfile, ProfileSettings, measure};
pub use policies::{PolicyProfile, measure_policies};
