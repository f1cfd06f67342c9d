//! Another library's memory and stream, for the duration of a call.
//!
//! Tensors of PyTorch or candle are on this GPU already, and the kernels that fill them run on that
//! library's stream. The decision here: a call starts after everything enqueued on that stream so
//! far, and what is enqueued there later starts after the call. No host thread waits, and memory
//! that its owner frees in stream order is reused only after the call's last use of it. On a device
//! that runs on that very stream ([`CudaKernel::on_stream`](crate::CudaKernel::on_stream)), its
//! order is enough.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};

use crate::allocation::ForeignAccess;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::device_view::DeviceView;
use crate::error::{Error, Result};
use crate::last_uses::LastUses;
use crate::lock::lock;

/// A call on behalf of another library's stream. Dropping it ends the call.
pub struct ForeignStream {
    device: Arc<Device>,
    stream: sys::CUstream,
    /// The stream's position at the start of the call, if the device has other streams.
    start_event: Option<Arc<CudaEvent>>,
    /// Keeps a reference-counted stream alive.
    _stream_owner: Option<Arc<CudaStream>>,
    /// Shared with all foreign memory of the call.
    ended: Arc<AtomicBool>,
    /// The last uses of all foreign memory of the call, as far as they are enqueued.
    uses: Arc<Mutex<LastUses>>,
}

impl ForeignStream {
    /// Begins a call: its uses of foreign memory come after everything `stream` has enqueued.
    ///
    /// # Safety
    /// `stream` must be a handle of the driver (`CUstream` or `cudaStream_t`; 0 is the default
    /// stream) of this GPU's primary context, and stay valid until the call has ended.
    pub unsafe fn begin(device: &Arc<Device>, stream: u64) -> Result<ForeignStream> {
        ForeignStream::begin_after(device, stream as usize as sys::CUstream, None)
    }

    /// The same for a stream of cudarc, which keeps its context.
    pub fn on(device: &Arc<Device>, stream: &Arc<CudaStream>) -> Result<ForeignStream> {
        if stream.context().cu_ctx() != device.context().cu_ctx() {
            return Err(Error::Unsupported {
                what: format!(
                    "a stream of GPU {}, or of a context of its own, on {}",
                    stream.context().ordinal(),
                    device.name()
                ),
            });
        }
        let owner = Some(Arc::clone(stream));
        ForeignStream::begin_after(device, stream.cu_stream(), owner)
    }

    fn begin_after(
        device: &Arc<Device>,
        stream: sys::CUstream,
        owner: Option<Arc<CudaStream>>,
    ) -> Result<ForeignStream> {
        let record = || -> std::result::Result<_, DriverError> {
            let event = device.context().new_event(None)?;
            // SAFETY: `new_event` has bound the context; the handle is valid by the contract of
            // `begin` or because `owner` keeps the stream.
            unsafe { sys::cuEventRecord(event.cu_event(), stream) }.result()?;
            device.compute().wait(&event)?;
            Ok(event)
        };
        let failed = |error| Error::driver("waiting for the caller's stream", error);
        let start_event = match device.runs_on(stream) {
            true => None,
            false => {
                device.refuse_capture(stream, "a call of several ranks")?;
                Some(Arc::new(record().map_err(failed)?))
            }
        };
        Ok(ForeignStream {
            device: Arc::clone(device),
            stream,
            start_event,
            _stream_owner: owner,
            ended: Arc::default(),
            uses: Arc::default(),
        })
    }

    /// `elements` elements of the caller's tensor from element `first` on, used in place. This
    /// crate never frees them, and the buffer is unusable after the call has ended.
    pub fn buffer(&self, view: &DeviceView<'_>, first: usize, elements: usize) -> Result<Buffer> {
        let pointer = view.address_of(self.device.context(), first, elements)?;
        let access = ForeignAccess {
            writable: view.is_writable(),
            start_event: self.start_event.clone(),
            ended: Arc::clone(&self.ended),
            uses: Arc::clone(&self.uses),
        };
        let (device, dtype) = (&self.device, view.dtype());
        Ok(Buffer::foreign(device, dtype, pointer, elements, access))
    }

    /// Ends the call: what the caller enqueues from now on comes after it.
    pub fn end(self) -> Result<()> {
        let failed = |error| Error::driver("ordering the caller's stream after a call", error);
        self.order_after_call().map_err(failed)
    }

    fn order_after_call(&self) -> std::result::Result<(), DriverError> {
        self.ended.store(true, Ordering::Release);
        if self.start_event.is_none() {
            return Ok(());
        }
        self.device.context().bind_to_thread()?;
        for event in lock(&self.uses).all() {
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
            // SAFETY: the stream lives until the call has ended, and an event may be destroyed
            // while streams wait for it.
            unsafe { sys::cuStreamWaitEvent(self.stream, event.cu_event(), flags) }.result()?;
        }
        Ok(())
    }
}

impl Drop for ForeignStream {
    fn drop(&mut self) {
        // A call that failed half way has used the caller's memory too.
        if !self.ended.load(Ordering::Acquire) && self.order_after_call().is_err() {
            let _ = self.device.synchronize();
        }
    }
}
