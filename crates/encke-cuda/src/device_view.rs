//! A view of another library's tensor on a GPU, for the duration of a call: its address and
//! strides, never a copy.
//!
//! The decision here: a view's constructor guarantees that its memory is valid for the whole call,
//! and all methods rely on that. For a raw address the caller gives this guarantee
//! ([`DeviceView::new`] is unsafe). For memory of cudarc the view borrows the slice, and on drop
//! cudarc records when the call stopped using it.

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
    /// The handle of its context, if known.
    context: Option<usize>,
    /// On drop, records the end of use with cudarc.
    _sync_on_drop: Option<SyncOnDrop<'a>>,
}

impl<'a> DeviceView<'a> {
    /// A tensor at an address.
    ///
    /// # Safety
    /// All elements that `dims` and `strides` reach must be allocated on the GPU that the call runs
    /// on, at an address aligned for the type, until the call has ended and its kernels are done.
    /// Until then no one else may write them, and if `writable`, no one else may read them either.
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
            _sync_on_drop: None,
        }
    }

    /// A tensor for reading in memory of cudarc, from element `first` on. The call must be on
    /// behalf of `stream`, and begin after this.
    pub fn reading<T: Element>(
        slice: &'a CudaSlice<T>,
        first: usize,
        dims: [usize; 4],
        strides: [usize; 4],
        stream: &'a Arc<CudaStream>,
    ) -> Result<DeviceView<'a>> {
        let context = handle(slice.context());
        let length = slice.len();
        let (address, sync) = slice.device_ptr(stream);
        let view = DeviceView {
            dtype: T::DTYPE,
            address: address + (first * T::DTYPE.bytes()) as u64,
            dims,
            strides,
            writable: false,
            context: Some(context),
            _sync_on_drop: Some(sync),
        };
        view.check_bounds(first, length)
    }

    /// A contiguous tensor for writing in memory of cudarc. The call must be on behalf of `stream`,
    /// and begin after this.
    pub fn writing<T: Element>(
        slice: &'a mut CudaSlice<T>,
        dims: [usize; 4],
        stream: &'a Arc<CudaStream>,
    ) -> Result<DeviceView<'a>> {
        let context = handle(slice.context());
        let length = slice.len();
        let (address, sync) = slice.device_ptr_mut(stream);
        let [_, n, h, d] = dims;
        let view = DeviceView {
            dtype: T::DTYPE,
            address,
            dims,
            strides: [n * h * d, h * d, d, 1],
            writable: true,
            context: Some(context),
            _sync_on_drop: Some(sync),
        };
        view.check_bounds(0, length)
    }

    /// The view itself, if it lies inside its slice of `length` elements.
    fn check_bounds(self, first: usize, length: usize) -> Result<DeviceView<'a>> {
        match first.checked_add(self.extent()) {
            Some(end) if end <= length => Ok(self),
            _ => Err(Error::Unsupported {
                what: format!(
                    "a tensor {:?} with strides {:?} from element {first} on in a slice of \
                     {length}",
                    self.dims, self.strides
                ),
            }),
        }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dimensions.
    pub fn dims(&self) -> [usize; 4] {
        self.dims
    }

    /// Its strides, in elements.
    pub fn strides(&self) -> [usize; 4] {
        self.strides
    }

    /// Whether the call may write it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether element `first` lies at a multiple of `bytes` bytes.
    pub fn is_aligned(&self, first: usize, bytes: usize) -> bool {
        let address = self.address + (first * self.dtype.bytes()) as u64;
        address.is_multiple_of(bytes as u64)
    }

    /// The number of elements from the first to the last, both included.
    pub fn extent(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        let reach = self.dims.iter().zip(self.strides);
        let reach = reach.map(|(size, stride)| (size - 1).saturating_mul(stride));
        reach.fold(1, usize::saturating_add)
    }

    /// The address of element `first`, if `elements` elements follow and the context is this one.
    pub(crate) fn address_of(
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
                    "{elements} elements from {first} on of a tensor that has {}",
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

    fn view(dims: [usize; 4], strides: [usize; 4]) -> DeviceView<'static> {
        // SAFETY: nothing is read: there is no call.
        unsafe { DeviceView::new(DType::Bf16, 0x1000, dims, strides, false) }
    }

    #[test]
    fn the_extent_reaches_from_the_first_element_to_the_last() {
        assert_eq!(view([2, 3, 4, 5], [60, 20, 5, 1]).extent(), 120);
        // A [b, h, n, d] tensor viewed as [b, n, h, d]; and one key head for all query heads.
        assert_eq!(view([2, 3, 4, 5], [60, 5, 15, 1]).extent(), 120);
        assert_eq!(view([2, 3, 4, 5], [15, 5, 0, 1]).extent(), 30);
        assert_eq!(view([2, 0, 4, 5], [60, 20, 5, 1]).extent(), 0);
        assert_eq!(
            view([9, 1, 1, 1], [usize::MAX, 1, 1, 1]).extent(),
            usize::MAX
        );
    }

    #[test]
    fn alignment_is_that_of_the_first_element() {
        let tensor = view([1, 8, 1, 8], [64, 8, 8, 1]);
        assert!(tensor.is_aligned(8, 16));
        assert!(!tensor.is_aligned(4, 16));
    }

    #[test]
    fn a_tensor_beyond_its_slice_is_refused() {
        let message = |view: Result<DeviceView<'_>>| view.err().map(|error| error.to_string());
        let whole = || view([1, 8, 1, 8], [64, 8, 8, 1]);
        assert_eq!(message(whole().check_bounds(0, 64)), None);
        let refused = message(whole().check_bounds(1, 64)).unwrap_or_default();
        assert!(
            refused.contains("from element 1 on in a slice of 64"),
            "{refused}"
        );
    }
}
