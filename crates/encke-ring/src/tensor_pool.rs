//! A pool for the storage of dropped result tensors.
//!
//! Fresh memory is slow: the kernel zero-fills it page by page on first touch and unmaps it on
//! free, which costs several times as much as rewriting memory that is already mapped. A result
//! tensor that was attached to a pool ([`Tensor::recycle_into`]) gives its storage back when it is
//! dropped, and the next call reuses it.
//!
//! The decision here: the pool owns storage, never tensors. A tensor holds its pool weakly, so a
//! caller may keep a result for any time, may take its data, and may outlive the pool.
//!
//! [`Tensor::recycle_into`]: encke_core::Tensor::recycle_into

use std::sync::{Mutex, MutexGuard, PoisonError};

use encke_core::tensor::StorageSink;
use encke_core::{DType, Data};

/// Storage of fewer bytes is freed: the system allocator already reuses it without unmapping.
const MIN_BYTES: usize = 1 << 20;
/// As many entries as a forward and a backward pass return.
const MAX_ENTRIES: usize = 5;

/// Storage that no tensor uses.
#[derive(Debug, Default)]
pub struct TensorPool {
    max_bytes: usize,
    entries: Mutex<Vec<PooledStorage>>,
}

/// One entry of the pool.
#[derive(Debug)]
pub struct PooledStorage {
    /// The storage, with arbitrary contents.
    pub data: Data,
    /// If set: every element that the program with this mark does not write is zero.
    pub mark: Option<u64>,
}

impl TensorPool {
    /// A pool of at most `max_bytes` bytes and at most the results of two passes; the most recently
    /// dropped storage is kept.
    pub fn new(max_bytes: usize) -> TensorPool {
        TensorPool {
            max_bytes,
            entries: Mutex::default(),
        }
    }

    fn entries(&self) -> MutexGuard<'_, Vec<PooledStorage>> {
        // The list is consistent between statements, so a panic elsewhere does not invalidate it.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in the pool.
    pub fn bytes(&self) -> usize {
        bytes(&self.entries())
    }

    /// Storage of exactly `elements` elements of `dtype`, preferring an entry with this mark.
    pub fn take(&self, dtype: DType, elements: usize, mark: Option<u64>) -> Option<PooledStorage> {
        let mut entries = self.entries();
        let fits = |entry: &PooledStorage| {
            let slice = entry.data.as_slice();
            slice.dtype() == dtype && slice.len() == elements
        };
        let marked = |entry: &PooledStorage| fits(entry) && entry.mark == mark;
        let index = entries.iter().rposition(marked);
        let index = index.or_else(|| entries.iter().rposition(fits))?;
        Some(entries.remove(index))
    }
}

impl StorageSink for TensorPool {
    /// Adds storage and evicts the oldest entries beyond the limits.
    fn recycle(&self, data: Data, mark: Option<u64>) {
        let own = data.capacity_bytes();
        if !(MIN_BYTES..=self.max_bytes).contains(&own) {
            return;
        }
        let mut entries = self.entries();
        let mut evicted = Vec::new();
        while entries.len() >= MAX_ENTRIES || bytes(&entries) + own > self.max_bytes {
            evicted.push(entries.remove(0));
        }
        entries.push(PooledStorage { data, mark });
        // Unlock before freeing: unmapping is slow, and other threads may be waiting.
        drop(entries);
        drop(evicted);
    }
}

fn bytes(entries: &[PooledStorage]) -> usize {
    entries
        .iter()
        .map(|entry| entry.data.capacity_bytes())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::Tensor;
    use std::sync::Arc;

    const DIMS: [usize; 4] = [1, 1 << 10, 4, 64];
    const BYTES: usize = 1 << 20;

    fn tensor() -> Tensor {
        Tensor::zeros(DType::F32, DIMS)
    }

    fn take(pool: &TensorPool) -> Option<PooledStorage> {
        pool.take(DType::F32, DIMS.iter().product(), Some(7))
    }

    #[test]
    fn a_dropped_tensor_is_pooled_and_a_live_one_is_not() {
        let pool = Arc::new(TensorPool::new(4 * BYTES));
        let live = tensor().recycle_into(&pool, Some(7));
        let copy = live.clone();
        let address = live.data().bytes().as_ptr();
        assert_eq!(pool.bytes(), 0, "both are alive");
        drop(copy);
        assert_eq!(pool.bytes(), 0, "a clone has no pool");
        drop(live);
        assert_eq!(pool.bytes(), BYTES);
        assert!(pool.take(DType::F32, 3, None).is_none(), "another size");
        assert!(
            pool.take(DType::Bf16, DIMS.iter().product(), None)
                .is_none()
        );
        let found = take(&pool).unwrap();
        assert_eq!(
            (found.data.bytes().as_ptr(), found.mark),
            (address, Some(7))
        );
        assert!(take(&pool).is_none(), "it was taken");
        let data = tensor().recycle_into(&pool, None).into_data();
        drop(data);
        assert_eq!(pool.bytes(), 0, "the caller took the data");
    }

    #[test]
    fn a_mark_is_lost_with_the_first_mutable_access() {
        let pool = Arc::new(TensorPool::new(4 * BYTES));
        let mut changed = tensor().recycle_into(&pool, Some(7));
        let _ = changed.data_mut();
        drop(changed);
        assert_eq!(take(&pool).unwrap().mark, None);
        for mark in [None, Some(7), Some(8)] {
            drop(tensor().recycle_into(&pool, mark));
        }
        assert_eq!(take(&pool).unwrap().mark, Some(7), "the marked one first");
        assert_eq!(take(&pool).unwrap().mark, Some(8));
    }

    #[test]
    fn the_pool_respects_its_limit_and_tensors_may_outlive_it() {
        let pool = Arc::new(TensorPool::new(3 * BYTES));
        for mark in 0..5 {
            drop(tensor().recycle_into(&pool, Some(mark)));
        }
        assert_eq!(pool.bytes(), 3 * BYTES);
        let marks = |_| take(&pool).unwrap().mark.unwrap();
        assert_eq!([0, 1, 2].map(marks), [4, 3, 2], "those dropped last");
        let large = Tensor::zeros(DType::F32, [4, 1 << 10, 4, 64]);
        drop(large.recycle_into(&pool, None));
        drop(Tensor::zeros(DType::F32, [1, 1, 1, 1]).recycle_into(&pool, None));
        assert_eq!(pool.bytes(), 0, "too large, too small");
        let orphan = tensor().recycle_into(&pool, None);
        drop(pool);
        drop(orphan);
    }
}
