//! Memory of results that their owners have dropped, kept for the next ones.
//!
//! Fresh memory is dear: the system clears it page by page when it is touched, and takes it back when
//! it is freed, at a fraction of the speed at which memory that one has can be written. A tensor
//! that knows its home ([`Tensor::returning_to`]) leaves its memory there when it is dropped.
//!
//! The decision here: a home knows its tensors by nothing but their memory, and they hold on to it
//! weakly. So whoever keeps a result keeps it, whoever takes its numbers away has them, and a home that
//! is gone is not missed.
//!
//! [`Tensor::returning_to`]: crate::Tensor::returning_to

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::dtype::{DType, Data};

/// Bytes below which memory is not worth keeping: the system's allocator does that itself.
const LEAST: usize = 1 << 20;
/// What a forward and a backward pass return.
const MOST_KEPT: usize = 5;

/// Memory that nobody uses at the moment.
#[derive(Debug, Default)]
pub struct TensorPool {
    most: usize,
    kept: Mutex<Vec<Kept>>,
}

/// Memory, and who has left it as he found it but for what he always writes.
#[derive(Debug)]
pub struct Kept {
    /// Any numbers.
    pub data: Data,
    /// Where it is known: all numbers that the holder of this mark does not write are zeros.
    pub mark: Option<u64>,
}

impl TensorPool {
    /// Keeps no more than so many bytes, and no more than what two passes return; those dropped last.
    pub fn new(most: usize) -> TensorPool {
        TensorPool {
            most,
            kept: Mutex::default(),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        // A list is whole between its changes, whoever panicked elsewhere.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are kept now.
    pub fn bytes(&self) -> usize {
        bytes(&self.kept())
    }

    /// Takes memory in. What there is too much then, longest unused first, is freed.
    pub fn keep(&self, kept: Kept) {
        let own = kept.data.capacity_bytes();
        if !(LEAST..=self.most).contains(&own) {
            return;
        }
        let mut all = self.kept();
        let mut freed = Vec::new();
        while all.len() >= MOST_KEPT || bytes(&all) + own > self.most {
            freed.push(all.remove(0));
        }
        all.push(kept);
        // Nobody need wait for the system to take the others back.
        drop(all);
        drop(freed);
    }

    /// Memory for just so many numbers of a type, those with the mark first.
    pub fn take(&self, dtype: DType, elements: usize, mark: Option<u64>) -> Option<Kept> {
        let mut all = self.kept();
        let fits = |kept: &Kept| {
            let numbers = kept.data.as_slice();
            numbers.dtype() == dtype && numbers.len() == elements
        };
        let marked = |kept: &Kept| fits(kept) && kept.mark == mark;
        let at = all.iter().rposition(marked);
        let at = at.or_else(|| all.iter().rposition(fits))?;
        Some(all.remove(at))
    }
}

fn bytes(kept: &[Kept]) -> usize {
    kept.iter().map(|kept| kept.data.capacity_bytes()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;
    use std::sync::Arc;

    const DIMS: [usize; 4] = [1, 1 << 10, 4, 64];
    const BYTES: usize = 1 << 20;

    fn tensor() -> Tensor {
        Tensor::zeros(DType::F32, DIMS)
    }

    fn take(spare: &TensorPool) -> Option<Kept> {
        spare.take(DType::F32, DIMS.iter().product(), Some(7))
    }

    #[test]
    fn what_is_dropped_comes_home_and_what_is_kept_does_not() {
        let spare = Arc::new(TensorPool::new(4 * BYTES));
        let kept = tensor().returning_to(&spare, Some(7));
        let copy = kept.clone();
        let address = kept.data().bytes().as_ptr();
        assert_eq!(spare.bytes(), 0, "both are alive");
        drop(copy);
        assert_eq!(spare.bytes(), 0, "a copy has no home");
        drop(kept);
        assert_eq!(spare.bytes(), BYTES);
        assert!(spare.take(DType::F32, 3, None).is_none(), "another size");
        assert!(
            spare
                .take(DType::Bf16, DIMS.iter().product(), None)
                .is_none()
        );
        let found = take(&spare).unwrap();
        assert_eq!(
            (found.data.bytes().as_ptr(), found.mark),
            (address, Some(7))
        );
        assert!(take(&spare).is_none(), "it was taken");
        let numbers = tensor().returning_to(&spare, None).into_data();
        drop(numbers);
        assert_eq!(spare.bytes(), 0, "its numbers were taken away");
    }

    #[test]
    fn a_mark_is_lost_with_the_first_change() {
        let spare = Arc::new(TensorPool::new(4 * BYTES));
        let mut changed = tensor().returning_to(&spare, Some(7));
        let _ = changed.data_mut();
        drop(changed);
        assert_eq!(take(&spare).unwrap().mark, None);
        for mark in [None, Some(7), Some(8)] {
            drop(tensor().returning_to(&spare, mark));
        }
        assert_eq!(take(&spare).unwrap().mark, Some(7), "the marked one first");
        assert_eq!(take(&spare).unwrap().mark, Some(8));
    }

    #[test]
    fn no_more_is_kept_than_was_said_and_homes_need_not_outlive() {
        let spare = Arc::new(TensorPool::new(3 * BYTES));
        for mark in 0..5 {
            drop(tensor().returning_to(&spare, Some(mark)));
        }
        assert_eq!(spare.bytes(), 3 * BYTES);
        let marks = |_| take(&spare).unwrap().mark.unwrap();
        assert_eq!([0, 1, 2].map(marks), [4, 3, 2], "those dropped last");
        let large = Tensor::zeros(DType::F32, [4, 1 << 10, 4, 64]);
        drop(large.returning_to(&spare, None));
        drop(Tensor::zeros(DType::F32, [1, 1, 1, 1]).returning_to(&spare, None));
        assert_eq!(spare.bytes(), 0, "too large, too small");
        let orphan = tensor().returning_to(&spare, None);
        drop(spare);
        drop(orphan);
    }
}
