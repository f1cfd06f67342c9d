//! Calls on tensors that torch has on a GPU already.
//!
//! Inputs are read and outputs written where torch has them, on behalf of the stream that torch is on
//! (see `GpuCall` in encke). Only what is torch's is here: the promise that its tensors are where it
//! says, and the kernels of this process, which are kept for all of its calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use encke::plan::Plan;
use encke::plan::program::Role;
use encke::{CudaKernel, Error, ForeignStream, GpuCall, KernelError};
use encke_cuda::{ExternalTransport, Staged, Summation};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::distributed::Wire;
use crate::tensor::Lent;

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
        // SAFETY: passed on to the caller.
        let enqueued = unsafe { self.carry_out(|call, guest| call.run(guest)) }?;
        Ok(enqueued.borrowed_bytes)
    }

    /// Enqueues one rank of it, whose rows these are, where the other ranks are at the ends of a
    /// wire. Its hops have landed when this returns.
    ///
    /// # Safety
    /// As for `run`.
    pub unsafe fn run_shard(&self, number: usize, wire: ShardWire<'_>) -> Result<(), Error> {
        let device = self.kernel.device();
        let run = |call: &GpuCall<'_>, guest: ForeignStream| match wire {
            ShardWire::OnGpu(wire) => call.run_shard(
                guest,
                number,
                &mut ExternalTransport::new(wire, device, number),
            ),
            ShardWire::OnHost(wire) => {
                let mut staged = Staged::new(wire, device, number, self.deadline);
                let ran = call.run_shard(guest, number, &mut staged);
                if ran.is_err() {
                    // A wire that has given up may still be at the memory that its parcels were
                    // staged in.
                    std::mem::forget(staged);
                }
                ran
            }
        };
        // SAFETY: passed on to the caller.
        unsafe { self.carry_out(run) }
    }

    /// # Safety
    /// As for `run`.
    unsafe fn carry_out<T>(
        &self,
        run: impl FnOnce(&GpuCall<'_>, ForeignStream) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // SAFETY: passed on to the caller.
        let guest = unsafe { ForeignStream::begin(self.kernel.device(), self.stream) };
        let guest = guest.map_err(KernelError::from)?;
        let lend = |tensors: &[(Role, Lent)],
                    writable: bool|
         -> Vec<(Role, encke::DeviceView<'_>)> {
            let lend = |(role, lent): &(Role, Lent)| {
                let address = lent.address as u64;
                // SAFETY: passed on to the caller.
                let lent = unsafe {
                    encke::DeviceView::new(lent.dtype, address, lent.dims, lent.strides, writable)
                };
                (*role, lent)
            };
            tensors.iter().map(lend).collect()
        };
        let call = GpuCall {
            kernel: self.kernel,
            plan: self.plan,
            inputs: &lend(self.inputs, false),
            outputs: &lend(self.outputs, true),
            deadline: self.deadline,
        };
        run(&call, guest)
    }
}
