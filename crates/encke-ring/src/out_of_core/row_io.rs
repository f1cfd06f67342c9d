//! Where a rank's rows come from and where they go, as near to its device as they can be.
//!
//! The decision here: a rank's buffers are the device's, so whoever can make rows on the device, or
//! needs no more of them than a sum, never brings them to the host. The host's own dock, for
//! sources and sinks of any kind, goes by way of the [`StagingBuffer`].

use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::{DType, Data, Tensor};

use super::staging::StagingBuffer;
use super::{GradientFile, RowRange, Sink, Source, StreamError};

/// A place in a buffer of a rank.
#[derive(Debug, Clone, Copy)]
pub struct BufferSlot<B> {
    /// The buffer.
    pub buffer: B,
    /// The type of its numbers.
    pub dtype: DType,
    /// The number with which the place begins.
    pub at: usize,
}

/// Brings a rank's rows to its buffers and takes them from there.
pub trait RowIo<K: Kernel> {
    /// Overwrites a place with the rows of a stretch, `width` numbers each.
    fn fetch(
        &mut self,
        stretch: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut K::Buffer>,
    ) -> Result<(), StreamError>;

    /// Takes the rows of a stretch of an output, all heads of them, to be rounded to a type.
    fn deliver(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        stretch: &RowRange<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError>;

    /// Takes a rank's share of the gradients of rows that are another's. A forward pass has none.
    fn add(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        stretch: &RowRange<'_>,
        width: usize,
    ) -> Result<(), StreamError> {
        let _ = (from, width);
        Err(StreamError::Missing {
            verb: "write",
            role: stretch.role,
        })
    }
}

/// The other side of a dock at which rows only come or only go.
pub(super) struct NoIo;

impl Source for NoIo {
    fn dtype(&self, _: Role) -> DType {
        DType::F32
    }

    fn read(&self, stretch: &RowRange<'_>, _: &mut Data) -> Result<(), StreamError> {
        let (verb, role) = ("read", stretch.role);
        Err(StreamError::Missing { verb, role })
    }
}

impl Sink for NoIo {
    fn write(&mut self, stretch: &RowRange<'_>, _: &Data) -> Result<(), StreamError> {
        let (verb, role) = ("write", stretch.role);
        Err(StreamError::Missing { verb, role })
    }
}

/// The dock of sources and sinks on the host.
pub(super) struct HostRowIo<'s, 'k, K: Kernel> {
    pub desk: &'s mut StagingBuffer<'k, K>,
    pub source: &'s dyn Source,
    pub sink: &'s mut dyn Sink,
    pub spool: Option<&'s mut GradientFile>,
}

impl<K: Kernel> RowIo<K> for HostRowIo<'_, '_, K> {
    fn fetch(
        &mut self,
        stretch: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut K::Buffer>,
    ) -> Result<(), StreamError> {
        self.desk.fetch(self.source, stretch, width, to)
    }

    fn deliver(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        stretch: &RowRange<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError> {
        if matches!(stretch.role, Role::Dk | Role::Dv) && self.spool.is_some() {
            return self.add(from, stretch, width);
        }
        let sink = &mut *self.sink;
        let mut take =
            |stretch: &RowRange<'_>, numbers: &Tensor| sink.write(stretch, numbers.data());
        self.desk.deliver(from, stretch, width, rounded, &mut take)
    }

    fn add(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        stretch: &RowRange<'_>,
        width: usize,
    ) -> Result<(), StreamError> {
        let (verb, role) = ("write", stretch.role);
        let spool = self.spool.as_deref_mut();
        let spool = spool.ok_or(StreamError::Missing { verb, role })?;
        let dtype = from.dtype;
        let mut take =
            |stretch: &RowRange<'_>, numbers: &Tensor| spool.add(stretch, numbers.data());
        self.desk.deliver(from, stretch, width, dtype, &mut take)
    }
}
