//! Scratch memory of the tile kernels: one piece for each thread, kept between calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What scratch memory is made of: a page, so that slabs can be placed within pages.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// The memory of one thread.
#[derive(Debug, Default)]
struct Scratch(Vec<Page>);

/// Scratch memory nobody uses at the moment.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Scratch>>);

impl Pool {
    /// Lends `bytes` of memory, whose contents are whatever was there last.
    pub(crate) fn with<R>(&self, bytes: usize, run: impl FnOnce(*mut u8) -> R) -> R {
        let mut scratch = self.lock().pop().unwrap_or_default();
        let pages = bytes.div_ceil(size_of::<Page>());
        let missing = pages.saturating_sub(scratch.0.len());
        scratch.0.reserve_exact(missing);
        scratch.0.resize(scratch.0.len() + missing, Page([0; 4096]));
        let result = run(scratch.0.as_mut_ptr().cast());
        self.lock().push(scratch);
        result
    }

    /// Bytes held for the next call.
    pub(crate) fn bytes(&self) -> usize {
        let pages: usize = self.lock().iter().map(|scratch| scratch.0.capacity()).sum();
        pages * size_of::<Page>()
    }

    /// Gives those back.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// A panic elsewhere leaves a vector of whole pieces behind, so the lock is good to use.
    fn lock(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Divides scratch memory into regions, in the order they are asked for.
#[derive(Debug, Default)]
pub(crate) struct Divider {
    bytes: usize,
}

impl Divider {
    /// The offset of a region that begins at a page.
    pub(crate) fn take(&mut self, bytes: usize) -> usize {
        let at = self.bytes;
        self.bytes += bytes.next_multiple_of(size_of::<Page>());
        at
    }

    /// Bytes of all regions.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}
