//! The staging buffer between sources or sinks in host memory and a rank's buffers.
//!
//! Rows are copied in chunks, so that staging memory does not grow with the problem. A chunk is
//! small enough to stay in the processor's cache, where its two copies are cheap.

use encke_core::job::Block;
use encke_core::kernel::{Kernel, KernelError};
use encke_core::sharding::Run;
use encke_core::{DType, Tensor, with_typed};

use crate::error::{RankError, RingError};

use super::error::StreamError;
use super::row_io::BufferSlot;
use super::source::{RowRange, TensorSource};

/// Elements of a chunk, unless one token has more.
const CHUNK: usize = 1 << 18;

/// Staging memory: up to two chunks of each type on the host, and one on the device.
pub(super) struct StagingBuffer<'a, K: Kernel> {
    kernel: &'a K,
    /// The rank, for errors.
    pub rank: usize,
    host: Vec<Tensor>,
    device: Vec<(DType, usize, K::Buffer)>,
}

/// Peak bytes of a staging buffer where a token has `row` elements: of each type two chunks on the
/// host, the one being read and the one being copied, and one on the device.
pub(super) fn bytes(row: usize, stored: DType, sum: DType) -> usize {
    CHUNK.max(row) * 3 * (stored.bytes() + sum.bytes())
}

impl<'a, K: Kernel> StagingBuffer<'a, K> {
    pub fn new(kernel: &'a K, rank: usize) -> StagingBuffer<'a, K> {
        StagingBuffer {
            kernel,
            rank,
            host: Vec::new(),
            device: Vec::new(),
        }
    }

    /// Copies the rows of a range, `width` elements each, from a source into a buffer.
    pub fn fetch(
        &mut self,
        source: &dyn TensorSource,
        range: &RowRange<'_>,
        width: usize,
        to: BufferSlot<&mut K::Buffer>,
    ) -> Result<(), StreamError> {
        let BufferSlot {
            buffer: to,
            dtype,
            at,
        } = to;
        let stored = source.dtype(range.role);
        let elements = |chunk: &RowRange<'_>| chunk.tokens.count * chunk.heads.len() * width;
        let mut chunks = chunks(range, width);
        let mut coming = chunks.next();
        let mut ready: Option<(usize, Tensor)> = None;
        // The next chunk is read while this one is copied into the buffer.
        while ready.is_some() || coming.is_some() {
            let mut next = match &coming {
                Some((at, chunk)) => Some((*at, self.host(stored, elements(chunk))?)),
                None => None,
            };
            let mut read = || match (&coming, &mut next) {
                (Some((_, chunk)), Some((_, host))) => source.read(chunk, host.data_mut()),
                _ => Ok(()),
            };
            let done = match ready {
                None => read(),
                Some((offset, host)) => {
                    let count = host.data().as_slice().len();
                    let block = Block::contiguous(count, 0, at + offset);
                    // A kernel that reads host memory needs no chunk on the device.
                    let kernel = self.kernel;
                    let in_place = kernel.borrow(host.data().as_slice()).is_some();
                    let mut device = self.device(dtype, if in_place { 0 } else { count })?;
                    let mut copy = || {
                        if let Some(from) = kernel.borrow(host.data().as_slice()) {
                            return kernel.copy(&block, false, from, to);
                        }
                        kernel.upload(&host.view(), &[ONE], &mut device.2)?;
                        kernel.copy(&block, false, kernel.input(&device.2), to)
                    };
                    let (read, copied) = match coming {
                        Some(_) => encke_pool::join(read, copy),
                        None => (Ok(()), copy()),
                    };
                    self.host.push(host);
                    self.device.push(device);
                    copied.map_err(|source| self.failed(source)).and(read)
                }
            };
            ready = next;
            coming = chunks.next();
            done?;
        }
        Ok(())
    }

    /// Copies the rows of a range to the host, rounded to a type, and passes each chunk to `take`.
    pub fn deliver(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
        rounded: DType,
        take: &mut dyn FnMut(&RowRange<'_>, &Tensor) -> Result<(), StreamError>,
    ) -> Result<(), StreamError> {
        let BufferSlot { dtype, at, .. } = from;
        for (offset, chunk) in chunks(range, width) {
            let elements = chunk.tokens.count * chunk.heads.len() * width;
            let mut host = self.host(rounded, elements)?;
            let mut device = self.device(dtype, elements)?;
            let block = Block::contiguous(elements, at + offset, 0);
            let from = self.kernel.input(from.buffer);
            let copied = self.kernel.copy(&block, false, from, &mut device.2);
            let copied = copied.and_then(|()| self.kernel.download(&device.2, &[ONE], &mut host));
            let done = copied.map_err(|source| self.failed(source));
            let done = done.and_then(|()| take(&chunk, &host));
            self.host.push(host);
            self.device.push(device);
            done?;
        }
        Ok(())
    }

    fn failed(&self, source: KernelError) -> StreamError {
        RingError::of_rank(self.rank, RankError::before_start(source)).into()
    }

    /// A host tensor with this many elements, in reused memory.
    fn host(&mut self, dtype: DType, elements: usize) -> Result<Tensor, StreamError> {
        let fits = |tensor: &Tensor| tensor.dtype() == dtype;
        let found = self.host.iter().position(fits);
        let dims = [1, 1, 1, elements];
        let Some(at) = found else {
            return Ok(Tensor::try_zeros(dtype, dims)?);
        };
        let mut tensor = self.host.swap_remove(at);
        if tensor.dims() == dims {
            return Ok(tensor);
        }
        let mut data = std::mem::take(tensor.data_mut());
        with_typed!(Data, &mut data, x => x.resize(elements, Default::default()));
        Ok(Tensor::from_data(data, dims)?)
    }

    /// A device buffer with at least this many elements.
    fn device(
        &mut self,
        dtype: DType,
        elements: usize,
    ) -> Result<(DType, usize, K::Buffer), StreamError> {
        let fits = |of: &(DType, usize, K::Buffer)| of.0 == dtype;
        if let Some(at) = self.device.iter().position(fits) {
            let kept = self.device.swap_remove(at);
            if kept.1 >= elements {
                return Ok(kept);
            }
        }
        let made = self.kernel.allocate(dtype, elements);
        let made = made.map_err(|source| self.failed(source))?;
        Ok((dtype, elements, made))
    }
}

/// The only row of a tensor `[1, 1, 1, n]`.
const ONE: Run = Run::leading(1);

/// A range in chunks of whole tokens, each with the number of elements before it.
fn chunks<'a>(range: &RowRange<'a>, width: usize) -> impl Iterator<Item = (usize, RowRange<'a>)> {
    let range = *range;
    let row = range.heads.len() * width;
    let most = (CHUNK / row.max(1)).max(1);
    let tokens = range.tokens;
    (0..tokens.count).step_by(most).map(move |skipped| {
        let chunk = RowRange {
            tokens: Run {
                first: tokens.first + skipped * tokens.stride,
                stride: tokens.stride,
                count: most.min(tokens.count - skipped),
            },
            ..range
        };
        (skipped * row, chunk)
    })
}
