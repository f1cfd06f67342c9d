//! One participant: the buffers of its program, and the interpreter that carries it out.
//!
//! Aliasing is settled by ownership. For the time of a round, buffers that are received into or
//! computed into are taken out of the rank's shelf; what is sent or read is borrowed from the
//! shelf. A program that wanted to write what it sends would find the shelf empty and be told so.

mod results;

use std::time::Instant;

use encke_core::host;
use encke_core::job::Job;
use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::membership::Continuation;
use encke_core::plan::program::{BufferId, BufferPlan, Message, Port, RankPlan, Role, Task};
use encke_core::sharding::Run;
use encke_core::tensor::View;
use encke_core::transport::{Incoming, Moved, Outgoing, Transport, WireBuffer};

pub use crate::buffer_table::BorrowedInputs;
use crate::buffer_table::{BufferTable, CheckedOut};
use crate::error::RankError;
use crate::ledger::Ledger;
use crate::perform::{perform, perform_all};
use crate::trace::{Activity, Recorder};
use results::Zeros;

/// One participant's state between rounds.
pub struct Rank<K: Kernel> {
    plan: RankPlan,
    shelf: BufferTable<K::Buffer>,
    ledger: Ledger,
    done: usize,
    pairs: u128,
    zeros: Zeros,
}

impl<K: Kernel> Rank<K> {
    /// Allocates exactly what the plan lists.
    pub fn new(kernel: &K, plan: RankPlan) -> Result<Rank<K>, KernelError> {
        let mut rank = Rank::idle(plan);
        rank.allocate(kernel, &BorrowedInputs::default())?;
        Ok(rank)
    }

    /// A rank that has not allocated anything yet.
    pub fn idle(plan: RankPlan) -> Rank<K> {
        let buffers = plan.buffers.iter().map(|_| None).collect();
        Rank {
            zeros: Zeros::new(&plan),
            plan,
            shelf: BufferTable { buffers },
            ledger: Ledger::default(),
            done: 0,
            pairs: 0,
        }
    }

    /// Begins a call: what the caller's inputs can be read in place of is given back, what else
    /// is missing is allocated, and the ledger is opened anew with what is held.
    fn allocate(&mut self, kernel: &K, loans: &BorrowedInputs<'_>) -> Result<(), KernelError> {
        self.ledger = Ledger::default();
        (self.done, self.pairs) = (0, 0);
        for (i, planned) in self.plan.buffers.iter().enumerate() {
            let buffer = &mut self.shelf.buffers[i];
            if loans.get(BufferId(i)).is_some() {
                *buffer = None;
                continue;
            }
            if buffer.is_none() {
                *buffer = Some(kernel.allocate(planned.dtype, planned.elements)?);
                self.zeros.know(BufferId(i), true);
            }
            let bytes = buffer.as_ref().map_or(0, WireBuffer::allocated_bytes);
            self.ledger.take(0, planned.component, bytes);
        }
        Ok(())
    }

    /// Puts memory of the caller in the place of a buffer, before a call begins.
    pub fn place(&mut self, id: BufferId, buffer: K::Buffer) {
        self.shelf.put(id, buffer);
        self.zeros.know(id, false);
    }

    /// Begins a call on buffers that were put in their places: what is missing is allocated, and
    /// outputs whose untouched cells are to be zeros are made so.
    pub fn begin(&mut self, kernel: &K) -> Result<(), KernelError> {
        for id in self.plan.sparse_outputs() {
            if let Some(buffer) = &mut self.shelf.buffers[id.0] {
                kernel.fill(buffer, 0.0)?;
            }
        }
        self.allocate(kernel, &BorrowedInputs::default())
    }

    /// Begins a call on inputs of the caller: those that lie as this rank would hold them are read
    /// in place, the rows of the others are copied in.
    pub fn bind_inputs<'a>(
        &mut self,
        kernel: &K,
        inputs: &[(Role, View<'a>)],
    ) -> Result<BorrowedInputs<'a>, KernelError> {
        self.admit_rows(kernel, |_, port, _| {
            let of = inputs.iter().find(|(role, _)| *role == port.role);
            of.map(|(_, view)| (*view, port.runs.clone()))
        })
    }

    /// The same for rows that lie anywhere: `given` is told which input it is, its port and whose
    /// tokens they are, and says where its rows are: a tensor, and which of its tokens.
    pub fn admit_rows<'a>(
        &mut self,
        kernel: &K,
        given: impl Fn(usize, &Port, usize) -> Option<(View<'a>, Vec<Run>)>,
    ) -> Result<BorrowedInputs<'a>, KernelError> {
        let mut slices = vec![None; self.plan.buffers.len()];
        let mut copied = Vec::new();
        for (index, port) in self.plan.inputs.iter().enumerate() {
            let BufferPlan { dtype, shard, .. } = self.plan.buffers[port.buffer.0];
            let Some((view, runs)) = given(index, port, shard) else {
                continue;
            };
            let slice = host::in_place(&view, &runs, dtype);
            match slice.filter(|slice| kernel.borrow(*slice).is_some()) {
                Some(slice) => slices[port.buffer.0] = Some(slice),
                None => copied.push((port.buffer, view, runs)),
            }
        }
        let loans = BorrowedInputs { slices };
        self.allocate(kernel, &loans)?;
        for (id, view, runs) in copied {
            kernel.upload(&view, &runs, self.buffer_mut(id))?;
        }
        Ok(loans)
    }

    /// Bytes that the plan lists and nobody allocated, because they were lent.
    pub fn lent_bytes(&self) -> usize {
        let ports = self.plan.inputs.iter().map(|port| port.buffer.0);
        let lent = ports.filter(|&at| self.shelf.buffers[at].is_none());
        lent.map(|at| self.plan.buffers[at].bytes()).sum()
    }

    /// What it has taken and given back so far.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The same, for whoever knows of memory that was taken on its behalf.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Frees every buffer, and returns the ledger in which that is booked too.
    pub fn free(mut self) -> Ledger {
        let after = self.plan.rounds.len();
        for (planned, buffer) in self.plan.buffers.iter().zip(self.shelf.buffers) {
            let Some(buffer) = buffer else { continue };
            let bytes = buffer.allocated_bytes();
            drop(buffer);
            self.ledger.give_back(after, planned.component, bytes);
        }
        self.ledger
    }

    /// Another rank in this one's memory: buffers of the right size are taken over with whatever
    /// they hold (a program clears what it adds to), the others are freed before new ones are made.
    /// Outputs whose untouched cells are to be zeros are made so again.
    pub fn reuse_for(mut self, kernel: &K, plan: RankPlan) -> Result<Rank<K>, KernelError> {
        let mut next = Rank::idle(plan);
        for (wanted, buffer) in next.plan.buffers.iter().zip(&mut next.shelf.buffers) {
            let fits = |(at, had): &(usize, &BufferPlan)| {
                let same = had.dtype == wanted.dtype && had.elements == wanted.elements;
                same && self.shelf.buffers[*at].is_some()
            };
            if let Some((at, _)) = self.plan.buffers.iter().enumerate().find(fits) {
                *buffer = self.shelf.buffers[at].take();
            }
        }
        drop(self);
        for id in next.plan.sparse_outputs() {
            if let Some(buffer) = &mut next.shelf.buffers[id.0] {
                kernel.fill(buffer, 0.0)?;
            }
        }
        next.allocate(kernel, &BorrowedInputs::default())?;
        Ok(next)
    }

    /// Goes on after a death: keeps the buffers that the continuation goes on with, frees the
    /// others before new ones are made. The ledger is that of the new program.
    pub fn resume<'a>(
        &mut self,
        kernel: &K,
        continuation: Continuation,
        loans: BorrowedInputs<'a>,
    ) -> Result<BorrowedInputs<'a>, KernelError> {
        let Continuation { program, keeps } = continuation;
        let (mut next, pairs) = (Rank::idle(program), self.pairs);
        let kept = |of: &Option<BufferId>| of.and_then(|id| self.shelf.buffers[id.0].take());
        next.shelf.buffers = keeps.iter().map(kept).collect();
        let lent = |of: &Option<BufferId>| of.and_then(|id| loans.get(id));
        let slices = keeps.iter().map(lent).collect();
        *self = next;
        let loans = BorrowedInputs { slices };
        self.allocate(kernel, &loans)?;
        self.pairs = pairs;
        Ok(loans)
    }

    /// Rounds of its program whose tasks it has done, whatever became of their messages.
    pub fn done(&self) -> usize {
        self.done
    }

    /// (query, key) pairs it has computed in this call.
    pub fn pairs(&self) -> u128 {
        self.pairs
    }

    /// Notes that the tasks of a round are done.
    fn note_done(&mut self, round: usize) {
        self.done = round + 1;
        let jobs = self.plan.rounds[round].meanwhile.iter();
        let pairs = jobs.filter_map(Task::job).map(Job::pairs);
        self.pairs += pairs.sum::<u128>();
    }

    /// Its program.
    pub fn plan(&self) -> &RankPlan {
        &self.plan
    }

    /// Bytes its buffers really hold on to.
    pub fn allocated_bytes(&self) -> usize {
        let buffers = self.shelf.buffers.iter().flatten();
        buffers.map(WireBuffer::allocated_bytes).sum()
    }

    /// A buffer of an input, to be filled by whoever does not have the tensor as a whole.
    pub fn buffer_mut(&mut self, id: BufferId) -> &mut K::Buffer {
        let buffer = self.shelf.buffers[id.0].as_mut();
        buffer.expect("between rounds every buffer is on the shelf")
    }

    /// A buffer as it stands between rounds.
    pub fn buffer(&self, id: BufferId) -> &K::Buffer {
        self.shelf.get(id)
    }

    /// Copies this rank's rows of an input in, if it has any use for it.
    pub fn load(&mut self, kernel: &K, role: Role, from: &View<'_>) -> Result<(), KernelError> {
        for port in self.plan.inputs.iter().filter(|port| port.role == role) {
            // What is not on the shelf between rounds was lent.
            if let Some(buffer) = &mut self.shelf.buffers[port.buffer.0] {
                kernel.upload(from, &port.runs, buffer)?;
            }
        }
        Ok(())
    }

    /// Carries out the whole program on rows that were loaded.
    pub fn run(
        &mut self,
        kernel: &K,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        self.run_on(kernel, &BorrowedInputs::default(), transport, recorder)
    }

    /// Carries out the whole program on rows that were lent or loaded.
    pub fn run_on(
        &mut self,
        kernel: &K,
        loans: &BorrowedInputs<'_>,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        for round in 0..self.plan.rounds.len() {
            self.prepare(kernel, loans, round, recorder)?;
            self.exchange(kernel, loans, round, transport, recorder)?;
        }
        Ok(())
    }

    /// The first part of a round: what is done before anything is sent.
    pub fn prepare(
        &mut self,
        kernel: &K,
        loans: &BorrowedInputs<'_>,
        round: usize,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank {
            plan, shelf, zeros, ..
        } = self;
        let tasks = &plan.rounds[round].before;
        let begin = Instant::now();
        for task in tasks {
            let done = match zeros.rows_to_clear(task) {
                Some((id, rows)) => {
                    let mut buffer = shelf.take(id);
                    let cleared = kernel.zero_rows(rows, &mut buffer);
                    shelf.put(id, buffer);
                    cleared
                }
                None => perform_all(kernel, loans, std::slice::from_ref(task), shelf),
            };
            done.map_err(|source| RankError::Kernel { round, source })?;
        }
        if !tasks.is_empty() {
            recorder.note(round, Activity::Prepare, begin, Moved::default());
        }
        Ok(())
    }

    /// The jobs of a round alone, for whoever delivers its messages with [`Rank::accept`]. What
    /// jobs read is never what the round receives into, so either may come first.
    pub fn compute(
        &mut self,
        kernel: &K,
        loans: &BorrowedInputs<'_>,
        round: usize,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank { plan, shelf, .. } = self;
        let tasks = &plan.rounds[round].meanwhile;
        let begin = Instant::now();
        perform_all(kernel, loans, tasks, shelf)
            .map_err(|source| RankError::Kernel { round, source })?;
        if !tasks.is_empty() {
            recorder.note(round, Activity::Compute, begin, Moved::default());
        }
        self.note_done(round);
        Ok(())
    }

    /// The buffer that a message of this rank's program is received into.
    pub fn accept(&mut self, message: &Message) -> &mut K::Buffer {
        self.buffer_mut(message.buffer)
    }

    /// The second part of a round: its hops, and its jobs while they fly.
    pub fn exchange(
        &mut self,
        kernel: &K,
        loans: &BorrowedInputs<'_>,
        round: usize,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank { plan, shelf, .. } = self;
        let steps = &plan.rounds[round];
        if steps.sends.is_empty() && steps.receives.is_empty() && steps.meanwhile.is_empty() {
            self.note_done(round);
            return Ok(());
        }
        let mut held = CheckedOut::take(shelf, &steps.meanwhile);
        let mut received: Vec<K::Buffer> = steps
            .receives
            .iter()
            .map(|message| shelf.take(message.buffer))
            .collect();
        let outgoing: Vec<Outgoing<'_, K::Buffer>> = steps
            .sends
            .iter()
            .map(|message| Outgoing {
                to: message.address,
                parcel: shelf.get(message.buffer),
            })
            .collect();
        let mut incoming: Vec<Incoming<'_, K::Buffer>> = steps
            .receives
            .iter()
            .zip(&mut received)
            .map(|(message, parcel)| Incoming {
                from: message.address,
                parcel,
            })
            .collect();
        let mut computed = None;
        let mut waiting_since = Instant::now();
        let exchanged = transport.exchange(round, &outgoing, &mut incoming, &mut || {
            let begin = Instant::now();
            let mut tasks = steps.meanwhile.iter();
            let done = tasks.try_for_each(|task| perform(kernel, loans, task, shelf, &mut held));
            computed = Some(done);
            if !steps.meanwhile.is_empty() {
                recorder.note(round, Activity::Compute, begin, Moved::default());
            }
            waiting_since = Instant::now();
        });
        if let Ok(moved) = &exchanged {
            let planned = plan.moved(round);
            assert_eq!(*moved, planned, "what moved is what was planned");
            if planned != Moved::default() {
                recorder.note(round, Activity::Wait, waiting_since, *moved);
            }
        }
        for (message, buffer) in steps.receives.iter().zip(received) {
            shelf.put(message.buffer, buffer);
        }
        held.give_back(shelf);
        match computed {
            // The kernel's own word comes first: an exchange can fail because of it.
            Some(computed) => {
                computed.map_err(|source| RankError::Kernel { round, source })?;
                self.note_done(round);
            }
            // Jobs need nothing that the messages of their round bring, so an exchange that has
            // failed before it came to them does not keep them from being done.
            None => self.compute(kernel, loans, round, recorder)?,
        }
        exchanged?;
        Ok(())
    }
}
