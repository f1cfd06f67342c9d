//! The lengths of rows: values may have another length than keys.

use encke_core::job::Job;

/// Elements of a row of queries and keys, and of a row of values and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowDims {
    pub keys: usize,
    pub values: usize,
}

impl RowDims {
    /// Those of a job.
    pub fn of(job: &Job) -> RowDims {
        RowDims {
            keys: job.dim,
            values: job.value_dim,
        }
    }

    /// Rows of one length.
    pub fn same(dim: usize) -> RowDims {
        RowDims {
            keys: dim,
            values: dim,
        }
    }

    /// Whether values have another length than keys.
    pub fn differ(&self) -> bool {
        self.keys != self.values
    }

    /// The longer of both.
    pub fn longest(&self) -> usize {
        self.keys.max(self.values)
    }

    /// Whether rows are at most as long as those of `other`.
    pub fn fit(&self, other: RowDims) -> bool {
        self.keys <= other.keys && self.values <= other.values
    }

    /// Both shorter by some elements.
    pub fn less(&self, elements: usize) -> RowDims {
        RowDims {
            keys: self.keys - elements,
            values: self.values - elements,
        }
    }

    /// Both rounded up to a multiple of 16, the step of the tensor cores.
    pub fn in_steps(&self) -> RowDims {
        RowDims {
            keys: self.keys.next_multiple_of(16),
            values: self.values.next_multiple_of(16),
        }
    }

    /// Both in slabs of 64 elements: 128 bytes, a swizzled row of shared memory.
    pub fn slabs(&self) -> RowDims {
        RowDims {
            keys: self.keys.div_ceil(64),
            values: self.values.div_ceil(64),
        }
    }
}
