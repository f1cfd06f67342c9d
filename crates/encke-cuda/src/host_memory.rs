//! Pinned host memory, which the GPU's copy engines read and write asynchronously.
//!
//! A copy may still run when the host thread has gone on, so the memory keeps the event of its last
//! copy: the host sees the contents, and the system gets the memory back, only after that event.
//! Copies are enqueued by `host_copies.rs`.

use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use crate::error::{Error, Result};

/// How long `drop` waits for a copy. A copy that takes longer is on a GPU that hangs, and its
/// memory is leaked rather than freed under it.
const DROP_LIMIT: Duration = Duration::from_secs(10);
/// How long a wait spins before it sleeps: a copy of a few MiB is over by then.
const SPIN: Duration = Duration::from_micros(200);
const SLEEP: Duration = Duration::from_micros(50);

/// Pinned host memory.
pub(crate) struct HostMemory {
    // Not the device, which owns some of these itself.
    context: Arc<CudaContext>,
    pointer: *mut u8,
    bytes: usize,
    last_copy: Option<Arc<CudaEvent>>,
}

// SAFETY: plain memory with one owner; the pointer is not tied to a thread.
unsafe impl Send for HostMemory {}
// SAFETY: shared access only reads, and only while no copy runs.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `bytes` zeros.
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<HostMemory> {
        let failed = |error| Error::driver(format!("pinning {bytes} bytes of host memory"), error);
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: the context is bound, and only `drop` frees the memory.
        let pointer = unsafe { result::malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        let pointer: *mut u8 = pointer.map_err(failed)?.cast();
        // SAFETY: just allocated with this size. Initialised memory may be viewed as a slice.
        unsafe { ptr::write_bytes(pointer, 0, bytes) };
        Ok(HostMemory {
            context: Arc::clone(context),
            pointer,
            bytes,
            last_copy: None,
        })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its address, for a copy that is ordered by [`HostMemory::order_after_last_copy`].
    pub fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Its contents, after [`HostMemory::wait`].
    pub fn as_bytes(&self) -> &[u8] {
        assert!(self.last_copy.is_none(), "host memory read during a copy");
        // SAFETY: initialised, `bytes` long, and no GPU writes to it.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// Its contents for overwriting, after [`HostMemory::wait`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let busy = self.last_copy.is_some();
        assert!(!busy, "host memory written during a copy");
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Whether no copy is running, without waiting. The next wait reports errors.
    pub fn is_idle(&self) -> bool {
        let event = self.last_copy.as_ref();
        event.is_none_or(|event| event.is_complete())
    }

    /// Waits until no copy is running.
    pub fn wait(&mut self, what: &str, limit: Duration) -> Result<()> {
        if let Some(event) = &self.last_copy {
            wait(event, what, limit)?;
            self.last_copy = None;
        }
        Ok(())
    }

    /// Makes a stream wait for the last copy.
    pub fn order_after_last_copy(
        &self,
        stream: &CudaStream,
    ) -> std::result::Result<(), DriverError> {
        let mut events = self.last_copy.iter();
        events.try_for_each(|event| stream.wait(event))
    }

    /// Records the completion of a copy that was just enqueued.
    pub fn set_last_copy(&mut self, event: Arc<CudaEvent>) {
        self.last_copy = Some(event);
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let waited = self.wait("a copy", DROP_LIMIT);
        let bound = self.context.bind_to_thread();
        if waited.is_ok() && bound.is_ok() {
            // SAFETY: allocated by `malloc_host`, and no copy uses it any more.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}

/// Waits for an event until `limit` has passed.
pub(crate) fn wait(event: &CudaEvent, what: &str, limit: Duration) -> Result<()> {
    let pause = |waited| match waited < SPIN {
        true => std::thread::yield_now(),
        false => std::thread::sleep(SLEEP),
    };
    poll(what, Instant::now(), limit, pause, || {
        let done = event.try_is_complete();
        done.map_err(|error| Error::driver(what, error))
    })
}

/// Polls `done` until it holds, and calls `pause` with the time waited in between. Fails with
/// [`Error::Deadline`] when `limit` has passed since `start`.
pub(crate) fn poll(
    what: &str,
    start: Instant,
    limit: Duration,
    pause: impl Fn(Duration),
    mut done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    while !done()? {
        let waited = start.elapsed();
        if waited > limit {
            return Err(Error::Deadline {
                what: what.into(),
                waited,
                limit,
            });
        }
        pause(waited);
    }
    Ok(())
}
