//! [`RowIo`] for sources and sinks in host memory, and the inputs and outputs of a [`ShardCall`]
//! made from it.
//!
//! Rows pass through a [`StagingBuffer`], a chunk at a time.
//!
//! [`ShardCall`]: crate::shard_call::ShardCall

use encke_core::kernel::Kernel;
use encke_core::plan::Request;
use encke_core::plan::program::Role;
use encke_core::{DType, Data, Tensor};

use crate::rank::{BorrowedInputs, Rank};
use crate::shard_call::{ShardInput, ShardOutput};

use super::error::StreamError;
use super::gradient_file::GradientFile;
use super::row_io::{BufferSlot, RowIo};
use super::rows::RankRows;
use super::source::{RowRange, TensorSink, TensorSource};
use super::staging::StagingBuffer;

/// A source and a sink in host memory, and a file for gradients that several ranks add to.
pub(super) struct HostRowIo<'s, 'k, K: Kernel> {
    pub staging: &'s mut StagingBuffer<'k, K>,
    pub source: &'s dyn TensorSource,
    pub sink: &'s mut dyn TensorSink,
    pub gradients: Option<&'s mut GradientFile>,
}

impl<K: Kernel> RowIo<K> for HostRowIo<'_, '_, K> {
    fn fetch(
        &mut self,
        range: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut K::Buffer>,
    ) -> Result<(), StreamError> {
        self.staging.fetch(self.source, range, width, to)
    }

    fn deliver(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError> {
        if matches!(range.role, Role::Dk | Role::Dv) && self.gradients.is_some() {
            return self.add(from, range, width);
        }
        let sink = &mut *self.sink;
        let mut take = |range: &RowRange<'_>, rows: &Tensor| sink.write(range, rows.data());
        self.staging.deliver(from, range, width, rounded, &mut take)
    }

    fn add(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
    ) -> Result<(), StreamError> {
        let gradients = self.gradients.as_deref_mut();
        let gradients = gradients.ok_or(missing("write", range))?;
        let dtype = from.dtype;
        let mut take = |range: &RowRange<'_>, rows: &Tensor| gradients.add(range, rows.data());
        self.staging.deliver(from, range, width, dtype, &mut take)
    }
}

/// A source without rows, and a sink that takes none.
struct NoIo;

fn missing(verb: &'static str, range: &RowRange<'_>) -> StreamError {
    let role = range.role;
    StreamError::Missing { verb, role }
}

impl TensorSource for NoIo {
    fn dtype(&self, _: Role) -> DType {
        DType::F32
    }

    fn read(&self, range: &RowRange<'_>, _: &mut Data) -> Result<(), StreamError> {
        Err(missing("read", range))
    }
}

impl TensorSink for NoIo {
    fn write(&mut self, range: &RowRange<'_>, _: &Data) -> Result<(), StreamError> {
        Err(missing("write", range))
    }
}

/// The inputs of a rank, read from a source: its own rows and, with redundancy, those it keeps for
/// other ranks.
pub struct FromSource<'s>(pub &'s dyn TensorSource);

impl<'a, K: Kernel> ShardInput<'a, K> for FromSource<'_> {
    type Error = StreamError;

    fn load(
        &mut self,
        kernel: &K,
        request: &Request,
        rank: &mut Rank<K>,
    ) -> Result<BorrowedInputs<'a>, StreamError> {
        let mut io = HostRowIo {
            staging: &mut StagingBuffer::new(kernel, rank.plan().rank),
            source: self.0,
            sink: &mut NoIo,
            gradients: None,
        };
        RankRows(&mut io).load(kernel, request, rank)
    }
}

/// The outputs of a rank, written to a sink: its own rows and those it has adopted.
pub struct ToSink<'s>(pub &'s mut dyn TensorSink);

impl<K: Kernel> ShardOutput<K> for ToSink<'_> {
    type Error = StreamError;

    fn store(&mut self, kernel: &K, request: &Request, rank: &Rank<K>) -> Result<(), StreamError> {
        let mut io = HostRowIo {
            staging: &mut StagingBuffer::new(kernel, rank.plan().rank),
            source: &NoIo,
            sink: self.0,
            gradients: None,
        };
        RankRows(&mut io).store(kernel, request, rank)
    }
}
