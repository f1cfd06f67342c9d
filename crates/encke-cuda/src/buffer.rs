//! Typed memory of a GPU as a kernel's buffer and as a parcel.
//!
//! The decision here: a parcel for another rank on the same GPU is handed over as a pointer, unless
//! [`Hops`](crate::Hops) says otherwise. Two buffers may therefore share memory, and writes are
//! copy-on-write: a buffer that writes to shared memory, to a slice or to read-only foreign memory
//! first gets memory of its own. A sent parcel cannot change under its receiver.

use std::sync::Arc;

use encke_core::host;
use encke_core::transport::WireBuffer;
use encke_core::{DType, Data};

use crate::allocation::{DeviceAllocation, ForeignAccess};
use crate::device::{Device, FlushReason};
use crate::error::{Error, Result};
use crate::hops::Hops;
use crate::host_copies::hop;

/// Alignment in bytes that tensor maps need of an address.
const TENSOR_MAP_ALIGNMENT: usize = 16;

/// Elements on a GPU. Memory that is shared with another buffer may be smaller than `elements`.
pub struct Buffer {
    memory: Option<Arc<DeviceAllocation>>,
    /// Its own memory, kept for reuse while `memory` is a slice of another buffer's.
    spare: Option<Arc<DeviceAllocation>>,
    dtype: DType,
    elements: usize,
}

impl Buffer {
    /// `elements` elements with undefined contents.
    pub(crate) fn new(device: &Arc<Device>, dtype: DType, elements: usize) -> Result<Buffer> {
        let overflow = Error::Memory { bytes: usize::MAX };
        let bytes = elements.checked_mul(dtype.bytes()).ok_or(overflow)?;
        Ok(Buffer {
            memory: Some(Arc::new(DeviceAllocation::new(device, bytes)?)),
            spare: None,
            dtype,
            elements,
        })
    }

    /// Elements in memory that another library has allocated and will free.
    pub(crate) fn foreign(
        device: &Arc<Device>,
        dtype: DType,
        pointer: u64,
        elements: usize,
        access: ForeignAccess,
    ) -> Buffer {
        let bytes = elements * dtype.bytes();
        Buffer {
            memory: Some(Arc::new(DeviceAllocation::foreign(
                device, pointer, bytes, access,
            ))),
            spare: None,
            dtype,
            elements,
        }
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Enqueues what was deferred, so that memory of another library can be read by its owner.
    pub fn settle(&self) -> Result<()> {
        let memory = self.memory()?;
        memory.flush_fill(memory.device().compute())
    }

    /// Refuses a type other than the kernel's.
    pub(crate) fn check_dtype(&self, what: &str, dtype: DType) -> Result<()> {
        match self.dtype == dtype {
            true => Ok(()),
            false => Err(Error::Unsupported {
                what: format!("{what} of type {}, {dtype} was expected", self.dtype),
            }),
        }
    }

    /// The memory it reads from; an error after the buffer was taken or its foreign call ended.
    pub(crate) fn memory(&self) -> Result<&Arc<DeviceAllocation>> {
        let memory = self.memory.as_ref().ok_or_else(|| Error::Unsupported {
            what: "a buffer whose contents were taken".into(),
        })?;
        match memory.is_usable() {
            true => Ok(memory),
            false => Err(Error::Unsupported {
                what: "foreign memory after its call has ended".into(),
            }),
        }
    }

    /// Bytes of its elements.
    fn bytes(&self) -> usize {
        self.elements * self.dtype.bytes()
    }

    /// Whether a write needs other memory: another buffer shares `shared`, it is read-only, or it
    /// was received and is too small. Two references are this buffer's and the caller's.
    fn needs_own_memory(&self, shared: &Arc<DeviceAllocation>) -> bool {
        let others = Arc::strong_count(shared) > 2;
        others || !shared.is_writable() || shared.bytes() < self.bytes()
    }

    /// Issues the delayed launches that read its memory and therefore hold references to it.
    fn flush_readers(&self) -> Result<()> {
        let memory = self.memory()?;
        memory.device().flush(FlushReason::BeforeWrite(memory))
    }

    /// Memory of its own with its contents, for writing.
    pub(crate) fn writable(&mut self) -> Result<&Arc<DeviceAllocation>> {
        self.flush_readers()?;
        self.writable_without_flush()
    }

    /// The same without issuing delayed launches: these keep the memory they read.
    fn writable_without_flush(&mut self) -> Result<&Arc<DeviceAllocation>> {
        let shared = Arc::clone(self.memory()?);
        if self.needs_own_memory(&shared) {
            let own = self.own_allocation(&shared)?;
            own.copy_from(&shared, shared.bytes().min(self.bytes()))?;
            self.memory = Some(own);
        }
        self.memory()
    }

    /// Memory of its own with undefined contents, for overwriting all of it.
    pub(crate) fn overwritable(&mut self) -> Result<&Arc<DeviceAllocation>> {
        self.flush_readers()?;
        let shared = Arc::clone(self.memory()?);
        if self.needs_own_memory(&shared) {
            self.memory = Some(self.own_allocation(&shared)?);
        }
        self.memory()
    }

    /// Memory for its elements on the device of `other`: the spare, if unshared, or new.
    fn own_allocation(&mut self, other: &DeviceAllocation) -> Result<Arc<DeviceAllocation>> {
        match self.spare.take().filter(|own| Arc::strong_count(own) == 1) {
            Some(own) => Ok(own),
            None => Ok(Arc::new(DeviceAllocation::new(
                other.device(),
                self.bytes(),
            )?)),
        }
    }

    /// Memory of its own for overwriting the first `elements` elements.
    pub(crate) fn receive_target(&mut self, elements: usize) -> Result<&Arc<DeviceAllocation>> {
        match elements == self.elements {
            true => self.overwritable(),
            false => self.writable(),
        }
    }

    /// Overwrites the first `elements` elements with those of another buffer.
    fn receive(&mut self, source: &Buffer, elements: usize) -> Result<()> {
        assert_eq!(self.dtype, source.dtype, "a parcel of another element type");
        let from = source.memory()?;
        let bytes = elements * self.dtype.bytes();
        if !self.is_on_same_device(source)? || from.device().hops() == Hops::Pinned {
            return hop(from, self.receive_target(elements)?, bytes);
        }
        if is_replaced(self.bytes(), bytes, from.bytes()) {
            self.spare = None;
            return self.alias(Arc::clone(from));
        }
        // The sender's thread runs this: the receiver's delayed launches must not depend on it.
        self.writable_without_flush()?.copy_from(from, bytes)
    }

    /// Whether another buffer is on the same GPU.
    fn is_on_same_device(&self, source: &Buffer) -> Result<bool> {
        let (own, from) = (self.memory()?.device(), source.memory()?.device());
        Ok(Arc::ptr_eq(own, from))
    }

    /// Refers to `elements` elements of another buffer from `at` on without a copy, if possible.
    pub(crate) fn alias_part(
        &mut self,
        source: &Buffer,
        at: usize,
        elements: usize,
    ) -> Result<bool> {
        let from = source.memory()?;
        let [at, bytes] = [at, elements].map(|count| count * source.dtype.bytes());
        let possible = self.dtype == source.dtype
            && self.is_on_same_device(source)?
            && at.is_multiple_of(TENSOR_MAP_ALIGNMENT)
            && at + bytes <= from.bytes();
        if possible {
            let own = self.memory.take();
            let reusable = |own: &Arc<DeviceAllocation>| {
                let sole = Arc::strong_count(own) == 1;
                sole && own.is_writable() && own.owned_bytes() >= self.bytes()
            };
            self.spare = own.filter(reusable).or(self.spare.take());
            self.alias(Arc::new(from.slice(at, bytes)))?;
        }
        Ok(possible)
    }

    /// Refers to another buffer's memory with its present contents.
    fn alias(&mut self, memory: Arc<DeviceAllocation>) -> Result<()> {
        // Delayed launches that write the memory come first; later writes copy it.
        memory.device().flush(FlushReason::BeforeUse(&[&memory]))?;
        self.memory = Some(memory);
        Ok(())
    }

    /// The first `elements` elements, on the host.
    pub(crate) fn read(&self, elements: usize) -> Result<Data> {
        let mut data = Data::zeros(self.dtype, elements);
        self.memory()?.read(data.bytes_mut())?;
        Ok(data)
    }
}

/// Whether a message of `message` bytes in an allocation of `source` bytes can replace the memory
/// of a buffer of `buffer` bytes: it must fill the buffer, and the allocation must not be larger
/// than planned for the buffer.
fn is_replaced(buffer: usize, message: usize, source: usize) -> bool {
    message == buffer && source <= buffer
}

impl WireBuffer for Buffer {
    fn elements(&self) -> usize {
        self.elements
    }

    fn element_bytes(&self) -> usize {
        self.dtype.bytes()
    }

    /// Hands over the pointer where a parcel of this buffer's size is received on one GPU; copies
    /// otherwise.
    fn copy_from(&mut self, source: &Buffer, elements: usize) {
        // The port has no error: the ring catches the panic and reports it to the other ranks.
        self.receive(source, elements)
            .unwrap_or_else(|error| panic!("{error}"));
    }

    fn allocated_bytes(&self) -> usize {
        let both = [&self.memory, &self.spare].into_iter().flatten();
        both.map(|memory| memory.owned_bytes()).sum()
    }

    fn take(&mut self) -> Buffer {
        let empty = Buffer {
            memory: None,
            spare: None,
            dtype: self.dtype,
            elements: 0,
        };
        std::mem::replace(self, empty)
    }

    fn is_enqueued(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| memory.device().hops() == Hops::Pinned)
    }

    /// A hop through the host writes this buffer when its sender arrives. Delayed launches that
    /// read it are issued before, in the order of the receiver's own work.
    fn vacate(&mut self, round: usize) {
        if let Some(memory) = self.memory.as_ref().filter(|_| self.is_enqueued()) {
            let flushed = memory
                .device()
                .flush(FlushReason::BeforeReceive { memory, round });
            flushed.unwrap_or_else(|error| panic!("{error}"));
        }
    }

    fn checksum(&self, elements: usize) -> u64 {
        let data = self
            .read(elements)
            .unwrap_or_else(|error| panic!("{error}"));
        host::checksum(data.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_takes_no_larger_allocation_than_its_own() {
        assert!(is_replaced(64, 64, 64), "a parcel of the buffer's size");
        assert!(!is_replaced(64, 64, 96), "a part of a larger allocation");
        assert!(!is_replaced(64, 32, 64), "a message that does not fill it");
    }
}
