//! The sizes at which a kernel is measured.

use encke_core::DType;

/// The sizes of measured jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeSizes {
    /// Rows of the largest job.
    pub rows: usize,
    /// Heads; queries and keys have the same number.
    pub heads: usize,
    /// Head dimension.
    pub dim: usize,
    /// The storage type.
    pub dtype: DType,
}

impl ProbeSizes {
    /// The elements of a tensor of all rows.
    pub(crate) fn elements(&self) -> usize {
        self.rows * self.heads * self.dim
    }
}
