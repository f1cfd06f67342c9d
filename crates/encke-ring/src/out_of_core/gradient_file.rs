//! Sums of dk and dv on disk, while ranks come and go.
//!
//! Every rank adds what it found for rows of its own and of others; who adds first is decided by
//! the order of ranks and rounds, so the sums are always the same bits. They are not those of a
//! ring, which adds in the order of hops, but differ from them by rounding only.

use std::fs::File;
use std::sync::Arc;

use encke_core::Data;
use encke_core::host;
use encke_core::job::Block;
use encke_core::plan::Request;
use encke_core::plan::program::Role;

use super::error::StreamError;
use super::files::{Files, TensorFile};
use super::source::{RowRange, Sink, Source};
use super::transfer::transfer;

/// Two tensors of sums in a file.
#[derive(Debug)]
pub struct GradientFile {
    sums: Files,
    request: Request,
    row: Data,
}

impl GradientFile {
    /// Sums for a backward pass, all zero, in a file nobody else uses.
    pub fn new(file: File, request: &Request) -> std::io::Result<GradientFile> {
        let shape = &request.shape;
        let (file, dtype) = (Arc::new(file), request.dtype.sum());
        let dims = [shape.batch, shape.tokens, shape.kv_heads, shape.dim];
        let tensor = |offset: u64| TensorFile {
            file: Arc::clone(&file),
            offset,
            dtype,
            dims,
        };
        let bytes = tensor(0).bytes();
        // A file that was empty reads as zeros wherever nothing was written.
        file.set_len(0)?;
        file.set_len(2 * bytes)?;
        let mut sums = Files::new();
        sums.add(Role::Dk, tensor(0));
        sums.add(Role::Dv, tensor(bytes));
        Ok(GradientFile {
            sums,
            request: request.clone(),
            row: Data::zeros(dtype, 0),
        })
    }

    /// Adds to the rows of a range.
    pub fn add(&mut self, range: &RowRange<'_>, numbers: &Data) -> Result<(), StreamError> {
        let count = numbers.as_slice().len();
        if self.row.as_slice().len() != count {
            self.row = Data::zeros(self.request.dtype.sum(), count);
        }
        self.sums.read(range, &mut self.row)?;
        let block = Block::contiguous(count, 0, 0);
        host::copy(&block, true, numbers.as_slice(), &mut self.row);
        self.sums.write(range, &self.row)
    }

    /// Rounds all sums and hands them over.
    pub fn finish(self, sink: &mut dyn Sink) -> Result<(), StreamError> {
        let shape = self.request.shape;
        let dims = [shape.batch, shape.tokens, shape.kv_heads, shape.dim];
        for role in [Role::Dk, Role::Dv] {
            transfer(&self.sums, sink, role, dims, self.request.dtype)?;
        }
        Ok(())
    }
}
