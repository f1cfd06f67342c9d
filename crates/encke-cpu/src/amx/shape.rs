//! Sizes of blocks: what both passes can be tuned with.
//!
//! No size changes a result by more than the order of its sums, and none depends on the number of
//! threads.

/// Sizes of the forward pass.
pub(crate) trait Shape: Send + Sync + 'static {
    /// Keys whose scores exist at once for a tile of queries; a multiple of 32.
    const KEYS: usize;
    /// Degree of the polynomial of the exponential: more than weights that are rounded to bf16
    /// need, because the lse is made of their sums.
    const DEGREE: usize = 4;
    /// Keys that are packed at a time, to stay in the second-level cache; a multiple of KEYS and
    /// at most 64 · 32.
    const PACKED: usize = 1024;
    /// Numbers of q that a task works on, over all its heads.
    const NUMBERS: usize = 1 << 16;
}

/// The most channels of rows that are short.
pub(crate) const MOST_OF_SHORT: usize = 64;

/// For rows that are short.
#[derive(Debug)]
pub(crate) struct Short;

/// As many keys as fit the first-level cache with all that is done to them: tiles are loaded from
/// the second level at an eighth of the speed.
impl Shape for Short {
    const KEYS: usize = 64;
    const NUMBERS: usize = 1 << 17;
}

/// For longer rows.
#[derive(Debug)]
pub(crate) struct Long;

impl Shape for Long {
    const KEYS: usize = 256;
    const PACKED: usize = 512;
    const NUMBERS: usize = 1 << 18;
}

/// Numbers in pieces: four or six times the products for the same sums, so that blocks may come from
/// the second-level cache, and sums should go there seldom.
#[derive(Debug)]
pub(crate) struct Wide;

impl Shape for Wide {
    const KEYS: usize = 512;
    const DEGREE: usize = 5;
    const PACKED: usize = 512;
    const NUMBERS: usize = 1 << 18;
}

/// Sizes of the backward pass.
pub(crate) trait BackwardShape: Send + Sync + 'static {
    /// Keys of a block; a multiple of 32.
    const KEYS: usize = 64;
    /// Tiles of 32 queries over which dk and dv are summed before they go back to memory.
    const TILES: usize = 8;
    /// Degree of the polynomial of the exponential: weights are rounded to bf16 at once.
    const DEGREE: usize = 3;
    /// Numbers of q that are packed at a time.
    const NUMBERS: usize = 1 << 16;
}

impl BackwardShape for Short {}

/// Rows are twice as long, so that adding to those of dk and dv, and reading those of k and v, takes
/// more of the time: once for twice as many queries. So do sums of dq: once for more keys.
impl BackwardShape for Long {
    const KEYS: usize = 256;
    const TILES: usize = 4;
    const NUMBERS: usize = 1 << 17;
}

impl BackwardShape for Wide {
    const KEYS: usize = 192;
    const TILES: usize = 4;
    const DEGREE: usize = 5;
    const NUMBERS: usize = 1 << 17;
}
