//! Block sizes of both passes, for tuning.
//!
//! No size changes a result by more than the order of its sums, and none depends on the number of
//! threads.

/// Block sizes of the forward pass.
pub trait AmxForwardConfig: Send + Sync + 'static {
    /// Keys of a block, whose scores exist at once for a tile of queries; a multiple of 32.
    const KEYS: usize;
    /// Degree of the exponential's polynomial: higher than weights rounded to bf16 need, because
    /// the lse is computed from their unrounded sums.
    const EXP_DEGREE: usize = 4;
    /// Keys that are packed at a time, so that they stay in the L2 cache; a multiple of KEYS and at
    /// most 128 · 32.
    const PACKED_KEYS: usize = 1024;
    /// Elements of q in a task, over all its heads.
    const QUERY_ELEMENTS: usize = 1 << 16;
    /// Elements of k that stay packed while the queries of a window advance; few enough that they
    /// stay in the L2 cache.
    const WINDOW_ELEMENTS: usize = 1 << 18;
}

/// The largest head dimension for [`SmallDim`](super::element::TileElement::SmallDim).
pub const SMALL_DIM_MAX: usize = 64;

/// Head dimensions up to 64, elements of one split.
#[derive(Debug)]
pub struct Dim64Split1;

/// A block and its scores fit the L1 cache: tiles are loaded from L2 at an eighth of the speed.
impl AmxForwardConfig for Dim64Split1 {
    const KEYS: usize = 64;
    const QUERY_ELEMENTS: usize = 1 << 17;
}

/// Head dimensions above 64, elements of one split.
#[derive(Debug)]
pub struct Dim128Split1;

impl AmxForwardConfig for Dim128Split1 {
    const KEYS: usize = 256;
    const PACKED_KEYS: usize = 512;
    const QUERY_ELEMENTS: usize = 1 << 18;
}

/// Elements of two or three splits: four or six times the products for the same sums, so that
/// blocks may come from the L2 cache, and larger blocks store sums there less often.
#[derive(Debug)]
pub struct MultiSplit;

impl AmxForwardConfig for MultiSplit {
    const KEYS: usize = 512;
    const EXP_DEGREE: usize = 5;
    const PACKED_KEYS: usize = 512;
    const QUERY_ELEMENTS: usize = 1 << 18;
    const WINDOW_ELEMENTS: usize = 3 << 15;
}

/// Block sizes of the backward pass.
pub trait AmxBackwardConfig: Send + Sync + 'static {
    /// Keys of a block; a multiple of 32.
    const KEYS: usize = 64;
    /// Tiles of 32 queries over which dk and dv are summed before they are stored.
    const QUERY_TILES: usize = 8;
    /// Degree of the exponential's polynomial: weights are rounded to bf16 immediately.
    const EXP_DEGREE: usize = 3;
    /// Elements of q that are packed at a time.
    const QUERY_ELEMENTS: usize = 1 << 16;
}

impl AmxBackwardConfig for Dim64Split1 {}

/// Rows are twice as long, so adding to dk and dv and reading k and v takes more of the time:
/// larger groups of queries share it. Likewise larger blocks of keys share one addition to the sums
/// of dq.
impl AmxBackwardConfig for Dim128Split1 {
    const KEYS: usize = 256;
    const QUERY_TILES: usize = 4;
    const QUERY_ELEMENTS: usize = 1 << 17;
}

impl AmxBackwardConfig for MultiSplit {
    const KEYS: usize = 192;
    const QUERY_TILES: usize = 4;
    const EXP_DEGREE: usize = 5;
    const QUERY_ELEMENTS: usize = 1 << 17;
}
