//! How an out-of-core run can fail.

use encke_core::plan::program::Role;

use crate::error::RingError;

/// Why a sequence could not be streamed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The request was refused before any work started.
    #[error(transparent)]
    Request(#[from] encke_core::Error),
    /// A request that one rank cannot compute without the others.
    #[error("{what} cannot be streamed: {hint}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// The memory limit is below the smallest possible rank.
    #[error(
        "a memory limit of {limit} bytes is too small: with {ranks} ranks, the most there can be \
         here, it takes {least} bytes; allow at least that"
    )]
    Limit {
        /// Bytes allowed.
        limit: usize,
        /// Bytes needed.
        least: usize,
        /// The number of ranks that needs so few.
        ranks: usize,
    },
    /// A file failed.
    #[error("cannot {verb} the rows of {role:?} at token {token}: {source}")]
    File {
        /// read or write.
        verb: &'static str,
        /// The tensor.
        role: Role,
        /// The first token of the rows.
        token: usize,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A source or a sink without the tensor.
    #[error("there is nothing to {verb} {role:?} with")]
    Missing {
        /// read or write.
        verb: &'static str,
        /// The tensor.
        role: Role,
    },
    /// A source that refuses the contents of its rows.
    #[error("{reason}")]
    Refused {
        /// What it found, and where.
        reason: String,
    },
    /// A rank failed.
    #[error(transparent)]
    Ring(#[from] RingError),
}
