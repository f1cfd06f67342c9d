//! Another library's memory and stream, for the time of a call.
//!
//! Tensors of PyTorch are on this GPU already, and so is the work that fills them: on a stream of its
//! own. The decision here: a call begins when everything enqueued there so far is done, and what is
//! enqueued there afterwards begins when the call is done. Nobody waits on the host, and memory that
//! its owner frees in the order of its stream is free only when the call no longer uses it.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};
use encke_core::DType;

use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result};

/// A call on behalf of a stream that is not ours. When it is dropped, the call has ended.
pub struct Guest {
    device: Arc<Device>,
    stream: sys::CUstream,
    ended: bool,
}

impl Guest {
    /// Begins a call: whatever is enqueued on the GPU from now on comes after what `stream` has now.
    ///
    /// # Safety
    /// `stream` must be a handle of the driver (`CUstream` or `cudaStream_t`; 0 is the default one)
    /// that belongs to the primary context of this GPU and lives until the call has ended.
    pub unsafe fn begin(device: &Arc<Device>, stream: u64) -> Result<Guest> {
        let failed = |error| Error::driver("waiting for the caller's stream", error);
        let stream = stream as usize as sys::CUstream;
        let event = device.context().new_event(None).map_err(failed)?;
        // SAFETY: `new_event` has bound the context; the handle is the caller's word.
        let recorded = unsafe { sys::cuEventRecord(event.cu_event(), stream) }.result();
        recorded.map_err(failed)?;
        let wait = |own: &Arc<CudaStream>| own.wait(&event);
        device
            .streams()
            .into_iter()
            .try_for_each(wait)
            .map_err(failed)?;
        Ok(Guest {
            device: Arc::clone(device),
            stream,
            ended: false,
        })
    }

    /// Numbers of the caller, to be read and written where they are. They are never freed here.
    ///
    /// # Safety
    /// `elements` numbers of this type must be allocated on this GPU at `pointer`, and stay so until
    /// the call has ended and everything enqueued until then is done; what is read must not be
    /// written by anybody else until then, and what is written not be used. The buffer must not
    /// outlive the call.
    pub unsafe fn buffer(&self, dtype: DType, pointer: u64, elements: usize) -> Buffer {
        Buffer::foreign(&self.device, dtype, pointer, elements)
    }

    /// Ends the call: whatever the caller enqueues from now on comes after it.
    pub fn end(mut self) -> Result<()> {
        self.ended = true;
        let failed = |error| Error::driver("having the caller's stream wait", error);
        self.hand_back().map_err(failed)
    }

    fn hand_back(&self) -> std::result::Result<(), DriverError> {
        self.device.context().bind_to_thread()?;
        for own in self.device.streams() {
            let event = own.record_event(None)?;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
            // SAFETY: the stream lives until the call has ended, and an event may be destroyed
            // while streams wait for it.
            unsafe { sys::cuStreamWaitEvent(self.stream, event.cu_event(), flags) }.result()?;
        }
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A call that failed half way has used the caller's memory too.
        if !self.ended && self.hand_back().is_err() {
            let _ = self.device.synchronize();
        }
    }
}
