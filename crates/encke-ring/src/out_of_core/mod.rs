//! Sequences larger than memory: ranks that live one after another.
//!
//! A rank needs its own rows and, a few at a time, rows of others. Where all inputs can be read at
//! any place, nobody has to be there to send them: one rank is resident, what it would receive is
//! read from the [`Source`], what it finds out goes to the [`Sink`], and then the next rank takes
//! over its memory. The rank is the very [`Rank`](crate::Rank) of every ring, and it carries
//! out the very same plan, so a forward pass has the same bits.
//!
//! The decision that shaped it: the plan says of every message which rows it holds
//! ([`Origin`](encke_core::plan::program::Origin)). Nothing here knows patterns or rings.
//!
//! Two kinds of request are refused: queries that every rank holds (they do not get smaller with
//! the number of ranks) and patterns whose branches are combined after the last rank has ended.

mod checksum;
mod drive;
mod files;
mod fit;
mod generator;
mod gradient_file;
mod member;
mod row_io;
mod rows;
mod samples;
mod staging;
mod streamed;
mod transfer;

use crate::RankError;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data};

pub use checksum::Checksum;
pub use drive::{RankDone, Stream};
pub use files::{Files, TensorFile};
pub use fit::{Fit, MOST_RANKS, PROGRAM_BYTES, fit};
pub use generator::Generator;
pub use gradient_file::GradientFile;
pub use member::Member;
pub use row_io::{BufferSlot, RowIo};
pub use rows::width;
pub use samples::{Gathered, Sampled, Samples};
pub use streamed::Streamed;
pub use transfer::transfer;

/// Some heads of some tokens of a tensor. Numbers of it lie `[tokens, heads, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRange<'a> {
    /// The tensor.
    pub role: Role,
    /// The batch entry.
    pub batch: usize,
    /// The tokens.
    pub tokens: Run,
    /// The heads, rising.
    pub heads: &'a [usize],
}

/// Where rows come from.
pub trait Source: Sync {
    /// The type its numbers have.
    fn dtype(&self, role: Role) -> DType;

    /// Overwrites `to`, which has that type and the size of the stretch.
    fn read(&self, stretch: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError>;
}

/// Where rows go.
pub trait Sink {
    /// Takes the rows of a stretch: all heads, rounded to the type of the output.
    fn write(&mut self, stretch: &RowRange<'_>, from: &Data) -> Result<(), StreamError>;
}

/// Why a sequence could not be streamed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The request was refused before any work started.
    #[error(transparent)]
    Request(#[from] encke_core::Error),
    /// A request that no rank alone can carry out.
    #[error("{what} cannot be streamed: {hint}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// Not enough memory for even the smallest share.
    #[error(
        "a memory limit of {limit} bytes is too small: with {ranks} ranks, the most there can be \
         here, it takes {least} bytes; allow at least that"
    )]
    Limit {
        /// Bytes allowed.
        limit: usize,
        /// Bytes needed.
        least: usize,
        /// The number of ranks with which they are.
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
        /// What the system said.
        source: std::io::Error,
    },
    /// A source or a sink that does not have the tensor.
    #[error("there is nothing to {verb} {role:?} with")]
    Missing {
        /// read or write.
        verb: &'static str,
        /// The tensor.
        role: Role,
    },
    /// A source that found something in its rows that may not be there.
    #[error("{reason}")]
    Refused {
        /// What it found, and where.
        reason: String,
    },
    /// A rank failed.
    #[error("rank {rank} failed: {source}")]
    Rank {
        /// Which.
        rank: usize,
        /// How.
        source: RankError,
    },
}
