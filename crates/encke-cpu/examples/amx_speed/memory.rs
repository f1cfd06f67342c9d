//! Memory for tiles.

use encke_cpu::internals::PageScratch;

/// Memory that starts at a page.
pub struct TileMemory(PageScratch);

impl TileMemory {
    /// `pages` pages of bf16 between 1 and 2: zeros would be multiplied faster.
    pub fn new(pages: usize) -> TileMemory {
        let mut memory = TileMemory(PageScratch::default());
        let start = memory.0.reserve(pages * 4096);
        for i in 0..pages * 4096 {
            let byte = [0x80 | (i * 37) as u8, 0x3f][i % 2];
            // SAFETY: the memory has this many bytes.
            unsafe { start.add(i).write(byte) };
        }
        memory
    }

    /// Its first byte.
    pub fn at(&mut self) -> *mut u8 {
        self.0.reserve(0)
    }
}
