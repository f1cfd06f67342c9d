//! Ports for rows outside a rank's memory: which rows, where they are read, where they are written.
//!
//! The decision here: rows are addressed by token and head of the whole tensor, so a source or sink
//! needs to know nothing of ranks, shards or rings.

use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data};

use super::error::StreamError;

/// Some heads of some tokens of a tensor. Its elements lie `[tokens, heads, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRange<'a> {
    /// The tensor.
    pub role: Role,
    /// The batch entry.
    pub batch: usize,
    /// The tokens.
    pub tokens: Run,
    /// The heads, in ascending order.
    pub heads: &'a [usize],
}

/// Where rows are read from.
pub trait TensorSource: Sync {
    /// The type of a tensor's elements.
    fn dtype(&self, role: Role) -> DType;

    /// Overwrites `to`, which has that type and the size of the range.
    fn read(&self, range: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError>;
}

/// Where rows are written to.
pub trait TensorSink {
    /// Takes the rows of a range: all heads, rounded to the type of the output.
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError>;
}
