//! The port between the buffers of a rank and rows outside of them.
//!
//! The decision here: buffers are device memory, and so is this port. An implementation that can
//! make rows on the device, or needs only a sum of them, never copies them to the host. Sources and
//! sinks in host memory go through [`HostRowIo`](super::host_row_io::HostRowIo).

use encke_core::DType;
use encke_core::kernel::Kernel;

use super::error::StreamError;
use super::source::RowRange;

/// A position in a buffer of a rank.
#[derive(Debug, Clone, Copy)]
pub struct BufferSlot<B> {
    /// The buffer.
    pub buffer: B,
    /// The type of its elements.
    pub dtype: DType,
    /// The element the position begins with.
    pub at: usize,
}

/// Moves rows into a rank's buffers and out of them.
pub trait RowIo<K: Kernel> {
    /// Overwrites a position with the rows of a range, `width` elements each.
    fn fetch(
        &mut self,
        range: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut K::Buffer>,
    ) -> Result<(), StreamError>;

    /// Takes the rows of a range of an output, all heads of them, to be rounded to a type.
    fn deliver(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
        rounded: DType,
    ) -> Result<(), StreamError>;

    /// Takes a rank's share of the gradients of rows that belong to another rank. A forward pass
    /// has none.
    fn add(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
    ) -> Result<(), StreamError> {
        let _ = (from, width);
        Err(StreamError::Missing {
            verb: "write",
            role: range.role,
        })
    }
}
