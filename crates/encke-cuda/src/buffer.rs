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

use crate::device::{Device, Reason};
use crate::error::{Error, Result};
use crate::hops::{Hops, hop};
use crate::memory::{Loan, Memory};

/// Numbers on a GPU. What was handed over to it may have fewer numbers than there is room for, or more.
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

    /// How much it has room for.
    fn bytes(&self) -> usize {
        self.elements * self.dtype.bytes()
    }

    /// Whether writing has to go elsewhere: another buffer has the memory of this one too, which is
    /// held once more by whoever asks, its owner lets it be read only, or it was handed over and is
    /// too small.
    fn must_part(&self, shared: &Arc<Memory>) -> bool {
        let others = Arc::strong_count(shared) > 2;
        others || !shared.is_writable() || shared.bytes() < self.bytes()
    }

    /// Work that was put off holds the memory of this buffer as well: it is put off no longer.
    fn release(&self) -> Result<()> {
        let memory = self.memory()?;
        memory.device().catch_up(Reason::Written(memory))
    }

    /// Memory that is its own and holds what it held, for writing.
    pub(crate) fn own(&mut self) -> Result<&Arc<Memory>> {
        self.release()?;
        self.own_beside()
    }

    /// The same where what was put off goes on waiting: it keeps the memory it reads.
    fn own_beside(&mut self) -> Result<&Arc<Memory>> {
        let shared = Arc::clone(self.memory()?);
        if self.must_part(&shared) {
            let own = Memory::new(shared.device(), self.bytes())?;
            own.copy_from(&shared, shared.bytes().min(self.bytes()))?;
            self.memory = Some(Arc::new(own));
        }
        self.memory()
    }

    /// Memory that is its own and may hold anything, for overwriting it whole.
    pub(crate) fn fresh(&mut self) -> Result<&Arc<Memory>> {
        self.release()?;
        let shared = Arc::clone(self.memory()?);
        if self.must_part(&shared) {
            self.memory = Some(Arc::new(Memory::new(shared.device(), self.bytes())?));
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
        if !self.shares_with(source)? {
            return hop(from, self.target(elements)?, bytes);
        }
        if elements == self.elements {
            self.take_share(source)?;
            return Ok(());
        }
        // In the sender's time: what the receiver has put off must not depend on it.
        self.own_beside()?.copy_from(from, bytes)
    }

    /// Whether what another buffer holds can be handed over to this one as a pointer.
    fn shares_with(&self, source: &Buffer) -> Result<bool> {
        let (own, from) = (self.memory()?.device(), source.memory()?.device());
        Ok(Arc::ptr_eq(own, from) && from.hops() == Hops::Pointer)
    }

    /// Holds what another buffer holds, without a copy, if parcels are pointers.
    pub(crate) fn take_share(&mut self, source: &Buffer) -> Result<bool> {
        let able = self.shares_with(source)?;
        if able {
            let from = source.memory()?;
            // What is asked for from now on, and changes the other, is not for this one.
            from.device().catch_up(Reason::Used(&[from]))?;
            self.memory = Some(Arc::clone(from));
        }
        Ok(able)
    }

    /// The first `elements` numbers, on the host.
    pub(crate) fn read(&self, elements: usize) -> Result<Data> {
        let mut data = Data::zeros(self.dtype, elements);
        self.memory()?.read(data.bytes_mut())?;
        Ok(data)
    }
}

impl Parcel for Buffer {
    fn elements(&self) -> usize {
        self.elements
    }

    fn element_bytes(&self) -> usize {
        self.dtype.bytes()
    }

    /// Hands over the pointer where all of this buffer is received on one GPU, and copies otherwise.
    fn copy_from(&mut self, source: &Buffer, elements: usize) {
        // A port that cannot fail: the ring catches the panic and tells the other ranks.
        self.receive(source, elements)
            .unwrap_or_else(|error| panic!("{error}"));
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.own_bytes())
    }

    fn take(&mut self) -> Buffer {
        // Through the host, parcels take their time, and are written when a sender comes: what was
        // asked for waits no longer, in the order of the receiver's own work.
        let told = match self.memory() {
            Ok(memory) if memory.device().hops() == Hops::Pinned => {
                memory.device().catch_up(Reason::Leaving)
            }
            _ => Ok(()),
        };
        told.unwrap_or_else(|error| panic!("{error}"));
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
