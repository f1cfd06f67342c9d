//! Buffers whose rows are written by several tasks at once.
//!
//! Rows of different tasks interleave in memory, so they cannot be handed out as slices of one
//! vector. [`SharedRows`] lends them one at a time, and [`disjoint`] makes that sound: kernels
//! reject a job whose rows could overlap before any task runs.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::marker::PhantomData;

use encke_core::job::Operand;

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

/// Whether no two rows of an operand can overlap, for every (batch, segment, row, head) of the
/// given counts and rows of `width` elements. The strides alone decide, so some operands without
/// overlap are rejected as well; those of plans never are.
///
/// Heads at the same address overlap, unless they are `grouped`: then one task has all of them.
pub fn disjoint(operand: &Operand, counts: [usize; 3], width: usize, grouped: bool) -> bool {
    let mut heads = operand.heads.to_vec();
    heads.sort_unstable();
    if grouped {
        heads.dedup();
    }
    let gaps = heads.windows(2).map(|pair| pair[1] - pair[0]);
    // (smallest distance, whole extent) of each dimension with more than one index.
    let mut extents: Vec<(usize, usize)> = Vec::new();
    extents.extend(
        gaps.min()
            .map(|gap| (gap, heads[heads.len() - 1] - heads[0])),
    );
    let strides = [operand.batch, operand.segment, operand.row];
    for (stride, count) in strides.into_iter().zip(counts) {
        if count > 1 {
            extents.push((stride, stride.saturating_mul(count - 1)));
        }
    }
    extents.sort_unstable();
    let mut reach = width;
    extents.into_iter().all(|(distance, extent)| {
        let apart = distance >= reach;
        reach = reach.saturating_add(extent);
        apart
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(batch: usize, segment: usize, row: usize, heads: &[usize]) -> Operand {
        Operand {
            offset: 0,
            batch,
            segment,
            row,
            heads: heads.into(),
        }
    }

    #[test]
    fn rows_that_could_overlap_are_rejected() {
        // Two heads of width 4, rows of 8, segments of 10 rows, a batch of 100 rows.
        let good = operand(800, 80, 8, &[4, 0]);
        assert!(disjoint(&good, [2, 10, 10], 4, false));
        assert!(
            !disjoint(&good, [2, 10, 11], 4, false),
            "a segment longer than its stride"
        );
        assert!(
            !disjoint(&good, [2, 11, 10], 4, false),
            "more segments than the batch has"
        );
        assert!(
            !disjoint(&good, [2, 10, 10], 5, false),
            "heads wider than their distance"
        );
        assert!(
            !disjoint(&operand(800, 80, 7, &[0, 4]), [1, 1, 2], 4, false),
            "rows too close"
        );
        assert!(
            disjoint(&operand(0, 0, 0, &[0, 4]), [1, 1, 1], 4, false),
            "a single row"
        );
        // Heads at one address are one row: fine for one task, a race for two.
        let twice = operand(0, 0, 8, &[0, 0, 4]);
        assert!(disjoint(&twice, [1, 1, 3], 4, true));
        assert!(!disjoint(&twice, [1, 1, 3], 4, false));
    }
}
