//! A piece of the host's memory that copy engines reach by themselves.
//!
//! A GPU may still be reading or writing it when the program has long gone on, so it remembers the
//! event of its last copy: it is shown to the host, and given back to the system, only after that.

use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;

/// How long freeing waits for a copy that is still under way. What is not done by then is on a GPU
/// that hangs, and its memory is lost rather than freed under it.
const FREEING: Duration = Duration::from_secs(10);
/// How long a wait spins before it begins to sleep: a copy of a few MiB is over by then.
const SPINNING: Duration = Duration::from_micros(200);
const SLEEP: Duration = Duration::from_micros(50);

/// Page-locked memory of the host.
pub(crate) struct HostMemory {
    // Not the device: it keeps some of these itself.
    context: Arc<CudaContext>,
    pointer: *mut u8,
    bytes: usize,
    busy: Option<Arc<CudaEvent>>,
}

// SAFETY: plain memory with one owner; the pointer is not tied to a thread.
unsafe impl Send for HostMemory {}
// SAFETY: shared access only reads, and only when no copy is under way.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `bytes` zeros.
    pub fn new(device: &Device, bytes: usize) -> Result<HostMemory> {
        let what = || format!("page-locking {bytes} bytes of the host's memory");
        let failed = |error| Error::driver(what(), error);
        device.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the context is bound, and the memory is freed by `drop` alone.
        let pointer = unsafe { result::malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        let pointer: *mut u8 = pointer.map_err(failed)?.cast();
        // SAFETY: just allocated, of that size; a slice of it may then be shown.
        unsafe { ptr::write_bytes(pointer, 0, bytes) };
        Ok(HostMemory {
            context: Arc::clone(device.context()),
            pointer,
            bytes,
            busy: None,
        })
    }

    /// How large it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it holds, once no copy is under way.
    pub fn shown(&self) -> &[u8] {
        assert!(self.busy.is_none(), "memory was read while it is copied");
        // SAFETY: initialised, `bytes` long, and no GPU writes to it.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The same, to be overwritten.
    pub fn shown_mut(&mut self) -> &mut [u8] {
        assert!(self.busy.is_none(), "memory was written while it is copied");
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Whether no copy is under way, without waiting. An error is for the next wait to tell.
    pub fn is_idle(&self) -> bool {
        self.busy.as_ref().is_none_or(|event| event.is_complete())
    }

    /// Waits until no copy is under way.
    pub fn settle(&mut self, what: &str, limit: Duration) -> Result<()> {
        if let Some(event) = &self.busy {
            wait(event, what, limit)?;
            self.busy = None;
        }
        Ok(())
    }

    /// Enqueues a copy of `bytes` bytes of a GPU's memory, from `at` on, to its beginning, after
    /// whatever copy of its own is under way.
    pub fn fetch(
        &mut self,
        stream: &Arc<CudaStream>,
        from: &Memory,
        at: usize,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            bytes <= self.bytes && at + bytes <= from.bytes(),
            "out of bounds"
        );
        let device = from.device();
        let what = "copying from the GPU";
        let placed = device.place(stream, what, &[from], &[], |stream| {
            let copied = self.after(stream).and_then(|()| {
                let (host, source) = (self.pointer.cast(), from.pointer() + at as u64);
                // SAFETY: both ends were checked; neither is freed before the copy's event.
                unsafe { sys::cuMemcpyDtoHAsync_v2(host, source, bytes, stream.cu_stream()) }
                    .result()
            });
            copied.map_err(|error| Error::driver(what, error))
        });
        self.busy = Some(placed?);
        Ok(())
    }

    /// Enqueues a copy of its beginning into a GPU's memory, after whatever copy of its own is
    /// under way.
    pub fn bring(
        &mut self,
        stream: &Arc<CudaStream>,
        to: &Memory,
        at: usize,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            bytes <= self.bytes && at + bytes <= to.bytes(),
            "out of bounds"
        );
        let device = to.device();
        let what = "copying to the GPU";
        let placed = device.place(stream, what, &[], &[to], |stream| {
            let copied = self.after(stream).and_then(|()| {
                let (target, host) = (to.pointer() + at as u64, self.pointer.cast_const().cast());
                // SAFETY: both ends were checked; neither is freed before the copy's event.
                unsafe { sys::cuMemcpyHtoDAsync_v2(target, host, bytes, stream.cu_stream()) }
                    .result()
            });
            copied.map_err(|error| Error::driver(what, error))
        });
        self.busy = Some(placed?);
        Ok(())
    }

    fn after(&self, stream: &CudaStream) -> std::result::Result<(), DriverError> {
        self.busy.iter().try_for_each(|event| stream.wait(event))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let settled = self.settle("a copy", FREEING);
        let bound = self.context.bind_to_thread();
        if settled.is_ok() && bound.is_ok() {
            // SAFETY: allocated by `malloc_host`, and no copy uses it any more.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}

/// Waits for an event, but not for ever.
pub(crate) fn wait(event: &CudaEvent, what: &str, limit: Duration) -> Result<()> {
    let since = Instant::now();
    loop {
        let done = event.try_is_complete();
        if done.map_err(|error| Error::driver(what, error))? {
            return Ok(());
        }
        let waited = since.elapsed();
        if waited > limit {
            return Err(Error::Deadline {
                what: what.into(),
                waited,
                limit,
            });
        }
        match waited < SPINNING {
            true => std::thread::yield_now(),
            false => std::thread::sleep(SLEEP),
        }
    }
}
