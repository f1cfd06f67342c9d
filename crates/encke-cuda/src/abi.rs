//! Kernel arguments in C layout: the device's form of jobs, blocks and operands.
//!
//! Nothing is computed here. Names, field order and types are those of `kernels/common.cuh`; both
//! sides assert the same sizes.

use cudarc::driver::DeviceRepr;

/// An affine view of a buffer, in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct OperandParams {
    pub offset: i64,
    pub batch: i64,
    pub segment: i64,
    pub row: i64,
    /// A common divisor of all head offsets; tensor maps count heads in it.
    pub unit: i64,
    /// The device address of the table of head offsets.
    pub heads: u64,
}

/// One strided batched attention.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct JobParams {
    pub q: OperandParams,
    pub k: OperandParams,
    pub cells: OperandParams,
    pub delta: OperandParams,
    pub dq: OperandParams,
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
    pub value_dim: i32,
    pub scale: f64,
    pub gain: f64,
}

// SAFETY: plain numbers in C layout, without padding or host pointers.
unsafe impl DeviceRepr for JobParams {}

/// What a masked job has beside [`JobParams`]. Its pieces are a table of [`PIECE_WORDS`] words
/// each.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskParams {
    pub v: OperandParams,
    /// The device address of the pieces, and of the list of tiles.
    pub pieces: u64,
    pub tiles: u64,
    /// The device address of the slope of each head; 0 without slopes.
    pub slopes: u64,
    /// The device address of the query head of each head; 0 without dropout.
    pub coin_heads: u64,
    /// 0 without.
    pub softcap: f64,
    /// The factor of pairs that are not dropped; 0 without dropout.
    pub kept: f64,
    pub first_token: i64,
    pub segment_step: i64,
    pub document: i64,
    pub all_heads: i64,
    pub threshold: u64,
    pub seed: [u32; 2],
    pub count_tiles: i32,
    pub value_dim: i32,
}

/// Words of a piece in its table: query, its step, key, its step, left, right; then the first and
/// the last query row, and the first and the last key row, as pairs of 32 bits.
pub(crate) const PIECE_WORDS: usize = 8;

/// A job with a mask, a score transform, dropout or values of another width.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskedJobParams {
    pub job: JobParams,
    pub mask: MaskParams,
}

// SAFETY: as for `JobParams`.
unsafe impl DeviceRepr for MaskedJobParams {}

/// Rows to copy, add or merge.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockParams {
    pub from: OperandParams,
    pub to: OperandParams,
    pub batch: i32,
    pub segments: i32,
    pub rows: i32,
    pub heads: i32,
    pub width: i64,
}

// SAFETY: as for `JobParams`.
unsafe impl DeviceRepr for BlockParams {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_the_kernels_assert() {
        let sizes = [
            size_of::<OperandParams>(),
            size_of::<JobParams>(),
            size_of::<BlockParams>(),
            8 * PIECE_WORDS,
            size_of::<MaskParams>(),
            size_of::<MaskedJobParams>(),
        ];
        assert_eq!(sizes, [48, 320, 120, 64, 152, 472]);
    }
}
