//! Sums of dk and dv in a file, while ranks run one after another.
//!
//! Every rank adds its share for its own rows and those of other ranks. Ranks and rounds determine
//! the order of the additions, so the bits are the same in every run. They differ from those of a
//! ring, which adds in the order of its hops, by rounding only.

use std::fs::File;
use std::sync::Arc;

use encke_core::host;
use encke_core::job::Block;
use encke_core::plan::Request;
use encke_core::plan::program::Role;
use encke_core::{Data, Shape};

use super::copy_tensor::copy_tensor;
use super::error::StreamError;
use super::files::{Files, TensorFile};
use super::rows::row_width;
use super::source::{RowRange, TensorSink, TensorSource};

/// The dimensions of dk or dv.
fn dims(role: Role, shape: &Shape) -> [usize; 4] {
    let width = row_width(role, shape);
    [shape.batch, shape.tokens, shape.kv_heads, width]
}

/// The sums of dk and dv in a file.
#[derive(Debug)]
pub struct GradientFile {
    sums: Files,
    request: Request,
    row: Data,
}

impl GradientFile {
    /// Sums for a backward pass, all zero. The file must not be used otherwise.
    pub fn new(file: File, request: &Request) -> std::io::Result<GradientFile> {
        let shape = &request.shape;
        let (file, dtype) = (Arc::new(file), request.dtype.sum());
        let tensor = |role: Role, offset: u64| TensorFile {
            file: Arc::clone(&file),
            offset,
            dtype,
            dims: dims(role, shape),
        };
        let dk = tensor(Role::Dk, 0);
        let dv = tensor(Role::Dv, dk.bytes());
        // An extended file reads as zeros where nothing was written.
        file.set_len(0)?;
        file.set_len(dk.bytes() + dv.bytes())?;
        let mut sums = Files::new();
        sums.add(Role::Dk, dk);
        sums.add(Role::Dv, dv);
        Ok(GradientFile {
            sums,
            request: request.clone(),
            row: Data::zeros(dtype, 0),
        })
    }

    /// Adds to the rows of a range.
    pub fn add(&mut self, range: &RowRange<'_>, rows: &Data) -> Result<(), StreamError> {
        let count = rows.as_slice().len();
        if self.row.as_slice().len() != count {
            self.row = Data::try_zeros(self.request.dtype.sum(), count)?;
        }
        self.sums.read(range, &mut self.row)?;
        let block = Block::contiguous(count, 0, 0);
        host::copy(&block, true, rows.as_slice(), &mut self.row);
        self.sums.write(range, &self.row)
    }

    /// Rounds all sums and writes them to a sink.
    pub fn finish(self, sink: &mut dyn TensorSink) -> Result<(), StreamError> {
        let shape = self.request.shape;
        for role in [Role::Dk, Role::Dv] {
            let dims = dims(role, &shape);
            copy_tensor(&self.sums, sink, role, dims, self.request.dtype)?;
        }
        Ok(())
    }
}
