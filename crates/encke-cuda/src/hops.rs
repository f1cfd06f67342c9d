//! How a parcel gets from one rank to another of the same process, and the staging buffers for it.
//!
//! By default a parcel is handed over as a pointer and nothing is copied. Through pinned host
//! memory it moves as between machines, which is also the only path from one GPU to another. The
//! decision here: such a hop is cut into chunks that rotate through a few staging slots. While one
//! chunk is copied in, the next is copied out; the memory needed does not depend on the parcel; and
//! no host thread waits, because a chunk whose slot is in use waits for it on the GPU. Every sender
//! has slots and streams of its own, so a hop into memory that is still being read delays no other
//! hop.
//!
//! The copies themselves are in `host_copies.rs`.

use std::collections::VecDeque;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::error::Result;
use crate::host_memory::HostMemory;

/// How parcels go from rank to rank on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Hops {
    /// The receiver shares the sender's memory; the first of them that writes gets a copy.
    #[default]
    Pointer,
    /// Through pinned host memory, on streams of their own.
    Pinned,
}

/// Slots of a lane: one is filled while the other is emptied.
const SLOTS: usize = 2;

/// Slots used in rotation.
pub(crate) struct RoundRobin<T> {
    /// Least recently used first.
    slots: VecDeque<T>,
    capacity: usize,
}

/// The staging slots of a sender, and the streams that fill and empty them.
pub(crate) struct StagingLane {
    pub device_to_host: Arc<CudaStream>,
    pub host_to_device: Arc<CudaStream>,
    pub slots: RoundRobin<HostMemory>,
}

impl StagingLane {
    /// A lane without slots.
    pub fn new(device_to_host: Arc<CudaStream>, host_to_device: Arc<CudaStream>) -> StagingLane {
        StagingLane {
            device_to_host,
            host_to_device,
            slots: RoundRobin::new(SLOTS),
        }
    }

    /// Both streams.
    pub fn streams(&self) -> [&Arc<CudaStream>; 2] {
        [&self.device_to_host, &self.host_to_device]
    }
}

impl<T> RoundRobin<T> {
    fn new(capacity: usize) -> RoundRobin<T> {
        RoundRobin {
            slots: VecDeque::new(),
            capacity,
        }
    }

    /// The next slot: the oldest if it is idle or all slots exist, else a new one.
    pub fn next(
        &mut self,
        idle: impl FnOnce(&T) -> bool,
        create: impl FnOnce() -> Result<T>,
    ) -> Result<&mut T> {
        let full = self.slots.len() >= self.capacity;
        let slot = match self.slots.pop_front_if(|slot| full || idle(slot)) {
            Some(slot) => slot,
            None => create()?,
        };
        self.slots.push_back(slot);
        let last = self.slots.len() - 1;
        Ok(&mut self.slots[last])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// A slot: its number, and whether it is in use.
    type NumberedSlot = (usize, bool);

    fn next(slots: &mut RoundRobin<NumberedSlot>, created: &mut usize) -> usize {
        let create = || {
            *created += 1;
            Ok((*created, false))
        };
        let slot = slots.next(|slot| !slot.1, create).unwrap();
        slot.1 = true;
        slot.0
    }

    #[test]
    fn slots_are_created_while_all_are_busy_and_then_rotate() {
        let (mut slots, mut created) = (RoundRobin::new(3), 0);
        let used: Vec<usize> = (0..7).map(|_| next(&mut slots, &mut created)).collect();
        assert_eq!(used, [1, 2, 3, 1, 2, 3, 1]);
        assert_eq!((created, slots.slots.len()), (3, 3));
    }

    #[test]
    fn an_idle_slot_is_reused_before_one_is_created() {
        let (mut slots, mut created) = (RoundRobin::new(3), 0);
        for _ in 0..5 {
            assert_eq!(next(&mut slots, &mut created), 1);
            slots.slots[0].1 = false;
        }
        assert_eq!(created, 1);
    }

    #[test]
    fn a_slot_that_cannot_be_created_is_an_error_and_leaves_the_others() {
        let (mut slots, mut created) = (RoundRobin::new(3), 0);
        next(&mut slots, &mut created);
        let refused = slots.next(|slot| !slot.1, || Err(Error::Memory { bytes: 8 }));
        assert_eq!(refused, Err(Error::Memory { bytes: 8 }));
        assert_eq!(slots.slots, [(1, true)]);
    }
}
