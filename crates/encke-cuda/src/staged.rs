//! A transport of host memory as a transport of a GPU's memory.
//!
//! Between processes that share no NCCL (MPI, torch.distributed), parcels are copied to pinned
//! memory, carried by the inner transport, and copied in. The copies are enqueued, and the round's
//! jobs behind them, so the GPU computes while this thread waits for the inner transport. Received
//! parcels are copied in asynchronously, in stream order; the next round therefore receives into a
//! second set of pinned memory, and no thread waits for the copies of the last round.

use std::sync::Arc;
use std::time::Duration;

use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError, WireBuffer};

use crate::buffer::Buffer;
use crate::device::{Device, FlushReason};
use crate::error::Result;
use crate::messages::local_error;
use crate::pinned::Pinned;

/// A transport of a GPU's buffers over a transport of pinned parcels.
pub struct Staged<T> {
    inner: T,
    device: Arc<Device>,
    rank: usize,
    deadline: Duration,
    sent: Vec<Pinned>,
    /// The receive buffers of this round, and of the last.
    received: [Vec<Pinned>; 2],
}

impl<T: Transport<Pinned>> Staged<T> {
    /// The transport of `rank` on a GPU. No exchange waits longer than `deadline` for the GPU; how
    /// long it waits for other ranks is up to the inner transport.
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

    /// The inner transport.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Bytes of pinned memory it holds.
    pub fn allocated_bytes(&self) -> usize {
        let received = self.received.iter().flatten();
        let all = self.sent.iter().chain(received);
        all.map(WireBuffer::allocated_bytes).sum()
    }

    /// Enqueues the copies of the parcels to send.
    fn copy_to_host(&mut self, outgoing: &[Outgoing<'_, Buffer>]) -> Result<()> {
        let parcels = outgoing.len().max(self.sent.len());
        self.sent.resize_with(parcels, Pinned::empty);
        for (message, parcel) in outgoing.iter().zip(&mut self.sent) {
            let (buffer, elements) = (message.parcel, message.to.elements);
            let width = buffer.element_bytes();
            parcel.reshape(&self.device, width, elements, self.deadline)?;
            parcel.copy_from_device(buffer.memory()?, elements)?;
        }
        Ok(())
    }

    /// Makes room for the parcels to receive.
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

    /// Waits until the parcels to send are in host memory.
    fn wait_until_on_host(&mut self, messages: usize) -> Result<()> {
        let mut parcels = self.sent.iter_mut().take(messages);
        parcels.try_for_each(|parcel| parcel.wait("parcels to leave the GPU", self.deadline))
    }

    /// Enqueues the copies of received parcels.
    fn copy_from_host(&mut self, incoming: &mut [Incoming<'_, Buffer>]) -> Result<()> {
        for (message, parcel) in incoming.iter_mut().zip(&mut self.received[0]) {
            let elements = message.from.elements;
            parcel.copy_to_device(message.parcel.receive_target(elements)?, elements)?;
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
        let failed = local_error(self.rank, round);
        self.copy_to_host(outgoing).map_err(&failed)?;
        meanwhile();
        let flushed = self.device.flush(FlushReason::BeforeWait);
        flushed.map_err(&failed)?;
        self.make_room(incoming).map_err(&failed)?;
        self.wait_until_on_host(outgoing.len()).map_err(&failed)?;
        let staged = outgoing.iter().zip(&self.sent);
        let sent: Vec<Outgoing<'_, Pinned>> = staged
            .map(|(message, parcel)| Outgoing {
                to: message.to,
                parcel,
            })
            .collect();
        let staged = incoming.iter().zip(&mut self.received[0]);
        let mut received: Vec<Incoming<'_, Pinned>> = staged
            .map(|(message, parcel)| Incoming {
                from: message.from,
                parcel,
            })
            .collect();
        let inner = &mut self.inner;
        let moved = inner.exchange(round, &sent, &mut received, &mut || {})?;
        self.copy_from_host(incoming).map_err(&failed)?;
        Ok(moved)
    }
}
