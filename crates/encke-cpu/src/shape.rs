//! Block sizes of the vector kernels.
//!
//! A *tile* is as many queries as fit three vectors. A *block* is a few tiles of queries that share
//! each packed panel of keys.

use encke_core::job::Job;

use crate::vector::Vector;

/// Vectors in a tile.
pub(crate) const VECTORS: usize = 3;
/// The most tiles of queries that share one packing of keys, in the forward pass.
pub(crate) const FORWARD_TILES: usize = 24;
/// The same in the backward pass, whose tiles take more memory.
pub(crate) const BACKWARD_TILES: usize = 16;
/// Blocks of fewer than twice as many tiles are not divided: keys are packed again for each block.
pub(crate) const MIN_TILES: usize = 8;
/// Keys in a panel: a multiple of every `R`, the number of rows held in registers.
pub(crate) const KEYS: usize = 128;
/// Lanes of the widest tile.
pub(crate) const MAX_LANES: usize = VECTORS * 16;

/// Queries in a tile.
pub(crate) const fn lanes<X: Vector>() -> usize {
    VECTORS * X::WIDTH
}

/// Queries and keys that are computed together.
pub(crate) fn tile<X: Vector, const R: usize>(_: X) -> [usize; 2] {
    [lanes::<X>(), R]
}

/// The head dimension, padded to a multiple of the vector width and of the rows held in registers.
pub(crate) const fn padded<X: Vector>(dim: usize) -> usize {
    let unit = if X::WIDTH > 8 { X::WIDTH } else { 8 };
    dim.next_multiple_of(unit)
}

/// The wider of the rows of keys and those of values.
pub(crate) fn widest(job: &Job) -> usize {
    job.dim.max(job.value_dim)
}

/// Tiles of queries that share one packing of keys: as many as stay in the L2 cache, which are
/// `most` for a head dimension of 64.
pub(crate) const fn tiles(most: usize, dim: usize) -> usize {
    let fitting = most * 64 / if dim > 64 { dim } else { 64 };
    if fitting > 2 { fitting } else { 2 }
}
