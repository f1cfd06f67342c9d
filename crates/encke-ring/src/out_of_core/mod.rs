//! Sequences larger than memory: ranks whose rows come from a [`TensorSource`] and go to a
//! [`TensorSink`].
//!
//! A rank needs its own rows and, a few at a time, rows of other ranks. Where every input row can
//! be read at any time, the other ranks need not run at the same time ([`Stream`]): one rank is
//! resident, reads from the source what it would receive, writes its results to the sink, and
//! leaves its memory to the next rank. It is the same [`Rank`](crate::Rank) with the same plan as
//! in every other ring, so a forward pass has the same bits. [`FromSource`] and [`ToSink`] are the
//! inputs and outputs of a rank whose neighbours do run.
//!
//! The decision that shaped it: the plan records of every message which rows it holds
//! ([`Origin`](encke_core::plan::program::Origin)). Nothing here knows patterns or rings.
//!
//! Two kinds of request are refused: replicated queries (their memory does not shrink with the
//! number of ranks) and patterns whose branches are combined after the last rank has ended.

mod checksum;
mod copy_tensor;
mod error;
mod extra_terms;
mod files;
mod fit;
mod generator;
mod gradient_file;
mod host_row_io;
mod row_io;
mod rows;
mod samples;
mod sequential;
mod source;
mod source_transport;
mod staging;

pub use checksum::Checksum;
pub use copy_tensor::copy_tensor;
pub use error::StreamError;
pub use extra_terms::{ExtraTermRows, WithExtraTerms};
pub use files::{Files, TensorFile};
pub use fit::{FittingRanks, MAX_RANKS, PROGRAM_BYTES, fit_ranks};
pub use generator::Generator;
pub use gradient_file::GradientFile;
pub use host_row_io::{FromSource, ToSink};
pub use row_io::{BufferSlot, RowIo};
pub use rows::row_width;
pub use samples::{GatheredSamples, SampledRow, Samples};
pub use sequential::Stream;
pub use source::{RowRange, TensorSink, TensorSource};
