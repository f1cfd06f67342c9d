//! Where a rank's buffers stand between tasks, and who holds them meanwhile.
//!
//! Nothing here knows what a buffer is for. A buffer that is written is taken off the shelf, so that
//! what is read and what is written can never be the same memory: a gap where a buffer should be is
//! a mistake of the program, and is said at once.

use encke_core::dtype::Slice;
use encke_core::kernel::Carry;
use encke_core::plan::program::{BufferId, CarryIds, Task};

/// Buffers by number; a gap is a buffer that somebody holds exclusively, or that was lent.
#[derive(Debug)]
pub(crate) struct BufferTable<B> {
    pub(crate) buffers: Vec<Option<B>>,
}

impl<B> BufferTable<B> {
    pub(crate) fn get(&self, id: BufferId) -> &B {
        self.buffers[id.0]
            .as_ref()
            .expect("a program never reads what is being written")
    }

    pub(crate) fn take(&mut self, id: BufferId) -> B {
        self.buffers[id.0]
            .take()
            .expect("a program never writes what is being read or written")
    }

    pub(crate) fn put(&mut self, id: BufferId, buffer: B) {
        self.buffers[id.0] = Some(buffer);
    }
}

/// Buffers taken from the shelf to be written.
pub(crate) struct CheckedOut<B> {
    buffers: Vec<(BufferId, Option<B>)>,
}

impl<B> CheckedOut<B> {
    /// Takes every buffer that one of `tasks` needs for itself.
    pub(crate) fn take(shelf: &mut BufferTable<B>, tasks: &[Task]) -> CheckedOut<B> {
        let mut ids: Vec<BufferId> = tasks.iter().flat_map(Task::holds).collect();
        ids.sort_unstable();
        ids.dedup();
        let buffers = ids.into_iter().map(|id| (id, Some(shelf.take(id))));
        CheckedOut {
            buffers: buffers.collect(),
        }
    }

    pub(crate) fn give_back(self, shelf: &mut BufferTable<B>) {
        for (id, buffer) in self.buffers {
            shelf.put(id, buffer.expect("a task gives back what it wrote"));
        }
    }

    pub(crate) fn slot(&mut self, id: BufferId) -> &mut Option<B> {
        let at = self.buffers.binary_search_by_key(&id, |(id, _)| *id);
        &mut self.buffers[at.expect("a task's writes are held")].1
    }

    pub(crate) fn get(&mut self, id: BufferId) -> &mut B {
        self.slot(id)
            .as_mut()
            .expect("a buffer has one writer at a time")
    }

    pub(crate) fn take_one(&mut self, id: BufferId) -> B {
        let buffer = self.slot(id).take();
        buffer.expect("a buffer has one writer at a time")
    }

    /// Runs `work` with the three buffers of a carry, and with what else is held.
    pub(crate) fn with_carry<R>(
        &mut self,
        ids: CarryIds,
        work: impl FnOnce(&mut CheckedOut<B>, &mut Carry<B>) -> R,
    ) -> R {
        let mut carry = Carry {
            acc: self.take_one(ids.acc),
            m: self.take_one(ids.m),
            l: self.take_one(ids.l),
        };
        let result = work(self, &mut carry);
        *self.slot(ids.acc) = Some(carry.acc);
        *self.slot(ids.m) = Some(carry.m);
        *self.slot(ids.l) = Some(carry.l);
        result
    }

    /// Runs `work` with out and lse.
    pub(crate) fn with_ends<R>(
        &mut self,
        out: BufferId,
        lse: BufferId,
        work: impl FnOnce(&mut B, &mut B) -> R,
    ) -> R {
        let (mut out_buffer, mut lse_buffer) = (self.take_one(out), self.take_one(lse));
        let result = work(&mut out_buffer, &mut lse_buffer);
        *self.slot(out) = Some(out_buffer);
        *self.slot(lse) = Some(lse_buffer);
        result
    }
}

/// Inputs of the caller that a rank reads in place, by buffer. They last as long as the call.
#[derive(Debug, Default)]
pub struct BorrowedInputs<'a> {
    pub(crate) slices: Vec<Option<Slice<'a>>>,
}

impl<'a> BorrowedInputs<'a> {
    pub(crate) fn get(&self, id: BufferId) -> Option<Slice<'a>> {
        self.slices.get(id.0).copied().flatten()
    }
}
