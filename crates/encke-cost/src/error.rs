//! What can be wrong with a description, and who says so.

use encke_core::DType;
use encke_core::kernel::KernelError;
use encke_ring::RingError;

/// Why there is no time to tell.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClockError {
    /// A number of the description that no machine can have.
    #[error("{what} is {got} in the description of the machine; it must be {wanted}")]
    Number {
        /// Which number.
        what: &'static str,
        /// What it is.
        got: f64,
        /// What it may be.
        wanted: &'static str,
    },
    /// A straggler that is not there.
    #[error("rank {rank} is to be slow, but there are {ranks} ranks, counted from 0")]
    Straggler {
        /// The rank named.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// A device without figures for the type.
    #[error(
        "{device} has no figures for {dtype}, only for {known}; choose one of them or give the FLOP/s"
    )]
    NoRate {
        /// The device.
        device: String,
        /// The type asked for.
        dtype: DType,
        /// The types it has figures for.
        known: String,
    },
    /// A name that is not in the catalogue.
    #[error("there is no {kind} {name:?}; known are {known}")]
    Unknown {
        /// What was looked for.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// The plan was refused.
    #[error(transparent)]
    Plan(#[from] encke_core::Error),
    /// The kernel could not be measured.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The ring that time was to be held against failed.
    #[error(transparent)]
    Ring(#[from] RingError),
}
