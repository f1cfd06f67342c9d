//! Calls on tensors that another library allocated on a GPU.
//!
//! Inputs are read and outputs written in place, ordered after the work on the owner's stream (see
//! [`ForeignStream`]). The decision here: a rank uses the caller's memory as its own buffer
//! wherever the layout matches; other rows are copied on the GPU. Ranks are dropped at the end of
//! the call, because they must not keep borrowed memory.

use std::time::{Duration, Instant};

use encke_core::host;
use encke_core::job::{Block, Operand};
use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::Plan;
use encke_core::plan::program::{BufferId, Port, Role};
use encke_core::sharding::Run;
use encke_core::transport::Transport;
use encke_cuda::{Buffer, CudaKernel, DeviceView, ForeignStream};
use encke_ring::call::{conclude, guarded};
use encke_ring::thread_ring::on_threads;
use encke_ring::trace::{Event, Recorder};
use encke_ring::{Rank, RankMemory, RingError as Error, Trace, memory};

/// Alignment in bytes that vector loads and Hopper's TMA need.
const ALIGNMENT: usize = 16;

/// A call with its input and output tensors. Outputs are contiguous; values are rounded to their
/// type.
pub struct GpuCall<'a> {
    /// The kernel that computes.
    pub kernel: &'a CudaKernel,
    /// The plan to execute.
    pub plan: &'a Plan,
    /// All inputs of the plan.
    pub inputs: &'a [(Role, DeviceView<'a>)],
    /// The outputs to write; others are dropped.
    pub outputs: &'a [(Role, DeviceView<'a>)],
    /// How long an exchange may wait for another rank.
    pub deadline: Duration,
}

/// Times and memory of an enqueued call.
#[derive(Debug)]
pub struct EnqueueReport {
    /// When each step was enqueued, which is not when the GPU executed it.
    pub trace: Trace,
    /// Memory of each rank.
    pub memory: Vec<RankMemory>,
    /// Bytes of inputs read in place.
    pub borrowed_bytes: usize,
}

impl GpuCall<'_> {
    /// Enqueues the call, all ranks on the kernel's GPU, and makes `stream` wait for it.
    pub fn run(&self, stream: ForeignStream) -> Result<EnqueueReport, Error> {
        let rank = |rank: usize| Ok(Rank::idle(self.plan.rank(rank)?));
        let mut ranks: Vec<Rank<CudaKernel>> = (0..self.plan.ranks())
            .map(rank)
            .collect::<Result<_, Error>>()?;
        let alone = ranks.len() == 1;
        let bind = |rank| self.bind(&stream, rank, alone);
        let borrowed = ranks.iter_mut().map(bind).collect::<Result<Vec<_>, _>>()?;
        let events = self.drive(&mut ranks)?;
        self.collect(&stream, &ranks)?;
        let mut memory = memory::of_ranks(self.kernel, &ranks, self.plan.request());
        for (memory, bytes) in memory.iter_mut().zip(&borrowed) {
            memory.lent_bytes = *bytes;
        }
        drop(ranks);
        stream.end().map_err(KernelError::from)?;
        Ok(EnqueueReport {
            trace: Trace { events },
            memory,
            borrowed_bytes: borrowed.iter().sum(),
        })
    }

    /// Enqueues one rank of the call on that rank's rows; a transport connects it to the other
    /// ranks. Its hops are complete on return.
    pub fn run_shard(
        &self,
        stream: ForeignStream,
        number: usize,
        transport: &mut dyn Transport<Buffer>,
    ) -> Result<(), Error> {
        let mut rank = Rank::idle(self.plan.rank(number)?.on_shard());
        self.bind(&stream, &mut rank, true)?;
        let mut recorder = Recorder::new(number, Instant::now());
        let ran = guarded(|| rank.run(self.kernel, transport, &mut recorder));
        ran.map_err(|source| Error::Rank {
            rank: number,
            source,
            others: Vec::new(),
        })?;
        self.collect(&stream, std::slice::from_ref(&rank))?;
        drop(rank);
        Ok(stream.end().map_err(KernelError::from)?)
    }

    /// Binds a rank's input buffers to the caller's memory, and copies the rows whose layout
    /// differs. The outputs are bound too if the rank is `alone`. Returns the bytes bound.
    fn bind(
        &self,
        stream: &ForeignStream,
        rank: &mut Rank<CudaKernel>,
        alone: bool,
    ) -> Result<usize, Error> {
        let buffer = |view: &DeviceView<'_>, first: usize, elements: usize| {
            let buffer = stream.buffer(view, first, elements);
            buffer.map_err(KernelError::from)
        };
        let mut borrowed_bytes = 0;
        let mut copied: Vec<(BufferId, &DeviceView<'_>, Vec<Run>)> = Vec::new();
        for port in rank.plan().inputs.clone() {
            let given = self.inputs.iter().find(|(role, _)| *role == port.role);
            let (_, view) = given.ok_or(Error::MissingInput { role: port.role })?;
            let planned = &rank.plan().buffers[port.buffer.0];
            let (dtype, elements) = (planned.dtype, planned.elements);
            match in_place(view, &port.runs).filter(|_| dtype == view.dtype()) {
                Some(first) => {
                    rank.place(port.buffer, buffer(view, first, elements)?);
                    borrowed_bytes += elements * dtype.bytes();
                }
                None => copied.push((port.buffer, view, port.runs)),
            }
        }
        if alone {
            for port in rank.plan().outputs.clone() {
                let given = self.outputs.iter().find(|(role, _)| *role == port.role);
                let planned = &rank.plan().buffers[port.buffer.0];
                let (dtype, elements) = (planned.dtype, planned.elements);
                if let Some((_, view)) = given.filter(|(_, view)| view.dtype() == dtype) {
                    rank.place(port.buffer, buffer(view, 0, elements)?);
                }
            }
        }
        rank.begin(self.kernel)?;
        for (id, view, runs) in copied {
            let from = buffer(view, 0, view.extent())?;
            for block in blocks(view, &runs) {
                self.kernel
                    .copy(&block, false, &from, rank.buffer_mut(id))?;
            }
        }
        Ok(borrowed_bytes)
    }

    /// Runs all ranks, one thread each. On return everything is enqueued, not necessarily computed.
    fn drive(&self, ranks: &mut [Rank<CudaKernel>]) -> Result<Vec<Event>, Error> {
        let origin = Instant::now();
        let (ended, first) = on_threads(ranks, self.deadline, |rank, mut endpoint| {
            let number = rank.plan().rank;
            let mut recorder = Recorder::new(number, origin);
            let hub = endpoint.observer();
            let ended = guarded(|| rank.run(self.kernel, &mut endpoint, &mut recorder));
            if let Err(error) = &ended
                && !error.is_consequence()
            {
                hub.fail(number, error.to_string());
            }
            ended.map(|()| recorder.finish())
        })?;
        conclude(ended, first)
    }

    /// Copies the rows of every output that was not written in place.
    fn collect(&self, stream: &ForeignStream, ranks: &[Rank<CudaKernel>]) -> Result<(), Error> {
        for (role, view) in self.outputs {
            let port = |rank: &Rank<CudaKernel>| -> Option<Port> {
                let found = rank.plan().outputs.iter().find(|port| port.role == *role);
                found.cloned()
            };
            let count = |runs: &[Run]| runs.iter().map(|run| run.count).sum::<usize>();
            // Where every rank holds the whole output, the first one's is copied.
            let whole = ranks.iter().position(|rank| {
                port(rank).is_some_and(|port| count(&port.runs) == view.dims()[1])
            });
            let from = whole.map_or(ranks, |at| std::slice::from_ref(&ranks[at]));
            for rank in from {
                let Some(port) = port(rank) else { continue };
                let buffer = rank.buffer(port.buffer);
                if ranks.len() == 1 && buffer.dtype() == view.dtype() {
                    continue; // it was written in place
                }
                let to = stream.buffer(view, 0, view.extent());
                let mut to = to.map_err(KernelError::from)?;
                for block in blocks(view, &port.runs) {
                    let Block {
                        from, to: there, ..
                    } = block.clone();
                    let back = Block {
                        from: there,
                        to: from,
                        ..block
                    };
                    self.kernel.copy(&back, false, buffer, &mut to)?;
                }
            }
        }
        Ok(())
    }
}

/// The index of the first element of `runs`, if their layout is that of a rank's buffer.
fn in_place(view: &DeviceView<'_>, runs: &[Run]) -> Option<usize> {
    let ([b, n, h, d], strides) = (view.dims(), view.strides());
    let (first, count) = host::whole_run(runs)?;
    let dense = strides[1] == h * d && (strides[2] == d || h == 1);
    let batches = b == 1 || (count == n && strides[0] == n * h * d);
    let first = first * strides[1];
    (dense && batches && view.is_aligned(first, ALIGNMENT)).then_some(first)
}

/// Copies of the rows of `runs` from a tensor to a buffer `[b, rows, h, d]`.
fn blocks(view: &DeviceView<'_>, runs: &[Run]) -> Vec<Block> {
    let ([b, _, h, d], strides) = (view.dims(), view.strides());
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
