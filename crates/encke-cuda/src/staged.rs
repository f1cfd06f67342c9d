//! A transport of host memory as a transport of a GPU's memory.
//!
//! Between processes that share no NCCL (MPI, torch.distributed), parcels take one of two routes.
//! Through the host they are copied to pinned memory, carried by the inner transport, and copied
//! in. To a process that can read this GPU's memory they are copied on the GPU, and the inner
//! transport carries a ticket (`shared_memory.rs`). In both cases copies are enqueued, and the
//! round's jobs behind them, so the GPU computes while this thread waits for the inner transport.
//! Parcels received through the host are copied in asynchronously, in stream order; the next round
//! therefore receives into a second set of pinned memory, and no thread waits for the copies of the
//! last round.

use std::borrow::BorrowMut;
use std::sync::Arc;
use std::time::Duration;

use encke_core::agreement::{Agreement, RankProgress};
use encke_core::transport::{
    Address, HostWireBuffer, Incoming, Moved, Outgoing, Survivors, Transport, TransportError,
    WireBuffer,
};

use crate::buffer::Buffer;
use crate::device::{Device, FlushReason};
use crate::error::Result;
use crate::host_memory::wait;
use crate::messages::local_error;
use crate::pinned::Pinned;
use crate::shared_memory::{SharedSlots, SlotIndex, TICKET};

/// A transport of a GPU's buffers over a transport of pinned parcels. It owns both, or borrows them
/// ([`StagedParcels::over`]).
pub struct Staged<T, P = StagedParcels> {
    inner: T,
    parcels: P,
}

impl<T: Transport<Pinned>> Staged<T> {
    /// The transport of `rank` on a GPU. No exchange waits longer than `deadline` for the GPU; how
    /// long it waits for other ranks is up to the inner transport.
    pub fn new(inner: T, device: &Arc<Device>, rank: usize, deadline: Duration) -> Staged<T> {
        let parcels = StagedParcels::new(device, rank, deadline);
        Staged { inner, parcels }
    }

    /// The inner transport.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Bytes of pinned memory it holds.
    pub fn allocated_bytes(&self) -> usize {
        self.parcels.pinned_bytes()
    }
}

impl<T: Transport<Pinned>, P: BorrowMut<StagedParcels>> Transport<Buffer> for Staged<T, P> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> std::result::Result<Moved, TransportError> {
        let (inner, parcels) = (&mut self.inner, self.parcels.borrow_mut());
        parcels.exchange(inner, round, outgoing, incoming, meanwhile)
    }
}

impl<T: Survivors<Pinned>, P: BorrowMut<StagedParcels>> Survivors<Buffer> for Staged<T, P> {
    fn agree(&mut self, progress: RankProgress) -> std::result::Result<Agreement, TransportError> {
        self.inner.agree(progress)
    }

    fn give_up(&mut self, reason: &str) {
        self.inner.give_up(reason);
    }
}

/// The memory through which a rank's parcels go. It outlives exchanges, and may outlive the inner
/// transport: [`StagedParcels::over`] borrows one.
pub struct StagedParcels {
    device: Arc<Device>,
    rank: usize,
    deadline: Duration,
    sent: Vec<Pinned>,
    /// The receive buffers of this round, and of the last.
    received: [Vec<Pinned>; 2],
    /// Ranks that can read this GPU's memory and whose memory it can read.
    sharing: Vec<usize>,
    slots: Option<SharedSlots>,
}

impl StagedParcels {
    /// The parcels of `rank` on a GPU, all of them through the host.
    pub fn new(device: &Arc<Device>, rank: usize, deadline: Duration) -> StagedParcels {
        StagedParcels {
            device: Arc::clone(device),
            rank,
            deadline,
            sent: Vec::new(),
            received: [Vec::new(), Vec::new()],
            sharing: Vec::new(),
            slots: None,
        }
    }

    /// Exchanges parcels with these ranks on the GPU. Each of them must do the same with this one,
    /// and a [`SharedMemoryProbe`](crate::SharedMemoryProbe) of each must be readable by the other.
    pub fn share_with(&mut self, ranks: Vec<usize>) -> Result<()> {
        if self.slots.is_none() && !ranks.is_empty() {
            self.slots = Some(SharedSlots::new(&self.device)?);
        }
        self.sharing = ranks;
        Ok(())
    }

    /// As a transport over `inner`.
    pub fn over<T: Transport<Pinned>>(&mut self, inner: T) -> Staged<T, &mut StagedParcels> {
        Staged {
            inner,
            parcels: self,
        }
    }

    /// Bytes of pinned memory it holds.
    pub fn pinned_bytes(&self) -> usize {
        let received = self.received.iter().flatten();
        let all = self.sent.iter().chain(received);
        all.map(WireBuffer::allocated_bytes).sum()
    }

    /// Closes the memory of other processes. Afterwards parcels go through the host.
    pub fn close_shared(&mut self) -> ClosedSlots {
        self.sharing.clear();
        let mut slots = self.slots.take();
        slots.iter_mut().for_each(SharedSlots::close);
        ClosedSlots(slots)
    }

    /// Enqueues the copies of the parcels to send; returns the slot of each that goes through one.
    fn copy_out(&mut self, outgoing: &[Outgoing<'_, Buffer>]) -> Result<Vec<Option<SlotIndex>>> {
        let parcels = outgoing.len().max(self.sent.len());
        self.sent.resize_with(parcels, Pinned::empty);
        let copy_out = |(message, parcel): (&Outgoing<'_, Buffer>, &mut Pinned)| {
            let (buffer, elements) = (message.parcel, message.to.elements);
            let width = buffer.element_bytes();
            let shared = self.sharing.contains(&message.to.peer);
            match self.slots.as_mut().filter(|_| shared) {
                Some(slots) => {
                    parcel.reshape(&self.device, 1, TICKET, self.deadline)?;
                    slots.fill(buffer.memory()?, elements * width).map(Some)
                }
                None => {
                    parcel.reshape(&self.device, width, elements, self.deadline)?;
                    parcel.copy_from_device(buffer.memory()?, elements)?;
                    Ok(None)
                }
            }
        };
        outgoing.iter().zip(&mut self.sent).map(copy_out).collect()
    }

    /// Makes room for the parcels, or tickets, to receive.
    fn make_room(&mut self, incoming: &[Incoming<'_, Buffer>]) -> Result<()> {
        self.received.swap(0, 1);
        let shared: Vec<bool> = incoming
            .iter()
            .map(|message| self.sharing.contains(&message.from.peer))
            .collect();
        let parcels = &mut self.received[0];
        parcels.resize_with(incoming.len().max(parcels.len()), Pinned::empty);
        for ((message, parcel), shared) in incoming.iter().zip(parcels).zip(shared) {
            let (width, elements) = match shared {
                true => (1, TICKET),
                false => (message.parcel.element_bytes(), message.from.elements),
            };
            parcel.reshape(&self.device, width, elements, self.deadline)?;
        }
        Ok(())
    }

    /// Waits until the parcels to send are in host memory or in their slots.
    fn wait_until_out(&mut self, slots: &[Option<SlotIndex>]) -> Result<()> {
        for (parcel, slot) in self.sent.iter_mut().zip(slots) {
            match (slot, &mut self.slots) {
                (Some(slot), Some(shared)) => {
                    let ticket = shared.ticket(*slot, self.deadline)?;
                    parcel.host_bytes_mut(TICKET).copy_from_slice(&ticket);
                }
                _ => parcel.wait("parcels to leave the GPU", self.deadline)?,
            }
        }
        Ok(())
    }

    /// Enqueues the copies of received parcels, and waits for those from slots: a slot may be
    /// filled again, or lost with its process, when the exchange is over.
    fn copy_in(&mut self, incoming: &mut [Incoming<'_, Buffer>]) -> Result<()> {
        let mut copies = Vec::new();
        for (message, parcel) in incoming.iter_mut().zip(&mut self.received[0]) {
            let elements = message.from.elements;
            let width = message.parcel.element_bytes();
            let target = message.parcel.receive_target(elements)?;
            let shared = self.sharing.contains(&message.from.peer);
            match self.slots.as_mut().filter(|_| shared) {
                Some(slots) => {
                    let ticket = parcel.host_bytes(TICKET);
                    copies.push(slots.empty(ticket, target, elements * width)?);
                }
                None => parcel.copy_to_device(target, elements)?,
            }
        }
        let waits = copies.iter();
        let mut waits = waits.map(|copy| wait(copy, "parcels of other processes", self.deadline));
        waits.try_for_each(|waited| waited)
    }

    fn exchange<T: Transport<Pinned>>(
        &mut self,
        inner: &mut T,
        round: usize,
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> std::result::Result<Moved, TransportError> {
        let failed = local_error(self.rank, round);
        let slots = self.copy_out(outgoing).map_err(&failed)?;
        meanwhile();
        let flushed = self.device.flush(FlushReason::BeforeWait);
        flushed.map_err(&failed)?;
        self.make_room(incoming).map_err(&failed)?;
        self.wait_until_out(&slots).map_err(&failed)?;
        let ticket_or = |address: Address, shared: bool| match shared {
            true => Address {
                elements: TICKET,
                ..address
            },
            false => address,
        };
        let staged = outgoing.iter().zip(&slots).zip(&self.sent);
        let sent: Vec<Outgoing<'_, Pinned>> = staged
            .map(|((message, slot), parcel)| Outgoing {
                to: ticket_or(message.to, slot.is_some()),
                parcel,
            })
            .collect();
        let sharing = &self.sharing;
        let staged = incoming.iter().zip(&mut self.received[0]);
        let mut received: Vec<Incoming<'_, Pinned>> = staged
            .map(|(message, parcel)| Incoming {
                from: ticket_or(message.from, sharing.contains(&message.from.peer)),
                parcel,
            })
            .collect();
        inner.exchange(round, &sent, &mut received, &mut || {})?;
        self.copy_in(incoming).map_err(&failed)?;
        let bytes = |address: Address, parcel: &Buffer| address.elements * parcel.element_bytes();
        Ok(Moved {
            sent_bytes: outgoing.iter().map(|x| bytes(x.to, x.parcel)).sum(),
            received_bytes: incoming.iter().map(|x| bytes(x.from, x.parcel)).sum(),
        })
    }
}

/// Shared memory that this process has stopped using.
#[must_use = "free it when all processes have closed theirs"]
pub struct ClosedSlots(Option<SharedSlots>);

impl ClosedSlots {
    /// Frees it. Every other process must have closed its own before.
    pub fn free(self) {
        self.0.into_iter().for_each(SharedSlots::free);
    }
}
