//! Another library's memory and stream, for the time of a call.
//!
//! Tensors of PyTorch or candle are on this GPU already, and so is the work that fills them: on a
//! stream of its own. The decision here: a call begins when everything enqueued there so far is done, and what is
//! enqueued there afterwards begins when the call is done. Nobody waits on the host, and memory that
//! its owner frees in the order of its stream is free only when the call no longer uses it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};

use crate::buffer::Buffer;
use crate::device::Device;
use crate::device_view::DeviceView;
use crate::error::{Error, Result};
use crate::memory::Loan;
use crate::order::Marks;

/// A call on behalf of a stream that is not ours. When it is dropped, the call has ended.
pub struct ForeignStream {
    device: Arc<Device>,
    stream: sys::CUstream,
    /// When everything is done that the stream had at the beginning.
    begun: Arc<CudaEvent>,
    /// Keeps the stream, where it is counted.
    _kept: Option<Arc<CudaStream>>,
    /// Told to all memory that was lent.
    ended: Arc<AtomicBool>,
    /// When what was lent is used, as far as that was enqueued.
    uses: Arc<Mutex<Marks>>,
}

impl ForeignStream {
    /// Begins a call: whatever uses memory that is lent for it comes after what `stream` has now.
    ///
    /// # Safety
    /// `stream` must be a handle of the driver (`CUstream` or `cudaStream_t`; 0 is the default one)
    /// that belongs to the primary context of this GPU and lives until the call has ended.
    pub unsafe fn begin(device: &Arc<Device>, stream: u64) -> Result<ForeignStream> {
        let failed = |error| Error::driver("waiting for the caller's stream", error);
        ForeignStream::wait_for(device, stream as usize as sys::CUstream, None).map_err(failed)
    }

    /// The same for a stream of cudarc, which knows what it belongs to.
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
        let failed = |error| Error::driver("waiting for the caller's stream", error);
        let kept = Some(Arc::clone(stream));
        ForeignStream::wait_for(device, stream.cu_stream(), kept).map_err(failed)
    }

    fn wait_for(
        device: &Arc<Device>,
        stream: sys::CUstream,
        kept: Option<Arc<CudaStream>>,
    ) -> std::result::Result<ForeignStream, DriverError> {
        let event = device.context().new_event(None)?;
        // SAFETY: `new_event` has bound the context; the handle is good, by the caller's word or by
        // the stream that is kept.
        unsafe { sys::cuEventRecord(event.cu_event(), stream) }.result()?;
        device.compute().wait(&event)?;
        Ok(ForeignStream {
            device: Arc::clone(device),
            stream,
            begun: Arc::new(event),
            _kept: kept,
            ended: Arc::default(),
            uses: Arc::default(),
        })
    }

    /// `elements` numbers of a tensor of the caller from its number `first` on, to be used where they
    /// are. They are never freed here, and nobody can use the buffer when the call has ended.
    pub fn buffer(&self, lent: &DeviceView<'_>, first: usize, elements: usize) -> Result<Buffer> {
        let pointer = lent.reach(self.device.context(), first, elements)?;
        let loan = Loan {
            writable: lent.is_writable(),
            begun: Arc::clone(&self.begun),
            ended: Arc::clone(&self.ended),
            uses: Arc::clone(&self.uses),
        };
        let dtype = lent.dtype();
        Ok(Buffer::foreign(
            &self.device,
            dtype,
            pointer,
            elements,
            loan,
        ))
    }

    /// Ends the call: whatever the caller enqueues from now on comes after it.
    pub fn end(self) -> Result<()> {
        let failed = |error| Error::driver("having the caller's stream wait", error);
        self.hand_back().map_err(failed)
    }

    fn hand_back(&self) -> std::result::Result<(), DriverError> {
        self.ended.store(true, Ordering::Release);
        self.device.context().bind_to_thread()?;
        let uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        for event in uses.all() {
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
        if !self.ended.load(Ordering::Acquire) && self.hand_back().is_err() {
            let _ = self.device.synchronize();
        }
    }
}
