//! Parts of the tile kernels that this crate's own tests and benchmarks call one by one.
//!
//! This module is not part of the API: its items may change or disappear in any release. It exists
//! so that tests and benchmarks link the library's code instead of compiling it a second time.

pub use crate::amx::backward::{AmxBackwardInputs, backward, backward_with_config};
pub use crate::amx::config::{AmxBackwardConfig, AmxForwardConfig, Dim64Split1};
pub use crate::amx::detect::available;
pub use crate::amx::element::{ScoreScale, TileElement, multiply_keys};
pub use crate::amx::emulated::Emulated;
pub use crate::amx::forward::{forward, forward_with_config};
pub use crate::amx::scratch::{PagePool, PageScratch};
pub use crate::amx::tiles::{Hardware, ROW_BYTES, SLAB_BYTES, TILE_BYTES, TileProduct, TileUnit};
pub use crate::amx::{supports, workspace_bytes};
pub use crate::target::Target;

/// Packing of rows into tiles.
pub mod pack {
    pub use crate::amx::pack::{Extremes, RowSource, Sign, columns, lanes, pairs, rows};
}

/// The softmax of a block of scores.
pub mod softmax {
    pub use crate::amx::softmax::{
        ALL_LANES, KeyBounds, Lanes, ScoreBlock, TileSoftmax, VisibleKeys, softmax,
    };
}

/// Vector functions.
pub mod vector {
    pub use crate::amx::vector::{exp2, splat};
}
