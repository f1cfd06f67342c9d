//! Workspaces between the calls on one stream of a caller.
//!
//! The driver's pool allocates and frees in the order of a stream, too, but every allocation and
//! every free is a call of the driver. The decision here: a size is reused only exactly, which
//! repeated calls ask for; the oldest memory is given back when there is too much.

use std::collections::VecDeque;

use cudarc::driver::sys::CUdeviceptr;

/// Bytes of all memory of one stream that is kept at most, and of each allocation.
const MOST_BYTES: usize = 128 << 20;
const MOST_BYTES_EACH: usize = 64 << 20;
/// Allocations that are kept at most.
const MOST: usize = 16;

/// Memory that the next operations of the stream may use, the oldest first.
#[derive(Default)]
pub(crate) struct SpareMemory {
    kept: VecDeque<(usize, CUdeviceptr)>,
    bytes: usize,
}

impl SpareMemory {
    /// Memory of exactly this many bytes, the latest that was kept.
    pub fn take(&mut self, bytes: usize) -> Option<CUdeviceptr> {
        let at = self.kept.iter().rposition(|(of, _)| *of == bytes)?;
        self.bytes -= bytes;
        self.kept.remove(at).map(|(_, pointer)| pointer)
    }

    /// Keeps memory; returns what must be freed instead.
    pub fn keep(&mut self, bytes: usize, pointer: CUdeviceptr) -> Vec<CUdeviceptr> {
        if bytes > MOST_BYTES_EACH {
            return vec![pointer];
        }
        self.kept.push_back((bytes, pointer));
        self.bytes += bytes;
        let mut freed = Vec::new();
        while self.bytes > MOST_BYTES || self.kept.len() > MOST {
            let Some((bytes, pointer)) = self.kept.pop_front() else {
                break;
            };
            self.bytes -= bytes;
            freed.push(pointer);
        }
        freed
    }

    /// All memory, which must be freed.
    pub fn take_all(&mut self) -> impl Iterator<Item = CUdeviceptr> {
        self.bytes = 0;
        std::mem::take(&mut self.kept).into_iter().map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_reused_exactly_and_the_oldest_is_freed() {
        let mut spare = SpareMemory::default();
        assert_eq!(spare.take(8), None);
        assert!(spare.keep(8, 1).is_empty() && spare.keep(16, 2).is_empty());
        assert!(spare.keep(8, 3).is_empty());
        assert_eq!(
            (spare.take(8), spare.take(8), spare.take(8)),
            (Some(3), Some(1), None)
        );
        assert_eq!(spare.take(12), None);
        assert_eq!(spare.keep(MOST_BYTES_EACH + 1, 4), [4]);
        for at in 0..MOST as u64 {
            let freed = spare.keep(4, 10 + at);
            assert_eq!(
                freed,
                if at + 1 == MOST as u64 {
                    vec![2]
                } else {
                    vec![]
                }
            );
        }
        assert_eq!(spare.keep(MOST_BYTES_EACH, 50), [10]);
        assert_eq!(spare.keep(MOST_BYTES_EACH, 51).len(), MOST - 1);
        assert_eq!(spare.take_all().collect::<Vec<_>>(), [50, 51]);
        assert_eq!(spare.take(MOST_BYTES_EACH), None);
    }
}
