//! The peak of the tiles: from registers, and fed from the L1 cache.

use encke_core::DType;
use encke_cpu::InstructionSet;
use encke_cpu::internals::{Hardware, ROW_BYTES, SLAB_BYTES, TileProduct, TileUnit};

use crate::memory::TileMemory;
use crate::tensors::time;

const FLOP_PER_TILE: f64 = 16.0 * 16.0 * 32.0 * 2.0;

/// GFLOP/s of the hardware's tiles from registers, on all threads of the pool together, best of 5.
pub fn peak() -> f64 {
    let run = |_| encke_cpu::peak(InstructionSet::Amx, DType::Bf16);
    (0..5).map(run).fold(0.0, f64::max)
}

/// Measures and prints both peaks.
pub fn peaks(threads: usize) {
    const ROUNDS: usize = 20_000;
    let (best, _) = time(5, || {
        rayon::broadcast(|_| {
            let mut memory = TileMemory::new(16);
            let at = memory.at();
            // SAFETY: the product stays in the memory, and tiles are configured.
            unsafe {
                Hardware::configure();
                for _ in 0..ROUNDS {
                    Hardware::multiply::<false, 1>(TileProduct {
                        a: at,
                        a_step: SLAB_BYTES,
                        b: [at.wrapping_add(12 << 10), at.wrapping_add(13 << 10)],
                        b_step: SLAB_BYTES,
                        b_row: ROW_BYTES,
                        c: [at.wrapping_add(24 << 10), at.wrapping_add(26 << 10)],
                        steps: 6,
                    });
                }
                Hardware::release();
            }
        });
    });
    let fed = threads as f64 * 24.0 * ROUNDS as f64 * FLOP_PER_TILE / best * 1e-9;
    println!(
        "peak: {:.0} GFLOP/s from registers, {fed:.0} fed from the L1 cache \
         (products of 6 steps, sums stored)",
        peak()
    );
}
