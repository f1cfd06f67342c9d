//! Calls on tensors that are on a GPU already, in memory of another library.
//!
//! Inputs are read and outputs written where they are, in the order of their owner's stream (see
//! [`ForeignStream`]). The decision here: a rank uses the caller's memory as its buffers where the
//! layout is the same; other rows are copied on the GPU. Ranks do not outlive a call, since they
//! must not keep memory that is only borrowed.

use std::time::Duration;

use encke_core::host;
use encke_core::job::{Block, Operand};
use encke_core::kernel::KernelError;
use encke_core::memory::Memory;
use encke_core::plan::program::{BufferId, Port, RankPlan, Role, Task};
use encke_core::plan::{Plan, Request};
use encke_core::sharding::Run;
use encke_core::transport::Transport;
use encke_cuda::{Buffer, CudaKernel, DeviceView, ForeignStream};
use encke_ring::rank::BorrowedInputs;
use encke_ring::rank_threads::{JoinedRanks, run_on_threads};
use encke_ring::{
    Event, Rank, RankMemory, RingError as Error, ShardCall, ShardInput, ShardOutput, Trace, memory,
};

/// The alignment that vector copies and Hopper's copy engine need.
const ALIGNMENT: usize = 16;

/// A call: what it reads and what it writes. Outputs are contiguous, and of any type that elements
/// can be rounded to.
pub struct GpuCall<'a> {
    /// The kernel.
    pub kernel: &'a CudaKernel,
    /// The plan.
    pub plan: &'a Plan,
    /// All tensors that the plan takes.
    pub inputs: &'a [(Role, DeviceView<'a>)],
    /// The tensors that the plan returns and the caller needs.
    pub outputs: &'a [(Role, DeviceView<'a>)],
    /// Whether rows of out that no head selects become 0; otherwise they keep what is there.
    pub clears: bool,
    /// How long an exchange may wait for another rank.
    pub deadline: Duration,
}

/// What a call did, apart from its results.
#[derive(Debug)]
pub struct EnqueueReport {
    /// When work was enqueued, which is not when it was computed.
    pub trace: Trace,
    /// The memory of each rank.
    pub memory: Vec<RankMemory>,
}

/// The tensors of a call, on the stream of their owner.
struct DeviceTensors<'a> {
    call: &'a GpuCall<'a>,
    stream: &'a ForeignStream,
    /// True if the rank is the only one that writes the outputs, so that it can write them in
    /// place.
    alone: bool,
    /// Bytes of inputs that are read in place.
    borrowed_bytes: usize,
}

impl GpuCall<'_> {
    /// Enqueues the call, all ranks on the kernel's GPU, and ends the call on the owner's stream.
    /// Returns how many bytes of the inputs are read where they are.
    pub fn run(&self, stream: ForeignStream) -> Result<usize, Error> {
        self.run_then(stream, |_, _, borrowed| borrowed.iter().sum())
    }

    /// The same, with a report.
    pub fn run_reported(&self, stream: ForeignStream) -> Result<EnqueueReport, Error> {
        self.run_then(stream, |ranks, events, borrowed| {
            let mut memory = memory::of_ranks(self.kernel, ranks, self.plan.request());
            for (memory, borrowed_bytes) in memory.iter_mut().zip(&borrowed) {
                memory.borrowed_bytes = *borrowed_bytes;
            }
            EnqueueReport {
                trace: Trace { events },
                memory,
            }
        })
    }

    /// Enqueues the call, and calls `then` with the ranks, what they recorded, and the bytes of the
    /// inputs that each of them reads where they are.
    fn run_then<T>(
        &self,
        stream: ForeignStream,
        then: impl FnOnce(&[Rank<CudaKernel>], Vec<Event>, Vec<usize>) -> T,
    ) -> Result<T, Error> {
        encke_pool::check()?;
        let mut ranks = Vec::new();
        let mut borrowed = Vec::new();
        for number in 0..self.plan.ranks() {
            let mut rank = Rank::idle(self.plan.program(number)?);
            let mut tensors = self.tensors(&stream, self.plan.ranks() == 1);
            tensors.bind(&mut rank)?;
            borrowed.push(tensors.borrowed_bytes);
            ranks.push(rank);
        }
        let work = |rank: &mut Rank<CudaKernel>, mut endpoint, recorder: &mut _| {
            rank.run(self.kernel, &mut endpoint, recorder)
        };
        // Everything is enqueued when this returns, not yet computed.
        let JoinedRanks { events, .. } = run_on_threads(&mut ranks, self.deadline, false, work)?;
        self.tensors(&stream, ranks.len() == 1).collect(&ranks)?;
        let result = then(&ranks, events, borrowed);
        drop(ranks);
        stream.end().map_err(KernelError::from)?;
        Ok(result)
    }

    /// Enqueues rank `number` of the call, whose rows these are; a transport connects it to the
    /// others. Its messages have arrived when this returns.
    pub fn run_shard(
        &self,
        stream: ForeignStream,
        number: usize,
        transport: &mut dyn Transport<Buffer>,
    ) -> Result<(), Error> {
        encke_pool::check()?;
        let rank = Rank::idle(self.plan.rank(number)?.on_shard());
        let mut tensors = self.tensors(&stream, true);
        let mut call = ShardCall::on_rank(self.kernel, self.plan, rank);
        call.load(&mut tensors)?;
        let ran = call.run(transport);
        ran.map_err(|source| Error::of_rank(number, source))?;
        call.store(&mut tensors)?;
        drop(call);
        Ok(stream.end().map_err(KernelError::from)?)
    }

    fn tensors<'t>(&'t self, stream: &'t ForeignStream, alone: bool) -> DeviceTensors<'t> {
        DeviceTensors {
            call: self,
            stream,
            alone,
            borrowed_bytes: 0,
        }
    }
}

impl<'a> ShardInput<'a, CudaKernel> for DeviceTensors<'_> {
    type Error = Error;

    fn load(
        &mut self,
        _: &CudaKernel,
        _: &Request,
        rank: &mut Rank<CudaKernel>,
    ) -> Result<BorrowedInputs<'a>, Error> {
        self.bind(rank)?;
        Ok(BorrowedInputs::default())
    }
}

impl ShardOutput<CudaKernel> for DeviceTensors<'_> {
    type Error = Error;

    fn store(&mut self, _: &CudaKernel, _: &Request, rank: &Rank<CudaKernel>) -> Result<(), Error> {
        self.collect(std::slice::from_ref(rank))
    }
}

impl DeviceTensors<'_> {
    /// Elements of a tensor, as a buffer of a rank.
    fn buffer(
        &self,
        tensor: &DeviceView<'_>,
        first: usize,
        elements: usize,
    ) -> Result<Buffer, KernelError> {
        let buffer = self.stream.buffer(tensor, first, elements);
        buffer.map_err(KernelError::from)
    }

    /// Gives a rank the caller's memory as buffers, and copies the rows whose layout differs.
    fn bind(&mut self, rank: &mut Rank<CudaKernel>) -> Result<(), Error> {
        let kernel = self.call.kernel;
        let mut copied: Vec<(BufferId, &DeviceView<'_>, Vec<Run>)> = Vec::new();
        for port in rank.plan().inputs.clone() {
            let found = self.call.inputs.iter().find(|(role, _)| *role == port.role);
            let (_, tensor) = found.ok_or(Error::MissingInput { role: port.role })?;
            let planned = &rank.plan().buffers[port.buffer.0];
            let (dtype, elements) = (planned.dtype, planned.elements);
            match in_place(tensor, &port.runs).filter(|_| dtype == tensor.dtype()) {
                Some(first) => {
                    rank.set_buffer(port.buffer, self.buffer(tensor, first, elements)?);
                    self.borrowed_bytes += elements * dtype.bytes();
                }
                None => copied.push((port.buffer, tensor, port.runs)),
            }
        }
        if self.alone {
            let rounded = self.rounded_outputs(rank.plan());
            for port in rank.plan().outputs.clone() {
                let planned = &rank.plan().buffers[port.buffer.0];
                let (dtype, elements) = (planned.dtype, planned.elements);
                let fits = |tensor: &DeviceView<'_>| {
                    tensor.dtype() == dtype || rounded.contains(&port.buffer)
                };
                if let Some(tensor) = self.output(port.role).filter(|tensor| fits(tensor)) {
                    rank.set_buffer(port.buffer, self.buffer(tensor, 0, elements)?);
                }
            }
        }
        rank.begin(kernel, self.call.clears)?;
        for (id, tensor, runs) in copied {
            let from = self.buffer(tensor, 0, tensor.extent())?;
            for block in blocks(tensor, &runs) {
                kernel.copy(&block, false, &from, rank.buffer_mut(id))?;
            }
        }
        Ok(())
    }

    /// The caller's tensor for an output, if the caller needs it.
    fn output(&self, role: Role) -> Option<&DeviceView<'_>> {
        let found = self.call.outputs.iter().find(|(of, _)| *of == role);
        found.map(|(_, tensor)| tensor)
    }

    /// dk and dv, if the rank's only job can write them rounded where the caller needs them: sums
    /// and a pass that rounds them are then not needed.
    fn rounded_outputs(&self, program: &RankPlan) -> Vec<BufferId> {
        let dtype = self.call.plan.request().dtype;
        let all = program.rounds.iter();
        let mut tasks = all.flat_map(|round| round.before.iter().chain(&round.meanwhile));
        let jobs = tasks.clone().filter_map(|task| match task {
            Task::Backward { job, dk, dv, .. } => Some((job, [*dk, *dv])),
            _ => None,
        });
        let [(job, written)] = jobs.collect::<Vec<_>>()[..] else {
            return Vec::new();
        };
        let simple = tasks.all(|task| {
            matches!(
                task,
                Task::Fill { .. } | Task::Delta { .. } | Task::Backward { .. }
            )
        });
        let tensor_fits = |id: &BufferId| {
            let port = program.outputs.iter().find(|port| port.buffer == *id);
            let tensor = port.and_then(|port| self.output(port.role));
            tensor.is_some_and(|tensor| tensor.dtype() == dtype && tensor.is_aligned(0, ALIGNMENT))
        };
        let elements = written.map(|id| program.buffers[id.0].elements);
        let kernel_rounds = || self.call.kernel.rounds_key_gradients(job, dtype, elements);
        if simple && written.iter().all(tensor_fits) && kernel_rounds() {
            written.to_vec()
        } else {
            Vec::new()
        }
    }

    /// Copies the rows of every output that no rank has written in place to their tokens.
    fn collect(&self, ranks: &[Rank<CudaKernel>]) -> Result<(), Error> {
        for (role, tensor) in self.call.outputs {
            let port = |rank: &Rank<CudaKernel>| -> Option<Port> {
                let found = rank.plan().outputs.iter().find(|port| port.role == *role);
                found.cloned()
            };
            let count = |runs: &[Run]| runs.iter().map(|run| run.count).sum::<usize>();
            // Where several ranks hold all of an output, they hold the same bits.
            let whole = ranks.iter().position(|rank| {
                port(rank).is_some_and(|port| count(&port.runs) == tensor.dims()[1])
            });
            let from = whole.map_or(ranks, |at| std::slice::from_ref(&ranks[at]));
            for rank in from {
                let Some(port) = port(rank) else { continue };
                let buffer = rank.buffer(port.buffer);
                if self.alone && buffer.dtype() == tensor.dtype() {
                    // It was written in place, apart from zeros that no job replaced.
                    buffer.settle().map_err(KernelError::from)?;
                    continue;
                }
                let mut to = self.buffer(tensor, 0, tensor.extent())?;
                for block in blocks(tensor, &port.runs) {
                    let Block {
                        from, to: there, ..
                    } = block.clone();
                    let back = Block {
                        from: there,
                        to: from,
                        ..block
                    };
                    self.call.kernel.copy(&back, false, buffer, &mut to)?;
                }
            }
        }
        Ok(())
    }
}

/// The element that the rows of `runs` begin with, if their layout is that of a rank's buffer.
fn in_place(tensor: &DeviceView<'_>, runs: &[Run]) -> Option<usize> {
    let ([b, n, h, d], strides) = (tensor.dims(), tensor.strides());
    let (first, count) = host::whole_run(runs)?;
    let dense = strides[1] == h * d && (strides[2] == d || h == 1);
    let batches = b == 1 || (count == n && strides[0] == n * h * d);
    let first = first * strides[1];
    (dense && batches && tensor.is_aligned(first, ALIGNMENT)).then_some(first)
}

/// Copies of the rows of `runs` from a tensor into a buffer `[b, rows, h, d]`.
fn blocks(tensor: &DeviceView<'_>, runs: &[Run]) -> Vec<Block> {
    let ([b, _, h, d], strides) = (tensor.dims(), tensor.strides());
    let rows: usize = runs.iter().map(|run| run.count).sum();
    let mut before = 0;
    let block = |run: &Run| {
        let from = Operand {
            offset: run.first * strides[1],
            batch: strides[0],
            segment: 0,
            row: run.stride * strides[1],
            heads: (0..h).map(|head| head * strides[2]).collect(),
        };
        let to = Operand {
            offset: before * h * d,
            batch: rows * h * d,
            segment: 0,
            row: h * d,
            heads: (0..h).map(|head| head * d).collect(),
        };
        before += run.count;
        Block {
            batch: b,
            segments: 1,
            rows: run.count,
            heads: h,
            width: d,
            from,
            to,
        }
    };
    runs.iter().map(block).collect()
}
