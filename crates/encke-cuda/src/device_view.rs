//! A tensor of another library on a GPU, for the time of a call: where it is and how it lies, never a
//! copy of it.
//!
//! The decision here: whoever makes one vouches for its memory, and nobody has to afterwards. Of a raw
//! address that is the caller's promise; of memory that cudarc has counted it is a borrow, and cudarc is
//! told when the call no longer uses it.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use encke_core::{DType, Element};

use crate::error::{Error, Result};

/// A tensor `[b, n, h, d]` of the caller, in any strides whose last one is 1.
pub struct DeviceView<'a> {
    dtype: DType,
    address: u64,
    dims: [usize; 4],
    strides: [usize; 4],
    writable: bool,
    /// The context it is in, by its handle, where that is known.
    context: Option<usize>,
    /// Tells cudarc, when it is dropped, until when its memory was used.
    _until: Option<SyncOnDrop<'a>>,
}

impl<'a> DeviceView<'a> {
    /// A tensor at an address.
    ///
    /// # Safety
    /// Everything that dimensions and strides reach must be allocated on the GPU that a call with
    /// this tensor runs on, at an address that suits its type, and stay so until that call has ended
    /// and what it enqueued is done. Until then nobody else may write it, and nobody use it where it
    /// is `writable`.
    pub unsafe fn new(
        dtype: DType,
        address: u64,
        dims: [usize; 4],
        strides: [usize; 4],
        writable: bool,
    ) -> DeviceView<'a> {
        DeviceView {
            dtype,
            address,
            dims,
            strides,
            writable,
            context: None,
            _until: None,
        }
    }

    /// A tensor in memory of cudarc, to be read, which begins `first` numbers after it. The call must
    /// be one on behalf of `stream`, and begin after this.
    pub fn reading<T: Element>(
        slice: &'a CudaSlice<T>,
        first: usize,
        dims: [usize; 4],
        strides: [usize; 4],
        stream: &'a Arc<CudaStream>,
    ) -> Result<DeviceView<'a>> {
        let context = handle(slice.context());
        let length = slice.len();
        let (address, until) = slice.device_ptr(stream);
        let lent = DeviceView {
            dtype: T::DTYPE,
            address: address + (first * T::DTYPE.bytes()) as u64,
            dims,
            strides,
            writable: false,
            context: Some(context),
            _until: Some(until),
        };
        lent.within(first, length)
    }

    /// A contiguous tensor in memory of cudarc, to be written. The call must be one on behalf of
    /// `stream`, and begin after this.
    pub fn writing<T: Element>(
        slice: &'a mut CudaSlice<T>,
        dims: [usize; 4],
        stream: &'a Arc<CudaStream>,
    ) -> Result<DeviceView<'a>> {
        let context = handle(slice.context());
        let length = slice.len();
        let (address, until) = slice.device_ptr_mut(stream);
        let [_, n, h, d] = dims;
        let lent = DeviceView {
            dtype: T::DTYPE,
            address,
            dims,
            strides: [n * h * d, h * d, d, 1],
            writable: true,
            context: Some(context),
            _until: Some(until),
        };
        lent.within(0, length)
    }

    /// The tensor itself, where the slice has room for it.
    fn within(self, first: usize, length: usize) -> Result<DeviceView<'a>> {
        match first.checked_add(self.extent()) {
            Some(end) if end <= length => Ok(self),
            _ => Err(Error::Unsupported {
                what: format!(
                    "a tensor {:?} with strides {:?} from number {first} on in a slice of {length}",
                    self.dims, self.strides
                ),
            }),
        }
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dimensions.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// How many numbers lie between one and the next, by dimension.
    pub fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// Whether it may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether its number `first` lies at a multiple of so many bytes.
    pub fn is_aligned(&self, first: usize, bytes: usize) -> bool {
        let address = self.address + (first * self.dtype.bytes()) as u64;
        address.is_multiple_of(bytes as u64)
    }

    /// How many numbers lie between the first and the last, both included.
    pub fn extent(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        let reach = self.dims.iter().zip(self.strides);
        let reach = reach.map(|(size, stride)| (size - 1).saturating_mul(stride));
        reach.fold(1, usize::saturating_add)
    }

    /// The address of its number `first`, if there are `elements` from there on, and in this context.
    pub(crate) fn reach(
        &self,
        context: &Arc<CudaContext>,
        first: usize,
        elements: usize,
    ) -> Result<u64> {
        if self.context.is_some_and(|own| own != handle(context)) {
            return Err(Error::Unsupported {
                what: "a tensor that is on another GPU than its call".into(),
            });
        }
        match first.checked_add(elements) {
            Some(end) if end <= self.extent() => {
                Ok(self.address + (first * self.dtype.bytes()) as u64)
            }
            _ => Err(Error::Unsupported {
                what: format!(
                    "{elements} numbers from {first} on of a tensor that has {}",
                    self.extent()
                ),
            }),
        }
    }
}

fn handle(context: &CudaContext) -> usize {
    context.cu_ctx() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lent(dims: [usize; 4], strides: [usize; 4]) -> DeviceView<'static> {
        // SAFETY: nothing is read: there is no call.
        unsafe { DeviceView::new(DType::Bf16, 0x1000, dims, strides, false) }
    }

    #[test]
    fn a_tensor_reaches_from_its_first_number_to_its_last() {
        assert_eq!(lent([2, 3, 4, 5], [60, 20, 5, 1]).extent(), 120);
        // Heads first, seen as [b, n, h, d]; and one key head that all have.
        assert_eq!(lent([2, 3, 4, 5], [60, 5, 15, 1]).extent(), 120);
        assert_eq!(lent([2, 3, 4, 5], [15, 5, 0, 1]).extent(), 30);
        assert_eq!(lent([2, 0, 4, 5], [60, 20, 5, 1]).extent(), 0);
        assert_eq!(
            lent([9, 1, 1, 1], [usize::MAX, 1, 1, 1]).extent(),
            usize::MAX
        );
    }

    #[test]
    fn only_whole_vectors_are_aligned() {
        let tensor = lent([1, 8, 1, 8], [64, 8, 8, 1]);
        assert!(tensor.is_aligned(8, 16));
        assert!(!tensor.is_aligned(4, 16));
    }

    #[test]
    fn a_tensor_that_does_not_fit_is_refused() {
        let message = |lent: Result<DeviceView<'_>>| lent.err().map(|error| error.to_string());
        let whole = || lent([1, 8, 1, 8], [64, 8, 8, 1]);
        assert_eq!(message(whole().within(0, 64)), None);
        let refused = message(whole().within(1, 64)).unwrap_or_default();
        assert!(
            refused.contains("from number 1 on in a slice of 64"),
            "{refused}"
        );
    }
}
