//! Why a prediction cannot be made: an invalid machine, a refused plan, a failed measurement.

use encke_core::DType;
use encke_core::kernel::KernelError;
use encke_ring::RingError;

/// Why there is no prediction.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CostError {
    /// A value of the machine description is out of range.
    #[error(
        "{what} is {} in the description of the machine; it must be {expected}",
        short(*got)
    )]
    Number {
        /// The field.
        what: &'static str,
        /// Its value.
        got: f64,
        /// The allowed range.
        expected: &'static str,
    },
    /// A straggler outside the ring.
    #[error("rank {rank} is to be slow, but there are {ranks} ranks, counted from 0")]
    Straggler {
        /// The rank named.
        rank: usize,
        /// The ranks of the ring.
        ranks: usize,
    },
    /// A device without rates for the dtype.
    #[error(
        "{device} has no figures for {dtype}, only for {known}; choose one of them or give the \
         FLOP/s"
    )]
    NoRate {
        /// The device.
        device: String,
        /// The dtype of the request.
        dtype: DType,
        /// The dtypes the device has rates for.
        known: String,
    },
    /// A name that is not in the catalogue.
    #[error("there is no {kind} {name:?}; known are {known}")]
    Unknown {
        /// `device` or `link`.
        kind: &'static str,
        /// The name looked up.
        name: String,
        /// The names in the catalogue.
        known: String,
    },
    /// The plan was refused.
    #[error(transparent)]
    Plan(#[from] encke_core::Error),
    /// The kernel failed while it was measured.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A measured ring failed.
    #[error(transparent)]
    Ring(#[from] RingError),
}

/// A number in digits, or with an exponent where it has more than 20 of them.
fn short(number: f64) -> String {
    match number.abs() < 1e20 {
        true => number.to_string(),
        false => format!("{number:e}"),
    }
}
