//! How a parcel gets from one rank to another of the same process.
//!
//! By default as a pointer: nothing is copied. Through page-locked memory of the host it goes as it
//! would between machines, which is also the way from one GPU to another. The decision here: such a
//! hop is cut into pieces that take turns in a few slots. While one piece is copied in, the next is
//! copied out, the memory needed does not depend on the parcel, and nobody waits on the host: a
//! piece whose slot is still in use waits for it on the GPU. Every sender has slots and streams of
//! its own, so that a hop into memory that is still read holds up no other.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use cudarc::driver::CudaStream;

use crate::device::Device;
use crate::error::Result;
use crate::host_memory::HostMemory;
use crate::memory::Memory;

/// How parcels go from rank to rank on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Hops {
    /// The receiver gets the sender's memory; whoever writes first gets memory of its own.
    #[default]
    Pointer,
    /// Through page-locked memory of the host, on streams of their own.
    Pinned,
}

/// Bytes of a slot: long enough that a copy runs at the speed of the link.
const PIECE: usize = 4 << 20;
/// How many slots a sender has at most: one is filled while another is emptied.
const SLOTS: usize = 2;
/// How many senders have slots of their own; more of them share.
const WAYS: usize = 8;

static SENDERS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Numbers the threads that send.
    static SENDER: usize = SENDERS.fetch_add(1, Ordering::Relaxed);
}

/// Slots that take turns.
pub(crate) struct Turns<T> {
    /// The one that was used longest ago is first.
    slots: VecDeque<T>,
    most: usize,
}

/// The slots of a sender, and the streams that fill and empty them.
pub(crate) struct Way {
    outward: Arc<CudaStream>,
    inward: Arc<CudaStream>,
    slots: Turns<HostMemory>,
}

impl Way {
    pub fn new(device: &Device) -> Result<Way> {
        Ok(Way {
            outward: device.stream()?,
            inward: device.stream()?,
            slots: Turns::new(SLOTS),
        })
    }

    pub fn streams(&self) -> [&Arc<CudaStream>; 2] {
        [&self.outward, &self.inward]
    }
}

impl<T> Turns<T> {
    fn new(most: usize) -> Turns<T> {
        Turns {
            slots: VecDeque::new(),
            most,
        }
    }

    /// The slot whose turn it is: the oldest if it is idle or there may be no more, else a new one.
    fn take(
        &mut self,
        idle: impl FnOnce(&T) -> bool,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<&mut T> {
        let full = self.slots.len() >= self.most;
        let slot = match self.slots.pop_front_if(|slot| full || idle(slot)) {
            Some(slot) => slot,
            None => make()?,
        };
        self.slots.push_back(slot);
        let last = self.slots.len() - 1;
        Ok(&mut self.slots[last])
    }
}

/// Enqueues the hop of `bytes` bytes; nothing waits but the GPU.
pub(crate) fn hop(from: &Memory, to: &Memory, bytes: usize) -> Result<()> {
    let way = from.device().way(SENDER.with(|own| own % WAYS))?;
    // Held for the whole hop, so that a slot is filled and emptied before its next turn is enqueued.
    let mut way = way.lock().unwrap_or_else(PoisonError::into_inner);
    let Way {
        outward,
        inward,
        slots,
    } = &mut *way;
    to.set_travelled();
    for at in (0..bytes).step_by(PIECE) {
        let piece = PIECE.min(bytes - at);
        let make = || HostMemory::new(from.device(), PIECE);
        let slot = slots.take(HostMemory::is_idle, make)?;
        slot.fetch(outward, from, at, piece)?;
        slot.bring(inward, to, at, piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// A slot: its number, and whether it is in use.
    type Slot = (usize, bool);

    fn take(turns: &mut Turns<Slot>, made: &mut usize) -> usize {
        let make = || {
            *made += 1;
            Ok((*made, false))
        };
        let slot = turns.take(|slot| !slot.1, make).unwrap();
        slot.1 = true;
        slot.0
    }

    #[test]
    fn slots_are_made_while_all_are_busy_and_then_take_turns() {
        let (mut turns, mut made) = (Turns::new(3), 0);
        let taken: Vec<usize> = (0..7).map(|_| take(&mut turns, &mut made)).collect();
        assert_eq!(taken, [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!((made, turns.slots.len()), (3, 3));
    }

    #[test]
    fn an_idle_slot_is_used_again_before_one_is_made() {
        let (mut turns, mut made) = (Turns::new(3), 0);
        for _ in 0..5 {
            assert_eq!(take(&mut turns, &mut made), 1);
            turns.slots[0].1 = false;
        }
        assert_eq!(made, 1);
    }

    #[test]
    fn a_slot_that_cannot_be_made_is_an_error_and_leaves_the_others() {
        let (mut turns, mut made) = (Turns::new(3), 0);
        take(&mut turns, &mut made);
        let refused = turns.take(|slot| !slot.1, || Err(Error::Memory { bytes: 8 }));
        assert_eq!(refused, Err(Error::Memory { bytes: 8 }));
        assert_eq!(turns.slots, [(1, true)]);
    }
}
