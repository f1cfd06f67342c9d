//! Buffers whose rows are written by several tasks at once.
//!
//! Rows of different tasks interleave in memory, so they cannot be handed out as slices of one
//! vector. [`SharedRows`] lends them one at a time; kernels reject a job whose rows could overlap
//! ([`Operand::is_apart`](encke_core::job::Operand::is_apart)) before any task runs.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::marker::PhantomData;

/// A slice from which tasks borrow rows.
#[derive(Debug, Clone, Copy)]
pub struct SharedRows<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a `SharedRows` is a `&mut [T]` whose elements are borrowed row by row. Sending or sharing
// it lets other threads borrow rows, which is sound for `T: Send` as long as no two rows that are
// borrowed at the same time overlap. That is the contract of `row`.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// Shares a slice whose rows are read and written.
    pub fn new(slice: &'a mut [T]) -> SharedRows<'a, T> {
        SharedRows {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            lifetime: PhantomData,
        }
    }

    /// Shares a slice whose rows are only read ([`SharedRows::read`]).
    pub fn of(slice: &'a [T]) -> SharedRows<'a, T> {
        SharedRows {
            start: slice.as_ptr().cast_mut(),
            len: slice.len(),
            lifetime: PhantomData,
        }
    }

    /// Prefetches a row into the L2 cache; does nothing if it lies outside the buffer.
    #[inline(always)]
    pub fn prefetch(&self, at: usize, len: usize) {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            prefetch(self.start.wrapping_add(at), len);
        }
    }

    /// Borrows one row for reading.
    ///
    /// # Safety
    /// No row that overlaps this one may be written while it is alive.
    #[inline]
    pub unsafe fn read(&self, at: usize, len: usize) -> &'a [T] {
        let end = at.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a row outside its buffer"
        );
        // SAFETY: the row lies inside the slice this was made from, and the caller promises that no
        // task writes it.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }

    /// Borrows one row for writing.
    ///
    /// # Safety
    /// The `SharedRows` was made by [`SharedRows::new`], and no overlapping row is borrowed at the
    /// same time, in any thread.
    #[inline]
    pub unsafe fn row(&self, at: usize, len: usize) -> &'a mut [T] {
        let end = at.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a row outside its buffer"
        );
        // SAFETY: the row lies inside the slice this was made from, which is borrowed for 'a, and
        // the caller promises that no other borrow overlaps it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

/// Prefetches `len` elements into the L2 cache. Rows of one head are strided, so the hardware
/// prefetcher does not follow them.
#[inline(always)]
pub fn prefetch<T>(elements: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for byte in (0..len * size_of::<T>()).step_by(64) {
        let line = elements.cast::<i8>().wrapping_add(byte);
        // SAFETY: a prefetch has no effect on memory, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (elements, len);
}
