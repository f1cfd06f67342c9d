//! Typed memory of a GPU as a kernel's buffer and as a parcel.
//!
//! The decision here: a parcel that goes to another rank on the same GPU is handed over as a
//! pointer, unless the GPU was told otherwise ([`Hops`](crate::Hops)). Two buffers may therefore share
//! memory; whoever writes to a shared one gets memory of its own first, and so does whoever writes to
//! what a guest has lent for reading. Nothing that was sent can change under the receiver.

use std::sync::Arc;

use encke_core::host;
use encke_core::transport::Parcel;
use encke_core::{DType, Data};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::hops::{Hops, hop};
use crate::memory::{Loan, Memory};

/// Numbers on a GPU.
pub struct Buffer {
    memory: Option<Arc<Memory>>,
    dtype: DType,
    elements: usize,
}

impl Buffer {
    /// `elements` numbers that hold anything.
    pub(crate) fn new(device: &Arc<Device>, dtype: DType, elements: usize) -> Result<Buffer> {
        let overflow = Error::Memory { bytes: usize::MAX };
        let bytes = elements.checked_mul(dtype.bytes()).ok_or(overflow)?;
        Ok(Buffer {
            memory: Some(Arc::new(Memory::new(device, bytes)?)),
            dtype,
            elements,
        })
    }

    /// Numbers that somebody else has allocated, and will free.
    pub(crate) fn foreign(
        device: &Arc<Device>,
        dtype: DType,
        pointer: u64,
        elements: usize,
        loan: Loan,
    ) -> Buffer {
        let bytes = elements * dtype.bytes();
        Buffer {
            memory: Some(Arc::new(Memory::foreign(device, pointer, bytes, loan))),
            dtype,
            elements,
        }
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory it reads from.
    pub(crate) fn memory(&self) -> Result<&Arc<Memory>> {
        let memory = self.memory.as_ref().ok_or_else(|| Error::Unsupported {
            what: "a buffer that was taken away".into(),
        })?;
        match memory.is_usable() {
            true => Ok(memory),
            false => Err(Error::Unsupported {
                what: "memory that was lent for a call that has ended".into(),
            }),
        }
    }

    /// Whether writing has to go elsewhere: another buffer has the memory of this one too, which is
    /// held once more by whoever asks, or its owner lets it be read only.
    fn must_part(shared: &Arc<Memory>) -> bool {
        Arc::strong_count(shared) > 2 || !shared.is_writable()
    }

    /// Memory that is its own and holds what it held, for writing.
    pub(crate) fn own(&mut self) -> Result<&Arc<Memory>> {
        let shared = Arc::clone(self.memory()?);
        if Buffer::must_part(&shared) {
            let own = Memory::new(shared.device(), shared.bytes())?;
            own.copy_from(&shared, shared.bytes())?;
            self.memory = Some(Arc::new(own));
        }
        self.memory()
    }

    /// Memory that is its own and may hold anything, for overwriting it whole.
    pub(crate) fn fresh(&mut self) -> Result<&Arc<Memory>> {
        let shared = Arc::clone(self.memory()?);
        if Buffer::must_part(&shared) {
            self.memory = Some(Arc::new(Memory::new(shared.device(), shared.bytes())?));
        }
        self.memory()
    }

    /// Memory that is its own, for overwriting the first `elements` numbers.
    pub(crate) fn target(&mut self, elements: usize) -> Result<&Arc<Memory>> {
        match elements == self.elements {
            true => self.fresh(),
            false => self.own(),
        }
    }

    /// Overwrites the first `elements` numbers with those of another buffer.
    fn receive(&mut self, source: &Buffer, elements: usize) -> Result<()> {
        assert_eq!(self.dtype, source.dtype, "a parcel of another type");
        let from = source.memory()?;
        let bytes = elements * self.dtype.bytes();
        let alone = Arc::ptr_eq(from.device(), self.memory()?.device());
        if !alone || from.device().hops() == Hops::Pinned {
            return hop(from, self.target(elements)?, bytes);
        }
        if elements == self.elements && elements == source.elements {
            *self = source.share();
            return Ok(());
        }
        self.own()?.copy_from(from, bytes)
    }

    /// The first `elements` numbers, on the host.
    pub(crate) fn read(&self, elements: usize) -> Result<Data> {
        let mut data = Data::zeros(self.dtype, elements);
        self.memory()?.read(data.bytes_mut())?;
        Ok(data)
    }

    /// The same memory for another reader.
    pub(crate) fn share(&self) -> Buffer {
        Buffer {
            memory: self.memory.clone(),
            ..*self
        }
    }
}

impl Parcel for Buffer {
    fn elements(&self) -> usize {
        self.elements
    }

    fn element_bytes(&self) -> usize {
        self.dtype.bytes()
    }

    /// Hands over the pointer where the whole buffer is sent on one GPU, and copies otherwise.
    fn copy_from(&mut self, source: &Buffer, elements: usize) {
        // A port that cannot fail: the ring catches the panic and tells the other ranks.
        self.receive(source, elements)
            .unwrap_or_else(|error| panic!("{error}"));
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.own_bytes())
    }

    fn take(&mut self) -> Buffer {
        let empty = Buffer {
            memory: None,
            dtype: self.dtype,
            elements: 0,
        };
        std::mem::replace(self, empty)
    }

    fn checksum(&self, elements: usize) -> u64 {
        let data = self
            .read(elements)
            .unwrap_or_else(|error| panic!("{error}"));
        host::checksum(data.bytes())
    }
}
