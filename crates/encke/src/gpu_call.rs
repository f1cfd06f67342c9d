//! Calls on tensors that are on a GPU already, in memory of another library.
//!
//! Inputs are read and outputs written where they are, on behalf of the stream their owner is on (see
//! [`ForeignStream`]). The decision here: a rank is seated on the caller's memory wherever it lies as the rank
//! would hold it; other rows are copied on the GPU. Ranks do not outlive a call, since they must not
//! keep what was only lent.

use std::time::{Duration, Instant};

use encke_core::host;
use encke_core::job::{Block, Operand};
use encke_core::kernel::KernelError;
use encke_core::memory::Memory;
use encke_core::plan::Plan;
use encke_core::plan::program::{BufferId, Port, Role};
use encke_core::sharding::Run;
use encke_core::transport::Transport;
use encke_cuda::{Buffer, CudaKernel, DeviceView, ForeignStream};
use encke_ring::call::{conclude, guarded};
use encke_ring::thread_ring::on_threads;
use encke_ring::trace::{Event, Recorder};
use encke_ring::{Rank, RankMemory, RingError as Error, Trace, memory};

/// What copies of whole vectors and Hopper's copy engine ask of an address.
const ALIGNMENT: usize = 16;

/// A call: what it reads and what it writes. Outputs are contiguous, and of any type that numbers can
/// be rounded to.
pub struct GpuCall<'a> {
    /// Who computes.
    pub kernel: &'a CudaKernel,
    /// What is computed.
    pub plan: &'a Plan,
    /// All tensors the plan takes.
    pub inputs: &'a [(Role, DeviceView<'a>)],
    /// Those it returns that are wanted.
    pub outputs: &'a [(Role, DeviceView<'a>)],
    /// How long an exchange may wait for another rank.
    pub deadline: Duration,
}

/// What a call did, beside its results.
#[derive(Debug)]
pub struct Enqueued {
    /// When what was enqueued, which is not when it was computed.
    pub trace: Trace,
    /// What each rank held.
    pub memory: Vec<RankMemory>,
    /// Bytes of the inputs that are read where they are.
    pub lent_bytes: usize,
}

impl GpuCall<'_> {
    /// Enqueues it, all ranks on the kernel's GPU, and ends the guest's call.
    pub fn run(&self, guest: ForeignStream) -> Result<Enqueued, Error> {
        let rank = |rank: usize| Ok(Rank::idle(self.plan.rank(rank)?));
        let mut ranks: Vec<Rank<CudaKernel>> = (0..self.plan.ranks())
            .map(rank)
            .collect::<Result<_, Error>>()?;
        let alone = ranks.len() == 1;
        let seat = |rank| self.seat(&guest, rank, alone);
        let lent = ranks.iter_mut().map(seat).collect::<Result<Vec<_>, _>>()?;
        let events = self.drive(&mut ranks)?;
        self.collect(&guest, &ranks)?;
        let mut memory = memory::of_ranks(self.kernel, &ranks, self.plan.request());
        for (memory, lent_bytes) in memory.iter_mut().zip(&lent) {
            memory.lent_bytes = *lent_bytes;
        }
        drop(ranks);
        guest.end().map_err(KernelError::from)?;
        Ok(Enqueued {
            trace: Trace { events },
            memory,
            lent_bytes: lent.iter().sum(),
        })
    }

    /// Enqueues one rank of it, whose rows these are, where the other ranks are at the ends of a
    /// transport. Its hops have landed when this returns.
    pub fn run_shard(
        &self,
        guest: ForeignStream,
        number: usize,
        transport: &mut dyn Transport<Buffer>,
    ) -> Result<(), Error> {
        let mut rank = Rank::idle(self.plan.rank(number)?.on_shard());
        self.seat(&guest, &mut rank, true)?;
        let mut recorder = Recorder::new(number, Instant::now());
        let ran = guarded(|| rank.run(self.kernel, transport, &mut recorder));
        ran.map_err(|source| Error::Rank {
            rank: number,
            source,
            others: Vec::new(),
        })?;
        self.collect(&guest, std::slice::from_ref(&rank))?;
        drop(rank);
        Ok(guest.end().map_err(KernelError::from)?)
    }

    /// Seats a rank on the caller's memory, and copies in the rows that do not lie right. A rank that
    /// is `alone` with the outputs is seated on them too.
    fn seat(
        &self,
        guest: &ForeignStream,
        rank: &mut Rank<CudaKernel>,
        alone: bool,
    ) -> Result<usize, Error> {
        let lend = |lent: &DeviceView<'_>, first: usize, elements: usize| {
            let buffer = guest.buffer(lent, first, elements);
            buffer.map_err(KernelError::from)
        };
        let mut lent_bytes = 0;
        let mut copied: Vec<(BufferId, &DeviceView<'_>, Vec<Run>)> = Vec::new();
        for port in rank.plan().inputs.clone() {
            let given = self.inputs.iter().find(|(role, _)| *role == port.role);
            let (_, lent) = given.ok_or(Error::MissingInput { role: port.role })?;
            let planned = &rank.plan().buffers[port.buffer.0];
            let (dtype, elements) = (planned.dtype, planned.elements);
            match in_place(lent, &port.runs).filter(|_| dtype == lent.dtype()) {
                Some(first) => {
                    rank.place(port.buffer, lend(lent, first, elements)?);
                    lent_bytes += elements * dtype.bytes();
                }
                None => copied.push((port.buffer, lent, port.runs)),
            }
        }
        if alone {
            for port in rank.plan().outputs.clone() {
                let given = self.outputs.iter().find(|(role, _)| *role == port.role);
                let planned = &rank.plan().buffers[port.buffer.0];
                let (dtype, elements) = (planned.dtype, planned.elements);
                if let Some((_, lent)) = given.filter(|(_, lent)| lent.dtype() == dtype) {
                    rank.place(port.buffer, lend(lent, 0, elements)?);
                }
            }
        }
        rank.begin(self.kernel)?;
        for (id, lent, runs) in copied {
            let from = lend(lent, 0, lent.extent())?;
            for block in blocks(lent, &runs) {
                self.kernel
                    .copy(&block, false, &from, rank.buffer_mut(id))?;
            }
        }
        Ok(lent_bytes)
    }

    /// All ranks to their end: everything is enqueued, not yet computed.
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

    /// Copies the rows of every output that no rank has written in place to their tokens.
    fn collect(&self, guest: &ForeignStream, ranks: &[Rank<CudaKernel>]) -> Result<(), Error> {
        for (role, lent) in self.outputs {
            let port = |rank: &Rank<CudaKernel>| -> Option<Port> {
                let found = rank.plan().outputs.iter().find(|port| port.role == *role);
                found.cloned()
            };
            let count = |runs: &[Run]| runs.iter().map(|run| run.count).sum::<usize>();
            // Where every rank has all of an output, the first one's word is as good as any.
            let whole = ranks.iter().position(|rank| {
                port(rank).is_some_and(|port| count(&port.runs) == lent.dims()[1])
            });
            let from = whole.map_or(ranks, |at| std::slice::from_ref(&ranks[at]));
            for rank in from {
                let Some(port) = port(rank) else { continue };
                let buffer = rank.buffer(port.buffer);
                if ranks.len() == 1 && buffer.dtype() == lent.dtype() {
                    continue; // it was written in place
                }
                let to = guest.buffer(lent, 0, lent.extent());
                let mut to = to.map_err(KernelError::from)?;
                for block in blocks(lent, &port.runs) {
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

/// Which number the rows of `runs` begin with, if they lie as a rank would hold them.
fn in_place(lent: &DeviceView<'_>, runs: &[Run]) -> Option<usize> {
    let ([b, n, h, d], strides) = (lent.dims(), lent.strides());
    let (first, count) = host::whole_run(runs)?;
    let dense = strides[1] == h * d && (strides[2] == d || h == 1);
    let batches = b == 1 || (count == n && strides[0] == n * h * d);
    let first = first * strides[1];
    (dense && batches && lent.is_aligned(first, ALIGNMENT)).then_some(first)
}

/// The rows of `runs`, from where a tensor has them to a buffer `[b, rows, h, d]`.
fn blocks(lent: &DeviceView<'_>, runs: &[Run]) -> Vec<Block> {
    let ([b, _, h, d], strides) = (lent.dims(), lent.strides());
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
