//! Calls on tensors that are on a GPU already.
//!
//! Inputs are read and outputs written where torch has them, on behalf of the stream that torch is on
//! (see `Guest` in encke-cuda). The decision here: a rank is seated on the caller's memory wherever it
//! lies as the rank would hold it; other rows are copied on the GPU. Ranks do not outlive a call, since
//! they must not keep what was only lent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use encke::plan::Plan;
use encke::plan::program::{BufferId, Role};
use encke::{CudaKernel, Error, KernelError, RankError};
use encke_core::host;
use encke_core::job::{Block, Operand};
use encke_core::kernel::Kernel;
use encke_core::sharding::Run;
use encke_core::transport::Transport;
use encke_cuda::{Buffer, Guest, Lending, Staged, Summation};
use encke_ring::Rank;
use encke_ring::call::{conclude, guarded};
use encke_ring::threads::{Endpoint, endpoints};
use encke_ring::trace::{Event, Recorder};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::distributed::Wire;
use crate::tensor::Lent;

/// What copies of whole vectors and Hopper's copy engine ask of an address.
const ALIGNMENT: usize = 16;

/// The kernels of this process, by GPU and by whether gradients are summed in one order.
static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

type Kernels = HashMap<(usize, bool), Arc<CudaKernel>>;

/// The kernel of a GPU; the first call opens it.
pub(crate) fn kernel(number: usize, deterministic: bool) -> PyResult<Arc<CudaKernel>> {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = kernels.get_or_insert_default();
    if let Some(kernel) = kernels.get(&(number, deterministic)) {
        return Ok(Arc::clone(kernel));
    }
    let opened = CudaKernel::new(number);
    let opened = opened.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let kernel = Arc::new(opened.summation(match deterministic {
        true => Summation::Deterministic,
        false => Summation::Fast,
    }));
    kernels.insert((number, deterministic), Arc::clone(&kernel));
    Ok(kernel)
}

/// How the hops of a rank go.
pub(crate) enum ShardWire<'a> {
    /// From the GPU's memory and into it.
    OnGpu(Wire<'a>),
    /// By way of the host's.
    OnHost(Wire<'a>),
}

/// A call: what it reads, what it writes, and on behalf of which stream.
pub(crate) struct Call<'a> {
    pub kernel: &'a CudaKernel,
    pub plan: &'a Plan,
    pub stream: u64,
    pub inputs: &'a [(Role, Lent)],
    pub outputs: &'a [(Role, Lent)],
    pub deadline: Duration,
}

impl Call<'_> {
    /// Enqueues it. Returns how many bytes of the inputs are read in place.
    ///
    /// # Safety
    /// All tensors are on the kernel's GPU, stay allocated in the order of the stream, and outputs
    /// are contiguous and nobody else's; the stream is one of that GPU.
    pub unsafe fn run(&self) -> Result<usize, Error> {
        let device = self.kernel.device();
        // SAFETY: passed on to the caller.
        let guest = unsafe { Guest::begin(device, self.stream) };
        let guest = guest.map_err(KernelError::from)?;
        let rank = |rank: usize| Ok(Rank::idle(self.plan.rank(rank)?));
        let mut ranks: Vec<Rank<CudaKernel>> = (0..self.plan.ranks())
            .map(rank)
            .collect::<Result<_, Error>>()?;
        let mut lent_bytes = 0;
        for rank in &mut ranks {
            // SAFETY: passed on to the caller; ranks end before the guest does.
            lent_bytes += unsafe { self.seat(&guest, rank, self.plan.ranks() == 1)? };
        }
        self.drive(&mut ranks)?;
        // SAFETY: as above.
        unsafe { self.collect(&guest, &ranks)? };
        drop(ranks);
        guest.end().map_err(KernelError::from)?;
        Ok(lent_bytes)
    }

    /// Enqueues one rank of it, whose rows these are, where the other ranks are at the ends of a
    /// wire. Its hops have landed when this returns.
    ///
    /// # Safety
    /// As for `run`.
    pub unsafe fn run_shard(&self, number: usize, wire: ShardWire<'_>) -> Result<(), Error> {
        let device = self.kernel.device();
        // SAFETY: passed on to the caller.
        let guest = unsafe { Guest::begin(device, self.stream) };
        let guest = guest.map_err(KernelError::from)?;
        let mut rank = Rank::idle(self.plan.rank(number)?.on_shard());
        // SAFETY: passed on to the caller; the rank ends before the guest does.
        unsafe { self.seat(&guest, &mut rank, true)? };
        match wire {
            ShardWire::OnGpu(wire) => {
                self.run_over(&mut rank, &mut Lending::new(wire, device, number))?;
            }
            ShardWire::OnHost(wire) => {
                let mut staged = Staged::new(wire, device, number, self.deadline);
                if let Err(error) = self.run_over(&mut rank, &mut staged) {
                    // A wire that has given up may still be at the memory that its parcels were
                    // staged in.
                    std::mem::forget(staged);
                    return Err(error);
                }
            }
        }
        // SAFETY: as above.
        unsafe { self.collect(&guest, std::slice::from_ref(&rank))? };
        drop(rank);
        guest.end().map_err(KernelError::from)?;
        Ok(())
    }

    fn run_over(
        &self,
        rank: &mut Rank<CudaKernel>,
        transport: &mut dyn Transport<Buffer>,
    ) -> Result<(), Error> {
        let number = rank.plan().rank;
        let mut recorder = Recorder::new(number, Instant::now());
        let ran = guarded(|| rank.run(self.kernel, transport, &mut recorder));
        ran.map_err(|source| Error::Rank {
            rank: number,
            source,
            others: Vec::new(),
        })
    }

    /// Seats a rank on the caller's memory, and copies in the rows that do not lie right. A rank that
    /// is `alone` with the outputs is seated on them too.
    ///
    /// # Safety
    /// As for `run`.
    unsafe fn seat(
        &self,
        guest: &Guest,
        rank: &mut Rank<CudaKernel>,
        alone: bool,
    ) -> Result<usize, Error> {
        let mut lent_bytes = 0;
        let mut copied: Vec<(BufferId, Lent, Vec<Run>)> = Vec::new();
        for port in rank.plan().inputs.clone() {
            let given = self.inputs.iter().find(|(role, _)| *role == port.role);
            let (_, lent) = given.ok_or(Error::MissingInput { role: port.role })?;
            let planned = &rank.plan().buffers[port.buffer.0];
            let (dtype, elements) = (planned.dtype, planned.elements);
            match in_place(lent, &port.runs).filter(|_| dtype == lent.dtype) {
                Some(address) => {
                    // SAFETY: as many numbers as the rank holds lie there one after another.
                    let buffer = unsafe { guest.buffer(dtype, address as u64, elements) };
                    rank.place(port.buffer, buffer);
                    lent_bytes += elements * dtype.bytes();
                }
                None => copied.push((port.buffer, *lent, port.runs)),
            }
        }
        if alone {
            for port in rank.plan().outputs.clone() {
                let given = self.outputs.iter().find(|(role, _)| *role == port.role);
                let planned = &rank.plan().buffers[port.buffer.0];
                let (dtype, elements) = (planned.dtype, planned.elements);
                if let Some((_, lent)) = given.filter(|(_, lent)| lent.dtype == dtype) {
                    // SAFETY: an output is contiguous, and one rank has all of it.
                    let buffer = unsafe { guest.buffer(dtype, lent.address as u64, elements) };
                    rank.place(port.buffer, buffer);
                }
            }
        }
        rank.begin(self.kernel)?;
        for (id, lent, runs) in copied {
            // SAFETY: everything that shape and strides reach is allocated.
            let from = unsafe { guest.buffer(lent.dtype, lent.address as u64, lent.extent()) };
            for block in blocks(&lent, &runs) {
                self.kernel
                    .copy(&block, false, &from, rank.buffer_mut(id))?;
            }
        }
        Ok(lent_bytes)
    }

    /// All ranks to their end: everything is enqueued, not yet computed.
    fn drive(&self, ranks: &mut [Rank<CudaKernel>]) -> Result<(), Error> {
        let origin = Instant::now();
        let live = |rank: &mut Rank<CudaKernel>, mut endpoint: Endpoint<Buffer>| {
            let mut recorder = Recorder::new(rank.plan().rank, origin);
            let hub = endpoint.observer();
            let ended = guarded(|| rank.run(self.kernel, &mut endpoint, &mut recorder));
            if let Err(error) = &ended
                && !error.is_consequence()
            {
                hub.fail(rank.plan().rank, error.to_string());
            }
            ended.map(|()| recorder.finish())
        };
        let ends = endpoints(ranks.len(), self.deadline);
        let observer = ends.first().map(Endpoint::observer);
        let ended: Vec<Result<Vec<Event>, RankError>> = match ranks {
            [rank] => ends.into_iter().map(|end| live(rank, end)).collect(),
            ranks => std::thread::scope(|scope| {
                let live = &live;
                let mut threads = Vec::new();
                for (rank, end) in ranks.iter_mut().zip(ends) {
                    threads.push(scope.spawn(move || live(rank, end)));
                }
                let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                    thread.join().expect("a rank catches its own panics")
                };
                threads.into_iter().map(join).collect()
            }),
        };
        let first = observer.and_then(|observer| observer.failure());
        conclude(ended, first.map(|(rank, _)| rank)).map(|_| ())
    }

    /// Copies the rows of every output that no rank has written in place to their tokens.
    ///
    /// # Safety
    /// As for `run`.
    unsafe fn collect(&self, guest: &Guest, ranks: &[Rank<CudaKernel>]) -> Result<(), Error> {
        for (role, lent) in self.outputs {
            let port = |rank: &Rank<CudaKernel>| {
                let found = rank.plan().outputs.iter().find(|port| port.role == *role);
                found.cloned()
            };
            let count = |runs: &[Run]| runs.iter().map(|run| run.count).sum::<usize>();
            // Where every rank has all of an output, the first one's word is as good as any.
            let whole = ranks
                .iter()
                .position(|rank| port(rank).is_some_and(|port| count(&port.runs) == lent.dims[1]));
            let from = whole.map_or(ranks, |at| std::slice::from_ref(&ranks[at]));
            for rank in from {
                let Some(port) = port(rank) else { continue };
                let buffer = rank.buffer(port.buffer);
                if ranks.len() == 1 && buffer.dtype() == lent.dtype {
                    continue; // it was written in place
                }
                // SAFETY: the output is contiguous.
                let mut to =
                    unsafe { guest.buffer(lent.dtype, lent.address as u64, lent.extent()) };
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

/// Where the rows of `runs` begin, if they lie as a rank would hold them.
fn in_place(lent: &Lent, runs: &[Run]) -> Option<usize> {
    let ([b, n, h, d], strides) = (lent.dims, lent.strides);
    let (first, count) = host::whole_run(runs)?;
    let dense = strides[1] == h * d && (strides[2] == d || h == 1);
    let batches = b == 1 || (count == n && strides[0] == n * h * d);
    let address = lent.address + first * strides[1] * lent.dtype.bytes();
    let aligned = address.is_multiple_of(ALIGNMENT);
    (dense && batches && aligned).then_some(address)
}

/// The rows of `runs`, from where a tensor has them to a buffer `[b, rows, h, d]`.
fn blocks(lent: &Lent, runs: &[Run]) -> Vec<Block> {
    let ([b, _, h, d], strides) = (lent.dims, lent.strides);
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
