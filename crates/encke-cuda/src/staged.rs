//! A wire for the host's memory as a wire for a GPU's.
//!
//! Between processes that have no NCCL in common (MPI, torch.distributed), parcels are copied to
//! page-locked memory, carried by the other wire, and copied in. The copies are enqueued and the
//! round's jobs after them, so that the GPU computes while this thread waits for the wire. What was
//! received is copied in behind the caller's back, in order; the next round's parcels therefore come
//! into another set of memory, and nothing waits for the copies of the last.

use std::sync::Arc;
use std::time::Duration;

use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError, WireBuffer};

use crate::buffer::Buffer;
use crate::device::{Device, Reason};
use crate::error::{Error, Result};
use crate::pinned::Pinned;

/// A transport of a GPU's buffers over one of page-locked parcels.
pub struct Staged<T> {
    inner: T,
    device: Arc<Device>,
    rank: usize,
    deadline: Duration,
    sent: Vec<Pinned>,
    /// What this round receives into, and what the last one did.
    received: [Vec<Pinned>; 2],
}

impl<T: Transport<Pinned>> Staged<T> {
    /// The wire of `rank` on a GPU. No exchange waits longer than `deadline` for the GPU; how long
    /// it waits for other ranks is up to the wire below.
    pub fn new(inner: T, device: &Arc<Device>, rank: usize, deadline: Duration) -> Staged<T> {
        Staged {
            inner,
            device: Arc::clone(device),
            rank,
            deadline,
            sent: Vec::new(),
            received: [Vec::new(), Vec::new()],
        }
    }

    /// The wire below.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Bytes of page-locked memory it holds on to.
    pub fn allocated_bytes(&self) -> usize {
        let received = self.received.iter().flatten();
        self.sent
            .iter()
            .chain(received)
            .map(WireBuffer::allocated_bytes)
            .sum()
    }

    /// Enqueues the copies of what is sent.
    fn fetch(&mut self, outgoing: &[Outgoing<'_, Buffer>]) -> Result<()> {
        self.sent
            .resize_with(outgoing.len().max(self.sent.len()), Pinned::empty);
        for (message, parcel) in outgoing.iter().zip(&mut self.sent) {
            let (buffer, elements) = (message.parcel, message.to.elements);
            let width = buffer.element_bytes();
            parcel.reshape(&self.device, width, elements, self.deadline)?;
            parcel.fetch(buffer.memory()?, elements)?;
        }
        Ok(())
    }

    /// Makes room for what is received.
    fn make_room(&mut self, incoming: &[Incoming<'_, Buffer>]) -> Result<()> {
        self.received.swap(0, 1);
        let parcels = &mut self.received[0];
        parcels.resize_with(incoming.len().max(parcels.len()), Pinned::empty);
        for (message, parcel) in incoming.iter().zip(parcels) {
            let width = message.parcel.element_bytes();
            parcel.reshape(&self.device, width, message.from.elements, self.deadline)?;
        }
        Ok(())
    }

    /// Waits until what is sent lies on the host.
    fn settle(&mut self, messages: usize) -> Result<()> {
        let mut parcels = self.sent.iter_mut().take(messages);
        parcels.try_for_each(|parcel| parcel.settle("parcels to leave the GPU", self.deadline))
    }

    /// Enqueues the copies of what was received.
    fn bring(&mut self, incoming: &mut [Incoming<'_, Buffer>]) -> Result<()> {
        for (message, parcel) in incoming.iter_mut().zip(&mut self.received[0]) {
            let elements = message.from.elements;
            parcel.bring(message.parcel.target(elements)?, elements)?;
        }
        Ok(())
    }
}

impl<T: Transport<Pinned>> Transport<Buffer> for Staged<T> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> std::result::Result<Moved, TransportError> {
        let rank = self.rank;
        let failed = |error: Error| TransportError::Local {
            rank,
            round,
            reason: error.to_string(),
        };
        self.fetch(outgoing).map_err(failed)?;
        meanwhile();
        self.device.catch_up(Reason::Leaving).map_err(failed)?;
        self.make_room(incoming).map_err(failed)?;
        self.settle(outgoing.len()).map_err(failed)?;
        let sent: Vec<Outgoing<'_, Pinned>> = outgoing
            .iter()
            .zip(&self.sent)
            .map(|(message, parcel)| Outgoing {
                to: message.to,
                parcel,
            })
            .collect();
        let mut received: Vec<Incoming<'_, Pinned>> = incoming
            .iter()
            .zip(&mut self.received[0])
            .map(|(message, parcel)| Incoming {
                from: message.from,
                parcel,
            })
            .collect();
        let moved = self
            .inner
            .exchange(round, &sent, &mut received, &mut || {})?;
        self.bring(incoming).map_err(failed)?;
        Ok(moved)
    }
}
