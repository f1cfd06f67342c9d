//! The buffers of one rank, and which of them a task is writing.
//!
//! A buffer that is written is taken out of the table, so that a task never reads and writes the
//! same memory: a missing buffer is a bug in the program and panics at once. Nothing here knows
//! what a buffer is for.

use encke_core::dtype::Slice;
use encke_core::kernel::Carry;
use encke_core::plan::program::{BufferId, CarryIds, Task};

/// Buffers by id. `None` is a buffer that is checked out, or an input that is read in place.
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

/// Buffers taken out of the table to be written.
pub(crate) struct CheckedOut<B> {
    buffers: Vec<(BufferId, Option<B>)>,
}

impl<B> CheckedOut<B> {
    /// Takes every buffer that one of `tasks` needs exclusively ([`Task::holds`]).
    pub(crate) fn take(table: &mut BufferTable<B>, tasks: &[Task]) -> CheckedOut<B> {
        let mut ids: Vec<BufferId> = tasks.iter().flat_map(Task::holds).collect();
        ids.sort_unstable();
        ids.dedup();
        let buffers = ids.into_iter().map(|id| (id, Some(table.take(id))));
        CheckedOut {
            buffers: buffers.collect(),
        }
    }

    pub(crate) fn give_back(self, table: &mut BufferTable<B>) {
        for (id, buffer) in self.buffers {
            table.put(id, buffer.expect("a task returns what it wrote"));
        }
    }

    pub(crate) fn slot(&mut self, id: BufferId) -> &mut Option<B> {
        let at = self.buffers.binary_search_by_key(&id, |(id, _)| *id);
        &mut self.buffers[at.expect("a task's outputs are checked out")].1
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

    /// Runs `work` with the three buffers of a carry, and with the other buffers that are checked
    /// out.
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

    /// Runs `work` with the buffers of out and lse.
    pub(crate) fn with_outputs<R>(
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

/// Inputs of the caller that a rank reads in place, by buffer. They stay borrowed for the call.
#[derive(Debug, Default)]
pub struct BorrowedInputs<'a> {
    pub(crate) slices: Vec<Option<Slice<'a>>>,
}

impl<'a> BorrowedInputs<'a> {
    pub(crate) fn get(&self, id: BufferId) -> Option<Slice<'a>> {
        self.slices.get(id.0).copied().flatten()
    }
}
