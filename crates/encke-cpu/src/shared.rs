//! Buffers that several tasks write at once, each its own rows.
//!
//! Rows of different tasks interleave in memory, so they cannot be handed out as slices of one
//! vector. A [`SharedRows`] hands them out one at a time, and [`disjoint`] is what makes that sound:
//! a job whose addresses could meet is refused before any task runs.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::marker::PhantomData;

use encke_core::job::Operand;

/// A slice of which tasks borrow rows.
#[derive(Debug, Clone, Copy)]
pub struct SharedRows<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a `SharedRows` is a `&mut [T]` whose elements are borrowed in pieces; sending or sharing it
// hands out pieces to other threads, which is sound for `T: Send` as long as no two pieces that
// live at once overlap. That is the contract of `row`.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    /// Shares a slice.
    pub fn new(slice: &'a mut [T]) -> SharedRows<'a, T> {
        SharedRows {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            lifetime: PhantomData,
        }
    }

    /// Shares a slice of which rows are read ([`SharedRows::read`]) and never written.
    pub fn of(slice: &'a [T]) -> SharedRows<'a, T> {
        SharedRows {
            start: slice.as_ptr().cast_mut(),
            len: slice.len(),
            lifetime: PhantomData,
        }
    }

    /// Asks for a row that is needed soon; for nothing if it lies outside the buffer.
    #[inline(always)]
    pub fn prefetch(&self, at: usize, len: usize) {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            prefetch(self.start.wrapping_add(at), len);
        }
    }

    /// One row, to be read.
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
        // SAFETY: the row lies inside the slice this was made from, and the caller promises that
        // nobody writes it.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }

    /// One row.
    ///
    /// # Safety
    /// The slice was shared to be written, and no other row that overlaps this one may be alive, in any thread.
    #[inline]
    pub unsafe fn row(&self, at: usize, len: usize) -> &'a mut [T] {
        let end = at.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "a row outside its buffer"
        );
        // SAFETY: the row lies inside the slice this was made from, which is borrowed for as long
        // as `self` can be, and the caller promises that nobody else has any of it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

/// Asks for numbers that are needed soon, while there is something else to do: rows of one head lie
/// apart, no processor expects them, and whoever waits for memory computes nothing.
#[inline(always)]
pub fn prefetch<T>(numbers: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for byte in (0..len * size_of::<T>()).step_by(64) {
        let line = numbers.cast::<i8>().wrapping_add(byte);
        // SAFETY: a hint, which changes nothing whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (numbers, len);
}

/// Whether no two of the rows that an operand names can overlap: (batch, segment, row, head) of
/// the given counts, each `width` long. Judged by the strides alone, so some operands without
/// overlap are refused as well; those of plans never are.
///
/// Heads at the same address overlap, unless they are `grouped`: then one task has all of them.
pub fn disjoint(operand: &Operand, counts: [usize; 3], width: usize, grouped: bool) -> bool {
    let mut heads = operand.heads.to_vec();
    heads.sort_unstable();
    if grouped {
        heads.dedup();
    }
    let gaps = heads.windows(2).map(|pair| pair[1] - pair[0]);
    // (smallest distance, whole extent) of each index; a single value has neither.
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
    fn rows_that_could_meet_are_seen() {
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
        // Heads at one address are one row: fine for whoever has both, a race for two tasks.
        let twice = operand(0, 0, 8, &[0, 0, 4]);
        assert!(disjoint(&twice, [1, 1, 3], 4, true));
        assert!(!disjoint(&twice, [1, 1, 3], 4, false));
    }
}
