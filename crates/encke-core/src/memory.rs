//! The port for memory: what one device must be able to store, move and return.
//!
//! It does no arithmetic beyond rounding and adding rows, and it decides nothing: which rows move
//! comes with the call. [`Kernel`](crate::kernel::Kernel) extends it with attention.
//!
//! Kernels that compute in host memory implement [`HostKernel`], one function, and get the whole
//! port from it.

use crate::dtype::{DType, Data, Slice};
use crate::host;
use crate::job::Block;
use crate::kernel_error::Result;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};
use crate::transport::WireBuffer;

/// Buffers of one device.
pub trait Memory: Send + Sync {
    /// A typed buffer in the device's memory.
    type Buffer: WireBuffer + Sync;

    /// What jobs read: the elements of a buffer, or the caller's where they can be read in place.
    type Input<'a>: Copy;

    /// The device's name, for reports and errors.
    fn name(&self) -> &'static str;

    /// A buffer as jobs read it.
    fn input<'a>(&self, buffer: &'a Self::Buffer) -> Self::Input<'a>;

    /// The caller's elements as jobs read them, or None if the device cannot read them in place.
    fn borrow<'a>(&self, elements: Slice<'a>) -> Option<Self::Input<'a>> {
        let _ = elements;
        None
    }

    /// Allocates `elements` zeros.
    fn allocate(&self, dtype: DType, elements: usize) -> Result<Self::Buffer>;

    /// Copies the rows of `runs`, in that order, into a `[b, rows, h, d]` buffer, rounding to the
    /// buffer's type.
    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Self::Buffer) -> Result<()>;

    /// Copies the rows of a `[b, rows, h, d]` buffer to the tokens of `runs`, in that order.
    fn download(&self, from: &Self::Buffer, runs: &[Run], to: &mut Tensor) -> Result<()>;

    /// Copies all rows of a buffer in order, where every element outside `blocks` is zero in both
    /// `from` and `to`. An implementation may copy those elements too, or skip them.
    fn download_rows(&self, from: &Self::Buffer, blocks: &[Block], to: &mut Tensor) -> Result<()> {
        let _ = blocks;
        let all = Run::leading(to.dims()[1]);
        self.download(from, &[all], to)
    }

    /// Consumes a buffer and returns its elements in host memory.
    fn move_to_host(&self, buffer: Self::Buffer) -> Result<Data>;

    /// Turns host memory into a buffer without a copy, keeping its contents. Returns the memory if
    /// the device cannot use it.
    fn move_from_host(&self, elements: Data) -> std::result::Result<Self::Buffer, Data> {
        Err(elements)
    }

    /// Sets every element.
    fn fill(&self, buffer: &mut Self::Buffer, value: f64) -> Result<()>;

    /// Zeroes the rows that `blocks` write to. An implementation may zero the whole buffer.
    fn zero_rows(&self, blocks: &[Block], buffer: &mut Self::Buffer) -> Result<()> {
        let _ = blocks;
        self.fill(buffer, 0.0)
    }

    /// Copies (or adds) rows from one buffer into another.
    fn copy(
        &self,
        block: &Block,
        add: bool,
        from: Self::Input<'_>,
        to: &mut Self::Buffer,
    ) -> Result<()>;

    /// Copies rows into a buffer whose other contents are no longer needed. An implementation may
    /// alias `from` instead of copying, as long as later writes to either do not show in the other.
    fn pack(&self, blocks: &[Block], from: Self::Input<'_>, to: &mut Self::Buffer) -> Result<()> {
        let mut blocks = blocks.iter();
        blocks.try_for_each(|block| self.copy(block, false, from, to))
    }
}

/// A kernel whose buffers are host memory, without any tuning: it gets [`Memory`] from here.
pub trait HostKernel: Send + Sync {
    /// The device's name, for reports and errors.
    fn name(&self) -> &'static str;
}

impl<K: HostKernel> Memory for K {
    type Buffer = Data;
    type Input<'a> = Slice<'a>;

    fn name(&self) -> &'static str {
        HostKernel::name(self)
    }

    fn input<'a>(&self, buffer: &'a Data) -> Slice<'a> {
        buffer.as_slice()
    }

    fn borrow<'a>(&self, elements: Slice<'a>) -> Option<Slice<'a>> {
        Some(elements)
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Data> {
        host::allocate(HostKernel::name(self), dtype, elements)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Data) -> Result<()> {
        host::upload(from, runs, to);
        Ok(())
    }

    fn download(&self, from: &Data, runs: &[Run], to: &mut Tensor) -> Result<()> {
        host::download(from, runs, to);
        Ok(())
    }

    fn move_to_host(&self, buffer: Data) -> Result<Data> {
        Ok(buffer)
    }

    fn move_from_host(&self, elements: Data) -> std::result::Result<Data, Data> {
        Ok(elements)
    }

    fn fill(&self, buffer: &mut Data, value: f64) -> Result<()> {
        host::fill(buffer, value);
        Ok(())
    }

    fn copy(&self, block: &Block, add: bool, from: Slice<'_>, to: &mut Data) -> Result<()> {
        host::copy(block, add, from, to);
        Ok(())
    }
}
