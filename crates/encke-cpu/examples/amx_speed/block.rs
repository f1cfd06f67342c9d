//! The phases of the forward pass on blocks of keys, as separate functions.

use std::hint::black_box;

use encke_cpu::internals::pack::{self, RowSource, Sign};
use encke_cpu::internals::softmax::{self, KeyBounds, Lanes, ScoreBlock, TileSoftmax, VisibleKeys};
use encke_cpu::internals::{
    Dim64Split1, Hardware, ROW_BYTES, SLAB_BYTES, ScoreScale, TileProduct, TileUnit, multiply_keys,
};
use half::bf16;

use crate::memory::TileMemory;
use crate::tensors::{BenchTensors, elements_of, job};

/// Blocks of keys: together they fit the L2 cache, but not the L1 cache.
pub const BLOCKS: usize = 16;

/// Two tiles of queries and some blocks of keys; one block fits the L1 cache.
pub struct BlockBench {
    q: TileMemory,
    k: TileMemory,
    v: TileMemory,
    sums: TileMemory,
    scores: TileMemory,
    steps: usize,
    keys: usize,
    state: TileSoftmax,
}

impl BlockBench {
    pub fn new(dim: usize, keys: usize) -> BlockBench {
        let steps = dim / 32;
        // Odd numbers of pages spread the buffers over different cache sets.
        let memory = |slabs: usize| TileMemory::new(slabs.div_ceil(2) | 1);
        let mut bench = BlockBench {
            q: memory(2 * steps),
            k: memory(BLOCKS * keys / 32 * steps),
            v: memory(BLOCKS * keys / 32 * steps),
            sums: memory(2 * 2 * steps),
            scores: memory(2 * 2 * keys / 32),
            steps,
            keys,
            state: TileSoftmax {
                m: Lanes([f32::NEG_INFINITY; 32]),
                l: Lanes([0.0; 32]),
                keys: VisibleKeys::new(|_| 0..i32::MAX as usize),
            },
        };
        let tensors = BenchTensors::<bf16>::new(&job(keys.max(64), 1, dim, false));
        bench.pack(&tensors, dim);
        let bytes = bench.block_bytes();
        for memory in [&mut bench.k, &mut bench.v] {
            for block in 1..BLOCKS {
                // SAFETY: the memory has this many blocks.
                unsafe {
                    let to = memory.at().add(block * bytes);
                    std::ptr::copy_nonoverlapping(memory.at(), to, bytes);
                }
            }
        }
        bench
    }

    fn pack(&mut self, tensors: &BenchTensors<bf16>, dim: usize) {
        for tile in 0..2 {
            let source = source(elements_of(&tensors.data[0]), dim, tile * 32);
            let to = self.q.at().wrapping_add(tile * self.steps * SLAB_BYTES);
            // SAFETY: the memory has these slabs, and the processor has AVX-512.
            unsafe { pack::lanes(&source, Sign::Plus, to) };
        }
        self.pack_keys(tensors, dim);
    }

    pub fn pack_keys(&mut self, tensors: &BenchTensors<bf16>, dim: usize) {
        for step in 0..self.keys / 32 {
            let at = step * self.steps * SLAB_BYTES;
            // SAFETY: the memory has these slabs, and the processor has AVX-512.
            unsafe {
                let keys = source(elements_of(&tensors.data[1]), dim, step * 32);
                pack::rows(&keys, self.k.at().wrapping_add(at));
                let values = source(elements_of(&tensors.data[2]), dim, step * 32);
                pack::columns(&values, self.v.at().wrapping_add(at));
            }
        }
    }

    fn block_bytes(&self) -> usize {
        self.keys / 32 * self.steps * SLAB_BYTES
    }

    fn buffer(&mut self, tile: usize) -> *mut u8 {
        let bytes = tile * 2 * self.keys / 32 * SLAB_BYTES;
        self.scores.at().wrapping_add(bytes)
    }

    /// # Safety
    /// Tiles are configured.
    pub unsafe fn qk(&mut self, tile: usize, block: usize) {
        let k = self.k.at().wrapping_add(block * self.block_bytes());
        let q = self.q.at().wrapping_add(tile * self.steps * SLAB_BYTES);
        let (sums, steps) = (self.buffer(tile), self.steps);
        // SAFETY: the memory has these slabs, and tiles are configured.
        unsafe { multiply_keys::<Hardware, bf16>(k, q, sums, steps, self.keys / 32) };
    }

    pub fn softmax(&mut self, tile: usize) {
        let block = ScoreBlock {
            scores: self.buffer(tile),
            weights: self.buffer(tile),
            steps: self.keys / 32,
            start: 0,
            common: KeyBounds {
                start: 0,
                end: usize::MAX,
            },
        };
        // SAFETY: the memory has these slabs, and the processor has AVX-512.
        let rescale = unsafe {
            softmax::softmax::<bf16, Dim64Split1>(
                &block,
                ScoreScale::new(0.125),
                &mut self.state,
                softmax::ALL_LANES,
                0,
            )
        };
        black_box(rescale);
    }

    /// # Safety
    /// Tiles are configured.
    pub unsafe fn pv(&mut self, tile: usize, block: usize) {
        let v = self.v.at().wrapping_add(block * self.block_bytes());
        let b = self.buffer(tile);
        let sums = tile * 2 * self.steps * SLAB_BYTES;
        for step in 0..self.steps {
            let c = self.sums.at().wrapping_add(sums + 2 * step * SLAB_BYTES);
            // SAFETY: the memory has these slabs, and tiles are configured.
            unsafe {
                Hardware::multiply::<true, 1>(TileProduct {
                    a: v.wrapping_add(step * SLAB_BYTES),
                    a_step: self.steps * SLAB_BYTES,
                    b: [b, b.wrapping_add(SLAB_BYTES)],
                    b_step: 2 * SLAB_BYTES,
                    b_row: 2 * ROW_BYTES,
                    c: [c, c.wrapping_add(SLAB_BYTES)],
                    steps: self.keys / 32,
                });
            }
        }
    }
}

fn source(
    elements: &[bf16],
    dim: usize,
    first: usize,
) -> RowSource<'_, bf16, impl Fn(usize) -> Option<usize>> {
    RowSource {
        elements,
        dim,
        count: 32,
        address: move |row: usize| Some((first + row) * dim),
    }
}
