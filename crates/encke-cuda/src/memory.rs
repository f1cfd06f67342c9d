//! A piece of the GPU's memory, and when it was last used. It is ours, or a guest's (see `guest.rs`),
//! who frees it, or a part of another piece, which lives and is ordered as a whole.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::order::Marks;

/// Memory on the device; ours is freed in stream order when nobody holds it any more.
pub(crate) struct Memory {
    device: Arc<Device>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
    loan: Option<Loan>,
    marks: Mutex<Marks>,
    /// Whether it is to be read as zeros that nobody has written yet.
    blank: Mutex<bool>,
    /// Whether a parcel has come through the host into it.
    travelled: AtomicBool,
    /// What it is a part of.
    whole: Option<Arc<Memory>>,
}

/// On which terms a guest lends its memory.
pub(crate) struct Loan {
    /// Whether it may be written.
    pub writable: bool,
    /// When the guest's call begins, for which the stream that computes has been told to wait.
    pub begun: Arc<CudaEvent>,
    /// Whether the guest's call has ended; nobody uses the memory from then on.
    pub ended: Arc<AtomicBool>,
    /// The last uses of everything that is lent for the call, one a stream.
    pub uses: Arc<Mutex<Marks>>,
}

impl Memory {
    /// `bytes` bytes that hold anything.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Memory> {
        let stream = device.taking();
        let refused = |error: cudarc::driver::DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::Memory { bytes },
            _ => Error::driver(format!("allocating {bytes} bytes"), error),
        };
        stream.context().bind_to_thread().map_err(refused)?;
        // SAFETY: the stream is alive; nothing is read before it is written.
        let pointer = unsafe { result::malloc_async(stream.cu_stream(), bytes.max(1)) };
        let pointer = pointer.map_err(refused)?;
        device.take(bytes);
        let memory = Memory::piece(device, pointer, bytes, None, None);
        // Another stream may use it only after the allocation: what was freed just before, and is
        // handed out again here, can still be in use until then.
        device.enqueue(stream, "allocating", &[], &[&memory], |_| Ok(()))?;
        Ok(memory)
    }

    /// Memory of a guest.
    pub fn foreign(
        device: &Arc<Device>,
        pointer: sys::CUdeviceptr,
        bytes: usize,
        loan: Loan,
    ) -> Memory {
        let begun = Arc::clone(&loan.begun);
        let memory = Memory::piece(device, pointer, bytes, Some(loan), None);
        // Whatever the guest has enqueued for it comes first, on whichever stream it is used.
        memory.marks().written(device.compute(), &begun);
        memory
    }

    /// `bytes` bytes of it from `at` on, to be read only.
    pub fn part(self: &Arc<Memory>, at: usize, bytes: usize) -> Memory {
        assert!(at + bytes <= self.bytes, "more than there is");
        let pointer = self.pointer + at as u64;
        Memory::piece(&self.device, pointer, bytes, None, Some(Arc::clone(self)))
    }

    /// One that nobody has used.
    fn piece(
        device: &Arc<Device>,
        pointer: sys::CUdeviceptr,
        bytes: usize,
        loan: Option<Loan>,
        whole: Option<Arc<Memory>>,
    ) -> Memory {
        Memory {
            device: Arc::clone(device),
            pointer,
            bytes,
            loan,
            marks: Mutex::default(),
            blank: Mutex::default(),
            travelled: AtomicBool::new(false),
            whole,
        }
    }

    /// What it is a part of; itself, if of nothing.
    pub fn whole(&self) -> &Memory {
        self.whole.as_ref().map_or(self, |whole| whole.whole())
    }

    /// Where it is.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// How large it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How much of it is ours.
    pub fn own_bytes(&self) -> usize {
        match (&self.loan, &self.whole) {
            (None, None) => self.bytes,
            _ => 0,
        }
    }

    /// Whether it may be used: for a guest's, whether its call goes on.
    pub fn is_usable(&self) -> bool {
        let ended = |loan: &Loan| loan.ended.load(Ordering::Acquire);
        !self.whole().loan.as_ref().is_some_and(ended)
    }

    /// Whether a parcel has come through the host into it.
    pub fn has_travelled(&self) -> bool {
        self.whole().travelled.load(Ordering::Relaxed)
    }

    /// A parcel comes through the host into it.
    pub fn set_travelled(&self) {
        self.travelled.store(true, Ordering::Relaxed);
    }

    /// Whether its owner lets it be written.
    pub fn is_writable(&self) -> bool {
        self.whole.is_none() && self.loan.as_ref().is_none_or(|loan| loan.writable)
    }

    /// The GPU it is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// When it was last used.
    pub fn marks(&self) -> MutexGuard<'_, Marks> {
        let marks = self.whole().marks.lock();
        marks.unwrap_or_else(PoisonError::into_inner)
    }

    /// It is used until this event: for its guest, who waits for that.
    pub fn note(&self, stream: &Arc<CudaStream>, event: &Arc<CudaEvent>) {
        if let Some(loan) = &self.whole().loan {
            let uses = loan.uses.lock();
            uses.unwrap_or_else(PoisonError::into_inner)
                .read(stream, event);
        }
    }

    /// Overwrites the beginning; returns when `bytes` may be used again.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "more than there is room for");
        if bytes.len() == self.bytes {
            self.take_blank();
        }
        let stream = self.device.compute();
        self.device
            .enqueue(stream, "copying to the GPU", &[], &[self], |stream| {
                // SAFETY: the room was checked; a copy from pageable memory has read it on return,
                // and any other is waited for.
                unsafe { result::memcpy_htod_async(self.pointer, bytes, stream.cu_stream()) }?;
                match is_known_to_driver(bytes) {
                    true => stream.synchronize(),
                    false => Ok(()),
                }
            })
    }

    /// Reads the beginning, waiting for everything that writes it.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "more than there is");
        let stream = self.device.compute();
        self.device
            .enqueue(stream, "copying from the GPU", &[self], &[], |stream| {
                // SAFETY: the room was checked, and the stream is waited for before `bytes` is used.
                unsafe { result::memcpy_dtoh_async(bytes, self.pointer, stream.cu_stream())? };
                stream.synchronize()
            })
    }

    /// Overwrites the first `bytes` bytes with those of another piece.
    pub fn copy_from(&self, source: &Memory, bytes: usize) -> Result<()> {
        assert!(
            bytes <= self.bytes && bytes <= source.bytes,
            "more than there is room for"
        );
        if bytes == self.bytes {
            self.take_blank();
        }
        let stream = self.device.compute();
        self.device
            .enqueue(stream, "copying on the GPU", &[source], &[self], |stream| {
                // SAFETY: both sizes were checked.
                unsafe {
                    result::memcpy_dtod_async(
                        self.pointer,
                        source.pointer,
                        bytes,
                        stream.cu_stream(),
                    )
                }
            })
    }

    /// Sets every byte to zero: ours when somebody wants to know, a guest's now, since its owner
    /// does not ask.
    pub fn clear(&self) -> Result<()> {
        *self.blank() = true;
        match self.loan {
            None => Ok(()),
            Some(_) => self.settle(self.device.compute()),
        }
    }

    /// Whether it was cleared and nobody has wanted to know. If so it holds anything from now on:
    /// whoever asks overwrites all of it.
    pub fn take_blank(&self) -> bool {
        std::mem::take(&mut *self.blank())
    }

    /// The same of several: all of them, or none.
    pub fn take_all_blank<const COUNT: usize>(all: [&Memory; COUNT]) -> bool {
        let blank = all.iter().all(|memory| *memory.blank());
        blank && all.iter().all(|memory| memory.take_blank())
    }

    /// Writes the zeros that a clearing left to its first user.
    pub fn settle(&self, stream: &Arc<CudaStream>) -> Result<()> {
        if let Some(whole) = &self.whole {
            return whole.settle(stream);
        }
        // Held until they are enqueued, so that another user does not come before them.
        let mut blank = self.blank();
        if !std::mem::take(&mut *blank) {
            return Ok(());
        }
        let zeros = |stream: &CudaStream| {
            // SAFETY: exactly the memory there is.
            let written =
                unsafe { result::memset_d8_async(self.pointer, 0, self.bytes, stream.cu_stream()) };
            written.map_err(|error| Error::driver("clearing memory", error))
        };
        self.device
            .place_settled(stream, "clearing memory", &[], &[self], zeros)
            .map(|_| ())
    }

    fn blank(&self) -> MutexGuard<'_, bool> {
        self.blank.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether memory of the host is page-locked or managed: a copy from it returns before it is read.
fn is_known_to_driver(bytes: &[u8]) -> bool {
    let mut kind = 0u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let (place, pointer) = ((&raw mut kind).cast(), bytes.as_ptr() as sys::CUdeviceptr);
    // SAFETY: the attribute is a 32-bit number as documented; the address is only looked up.
    unsafe { sys::cuPointerGetAttribute(place, attribute, pointer) }
        .result()
        .is_ok()
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.loan.is_some() || self.whole.is_some() {
            return;
        }
        let stream = self.device.freeing();
        let marks = self.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut waits = marks.before_writing(stream);
        let bound = stream.context().bind_to_thread();
        let ordered = bound.and_then(|()| waits.try_for_each(|event| stream.wait(event)));
        // Errors of a context that is gone have nobody left to hear them; what cannot be ordered is
        // not freed.
        if ordered.is_ok() {
            // SAFETY: its allocation and every use of it come before.
            let _ = unsafe { result::free_async(self.pointer, stream.cu_stream()) };
        }
        self.device.give_back(self.bytes);
    }
}
