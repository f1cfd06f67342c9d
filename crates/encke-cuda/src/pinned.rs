//! Page-locked memory of the host as a parcel: what a wire that knows no GPUs carries for one.

use std::time::Duration;

use encke_core::host;
use encke_core::transport::{HostWireBuffer, WireBuffer};

use crate::device::Device;
use crate::error::Result;
use crate::host_memory::HostMemory;
use crate::memory::Memory;

/// Numbers in the host's memory that a GPU can reach by itself.
pub struct Pinned {
    memory: Option<HostMemory>,
    element_bytes: usize,
}

impl Pinned {
    /// One of no size at all.
    pub(crate) fn empty() -> Pinned {
        Pinned {
            memory: None,
            element_bytes: 1,
        }
    }

    /// `elements` zeros of `element_bytes` bytes each.
    pub fn new(device: &Device, element_bytes: usize, elements: usize) -> Result<Pinned> {
        Ok(Pinned {
            memory: Some(HostMemory::new(device, elements * element_bytes)?),
            element_bytes,
        })
    }

    /// Makes room for `elements` elements of `element_bytes` bytes; what it held is lost. Waits for
    /// copies of its earlier life.
    pub(crate) fn reshape(
        &mut self,
        device: &Device,
        element_bytes: usize,
        elements: usize,
        limit: Duration,
    ) -> Result<()> {
        if let Some(memory) = &mut self.memory {
            memory.settle("an earlier copy", limit)?;
        }
        if self.allocated_bytes() < element_bytes * elements {
            *self = Pinned::new(device, element_bytes, elements)?;
        }
        self.element_bytes = element_bytes;
        Ok(())
    }

    /// Enqueues a copy of the first `elements` numbers of a GPU's memory.
    pub(crate) fn fetch(&mut self, from: &Memory, elements: usize) -> Result<()> {
        let bytes = elements * self.element_bytes;
        let memory = self.memory.as_mut().filter(|_| bytes > 0);
        let stream = from.device().outward();
        memory.map_or(Ok(()), |memory| memory.fetch(stream, from, 0, bytes))
    }

    /// Enqueues a copy of the first `elements` numbers into a GPU's memory.
    pub(crate) fn bring(&mut self, to: &Memory, elements: usize) -> Result<()> {
        let bytes = elements * self.element_bytes;
        let memory = self.memory.as_mut().filter(|_| bytes > 0);
        let stream = to.device().inward();
        memory.map_or(Ok(()), |memory| memory.bring(stream, to, 0, bytes))
    }

    /// Waits until no copy is under way.
    pub(crate) fn settle(&mut self, what: &str, limit: Duration) -> Result<()> {
        let memory = self.memory.as_mut();
        memory.map_or(Ok(()), |memory| memory.settle(what, limit))
    }
}

impl WireBuffer for Pinned {
    fn elements(&self) -> usize {
        self.allocated_bytes() / self.element_bytes
    }

    fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    fn copy_from(&mut self, source: &Pinned, elements: usize) {
        let bytes = source.host_bytes(elements);
        self.host_bytes_mut(elements).copy_from_slice(bytes);
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, HostMemory::bytes)
    }

    fn take(&mut self) -> Pinned {
        std::mem::replace(self, Pinned::empty())
    }

    fn checksum(&self, elements: usize) -> u64 {
        host::checksum(self.host_bytes(elements))
    }
}

impl HostWireBuffer for Pinned {
    fn host_bytes(&self, elements: usize) -> &[u8] {
        let all = self.memory.as_ref().map_or(&[][..], HostMemory::shown);
        &all[..elements * self.element_bytes]
    }

    fn host_bytes_mut(&mut self, elements: usize) -> &mut [u8] {
        let bytes = elements * self.element_bytes;
        let all = self
            .memory
            .as_mut()
            .map_or(&mut [][..], HostMemory::shown_mut);
        &mut all[..bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parcel_without_memory_holds_nothing() {
        let mut parcel = Pinned::empty();
        assert_eq!((parcel.elements(), parcel.allocated_bytes()), (0, 0));
        assert!(parcel.host_bytes(0).is_empty() && parcel.host_bytes_mut(0).is_empty());
        parcel.copy_from(&Pinned::empty(), 0);
        assert_eq!(parcel.take().checksum(0), parcel.checksum(0));
    }
}
