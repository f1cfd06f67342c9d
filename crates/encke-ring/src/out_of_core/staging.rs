//! The small piece of memory through which rows go between the outside and a rank's buffers.
//!
//! Rows come and go a piece at a time, so that what is in between does not grow with anything. A
//! piece is small enough to stay in the processor's cache: the two copies it takes are cheap there.

use encke_core::job::Block;
use encke_core::kernel::{Kernel, KernelError};
use encke_core::sharding::Run;
use encke_core::{DType, Tensor, with_typed};

use crate::error::{RankError, RingError};

use super::error::StreamError;
use super::row_io::BufferSlot;
use super::source::{RowRange, Source};

/// Numbers of a piece, unless one token has more.
const PIECE: usize = 1 << 18;

/// Staging memory: a piece or two of each type that is needed, on the host and on the device.
pub(super) struct StagingBuffer<'a, K: Kernel> {
    kernel: &'a K,
    /// The rank at work, for errors.
    pub rank: usize,
    host: Vec<Tensor>,
    device: Vec<(DType, usize, K::Buffer)>,
}

/// Bytes that a desk holds at most where a token has `row` numbers: of each type two pieces on the
/// host, the one being read and the one being copied, and one on the device.
pub(super) fn bytes(row: usize, stored: DType, sum: DType) -> usize {
    PIECE.max(row) * 3 * (stored.bytes() + sum.bytes())
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

    /// Copies the rows of a range, `width` numbers each, from a source to their place.
    pub fn fetch(
        &mut self,
        source: &dyn Source,
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
        let numbers = |piece: &RowRange<'_>| piece.tokens.count * piece.heads.len() * width;
        let mut pieces = pieces(range, width);
        let mut coming = pieces.next();
        let mut ready: Option<(usize, Tensor)> = None;
        // While one piece is copied into the buffer, the next one is read.
        while ready.is_some() || coming.is_some() {
            let mut next = coming.map(|(at, piece)| (at, self.host(stored, numbers(&piece))));
            let mut read = || match (&coming, &mut next) {
                (Some((_, piece)), Some((_, host))) => source.read(piece, host.data_mut()),
                _ => Ok(()),
            };
            let done = match ready {
                None => read(),
                Some((offset, host)) => {
                    let count = host.data().as_slice().len();
                    let block = Block::contiguous(count, 0, at + offset);
                    // A kernel that can read the host's memory needs no staging of its own.
                    let kernel = self.kernel;
                    let lent = kernel.borrow(host.data().as_slice()).is_some();
                    let mut device = self.device(dtype, if lent { 0 } else { count })?;
                    let mut copy = || {
                        if let Some(lent) = kernel.borrow(host.data().as_slice()) {
                            return kernel.copy(&block, false, lent, to);
                        }
                        kernel.upload(&host.view(), &[ONE], &mut device.2)?;
                        kernel.copy(&block, false, kernel.input(&device.2), to)
                    };
                    let (read, copied) = match coming {
                        Some(_) => rayon::join(read, copy),
                        None => (Ok(()), copy()),
                    };
                    self.host.push(host);
                    self.device.push(device);
                    copied.map_err(|source| self.failed(source)).and(read)
                }
            };
            ready = next;
            coming = pieces.next();
            done?;
        }
        Ok(())
    }

    /// Hands the rows of a range over as numbers of type `rounded`, piece by piece.
    pub fn deliver(
        &mut self,
        from: BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
        rounded: DType,
        take: &mut dyn FnMut(&RowRange<'_>, &Tensor) -> Result<(), StreamError>,
    ) -> Result<(), StreamError> {
        let BufferSlot { dtype, at, .. } = from;
        for (offset, piece) in pieces(range, width) {
            let numbers = piece.tokens.count * piece.heads.len() * width;
            let mut host = self.host(rounded, numbers);
            let mut device = self.device(dtype, numbers)?;
            let block = Block::contiguous(numbers, at + offset, 0);
            let from = self.kernel.input(from.buffer);
            let copied = self.kernel.copy(&block, false, from, &mut device.2);
            let copied = copied.and_then(|()| self.kernel.download(&device.2, &[ONE], &mut host));
            let done = copied.map_err(|source| self.failed(source));
            let done = done.and_then(|()| take(&piece, &host));
            self.host.push(host);
            self.device.push(device);
            done?;
        }
        Ok(())
    }

    fn failed(&self, source: KernelError) -> StreamError {
        RingError::of_rank(self.rank, RankError::before_start(source)).into()
    }

    /// A host tensor of exactly so many numbers, in memory that is used again.
    fn host(&mut self, dtype: DType, numbers: usize) -> Tensor {
        let fits = |tensor: &Tensor| tensor.dtype() == dtype;
        let found = self.host.iter().position(fits);
        let dims = [1, 1, 1, numbers];
        let Some(at) = found else {
            return Tensor::zeros(dtype, dims);
        };
        let mut tensor = self.host.swap_remove(at);
        if tensor.dims() == dims {
            return tensor;
        }
        let mut data = std::mem::take(tensor.data_mut());
        with_typed!(Data, &mut data, x => x.resize(numbers, Default::default()));
        Tensor::from_data(data, dims).expect("it was made that long")
    }

    /// A device buffer of at least so many numbers.
    fn device(
        &mut self,
        dtype: DType,
        numbers: usize,
    ) -> Result<(DType, usize, K::Buffer), StreamError> {
        let fits = |of: &(DType, usize, K::Buffer)| of.0 == dtype;
        if let Some(at) = self.device.iter().position(fits) {
            let kept = self.device.swap_remove(at);
            if kept.1 >= numbers {
                return Ok(kept);
            }
        }
        let made = self.kernel.allocate(dtype, numbers);
        let made = made.map_err(|source| self.failed(source))?;
        Ok((dtype, numbers, made))
    }
}

/// The only row of a tensor that is one piece.
const ONE: Run = Run {
    first: 0,
    stride: 1,
    count: 1,
};

/// A range cut into pieces of whole tokens, each with the number of numbers before it.
fn pieces<'a>(range: &RowRange<'a>, width: usize) -> impl Iterator<Item = (usize, RowRange<'a>)> {
    let range = *range;
    let row = range.heads.len() * width;
    let most = (PIECE / row.max(1)).max(1);
    let tokens = range.tokens;
    (0..tokens.count).step_by(most).map(move |skipped| {
        let piece = RowRange {
            tokens: Run {
                first: tokens.first + skipped * tokens.stride,
                stride: tokens.stride,
                count: most.min(tokens.count - skipped),
            },
            ..range
        };
        (skipped * row, piece)
    })
}
