//! One participant: the buffers of its program, and the interpreter that carries it out.
//!
//! Aliasing is settled by ownership. For the time of a round, buffers that are received into or
//! computed into are taken out of the rank's shelf; what is sent or read is borrowed from the
//! shelf. A program that wanted to write what it sends would find the shelf empty and be told so.

use std::time::Instant;

use encke_core::dtype::{Data, Slice};
use encke_core::host;
use encke_core::kernel::{Carry, Gradients, Kernel, KernelError, Upstream};
use encke_core::plan::program::{
    BufferId, BufferPlan, CarryIds, Fill, Message, RankPlan, Role, Task,
};
use encke_core::tensor::{Tensor, View};
use encke_core::transport::{Incoming, Moved, Outgoing, Parcel, Transport};

use crate::error::RankError;
use crate::ledger::Ledger;
use crate::trace::{Activity, Recorder};

/// One participant's state between rounds.
pub struct Rank<K: Kernel> {
    plan: RankPlan,
    shelf: Shelf<K::Buffer>,
    ledger: Ledger,
}

/// Buffers by number; a gap is a buffer that somebody holds exclusively, or that was lent.
#[derive(Debug)]
struct Shelf<B> {
    buffers: Vec<Option<B>>,
}

impl<B> Shelf<B> {
    fn get(&self, id: BufferId) -> &B {
        self.buffers[id.0]
            .as_ref()
            .expect("a program never reads what is being written")
    }

    fn take(&mut self, id: BufferId) -> B {
        self.buffers[id.0]
            .take()
            .expect("a program never writes what is being read or written")
    }

    fn put(&mut self, id: BufferId, buffer: B) {
        self.buffers[id.0] = Some(buffer);
    }
}

/// Buffers taken from the shelf to be written.
struct Held<B> {
    buffers: Vec<(BufferId, Option<B>)>,
}

impl<B> Held<B> {
    /// Takes every buffer that one of `tasks` needs for itself.
    fn take(shelf: &mut Shelf<B>, tasks: &[Task]) -> Held<B> {
        let mut ids: Vec<BufferId> = tasks.iter().flat_map(Task::holds).collect();
        ids.sort_unstable();
        ids.dedup();
        let buffers = ids.into_iter().map(|id| (id, Some(shelf.take(id))));
        Held {
            buffers: buffers.collect(),
        }
    }

    fn give_back(self, shelf: &mut Shelf<B>) {
        for (id, buffer) in self.buffers {
            shelf.put(id, buffer.expect("a task gives back what it wrote"));
        }
    }

    fn slot(&mut self, id: BufferId) -> &mut Option<B> {
        let at = self.buffers.binary_search_by_key(&id, |(id, _)| *id);
        &mut self.buffers[at.expect("a task's writes are held")].1
    }

    fn get(&mut self, id: BufferId) -> &mut B {
        self.slot(id)
            .as_mut()
            .expect("a buffer has one writer at a time")
    }

    fn take_one(&mut self, id: BufferId) -> B {
        let buffer = self.slot(id).take();
        buffer.expect("a buffer has one writer at a time")
    }

    /// Runs `work` with the three buffers of a carry, and with what else is held.
    fn with_carry<R>(
        &mut self,
        ids: CarryIds,
        work: impl FnOnce(&mut Held<B>, &mut Carry<B>) -> R,
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
}

/// Inputs of the caller that a rank reads in place, by buffer. They last as long as the call.
#[derive(Debug, Default)]
pub struct Loans<'a> {
    slices: Vec<Option<Slice<'a>>>,
}

impl<'a> Loans<'a> {
    fn get(&self, id: BufferId) -> Option<Slice<'a>> {
        self.slices.get(id.0).copied().flatten()
    }
}

impl<K: Kernel> Rank<K> {
    /// Allocates exactly what the plan lists.
    pub fn new(kernel: &K, plan: RankPlan) -> Result<Rank<K>, KernelError> {
        let mut rank = Rank::idle(plan);
        rank.furnish(kernel, &Loans::default())?;
        Ok(rank)
    }

    /// A rank that has not allocated anything yet.
    pub fn idle(plan: RankPlan) -> Rank<K> {
        let buffers = plan.buffers.iter().map(|_| None).collect();
        Rank {
            plan,
            shelf: Shelf { buffers },
            ledger: Ledger::default(),
        }
    }

    /// Begins a call: what the caller's inputs can be read in place of is given back, what else
    /// is missing is allocated, and the ledger is opened anew with what is held.
    fn furnish(&mut self, kernel: &K, loans: &Loans<'_>) -> Result<(), KernelError> {
        self.ledger = Ledger::default();
        for (i, planned) in self.plan.buffers.iter().enumerate() {
            let buffer = &mut self.shelf.buffers[i];
            if loans.get(BufferId(i)).is_some() {
                *buffer = None;
                continue;
            }
            if buffer.is_none() {
                *buffer = Some(kernel.allocate(planned.dtype, planned.elements)?);
            }
            let bytes = buffer.as_ref().map_or(0, Parcel::allocated_bytes);
            self.ledger.take(0, planned.component, bytes);
        }
        Ok(())
    }

    /// Begins a call on inputs of the caller: those that lie as this rank would hold them are read
    /// in place, the rows of the others are copied in.
    pub fn admit<'a>(
        &mut self,
        kernel: &K,
        inputs: &[(Role, View<'a>)],
    ) -> Result<Loans<'a>, KernelError> {
        let mut slices = vec![None; self.plan.buffers.len()];
        for port in &self.plan.inputs {
            let Some((_, view)) = inputs.iter().find(|(role, _)| *role == port.role) else {
                continue;
            };
            let dtype = self.plan.buffers[port.buffer.0].dtype;
            let slice = host::in_place(view, &port.runs, dtype);
            slices[port.buffer.0] = slice.filter(|slice| kernel.lent(*slice).is_some());
        }
        let loans = Loans { slices };
        self.furnish(kernel, &loans)?;
        for (role, view) in inputs {
            self.load(kernel, *role, view)?;
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
    pub fn retire(mut self) -> Ledger {
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
    pub fn succeed(mut self, kernel: &K, plan: RankPlan) -> Result<Rank<K>, KernelError> {
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
        next.furnish(kernel, &Loans::default())?;
        Ok(next)
    }

    /// Its program.
    pub fn plan(&self) -> &RankPlan {
        &self.plan
    }

    /// Bytes its buffers really hold on to.
    pub fn allocated_bytes(&self) -> usize {
        let buffers = self.shelf.buffers.iter().flatten();
        buffers.map(Parcel::allocated_bytes).sum()
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

    /// Copies this rank's rows of an output out.
    pub fn store(&self, kernel: &K, role: Role, to: &mut Tensor) -> Result<(), KernelError> {
        for port in self.plan.outputs.iter().filter(|port| port.role == role) {
            kernel.download(self.shelf.get(port.buffer), &port.runs, to)?;
        }
        Ok(())
    }

    /// Takes an output that this rank has all of, in the order of its tokens; the buffer that held
    /// it is not copied but given away.
    pub fn surrender(&mut self, kernel: &K, role: Role) -> Result<Option<Data>, KernelError> {
        let of = self.plan.outputs.iter().find(|port| port.role == role);
        let Some(port) = of.filter(|port| host::whole_run(&port.runs).is_some()) else {
            return Ok(None);
        };
        let Some(buffer) = self.shelf.buffers[port.buffer.0].take() else {
            return Ok(None);
        };
        let (after, planned) = (self.plan.rounds.len(), &self.plan.buffers[port.buffer.0]);
        let bytes = buffer.allocated_bytes();
        self.ledger.give_back(after, planned.component, bytes);
        kernel.hand_over(buffer).map(Some)
    }

    /// Carries out the whole program on rows that were loaded.
    pub fn run(
        &mut self,
        kernel: &K,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        self.run_on(kernel, &Loans::default(), transport, recorder)
    }

    /// Carries out the whole program on rows that were lent or loaded.
    pub fn run_on(
        &mut self,
        kernel: &K,
        loans: &Loans<'_>,
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
        loans: &Loans<'_>,
        round: usize,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank { plan, shelf, .. } = self;
        let tasks = &plan.rounds[round].before;
        let begin = Instant::now();
        for task in tasks {
            perform_all(kernel, loans, std::slice::from_ref(task), shelf)
                .map_err(|source| RankError::Kernel { round, source })?;
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
        loans: &Loans<'_>,
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
        loans: &Loans<'_>,
        round: usize,
        transport: &mut dyn Transport<K::Buffer>,
        recorder: &mut Recorder,
    ) -> Result<(), RankError> {
        let Rank { plan, shelf, .. } = self;
        let steps = &plan.rounds[round];
        if steps.sends.is_empty() && steps.receives.is_empty() && steps.meanwhile.is_empty() {
            return Ok(());
        }
        let mut held = Held::take(shelf, &steps.meanwhile);
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
        let mut computed = Ok(());
        let mut waiting_since = Instant::now();
        let exchanged = transport.exchange(round, &outgoing, &mut incoming, &mut || {
            let begin = Instant::now();
            let mut tasks = steps.meanwhile.iter();
            computed = tasks.try_for_each(|task| perform(kernel, loans, task, shelf, &mut held));
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
        // The kernel's own word comes first: an exchange can fail because of it.
        computed.map_err(|source| RankError::Kernel { round, source })?;
        exchanged?;
        Ok(())
    }
}

/// Carries out tasks, none of which reads what another one writes.
fn perform_all<K: Kernel>(
    kernel: &K,
    loans: &Loans<'_>,
    tasks: &[Task],
    shelf: &mut Shelf<K::Buffer>,
) -> Result<(), KernelError> {
    let mut held = Held::take(shelf, tasks);
    let mut tasks = tasks.iter();
    let done = tasks.try_for_each(|task| perform(kernel, loans, task, shelf, &mut held));
    held.give_back(shelf);
    done
}

/// A buffer as jobs read it: the caller's where it was lent, the rank's own otherwise.
fn read<'x, K: Kernel>(
    kernel: &K,
    loans: &Loans<'x>,
    shelf: &'x Shelf<K::Buffer>,
    id: BufferId,
) -> K::Input<'x> {
    match loans.get(id) {
        Some(slice) => {
            let input = kernel.lent(slice);
            input.expect("only what the kernel can read in place is lent")
        }
        None => kernel.input(shelf.get(id)),
    }
}

/// Tells the kernel what a task says.
fn perform<K: Kernel>(
    kernel: &K,
    loans: &Loans<'_>,
    task: &Task,
    shelf: &Shelf<K::Buffer>,
    held: &mut Held<K::Buffer>,
) -> Result<(), KernelError> {
    let read = |id: BufferId| read(kernel, loans, shelf, id);
    match task {
        Task::Fill { buffer, value } => {
            let value = match value {
                Fill::Zero => 0.0,
                Fill::MinusInfinity => f64::NEG_INFINITY,
            };
            kernel.fill(held.get(*buffer), value)
        }
        Task::Copy {
            blocks,
            add,
            from,
            to,
        } => blocks
            .iter()
            .try_for_each(|block| kernel.copy(block, *add, read(*from), held.get(*to))),
        Task::Forward {
            job,
            q,
            k,
            v,
            carry,
        } => held.with_carry(*carry, |_, carry| {
            kernel.forward(job, read(*q), read(*k), read(*v), carry)
        }),
        Task::Attend {
            job,
            q,
            k,
            v,
            out,
            lse,
        } => {
            let (mut out_buffer, mut lse_buffer) = (held.take_one(*out), held.take_one(*lse));
            let (q, k, v) = (read(*q), read(*k), read(*v));
            let done = kernel.attend(job, q, k, v, &mut out_buffer, &mut lse_buffer);
            *held.slot(*out) = Some(out_buffer);
            *held.slot(*lse) = Some(lse_buffer);
            done
        }
        Task::Merge { blocks, from, to } => held.with_carry(*from, |held, from| {
            held.with_carry(*to, |_, to| {
                let mut blocks = blocks.iter();
                blocks.try_for_each(|block| kernel.merge(block, from, to))
            })
        }),
        Task::Finish {
            cells,
            dim,
            gain,
            carry,
            out,
            lse,
        } => held.with_carry(*carry, |held, carry| {
            let (mut out_buffer, mut lse_buffer) = (held.take_one(*out), held.take_one(*lse));
            let (out_ref, lse_ref) = (&mut out_buffer, &mut lse_buffer);
            let done = kernel.finish(*cells, *dim, *gain, carry, out_ref, lse_ref);
            *held.slot(*out) = Some(out_buffer);
            *held.slot(*lse) = Some(lse_buffer);
            done
        }),
        Task::Delta {
            cells,
            dim,
            out,
            dout,
            dlse,
            delta,
        } => kernel.delta(
            *cells,
            *dim,
            read(*out),
            read(*dout),
            dlse.map(read),
            held.get(*delta),
        ),
        Task::Backward {
            job,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
        } => {
            let mut gradients = [*dq, *dk, *dv].map(|id| held.take_one(id));
            let upstream = Upstream {
                dout: read(*dout),
                lse: read(*lse),
                delta: read(*delta),
            };
            let (q, k, v) = (read(*q), read(*k), read(*v));
            let [to_q, to_k, to_v] = &mut gradients;
            let into = Gradients {
                dq: to_q,
                dk: to_k,
                dv: to_v,
            };
            let done = kernel.backward(job, q, k, v, upstream, into);
            for (id, buffer) in [*dq, *dk, *dv].into_iter().zip(gradients) {
                *held.slot(id) = Some(buffer);
            }
            done
        }
    }
}
