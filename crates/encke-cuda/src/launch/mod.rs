//! How each kernel is launched: program, grid and arguments.

pub(crate) mod branches;
pub(crate) mod cells;
mod chain;
pub(crate) mod chain_queue;
pub(crate) mod copy;
pub(crate) mod grid_backward;
pub(crate) mod grid_jobs;
pub(crate) mod hopper_backward;
pub(crate) mod hopper_backward_variants;
pub(crate) mod hopper_forward;
mod hopper_ranges;
mod hopper_tiles;
mod hopper_tilings;
mod key_heads;
pub(crate) mod mma;
pub(crate) mod mma_tiles;
pub(crate) mod plain;
mod row_dims;
pub(crate) mod split;
pub(crate) mod split_tilings;

use std::sync::Arc;

use cudarc::driver::{CudaFunction, DeviceRepr, LaunchArgs, LaunchConfig, PushKernelArg};

use crate::allocation::DeviceAllocation;
use crate::arguments::TableCache;
use crate::device::Device;
use crate::error::Result;

/// What a launch needs beside its operands.
pub(crate) struct LaunchContext {
    pub device: Arc<Device>,
    pub tables: Arc<TableCache>,
    /// For each attention stream, two zeros that an attention on it may use as counters, and resets
    /// to zero.
    pub counters: Vec<DeviceAllocation>,
}

/// A value that can be passed to a kernel.
pub(crate) trait KernelValue {
    /// Appends it to the arguments of a launch.
    fn push<'a>(&'a self, launch: &mut LaunchArgs<'a>);
}

impl<T: DeviceRepr> KernelValue for T {
    fn push<'a>(&'a self, launch: &mut LaunchArgs<'a>) {
        launch.arg(self);
    }
}

/// Addresses as kernel arguments.
pub(crate) fn pointer_arguments(pointers: &[u64]) -> Vec<&dyn KernelValue> {
    let all = pointers.iter();
    all.map(|pointer| pointer as &dyn KernelValue).collect()
}

impl LaunchContext {
    /// Launches a kernel on the compute stream, after everything it depends on.
    ///
    /// # Safety
    /// `arguments` must be those of the kernel, and it must access no memory but `reads` and
    /// `writes`.
    pub unsafe fn launch(
        &self,
        what: &str,
        (function, shape): (&CudaFunction, LaunchConfig),
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        arguments: &[&dyn KernelValue],
    ) -> Result<()> {
        let stream = self.device.compute();
        self.device.enqueue(stream, what, reads, writes, |stream| {
            let mut launch = stream.launch_builder(function);
            for argument in arguments {
                argument.push(&mut launch);
            }
            // SAFETY: the contract of this function.
            unsafe { launch.launch(shape) }.map(|_| ())
        })
    }
}

/// The addresses of allocations.
pub(crate) fn addresses<'a>(
    memory: impl IntoIterator<Item = &'a &'a DeviceAllocation>,
) -> Vec<u64> {
    memory.into_iter().map(|memory| memory.pointer()).collect()
}

/// A grid that fills the GPU a few times over, with at most one block per unit of work.
pub(crate) fn spread(device: &Device, work: usize, threads: u32) -> LaunchConfig {
    let most = device.multiprocessors() as usize * 16;
    grid(work.clamp(1, most), threads, 0)
}

/// A one-dimensional grid.
pub(crate) fn grid(blocks: usize, threads: u32, shared_bytes: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: shared_bytes as u32,
    }
}
