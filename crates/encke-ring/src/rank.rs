//! One rank: the buffers of its program, and the interpreter that runs it.
//!
//! Ownership rules out aliasing. During a round, buffers that are received into or computed into
//! are taken out of the rank's table; buffers that are sent or read are borrowed from it. A program
//! that writes what it sends finds no buffer in the table and panics.

mod results;

use std::sync::Arc;
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
use crate::task::{run_task, run_tasks};
use crate::trace::{Activity, Recorder};
use results::ZeroTracker;

/// One rank between two rounds.
pub struct Rank<K: Kernel> {
    plan: Arc<RankPlan>,
    table: BufferTable<K::Buffer>,
    ledger: Ledger,
    rounds_done: usize,
    pairs: u128,
    zeros: ZeroTracker,
}

impl<K: Kernel> Rank<K> {
    /// Allocates exactly what the plan lists.
    pub fn new(kernel: &K, plan: impl Into<Arc<RankPlan>>) -> Result<Rank<K>, KernelError> {
        let mut rank = Rank::idle(plan);
        rank.allocate(kernel, &BorrowedInputs::default())?;
        Ok(rank)
    }

    /// A rank without buffers.
    pub fn idle(plan: impl Into<Arc<RankPlan>>) -> Rank<K> {
        let plan = plan.into();
        let buffers = plan.buffers.iter().map(|_| None).collect();
        Rank {
            zeros: ZeroTracker::new(&plan),
            plan,
            table: BufferTable { buffers },
            ledger: Ledger::default(),
            rounds_done: 0,
            pairs: 0,
        }
    }

    /// Starts a call: frees the buffers of inputs that are read in place, allocates the other
    /// buffers that are missing, and starts a new ledger with what is allocated.
    fn allocate(&mut self, kernel: &K, borrowed: &BorrowedInputs<'_>) -> Result<(), KernelError> {
        let on_grid = |job: &Job| job.tiles.is_some();
        if !kernel.repeats_bits() && self.plan.jobs().any(on_grid) {
            return Err(KernelError::Unsupported {
                kernel: kernel.name(),
                what: "bits = invariant; use the CPU, or planned bits".into(),
            });
        }
        self.ledger = Ledger::default();
        (self.rounds_done, self.pairs) = (0, 0);
        for (i, planned) in self.plan.buffers.iter().enumerate() {
            let buffer = &mut self.table.buffers[i];
            if borrowed.get(BufferId(i)).is_some() {
                *buffer = None;
                continue;
            }
            if buffer.is_none() {
                *buffer = Some(kernel.allocate(planned.dtype, planned.elements)?);
                self.zeros.set(BufferId(i), true);
            }
            let bytes = buffer.as_ref().map_or(0, WireBuffer::allocated_bytes);
            self.ledger.allocate(0, planned.component, bytes);
        }
        Ok(())
    }

    /// Uses memory of the caller as a buffer. Must be called before the call starts.
    pub fn set_buffer(&mut self, id: BufferId, buffer: K::Buffer) {
        self.table.put(id, buffer);
        self.zeros.set(id, false);
    }

    /// Starts a call on the buffers that are there: allocates the missing ones, and zeroes outputs
    /// that the program writes only in part, if it `clears`.
    pub fn begin(&mut self, kernel: &K, clears: bool) -> Result<(), KernelError> {
        let sparse = self.plan.sparse_outputs();
        for id in sparse.into_iter().filter(|_| clears) {
            if let Some(buffer) = &mut self.table.buffers[id.0] {
                kernel.fill(buffer, 0.0)?;
            }
        }
        self.allocate(kernel, &BorrowedInputs::default())
    }

    /// Starts a call on the caller's inputs. Inputs whose layout is that of the rank's buffers are
    /// read in place, the rows of the others are copied. `rows` returns, for an input's index, its
    /// port and the rank whose tokens it holds, the tensor with its rows and which rows they are.
    pub fn bind_inputs<'a>(
        &mut self,
        kernel: &K,
        rows: impl Fn(usize, &Port, usize) -> Option<(View<'a>, Vec<Run>)>,
    ) -> Result<BorrowedInputs<'a>, KernelError> {
        let mut slices = vec![None; self.plan.buffers.len()];
        let mut copied = Vec::new();
        for (index, port) in self.plan.inputs.iter().enumerate() {
            let BufferPlan { dtype, shard, .. } = self.plan.buffers[port.buffer.0];
            let Some((view, runs)) = rows(index, port, shard) else {
                continue;
            };
            let slice = host::in_place(&view, &runs, dtype);
            match slice.filter(|slice| kernel.borrow(*slice).is_some()) {
                Some(slice) => slices[port.buffer.0] = Some(slice),
                None => copied.push((port.buffer, view, runs)),
            }
        }
        let borrowed = BorrowedInputs { slices };
        self.allocate(kernel, &borrowed)?;
        for (id, view, runs) in copied {
            kernel.upload(&view, &runs, self.buffer_mut(id))?;
        }
        Ok(borrowed)
    }

    /// Planned bytes that were not allocated, because the inputs are read in place.
    pub fn borrowed_bytes(&self) -> usize {
        let ports = self.plan.inputs.iter().map(|port| port.buffer.0);
        let borrowed = ports.filter(|&at| self.table.buffers[at].is_none());
        borrowed.map(|at| self.plan.buffers[at].bytes()).sum()
    }

    /// What it has allocated and freed so far.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The ledger, to record memory that was allocated on the rank's behalf.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Frees every buffer, and returns the ledger with those entries.
    pub fn free(mut self) -> Ledger {
        let after = self.plan.rounds.len();
        for (planned, buffer) in self.plan.buffers.iter().zip(self.table.buffers) {
            let Some(buffer) = buffer else { continue };
            let bytes = buffer.allocated_bytes();
            drop(buffer);
            self.ledger.free(after, planned.component, bytes);
        }
        self.ledger
    }

    /// Another rank in this one's memory: it takes the buffers of the right size and type with
    /// their contents (a program clears what it adds to), the others are freed.
    pub fn reuse_for(mut self, plan: RankPlan) -> Rank<K> {
        let mut next = Rank::idle(plan);
        for (planned, buffer) in next.plan.buffers.iter().zip(&mut next.table.buffers) {
            let fits = |(at, had): &(usize, &BufferPlan)| {
                let same = had.dtype == planned.dtype && had.elements == planned.elements;
                same && self.table.buffers[*at].is_some()
            };
            if let Some((at, _)) = self.plan.buffers.iter().enumerate().find(fits) {
                *buffer = self.table.buffers[at].take();
            }
        }
        next
    }

    /// Continues after a death: keeps the buffers that the continuation uses and frees the others
    /// before it allocates new ones. The ledger starts anew.
    pub fn resume<'a>(
        &mut self,
        kernel: &K,
        continuation: Continuation,
        borrowed: BorrowedInputs<'a>,
    ) -> Result<BorrowedInputs<'a>, KernelError> {
        let Continuation { program, keeps } = continuation;
        let (mut next, pairs) = (Rank::idle(program), self.pairs);
        let kept = |of: &Option<BufferId>| of.and_then(|id| self.table.buffers[id.0].take());
        next.table.buffers = keeps.iter().map(kept).collect();
        let slice = |of: &Option<BufferId>| of.and_then(|id| borrowed.get(id));
        let slices = keeps.iter().map(slice).collect();
        *self = next;
        let borrowed = BorrowedInputs { slices };
        self.allocate(kernel, &borrowed)?;
        self.pairs = pairs;
        Ok(borrowed)
    }

    /// Rounds of its program whose tasks are done, whether or not their messages arrived.
    pub fn rounds_done(&self) -> usize {
        self.rounds_done
    }

    /// (query, key) pairs it has computed in this call.
    pub fn pairs(&self) -> u128 {
        self.pairs
    }

    /// Counts a round whose tasks are done.
    fn count_round(&mut self, round: usize) {
        self.rounds_done = round + 1;
        let jobs = self.plan.rounds[round].meanwhile.iter();
        let pairs = jobs.filter_map(Task::job).map(Job::pairs);
        self.pairs += pairs.sum::<u128>();
    }

    /// Sets the seed of its next call's dropout.
    pub fn set_seed(&mut self, seed: u64) {
        Arc::make_mut(&mut self.plan).set_seed(seed);
    }

    /// Its program.
    pub fn plan(&self) -> &RankPlan {
        &self.plan
    }

    /// Bytes that its buffers occupy.
    pub fn allocated_bytes(&self) -> usize {
        let buffers = self.table.buffers.iter().flatten();
        buffers.map(WireBuffer::allocated_bytes).sum()
    }

    /// A buffer, to be overwritten between rounds.
    pub fn buffer_mut(&mut self, id: BufferId) -> &mut K::Buffer {
        let buffer = self.table.buffers[id.0].as_mut();
        buffer.expect("between rounds no buffer is checked out")
    }

    /// A buffer, between rounds.
    pub fn buffer(&self, id: BufferId) -> &K::Buffer {
        self.table.get(id)
    }

    /// Copies this rank's rows of an input into its buffers, if the rank needs the input.
    pub fn load(&mut self, kernel: &K, role: Role, from: &View<'_>) -> Result<(), KernelError> {
        for port in self.plan.inputs.iter().filter(|port| port.role == role) {
            // A buffer that is missing between rounds is an input that is read in place.
            if let Some(buffer) = &mut self.table.buffers[port.buffer.0] {
                kernel.upload(from, &port.runs, buffer)?;
            }
        }
        Ok(())
    }

    /// Runs the whole program on inputs that were copied into its buffers.
    pub fn run(
        &mut self,
        kernel: &K,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        self.run_on(kernel, &BorrowedInputs::default(), transport, recorder)
    }

    /// Runs the whole program on inputs that were copied or are read in place.
    pub fn run_on(
        &mut self,
        kernel: &K,
        borrowed: &BorrowedInputs<'_>,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        for round in 0..self.plan.rounds.len() {
            self.prepare(kernel, borrowed, round, recorder)?;
            self.exchange(kernel, borrowed, round, transport, recorder)?;
        }
        Ok(())
    }

    /// The first part of a round: the tasks that come before its messages.
    pub fn prepare(
        &mut self,
        kernel: &K,
        borrowed: &BorrowedInputs<'_>,
        round: usize,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank {
            plan, table, zeros, ..
        } = self;
        let tasks = &plan.rounds[round].before;
        let begin = Instant::now();
        for task in tasks {
            let done = match zeros.rows_to_zero(task) {
                Some((id, rows)) => {
                    let mut buffer = table.take(id);
                    let cleared = kernel.zero_rows(rows, &mut buffer);
                    table.put(id, buffer);
                    cleared
                }
                None => run_tasks(kernel, borrowed, std::slice::from_ref(task), table),
            };
            done.map_err(|source| RankError::Kernel { round, source })?;
        }
        if !tasks.is_empty() {
            recorder.record(round, Activity::Prepare, begin, Moved::default());
        }
        Ok(())
    }

    /// The jobs of a round without its messages, for drivers that deliver those with
    /// [`Rank::accept`]. Jobs never read what their round receives into, so either may come first.
    pub fn compute(
        &mut self,
        kernel: &K,
        borrowed: &BorrowedInputs<'_>,
        round: usize,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank { plan, table, .. } = self;
        let tasks = &plan.rounds[round].meanwhile;
        let begin = Instant::now();
        run_tasks(kernel, borrowed, tasks, table)
            .map_err(|source| RankError::Kernel { round, source })?;
        if !tasks.is_empty() {
            recorder.record(round, Activity::Compute, begin, Moved::default());
        }
        self.count_round(round);
        Ok(())
    }

    /// The buffer that receives a message.
    pub fn accept(&mut self, message: &Message) -> &mut K::Buffer {
        self.buffer_mut(message.buffer)
    }

    /// The second part of a round: its messages, and its jobs while they are in flight.
    pub fn exchange(
        &mut self,
        kernel: &K,
        borrowed: &BorrowedInputs<'_>,
        round: usize,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank { plan, table, .. } = self;
        let steps = &plan.rounds[round];
        if steps.sends.is_empty() && steps.receives.is_empty() && steps.meanwhile.is_empty() {
            self.count_round(round);
            return Ok(());
        }
        let mut outputs = CheckedOut::take(table, &steps.meanwhile);
        let mut received: Vec<K::Buffer> = steps
            .receives
            .iter()
            .map(|message| table.take(message.buffer))
            .collect();
        let outgoing: Vec<Outgoing<'_, K::Buffer>> = steps
            .sends
            .iter()
            .map(|message| Outgoing {
                to: message.address,
                parcel: table.get(message.buffer),
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
            let done =
                tasks.try_for_each(|task| run_task(kernel, borrowed, task, table, &mut outputs));
            computed = Some(done);
            if !steps.meanwhile.is_empty() {
                recorder.record(round, Activity::Compute, begin, Moved::default());
            }
            waiting_since = Instant::now();
        });
        if let Ok(moved) = &exchanged {
            let planned = plan.moved(round);
            assert_eq!(*moved, planned, "the bytes moved are those planned");
            if planned != Moved::default() {
                recorder.record(round, Activity::Wait, waiting_since, *moved);
            }
        }
        for (message, buffer) in steps.receives.iter().zip(received) {
            table.put(message.buffer, buffer);
        }
        outputs.give_back(table);
        match computed {
            // The kernel's error comes first: the exchange may have failed because of it.
            Some(computed) => {
                computed.map_err(|source| RankError::Kernel { round, source })?;
                self.count_round(round);
            }
            // The exchange failed before it ran the jobs. They do not depend on its messages, so
            // they run now.
            None => self.compute(kernel, borrowed, round, recorder)?,
        }
        exchanged?;
        Ok(())
    }
}
