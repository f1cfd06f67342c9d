//! GPU memory that other processes of this machine read: CUDA IPC.
//!
//! The decision here: a parcel is copied into a slot that the receiver's process has opened, and
//! the receiver copies it out; a ticket of a few bytes, which any transport of host memory can
//! carry, says which slot. The ticket is sent when the copy into the slot is complete, so a ticket
//! that has arrived is a parcel that is there, whatever happens to the sender. A slot is filled
//! again when its receiver has emptied it, which the receiver's stream writes into the slot's
//! header; if no slot is empty there is another one. So no stream and no thread waits for a process
//! that may be dead.
//!
//! Handles name whole allocations, so a slot is one, in multiples of the driver's granularity.
//! Slots are freed only by [`SharedSlots::free`], after every process has closed what it opened.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use crate::allocation::DeviceAllocation;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::host_memory::wait;

/// Bytes of the name of an allocation.
const HANDLE: usize = 64;
/// Bytes of a ticket: the handle and the generation.
pub(crate) const TICKET: usize = HANDLE + 4;
/// Bytes before the contents of a slot. The first four are the generation that was emptied last.
const HEADER: usize = 256;
/// Allocations of this size share no block of the driver's with others.
const GRANULARITY: usize = 2 << 20;

type Handle = [u8; HANDLE];

/// A slot of this process.
#[derive(Clone, Copy)]
pub(crate) struct SlotIndex(usize);

/// Memory that this process allocated for others.
struct SharedSlot {
    context: Arc<CudaContext>,
    pointer: sys::CUdeviceptr,
    bytes: usize,
    handle: Handle,
    /// How often it was filled.
    generation: u32,
    /// The event of the copy that fills it, until a ticket was made.
    filled: Option<Arc<CudaEvent>>,
}

impl SharedSlot {
    /// A slot for `bytes` bytes.
    fn new(device: &Device, bytes: usize) -> Result<SharedSlot> {
        let bytes = (HEADER + bytes).next_multiple_of(GRANULARITY);
        let refused = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::Memory { bytes },
            _ => Error::driver(format!("sharing {bytes} bytes with other processes"), error),
        };
        device.context().bind_to_thread().map_err(refused)?;
        // SAFETY: the context is bound. Memory that is not freed below is owned by the slot.
        let pointer = unsafe { result::malloc_sync(bytes) }.map_err(refused)?;
        let mut handle = sys::CUipcMemHandle {
            reserved: [0; HANDLE],
        };
        // SAFETY: the allocation is alive, and its header is inside it.
        let named = unsafe {
            result::memset_d8_sync(pointer, 0, HEADER)
                .and_then(|()| sys::cuIpcGetMemHandle(&raw mut handle, pointer).result())
        };
        if let Err(error) = named {
            // SAFETY: allocated above, and nothing uses it.
            let _ = unsafe { result::free_sync(pointer) };
            return Err(refused(error));
        }
        Ok(SharedSlot {
            context: Arc::clone(device.context()),
            pointer,
            bytes: bytes - HEADER,
            handle: handle.reserved.map(|byte| byte as u8),
            generation: 0,
            filled: None,
        })
    }

    /// Whether the receiver has emptied it, as far as this process can see now.
    fn is_empty(&self) -> Result<bool> {
        let failed = |error| Error::driver("reading shared memory", error);
        self.context.bind_to_thread().map_err(failed)?;
        let mut emptied = [0u32];
        // SAFETY: the header is inside the allocation.
        unsafe { result::memcpy_dtoh_sync(&mut emptied, self.pointer) }.map_err(failed)?;
        Ok(emptied == [self.generation])
    }

    /// Enqueues a copy of the first `bytes` bytes of `from`.
    fn fill(
        &mut self,
        stream: &Arc<CudaStream>,
        from: &DeviceAllocation,
        bytes: usize,
    ) -> Result<()> {
        let inside = bytes <= self.bytes && bytes <= from.bytes();
        assert!(inside, "a parcel beyond its slot");
        let what = "a hop to another process";
        let (to, source) = (self.pointer + HEADER as u64, from.pointer());
        let device = from.device();
        let event = device.enqueue_recorded(stream, what, &[from], &[], |stream| {
            let copied = match bytes {
                0 => Ok(()),
                // SAFETY: the slot is alive until it is freed; both sizes were checked.
                _ => unsafe { result::memcpy_dtod_async(to, source, bytes, stream.cu_stream()) },
            };
            copied.map_err(|error| Error::driver(what, error))
        })?;
        self.generation = self.generation.wrapping_add(1);
        self.filled = Some(event);
        Ok(())
    }

    /// The ticket of the present contents, once they are there.
    fn ticket(&mut self, deadline: Duration) -> Result<[u8; TICKET]> {
        if let Some(event) = self.filled.take() {
            wait(&event, "parcels to leave the GPU", deadline)?;
        }
        let mut ticket = [0; TICKET];
        ticket[..HANDLE].copy_from_slice(&self.handle);
        ticket[HANDLE..].copy_from_slice(&self.generation.to_le_bytes());
        Ok(ticket)
    }

    fn free(self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: no process has it open, and no copy uses it.
            let _ = unsafe { result::free_sync(self.pointer) };
        }
    }
}

/// Memory of another process, opened here.
struct OpenedSlot {
    context: Arc<CudaContext>,
    pointer: sys::CUdeviceptr,
}

impl OpenedSlot {
    fn open(context: &Arc<CudaContext>, handle: Handle) -> Result<OpenedSlot> {
        let failed = |error| Error::driver("opening memory of another process", error);
        context.bind_to_thread().map_err(failed)?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(|byte| byte as _),
        };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut pointer = 0;
        // SAFETY: the handle was made by the process that owns the memory, which keeps it.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags) }
            .result()
            .map_err(failed)?;
        Ok(OpenedSlot {
            context: Arc::clone(context),
            pointer,
        })
    }

    /// Enqueues a copy of its contents, and tells the owner that it is empty.
    fn empty(
        &self,
        stream: &Arc<CudaStream>,
        to: &DeviceAllocation,
        bytes: usize,
        generation: u32,
    ) -> Result<Arc<CudaEvent>> {
        assert!(bytes <= to.bytes(), "a parcel beyond its buffer");
        let what = "a hop from another process";
        let (from, target) = (self.pointer, to.pointer());
        to.device()
            .enqueue_recorded(stream, what, &[], &[to], |stream| {
                let stream = stream.cu_stream();
                // SAFETY: both ends of the message have one size, and the slot has room for it.
                let emptied = unsafe {
                    let copied =
                        result::memcpy_dtod_async(target, from + HEADER as u64, bytes, stream);
                    copied.and_then(|()| {
                        sys::cuStreamWriteValue32_v2(stream, from, generation, 0).result()
                    })
                };
                emptied.map_err(|error| Error::driver(what, error))
            })
    }
}

impl Drop for OpenedSlot {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: opened by `open`; every copy from it was waited for.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
        }
    }
}

/// The slots through which one rank exchanges parcels with ranks of other processes.
pub(crate) struct SharedSlots {
    device: Arc<Device>,
    filling: Arc<CudaStream>,
    emptying: Arc<CudaStream>,
    slots: Vec<SharedSlot>,
    opened: HashMap<Handle, OpenedSlot>,
}

impl SharedSlots {
    pub fn new(device: &Arc<Device>) -> Result<SharedSlots> {
        Ok(SharedSlots {
            device: Arc::clone(device),
            filling: device.stream()?,
            emptying: device.stream()?,
            slots: Vec::new(),
            opened: HashMap::new(),
        })
    }

    /// Enqueues the copy of a parcel into an empty slot; returns the slot.
    pub fn fill(&mut self, from: &DeviceAllocation, bytes: usize) -> Result<SlotIndex> {
        let at = self.empty_slot(bytes)?;
        self.slots[at].fill(&self.filling, from, bytes)?;
        Ok(SlotIndex(at))
    }

    fn empty_slot(&mut self, bytes: usize) -> Result<usize> {
        for (at, slot) in self.slots.iter().enumerate() {
            let fits = slot.bytes >= bytes && slot.filled.is_none();
            if fits && slot.is_empty()? {
                return Ok(at);
            }
        }
        self.slots.push(SharedSlot::new(&self.device, bytes)?);
        Ok(self.slots.len() - 1)
    }

    /// The ticket of a parcel, once it is in its slot.
    pub fn ticket(&mut self, slot: SlotIndex, deadline: Duration) -> Result<[u8; TICKET]> {
        self.slots[slot.0].ticket(deadline)
    }

    /// Enqueues the copy of the parcel of a ticket; returns the event of its completion.
    pub fn empty(
        &mut self,
        ticket: &[u8],
        to: &DeviceAllocation,
        bytes: usize,
    ) -> Result<Arc<CudaEvent>> {
        let (handle, generation) = ticket.split_at(HANDLE);
        let handle: Handle = handle.try_into().expect("the length of a handle");
        let generation = u32::from_le_bytes(generation.try_into().expect("four bytes"));
        if !self.opened.contains_key(&handle) {
            let opened = OpenedSlot::open(self.device.context(), handle)?;
            self.opened.insert(handle, opened);
        }
        self.opened[&handle].empty(&self.emptying, to, bytes, generation)
    }

    /// Closes what other processes own. When all have done so, [`SharedSlots::free`] may follow.
    pub fn close(&mut self) {
        self.opened.clear();
    }

    /// Frees what this process owns.
    pub fn free(self) {
        self.slots.into_iter().for_each(SharedSlot::free);
    }
}

/// A small slot with which ranks find out whose memory they can read.
pub struct SharedMemoryProbe {
    device: Arc<Device>,
    slot: SharedSlot,
}

impl SharedMemoryProbe {
    /// A slot whose contents are `token`.
    pub fn new(device: &Arc<Device>, token: u64) -> Result<SharedMemoryProbe> {
        let slot = SharedSlot::new(device, size_of::<u64>())?;
        let at = slot.pointer + HEADER as u64;
        // SAFETY: the contents of the slot have this size.
        let written = unsafe { result::memcpy_htod_sync(at, &[token]) };
        written.map_err(|error| Error::driver("writing shared memory", error))?;
        Ok(SharedMemoryProbe {
            device: Arc::clone(device),
            slot,
        })
    }

    /// Its name, to be sent to the other ranks.
    pub fn handle(&self) -> &[u8] {
        &self.slot.handle
    }

    /// Whether the slot with this name can be opened here and contains `token`.
    pub fn reads(&self, handle: &[u8], token: u64) -> bool {
        let Ok(handle) = Handle::try_from(handle) else {
            return false;
        };
        let Ok(opened) = OpenedSlot::open(self.device.context(), handle) else {
            return false;
        };
        let mut found = [0u64];
        // SAFETY: the contents of a probe's slot have this size.
        let read = unsafe { result::memcpy_dtoh_sync(&mut found, opened.pointer + HEADER as u64) };
        read.is_ok() && found == [token]
    }

    /// Frees it, when no rank reads it any more.
    pub fn free(self) {
        self.slot.free();
    }
}
