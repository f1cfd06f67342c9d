//! Scratch memory of the tile kernels: whole pages for each thread, divided into regions.

use crate::scratch::{HeldBytes, ScratchPool};

/// The unit of scratch memory: a page, so that slabs do not straddle pages.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Scratch memory of one thread.
#[derive(Debug, Default)]
pub struct PageScratch(Vec<Page>);

/// Scratch memory that no thread uses at the moment.
pub type PagePool = ScratchPool<PageScratch>;

impl PageScratch {
    /// The start of at least `bytes` bytes, at a page boundary. Contents are left over from earlier
    /// uses, or zero.
    pub fn reserve(&mut self, bytes: usize) -> *mut u8 {
        let pages = bytes.div_ceil(size_of::<Page>());
        let missing = pages.saturating_sub(self.0.len());
        self.0.reserve_exact(missing);
        self.0.resize(self.0.len() + missing, Page([0; 4096]));
        self.0.as_mut_ptr().cast()
    }
}

impl HeldBytes for PageScratch {
    fn held_bytes(&self) -> usize {
        self.0.capacity() * size_of::<Page>()
    }
}

/// Divides scratch memory into regions, each of which starts at a page.
#[derive(Debug, Default)]
pub struct RegionAllocator {
    bytes: usize,
}

impl RegionAllocator {
    /// The offset of a new region of `bytes` bytes.
    pub fn take(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(size_of::<Page>());
        at
    }

    /// Bytes of all regions.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
