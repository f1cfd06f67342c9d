//! Sizes of blocks, for every instruction set.
//!
//! A *tile* is as many queries as fit three vectors, a *block* is a few tiles of queries that share
//! each packed panel of keys.

use crate::vector::Vector;

/// Vectors in a tile.
pub(crate) const VECTORS: usize = 3;
/// The most tiles of queries that one packing of keys serves, in the forward pass.
pub(crate) const FORWARD_TILES: usize = 24;
/// The same in the backward pass, which has more to keep of each.
pub(crate) const BACKWARD_TILES: usize = 16;
/// Tiles below which a block is not cut further: keys are packed for each block.
pub(crate) const MIN_TILES: usize = 8;
/// Keys in a panel: a multiple of every number of rows held in registers.
pub(crate) const KEYS: usize = 128;
/// Lanes of the widest tile.
pub(crate) const MAX_LANES: usize = VECTORS * 16;

/// Queries in a tile.
pub(crate) const fn lanes<X: Vector>() -> usize {
    VECTORS * X::WIDTH
}

/// Queries, and keys, that are computed together.
pub(crate) fn tile<X: Vector, const R: usize>(_: X) -> [usize; 2] {
    [lanes::<X>(), R]
}

/// A head dimension padded so that vectors, and rows held in registers, divide it.
pub(crate) const fn padded<X: Vector>(dim: usize) -> usize {
    let unit = if X::WIDTH > 8 { X::WIDTH } else { 8 };
    dim.next_multiple_of(unit)
}

/// Tiles of queries that one packing of keys serves: as many as stay in the second-level cache,
/// where `most` do with a head dimension of 64.
pub(crate) const fn tiles(most: usize, dim: usize) -> usize {
    let fitting = most * 64 / if dim > 64 { dim } else { 64 };
    if fitting > 2 { fitting } else { 2 }
}
