//! What a kernel is told, as it lies in memory: the device's mirror of a job.
//!
//! Nothing is computed here. Field order and types are those of `kernels/common.cuh`; both sides
//! assert the same sizes.

use cudarc::driver::DeviceRepr;

/// An affine view of a buffer, in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    pub offset: i64,
    pub batch: i64,
    pub segment: i64,
    pub row: i64,
    /// A number that divides every head's share; tensor maps count heads in it.
    pub unit: i64,
    /// Where the table of the heads' shares lies on the device.
    pub heads: u64,
}

/// One strided batched attention.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub q: Operand,
    pub k: Operand,
    pub cells: Operand,
    pub dq: Operand,
    pub query: i64,
    pub query_step: i64,
    pub key: i64,
    pub key_step: i64,
    pub batch: i32,
    pub segments: i32,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub dim: i32,
    pub causal: i32,
    pub pad: i32,
    pub scale: f64,
    pub gain: f64,
}

// SAFETY: plain numbers in C layout, no padding, no pointers the host would follow.
unsafe impl DeviceRepr for Job {}

/// Rows to be copied, added or merged.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub from: Operand,
    pub to: Operand,
    pub batch: i32,
    pub segments: i32,
    pub rows: i32,
    pub heads: i32,
    pub width: i64,
}

// SAFETY: as for `Job`.
unsafe impl DeviceRepr for Block {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_the_kernels_assert() {
        let sizes = [size_of::<Operand>(), size_of::<Job>(), size_of::<Block>()];
        assert_eq!(sizes, [48, 272, 120]);
    }
}
