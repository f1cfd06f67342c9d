//! Typed memory of a GPU as a kernel's buffer and as a parcel.
//!
//! The decision here: a parcel that goes to another rank on the same GPU is handed over as a
//! pointer, unless the GPU was told otherwise ([`Hops`](crate::Hops)). Two buffers may therefore share
//! memory; whoever writes to a shared one gets memory of its own first, and so does whoever writes to
//! what a guest has lent for reading. Nothing that was sent can change under the receiver.

use std::sync::Arc;

use encke_core::host;
use encke_core::transport::WireBuffer;
use encke_core::{DType, Data};

use crate::device::{Device, Reason};
use crate::error::{Error, Result};
use crate::hops::{Hops, hop};
use crate::memory::{Loan, Memory};

/// Bytes that the beginning of memory is a multiple of, for tensor maps.
const ALIGNED: usize = 16;

/// Numbers on a GPU. What was handed over to it may have fewer numbers than there is room for, or more.
pub struct Buffer {
    memory: Option<Arc<Memory>>,
    /// Memory of its own, laid aside while it holds a part of another's.
    aside: Option<Arc<Memory>>,
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
            aside: None,
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
            aside: None,
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
            let own = self.room(&shared)?;
            own.copy_from(&shared, shared.bytes().min(self.bytes()))?;
            self.memory = Some(own);
        }
        self.memory()
    }

    /// Memory that is its own and may hold anything, for overwriting it whole.
    pub(crate) fn fresh(&mut self) -> Result<&Arc<Memory>> {
        self.release()?;
        let shared = Arc::clone(self.memory()?);
        if self.must_part(&shared) {
            self.memory = Some(self.room(&shared)?);
        }
        self.memory()
    }

    /// Memory for what it holds, beside other memory: what was laid aside, or new.
    fn room(&mut self, other: &Memory) -> Result<Arc<Memory>> {
        match self.aside.take().filter(|own| Arc::strong_count(own) == 1) {
            Some(own) => Ok(own),
            None => Ok(Arc::new(Memory::new(other.device(), self.bytes())?)),
        }
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
        if !self.is_beside(source)? || from.device().hops() == Hops::Pinned {
            return hop(from, self.target(elements)?, bytes);
        }
        if elements == self.elements {
            self.aside = None;
            return self.hold(Arc::clone(from));
        }
        // In the sender's time: what the receiver has put off must not depend on it.
        self.own_beside()?.copy_from(from, bytes)
    }

    /// Whether another buffer is on the same GPU.
    fn is_beside(&self, source: &Buffer) -> Result<bool> {
        let (own, from) = (self.memory()?.device(), source.memory()?.device());
        Ok(Arc::ptr_eq(own, from))
    }

    /// Holds `numbers` numbers of another buffer from `at` on, without a copy, if that can be.
    pub(crate) fn take_part(&mut self, source: &Buffer, at: usize, numbers: usize) -> Result<bool> {
        let from = source.memory()?;
        let [at, bytes] = [at, numbers].map(|of| of * source.dtype.bytes());
        let able = self.dtype == source.dtype
            && self.is_beside(source)?
            && at.is_multiple_of(ALIGNED)
            && at + bytes <= from.bytes();
        if able {
            let own = self.memory.take();
            let of_use = |own: &Arc<Memory>| {
                let sole = Arc::strong_count(own) == 1;
                sole && own.is_writable() && own.own_bytes() >= self.bytes()
            };
            self.aside = own.filter(of_use).or(self.aside.take());
            self.hold(Arc::new(from.part(at, bytes)))?;
        }
        Ok(able)
    }

    /// Holds memory of another buffer, as it is now.
    fn hold(&mut self, memory: Arc<Memory>) -> Result<()> {
        // What is asked for from now on, and changes the other, is not for this one.
        memory.device().catch_up(Reason::Used(&[&memory]))?;
        self.memory = Some(memory);
        Ok(())
    }

    /// The first `elements` numbers, on the host.
    pub(crate) fn read(&self, elements: usize) -> Result<Data> {
        let mut data = Data::zeros(self.dtype, elements);
        self.memory()?.read(data.bytes_mut())?;
        Ok(data)
    }
}

impl WireBuffer for Buffer {
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
        let both = [&self.memory, &self.aside].into_iter().flatten();
        both.map(|memory| memory.own_bytes()).sum()
    }

    fn take(&mut self) -> Buffer {
        let empty = Buffer {
            memory: None,
            aside: None,
            dtype: self.dtype,
            elements: 0,
        };
        std::mem::replace(self, empty)
    }

    fn is_enqueued(&self) -> bool {
        let memory = self.memory.as_ref();
        memory.is_some_and(|memory| memory.device().hops() == Hops::Pinned)
    }

    /// Through the host, parcels take their time, and are written when a sender comes: what reads
    /// this one waits no longer, in the order of the receiver's own work.
    fn vacate(&mut self, round: usize) {
        if let Some(memory) = self.memory.as_ref().filter(|_| self.is_enqueued()) {
            let told = memory.device().catch_up(Reason::Vacated { memory, round });
            told.unwrap_or_else(|error| panic!("{error}"));
        }
    }

    fn checksum(&self, elements: usize) -> u64 {
        let data = self
            .read(elements)
            .unwrap_or_else(|error| panic!("{error}"));
        host::checksum(data.bytes())
    }
}
