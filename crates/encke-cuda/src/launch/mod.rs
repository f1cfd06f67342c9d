//! How each kernel is started: which program, how many blocks, which arguments.

pub(crate) mod cells;
mod chain;
pub(crate) mod chains;
pub(crate) mod hopper_backward;
pub(crate) mod hopper_forward;
mod hopper_tiles;
mod hopper_tilings;
pub(crate) mod hopper_variants;
pub(crate) mod mma;
pub(crate) mod mma_tiles;
pub(crate) mod moving;
pub(crate) mod plain;
pub(crate) mod rows;

use std::sync::Arc;

use cudarc::driver::LaunchConfig;

use crate::device::Device;
use crate::jobs::Tables;
use crate::memory::Memory;

/// What a launch needs beside its operands.
pub(crate) struct LaunchContext {
    pub device: Arc<Device>,
    pub tables: Tables,
    /// For each lane, two zeros that an attention on it may count in, and leaves as zeros.
    pub counters: Vec<Memory>,
}

/// Blocks enough to fill the GPU a few times over, and no more than there is work for.
pub(crate) fn spread(device: &Device, work: usize, threads: u32) -> LaunchConfig {
    let most = device.processors() as usize * 16;
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
