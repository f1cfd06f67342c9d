//! Pinned host memory as a parcel: what a transport without GPU support carries for a GPU.

use std::time::Duration;

use encke_core::host;
use encke_core::transport::{HostWireBuffer, WireBuffer};

use crate::allocation::DeviceAllocation;
use crate::device::Device;
use crate::error::Result;
use crate::host_copies::{copy_from_host, copy_to_host};
use crate::host_memory::HostMemory;

/// Elements in pinned host memory, which GPUs copy asynchronously.
pub struct Pinned {
    memory: Option<HostMemory>,
    element_bytes: usize,
}

impl Pinned {
    /// A parcel without memory.
    pub(crate) fn empty() -> Pinned {
        Pinned {
            memory: None,
            element_bytes: 1,
        }
    }

    /// `elements` zeros of `element_bytes` bytes each.
    pub fn new(device: &Device, element_bytes: usize, elements: usize) -> Result<Pinned> {
        Ok(Pinned {
            memory: Some(HostMemory::new(device.context(), elements * element_bytes)?),
            element_bytes,
        })
    }

    /// Makes room for `elements` elements of `element_bytes` bytes; the contents are lost. Waits
    /// for earlier copies.
    pub(crate) fn reshape(
        &mut self,
        device: &Device,
        element_bytes: usize,
        elements: usize,
        limit: Duration,
    ) -> Result<()> {
        if let Some(memory) = &mut self.memory {
            memory.wait("an earlier copy", limit)?;
        }
        if self.allocated_bytes() < element_bytes * elements {
            *self = Pinned::new(device, element_bytes, elements)?;
        }
        self.element_bytes = element_bytes;
        Ok(())
    }

    /// Enqueues the copy of the first `elements` elements of a GPU's memory.
    pub(crate) fn copy_from_device(
        &mut self,
        from: &DeviceAllocation,
        elements: usize,
    ) -> Result<()> {
        let bytes = elements * self.element_bytes;
        let memory = self.memory.as_mut().filter(|_| bytes > 0);
        let stream = from.device().device_to_host();
        memory.map_or(Ok(()), |host| copy_to_host(host, stream, from, 0, bytes))
    }

    /// Enqueues the copy of the first `elements` elements into a GPU's memory.
    pub(crate) fn copy_to_device(&mut self, to: &DeviceAllocation, elements: usize) -> Result<()> {
        let bytes = elements * self.element_bytes;
        let memory = self.memory.as_mut().filter(|_| bytes > 0);
        let stream = to.device().host_to_device();
        memory.map_or(Ok(()), |host| copy_from_host(host, stream, to, 0, bytes))
    }

    /// Waits until no copy is running.
    pub(crate) fn wait(&mut self, what: &str, limit: Duration) -> Result<()> {
        let memory = self.memory.as_mut();
        memory.map_or(Ok(()), |memory| memory.wait(what, limit))
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
        let all = self.memory.as_ref().map_or(&[][..], HostMemory::as_bytes);
        &all[..elements * self.element_bytes]
    }

    fn host_bytes_mut(&mut self, elements: usize) -> &mut [u8] {
        let bytes = elements * self.element_bytes;
        let all = self
            .memory
            .as_mut()
            .map_or(&mut [][..], HostMemory::bytes_mut);
        &mut all[..bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parcel_without_memory_has_no_elements() {
        let mut parcel = Pinned::empty();
        assert_eq!((parcel.elements(), parcel.allocated_bytes()), (0, 0));
        assert!(parcel.host_bytes(0).is_empty() && parcel.host_bytes_mut(0).is_empty());
        parcel.copy_from(&Pinned::empty(), 0);
        assert_eq!(parcel.take().checksum(0), parcel.checksum(0));
    }
}
