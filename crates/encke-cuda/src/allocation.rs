//! An allocation in the GPU's memory, and its last uses.
//!
//! It is this crate's own and freed in stream order; or foreign (see `foreign_stream.rs`), freed by
//! its owner; or a slice of another allocation, which it keeps alive and whose last uses it shares.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::last_uses::LastUses;
use crate::lock::lock;

/// Memory on the device.
pub(crate) struct DeviceAllocation {
    device: Arc<Device>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
    foreign: Option<ForeignAccess>,
    last_uses: Mutex<LastUses>,
    /// The 32-bit word of a pending fill: the memset is deferred until the first use.
    pending_fill: Mutex<Option<u32>>,
    /// True if a parcel was received into it through the host.
    received_through_host: AtomicBool,
    /// The allocation that it is a slice of.
    parent: Option<Arc<DeviceAllocation>>,
}

/// How a call may use memory of another library.
pub(crate) struct ForeignAccess {
    /// Whether the call may write it.
    pub writable: bool,
    /// The foreign stream's position at the start of the call, which the compute stream waits for;
    /// `None` if it is that stream.
    pub start_event: Option<Arc<CudaEvent>>,
    /// Whether the call has ended; the memory is not used after that.
    pub ended: Arc<AtomicBool>,
    /// The last uses of all foreign memory of the call.
    pub uses: Arc<Mutex<LastUses>>,
}

impl DeviceAllocation {
    /// Allocates `bytes` bytes with undefined contents.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<DeviceAllocation> {
        let stream = device.allocation_stream();
        let refused = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::Memory { bytes },
            _ => Error::driver(format!("allocating {bytes} bytes"), error),
        };
        stream.context().bind_to_thread().map_err(refused)?;
        if let Some(pointer) = device.take_spare(bytes) {
            device.count_allocated(bytes);
            return Ok(DeviceAllocation::unused(device, pointer, bytes, None, None));
        }
        // SAFETY: the stream is alive; nothing is read before it is written.
        let pointer = unsafe { result::malloc_async(stream.cu_stream(), bytes.max(1)) };
        let pointer = pointer.map_err(refused)?;
        device.count_allocated(bytes);
        let memory = DeviceAllocation::unused(device, pointer, bytes, None, None);
        // Other streams use it only after this operation of the allocation stream: memory that was
        // freed before and is reused here may still be in use until then.
        device.enqueue(stream, "allocating", &[], &[&memory], |_| Ok(()))?;
        Ok(memory)
    }

    /// Memory of another library.
    pub fn foreign(
        device: &Arc<Device>,
        pointer: sys::CUdeviceptr,
        bytes: usize,
        access: ForeignAccess,
    ) -> DeviceAllocation {
        let start_event = access.start_event.clone();
        let memory = DeviceAllocation::unused(device, pointer, bytes, Some(access), None);
        // Every stream that uses it waits for what its owner has enqueued so far.
        if let Some(start_event) = start_event {
            memory
                .last_uses()
                .record_write(device.compute(), &start_event);
        }
        memory
    }

    /// `bytes` bytes of it from offset `at` on, read-only.
    pub fn slice(self: &Arc<DeviceAllocation>, at: usize, bytes: usize) -> DeviceAllocation {
        assert!(at + bytes <= self.bytes, "a slice beyond its allocation");
        let pointer = self.pointer + at as u64;
        DeviceAllocation::unused(&self.device, pointer, bytes, None, Some(Arc::clone(self)))
    }

    fn unused(
        device: &Arc<Device>,
        pointer: sys::CUdeviceptr,
        bytes: usize,
        foreign: Option<ForeignAccess>,
        parent: Option<Arc<DeviceAllocation>>,
    ) -> DeviceAllocation {
        DeviceAllocation {
            device: Arc::clone(device),
            pointer,
            bytes,
            foreign,
            last_uses: Mutex::default(),
            pending_fill: Mutex::default(),
            received_through_host: AtomicBool::new(false),
            parent,
        }
    }

    /// The allocation that it is a slice of, at any depth; itself, if it is no slice.
    pub fn root(&self) -> &DeviceAllocation {
        self.parent.as_ref().map_or(self, |parent| parent.root())
    }

    /// Its device address.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes that this crate allocated for it: none for foreign memory and slices.
    pub fn owned_bytes(&self) -> usize {
        match (&self.foreign, &self.parent) {
            (None, None) => self.bytes,
            _ => 0,
        }
    }

    /// Whether it may be used: foreign memory only until its call has ended.
    pub fn is_usable(&self) -> bool {
        let ended = |access: &ForeignAccess| access.ended.load(Ordering::Acquire);
        !self.root().foreign.as_ref().is_some_and(ended)
    }

    /// Whether a parcel was received into it through the host.
    pub fn was_received_through_host(&self) -> bool {
        self.root().received_through_host.load(Ordering::Relaxed)
    }

    /// Records that a parcel is received into it through the host.
    pub fn mark_received_through_host(&self) {
        self.received_through_host.store(true, Ordering::Relaxed);
    }

    /// Whether it may be written: slices and read-only foreign memory may not.
    pub fn is_writable(&self) -> bool {
        self.parent.is_none() && self.foreign.as_ref().is_none_or(|access| access.writable)
    }

    /// The GPU it is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its last uses.
    pub fn last_uses(&self) -> MutexGuard<'_, LastUses> {
        lock(&self.root().last_uses)
    }

    /// Records a use of foreign memory, which the foreign stream waits for when the call ends.
    pub fn record_foreign_use(&self, stream: &Arc<CudaStream>, event: &Arc<CudaEvent>) {
        if let Some(access) = &self.root().foreign {
            lock(&access.uses).record_read(stream, event);
        }
    }

    /// Overwrites the first `bytes.len()` bytes. On return the caller may reuse `bytes`.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "a write beyond its allocation");
        if bytes.len() == self.bytes {
            self.cancel_fill();
        }
        let stream = self.device.compute();
        self.device
            .enqueue(stream, "copying to the GPU", &[], &[self], |stream| {
                // SAFETY: the size was checked. A copy from pageable memory has read it on return;
                // the stream is synchronized for any other.
                unsafe { result::memcpy_htod_async(self.pointer, bytes, stream.cu_stream()) }?;
                match is_pinned_or_managed(bytes) {
                    true => stream.synchronize(),
                    false => Ok(()),
                }
            })
    }

    /// Reads the first `bytes.len()` bytes; waits for all writes enqueued before.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "a read beyond its allocation");
        let stream = self.device.compute();
        self.device
            .enqueue(stream, "copying from the GPU", &[self], &[], |stream| {
                // SAFETY: the size was checked, and the stream is synchronized before `bytes` is
                // used.
                unsafe { result::memcpy_dtoh_async(bytes, self.pointer, stream.cu_stream())? };
                stream.synchronize()
            })
    }

    /// Overwrites the first `bytes` bytes with those of another allocation.
    pub fn copy_from(&self, source: &DeviceAllocation, bytes: usize) -> Result<()> {
        assert!(
            bytes <= self.bytes && bytes <= source.bytes,
            "a copy beyond its allocation"
        );
        if bytes == self.bytes {
            self.cancel_fill();
        }
        let (to, from) = (self.pointer, source.pointer);
        let stream = self.device.compute();
        self.device
            .enqueue(stream, "copying on the GPU", &[source], &[self], |stream| {
                // SAFETY: both sizes were checked.
                unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }
            })
    }

    /// Sets every byte to zero, as [`fill_words`](Self::fill_words) does.
    pub fn zero_fill(&self) {
        self.fill_words(0);
    }

    /// Sets every 32-bit word. The memset is deferred until the first use. The owner of foreign
    /// memory reads it without this crate: [`Buffer::settle`](crate::Buffer::settle) comes before.
    pub fn fill_words(&self, word: u32) {
        *lock(&self.pending_fill) = Some(word);
    }

    /// Cancels a pending fill: the caller must overwrite all bytes, or treat the contents as
    /// undefined.
    pub fn cancel_fill(&self) {
        *lock(&self.pending_fill) = None;
    }

    /// Whether a zero-fill is pending for each of several allocations. If so, all are cancelled:
    /// the caller must overwrite all bytes.
    pub fn take_all_pending_zero_fills<const COUNT: usize>(
        all: [&DeviceAllocation; COUNT],
    ) -> bool {
        let pending = (all.iter()).all(|memory| *lock(&memory.pending_fill) == Some(0));
        if pending {
            all.iter().for_each(|memory| memory.cancel_fill());
        }
        pending
    }

    /// Enqueues the memset of a pending fill.
    pub fn flush_fill(&self, stream: &Arc<CudaStream>) -> Result<()> {
        if let Some(parent) = &self.parent {
            return parent.flush_fill(stream);
        }
        // Held until the memset is enqueued, so that no other use comes before it.
        let mut pending = lock(&self.pending_fill);
        let Some(word) = pending.take() else {
            return Ok(());
        };
        let what = "filling memory";
        let memset = |stream: &CudaStream| {
            let (at, stream) = (self.pointer, stream.cu_stream());
            let set = match word {
                // SAFETY: exactly the bytes of this allocation.
                0 => unsafe { result::memset_d8_async(at, 0, self.bytes, stream) },
                // SAFETY: the words of this allocation.
                _ => unsafe { sys::cuMemsetD32Async(at, word, self.bytes / 4, stream) }.result(),
            };
            set.map_err(|error| Error::driver(what, error))
        };
        let writes = [self];
        let device = &self.device;
        device
            .enqueue_filled(stream, what, &[], &writes, memset)
            .map(|_| ())
    }
}

/// Whether host memory is pinned or managed: an asynchronous copy from it returns before it is
/// read.
fn is_pinned_or_managed(bytes: &[u8]) -> bool {
    let mut kind = 0u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let (result, pointer) = ((&raw mut kind).cast(), bytes.as_ptr() as sys::CUdeviceptr);
    // SAFETY: the attribute is a 32-bit number as documented; the address is only looked up.
    unsafe { sys::cuPointerGetAttribute(result, attribute, pointer) }
        .result()
        .is_ok()
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        if self.foreign.is_some() || self.parent.is_some() {
            return;
        }
        let stream = self.device.free_stream();
        let uses = self.last_uses.get_mut();
        let uses = uses.unwrap_or_else(PoisonError::into_inner);
        let mut events = uses.events_before_write(stream);
        let bound = stream.context().bind_to_thread();
        let ordered = bound.and_then(|()| events.try_for_each(|event| stream.wait(event)));
        // `drop` cannot report errors of a context that is gone. Memory whose free cannot be
        // ordered after its last use is leaked.
        if ordered.is_ok() {
            for pointer in self.device.keep_spare(self.bytes, self.pointer) {
                // SAFETY: the free comes after the allocation and all uses.
                let _ = unsafe { result::free_async(pointer, stream.cu_stream()) };
            }
        }
        self.device.count_freed(self.bytes);
    }
}
